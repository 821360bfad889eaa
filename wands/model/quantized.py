"""Frozen linear layers whose weights are stored as codes.

A quantized weight consists of codes (8-bit or 4-bit numbers) and scales. Both are ordinary parameters, so ZeRO-3 partitions and
gathers them. Layers in int8 and nf4 decode the weight to compute, with bitsandbytes; a layer in fp8 multiplies the codes as they
are.
Letters: O out features, I in features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wands.errors import ConfigError, one_line
from wands.model.fp8 import E4M3, StoredFp8Product, cast_fp8_rows

BLOCK_SIZE = 64  # weights that share a scale in nf4


def load_library() -> Any:
    """Return `bitsandbytes.functional`; raise ConfigError if bitsandbytes cannot be imported."""
    try:
        import bitsandbytes.functional as library
    except (ImportError, OSError, RuntimeError) as error:  # the import loads its kernels
        raise ConfigError(
            f"lora.quantize needs the package bitsandbytes, which does not load ({one_line(error)}). Run "
            "pip install -e '.[8bit]' in the folder of wands, or set lora.quantize=none."
        ) from None
    return library


class Int8:
    """Codec with integers from -127 to 127 and one fp32 scale per row.

    The rounding error of a value is at most 1/254 of the largest absolute value in its row.
    """

    @staticmethod
    def empty(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Allocate (codes, scales) on the default device: int8 [O, I] and fp32 [O]."""
        return torch.empty(out_features, in_features, dtype=torch.int8), torch.empty(out_features)

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize a weight, fp32 [O, I] on the CPU, to (codes, scales): int8 [O, I] and fp32 [O]."""
        return load_library().int8_vectorwise_quant(weight)[:2]

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
        """Decode the result (codes, scales) of `encode`, and return the weight, fp32 [out_features, in_features]."""
        return load_library().int8_vectorwise_dequant(codes, scales)


class NormalFloat4:
    """Codec with QLoRA's NormalFloat: 4-bit codes, two per byte, and one fp32 scale per `BLOCK_SIZE` values."""

    @staticmethod
    def empty(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Allocate (codes, scales) on the default device: uint8 [O, I / 2] and fp32 [O * I / 64, rounded up]."""
        assert in_features % 2 == 0, f"nf4 needs an even number of in features, not {in_features}"
        num_blocks = -(-out_features * in_features // BLOCK_SIZE)
        return torch.empty(out_features, in_features // 2, dtype=torch.uint8), torch.empty(num_blocks)

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize a weight, fp32 [O, I] on the CPU, to (codes, scales): uint8 [O, I / 2] and fp32 [O * I / 64, rounded up]."""
        codes, state = load_library().quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4")
        return codes.view(len(weight), -1), state.absmax

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
        """Decode the result (codes, scales) of `encode`, and return the weight, fp32 [out_features, in_features]."""
        library = load_library()
        # Decode the weight as one row: the CPU kernel starts a new block at every row, even if I is not a multiple of BLOCK_SIZE.
        shape = torch.Size((1, len(codes) * in_features))
        state = library.QuantState(
            scales, shape=shape, dtype=torch.float32, blocksize=BLOCK_SIZE, quant_type="nf4"
        )
        return library.dequantize_4bit(codes.view(-1, 1), state).view(-1, in_features)


class Float8:
    """Codec in e4m3 with one fp32 scale per row, a power of two.

    The rounding error of a value is at most 1/16 of the value, or 2**-10 of the scale for the smallest values.
    """

    @staticmethod
    def empty(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Allocate (codes, scales) on the default device: uint8 [O, I] and fp32 [O]."""
        return torch.empty(out_features, in_features, dtype=torch.uint8), torch.empty(out_features)

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize a weight, fp32 [O, I] on the CPU, to (codes, scales): uint8 [O, I] and fp32 [O].

        The codes are the bits of e4m3, in uint8 because communication libraries lack e4m3.
        """
        codes, scales = cast_fp8_rows(weight)
        return codes.view(torch.uint8), scales.flatten()

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
        """Decode the result (codes, scales) of `encode`, and return the weight, fp32 [out_features, in_features]."""
        return codes.view(E4M3).float() * scales[:, None]


Codec = type[Int8] | type[NormalFloat4] | type[Float8]
CODECS: dict[str, Codec] = {"int8": Int8, "nf4": NormalFloat4, "fp8": Float8}


class QuantizedLinear(nn.Linear):
    """Frozen linear layer with a quantized weight, bit-equal to a linear layer with the decoded weight.

    Both passes decode the weight. Between them, only codes and scales are stored; under ZeRO-3, only the rank's partition.
    """

    codec: Codec
    scale: nn.Parameter

    @classmethod
    def convert(cls, linear: nn.Linear, codec: Codec) -> None:
        """Convert a linear layer on the meta device to a quantized layer there, in place."""
        with torch.device("meta"):
            codes, scale = codec.empty(linear.out_features, linear.in_features)
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.codec = codec
        linear.weight = nn.Parameter(codes, requires_grad=False)
        linear.register_parameter("scale", nn.Parameter(scale, requires_grad=False))

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantize a weight, fp32 [O, I] on the CPU; return the values of the parameters "weight" (the codes) and "scale"."""
        codes, scale = self.codec.encode(weight.contiguous())
        return {"weight": codes, "scale": scale}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., I]; return [..., O] in autocast's dtype, or that of x if autocast is off."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            decode = functools.partial(self._decode, dtype)
            bias = None if self.bias is None else self.bias.to(dtype)
            return _MultiplyDecoded.apply(x.to(dtype), self.weight, self.scale, bias, decode)

    def _decode(self, dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
        return self.codec.decode(codes, scale.float(), self.in_features).to(dtype)


class StoredFp8Linear(QuantizedLinear):
    """Frozen linear layer that multiplies in fp8, with the codes in which its weight is stored."""

    compiled = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., I], and return bf16 [..., O]."""
        rows = x.flatten(0, -2).to(torch.bfloat16)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        out = StoredFp8Product.apply(rows, self.weight, self.scale, bias, self.compiled)
        return out.unflatten(0, x.shape[:-1])


class _MultiplyDecoded(torch.autograd.Function):
    """Autograd function for x @ decode(codes, scale).T + bias. Only x has a gradient."""

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
