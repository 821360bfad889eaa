"""Frozen linear layers whose weights are kept in 8 or 4 bits, and made whole only while they multiply.

Codes and scales are plain parameters, so ZeRO-3 cuts and gathers them as they are. bitsandbytes does the arithmetic, and this
file alone asks for it.

Letters: O out features, I in features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wands.errors import ConfigError

BLOCK_SIZE = 64  # weights that share a scale in nf4


def load_library() -> Any:
    """`bitsandbytes.functional`.

    Raises:
        ConfigError: it is not installed, or does not load here.
    """
    try:
        import bitsandbytes.functional as library
    except (ImportError, OSError, RuntimeError) as error:  # its kernels are loaded with it
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"lora.quantize needs bitsandbytes, which does not load here ({reason}); pip install 'wands[8bit]', or set "
            "lora.quantize=none."
        ) from None
    return library


class Int8:
    """Whole numbers from -127 to 127, with one fp32 scale for each row: the error is at most 1/254 of the row's largest."""

    @staticmethod
    def empty(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Codes int8 [O, I] and scales fp32 [O], on the default device."""
        return torch.empty(out_features, in_features, dtype=torch.int8), torch.empty(out_features)

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [O, I] on the CPU -> codes, scales."""
        codes, scales, _ = load_library().int8_vectorwise_quant(weight)
        return codes, scales

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
        """Codes, scales -> fp32 [O, I]."""
        return load_library().int8_vectorwise_dequant(codes, scales)


class NormalFloat4:
    """The 16 values of QLoRA's NormalFloat, two to a byte, with one fp32 scale for each `BLOCK_SIZE` weights."""

    @staticmethod
    def empty(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Codes uint8 [O, I / 2] and scales fp32 [O * I / 64, rounded up], on the default device."""
        assert in_features % 2 == 0, f"{in_features} features do not fill whole bytes"
        num_blocks = -(-out_features * in_features // BLOCK_SIZE)
        return torch.empty(out_features, in_features // 2, dtype=torch.uint8), torch.empty(num_blocks)

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [O, I] on the CPU -> codes, scales."""
        codes, state = load_library().quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4")
        return codes.view(len(weight), -1), state.absmax

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
        """Codes, scales -> fp32 [O, I]."""
        library = load_library()
        # As one row: of several, the CPU's kernel begins a block anew with each, wherever I is no multiple of it.
        shape = torch.Size((1, len(codes) * in_features))
        state = library.QuantState(
            scales, shape=shape, dtype=torch.float32, blocksize=BLOCK_SIZE, quant_type="nf4"
        )
        return library.dequantize_4bit(codes.view(-1, 1), state).view(-1, in_features)


Codec = type[Int8] | type[NormalFloat4]
CODECS: dict[str, Codec] = {"int8": Int8, "nf4": NormalFloat4}


class QuantizedLinear(nn.Linear):
    """A frozen linear layer of codes and scales: that of the decoded weight, to the bit.

    A weight is decoded in forward and again in backward; kept between them are only the codes, which ZeRO-3 lets go.
    """

    codec: Codec
    scale: nn.Parameter

    @classmethod
    def convert(cls, linear: nn.Linear, codec: Codec) -> None:
        """Make a linear layer on the meta device one of these, without values."""
        with torch.device("meta"):
            codes, scale = codec.empty(linear.out_features, linear.in_features)
        linear.__class__ = cls
        linear.codec = codec
        linear.weight = nn.Parameter(codes, requires_grad=False)
        linear.register_parameter("scale", nn.Parameter(scale, requires_grad=False))

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """fp32 [O, I] on the CPU -> values of this layer's `weight` and `scale`."""
        codes, scale = self.codec.encode(weight.contiguous())
        return {"weight": codes, "scale": scale}

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O], in autocast's dtype, or else in that of x."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            decode = functools.partial(self._decode, dtype)
            bias = None if self.bias is None else self.bias.to(dtype)
            return _MultiplyDecoded.apply(x.to(dtype), self.weight, self.scale, bias, decode)

    def _decode(self, dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
        return self.codec.decode(codes, scale.float(), self.in_features).to(dtype)


class _MultiplyDecoded(torch.autograd.Function):
    """x @ decode(codes, scale).T + bias, of which only x has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, decode: Any
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.decode = decode
        return F.linear(x, decode(codes, scale), bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return dout @ ctx.decode(*ctx.saved_tensors), None, None, None, None
