"""Frozen linear layers with 8-bit or 4-bit weights, which are decoded only for the matmul.

Codes and scales are ordinary parameters, so ZeRO-3 partitions and gathers them. bitsandbytes encodes and decodes.

Letters: O out features, I in features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wands.errors import ConfigError, one_line

BLOCK_SIZE = 64  # weights that share a scale in nf4


def load_library() -> Any:
    """Import `bitsandbytes.functional`.

    Raises:
        ConfigError: if bitsandbytes is not installed or does not load.
    """
    try:
        import bitsandbytes.functional as library
    except (ImportError, OSError, RuntimeError) as error:  # the import loads its kernels
        raise ConfigError(
            f"lora.quantize needs bitsandbytes, which does not load ({one_line(error)}). Run pip install 'wands[8bit]', or set "
            "lora.quantize=none."
        ) from None
    return library


class Int8:
    """Integers from -127 to 127 with one fp32 scale per row. The error is at most 1/254 of the row's largest value."""

    @staticmethod
    def empty(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Allocate codes int8 [O, I] and scales fp32 [O] on the default device."""
        return torch.empty(out_features, in_features, dtype=torch.int8), torch.empty(out_features)

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a weight: fp32 [O, I] on the CPU -> codes, scales."""
        codes, scales, _ = load_library().int8_vectorwise_quant(weight)
        return codes, scales

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
        """Decode codes and scales to fp32 [O, I]."""
        return load_library().int8_vectorwise_dequant(codes, scales)


class NormalFloat4:
    """The 16 values of QLoRA's NormalFloat, two per byte, with one fp32 scale per `BLOCK_SIZE` weights."""

    @staticmethod
    def empty(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Allocate codes uint8 [O, I / 2] and scales fp32 [O * I / 64, rounded up] on the default device."""
        assert in_features % 2 == 0, f"{in_features} features do not fill whole bytes"
        num_blocks = -(-out_features * in_features // BLOCK_SIZE)
        return torch.empty(out_features, in_features // 2, dtype=torch.uint8), torch.empty(num_blocks)

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a weight: fp32 [O, I] on the CPU -> codes, scales."""
        codes, state = load_library().quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4")
        return codes.view(len(weight), -1), state.absmax

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
        """Decode codes and scales to fp32 [O, I]."""
        library = load_library()
        # As one row, because the CPU kernel starts a new block at every row, even if I is not a multiple of BLOCK_SIZE.
        shape = torch.Size((1, len(codes) * in_features))
        state = library.QuantState(
            scales, shape=shape, dtype=torch.float32, blocksize=BLOCK_SIZE, quant_type="nf4"
        )
        return library.dequantize_4bit(codes.view(-1, 1), state).view(-1, in_features)


Codec = type[Int8] | type[NormalFloat4]
CODECS: dict[str, Codec] = {"int8": Int8, "nf4": NormalFloat4}


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with codes and scales. Its result equals a linear layer with the decoded weight, bit for bit.

    Forward and backward each decode the weight. In between, only the codes are stored, and ZeRO-3 releases the codes too.
    """

    codec: Codec
    scale: nn.Parameter

    @classmethod
    def convert(cls, linear: nn.Linear, codec: Codec) -> None:
        """Convert a linear layer on the meta device in place, without values."""
        with torch.device("meta"):
            codes, scale = codec.empty(linear.out_features, linear.in_features)
        linear.__class__ = cls
        linear.codec = codec
        linear.weight = nn.Parameter(codes, requires_grad=False)
        linear.register_parameter("scale", nn.Parameter(scale, requires_grad=False))

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the values of `weight` and `scale` for a weight fp32 [O, I] on the CPU."""
        codes, scale = self.codec.encode(weight.contiguous())
        return {"weight": codes, "scale": scale}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [..., I] -> [..., O], in autocast's dtype, or without autocast in the dtype of x."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            decode = functools.partial(self._decode, dtype)
            bias = None if self.bias is None else self.bias.to(dtype)
            return _MultiplyDecoded.apply(x.to(dtype), self.weight, self.scale, bias, decode)

    def _decode(self, dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
        return self.codec.decode(codes, scale.float(), self.in_features).to(dtype)


class _MultiplyDecoded(torch.autograd.Function):
    """Computes x @ decode(codes, scale).T + bias; only x has a gradient."""

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
