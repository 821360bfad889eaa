"""Linear layers whose matrix products run in fp8 (e4m3).

Both factors of a product are cast with one scale per row, a vector along the dimension that the product sums. A scale is the
largest power of two with which the row's absolute values stay at most 448, so it adds no rounding error and nothing is clipped. A
row with an infinite or NaN value gets the scale NaN, and its products are NaN.

The two products of the backward pass cast their factors again, because they sum other dimensions. Between the passes a layer
keeps its input in bf16 and a reference to its weight, never a cast or gathered copy: ZeRO-3 would otherwise keep the whole model
on every rank.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Row-wise scales: torchao's float8 training.
Letters: T tokens, O out features, I in features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, pad, scaled_mm
from torch.utils.flop_counter import register_flop_formula

from wands.compiled import compiled_op
from wands.errors import ConfigError, one_line

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest value of e4m3, 1.75 * 2**8."""
MULTIPLE = 16
"""Every dimension of a weight must be a multiple of this number, as GPUs multiply fp8 matrices in tiles."""
MIN_CAPABILITY = (8, 9)
_MANTISSA_BITS = 23
_MANTISSA_OF_LARGEST = 0x600000  # of 1.75 in fp32
_EXPONENT_OF_LARGEST = 8
_BIAS = 127


def power_of_two_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return (factor, scale) of rows from their largest absolute values, fp32: code = value * factor, value = code * scale."""
    bits = largest.view(torch.int32)
    exponent = bits >> _MANTISSA_BITS
    mantissa = bits & ((1 << _MANTISSA_BITS) - 1)
    too_large = (mantissa > _MANTISSA_OF_LARGEST).to(torch.int32)
    # Exponents are computed as integers: a logarithm in fp32 is off by one next to a power of two.
    biased = (_BIAS + _EXPONENT_OF_LARGEST + _BIAS - exponent - too_large).clamp(1, 2 * _BIAS - 1)
    factor = (biased << _MANTISSA_BITS).view(torch.float32)
    scale = ((2 * _BIAS - biased) << _MANTISSA_BITS).view(torch.float32)
    return factor, torch.where(largest.isfinite(), scale, torch.nan)


def cast_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast each row of x [R, K] to e4m3; return (codes [R, K], scale fp32 [R, 1])."""
    wide = x.float()
    factor, scale = power_of_two_scales(wide.abs().amax(1, keepdim=True))
    return (wide * factor).clamp_(-LARGEST, LARGEST).to(E4M3).contiguous(), scale


def cast_fp8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast each column of x [K, C] to e4m3; return (codes [C, padded K], scale fp32 [C, 1]).

    K is padded with zeros to a multiple of 16, for a product that sums over K.
    """
    wide = pad(x.float(), (0, 0, 0, -len(x) % MULTIPLE))
    factor, scale = power_of_two_scales(wide.abs().amax(0, keepdim=True))
    codes = (wide * factor).clamp_(-LARGEST, LARGEST).to(E4M3)
    return codes.t().contiguous(), scale.t()


_cast_rows_op = compiled_op(cast_fp8_rows)
_cast_columns_op = compiled_op(cast_fp8_columns)


def _cast(x: Tensor, columns: bool, compiled: bool) -> tuple[Tensor, Tensor]:
    if columns:
        return _cast_columns_op(x) if compiled else cast_fp8_columns(x)
    return _cast_rows_op(x) if compiled else cast_fp8_rows(x)


def _multiply(
    codes_a: Tensor, scale_a: Tensor, codes_b: Tensor, scale_b: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return a @ b.T + bias in bf16, for a [M, K] and b [N, K] as codes with scales [M, 1] and [N, 1]."""
    # Under autocast, the product is rounded once more before the bias is added.
    with torch.autocast(codes_a.device.type, enabled=False):
        return scaled_mm(
            codes_a,
            codes_b.t(),
            scale_a.flatten()[:, None],  # the product checks strides, also of dimensions of size 1
            ScalingType.RowWise,
            scale_b.flatten()[None],
            ScalingType.RowWise,
            bias=bias,
            output_dtype=torch.bfloat16,
        )


@torch.library.custom_op("wands::fp8_matmul", mutates_args=())
def fp8_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, a_columns: bool, b_columns: bool, compiled: bool
) -> Tensor:
    """Return a @ b.T + bias, multiplied in fp8, bf16 [M, N].

    a is [M, K], or [K, M] with `a_columns`; b is [N, K], or [K, N] with `b_columns`; bias is bf16 [N]. `compiled` compiles the
    casts, with the same values.
    """
    return _multiply(*_cast(a, a_columns, compiled), *_cast(b, b_columns, compiled), bias)


@fp8_matmul.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, a_columns: bool, b_columns: bool, compiled: bool) -> Tensor:
    return a.new_empty(a.shape[int(a_columns)], b.shape[int(b_columns)], dtype=torch.bfloat16)


@torch.library.custom_op("wands::fp8_stored", mutates_args=())
def fp8_stored(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, compiled: bool) -> Tensor:
    """Multiply x [T, I] by a stored weight: uint8 codes [O, I] of e4m3 with fp32 scales [O]. Return bf16 [T, O]."""
    return _multiply(*_cast(x, False, compiled), codes.view(E4M3), scale.float()[:, None], bias)


@fp8_stored.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, compiled: bool) -> Tensor:
    return x.new_empty(len(x), len(codes), dtype=torch.bfloat16)


@torch.library.custom_op("wands::fp8_stored_backward", mutates_args=())
def fp8_stored_backward(dout: Tensor, codes: Tensor, scale: Tensor, compiled: bool) -> Tensor:
    """Return dout [T, O] times the stored weight, bf16 [T, I].

    The product sums over the rows that have the scales, so the scales multiply `dout` before its cast.
    """
    ones = scale.new_ones(codes.shape[1], 1, dtype=torch.float32)
    scaled = dout.float() * scale.float()
    return _multiply(*_cast(scaled, False, compiled), codes.t().contiguous().view(E4M3), ones)


@fp8_stored_backward.register_fake
def _(dout: Tensor, codes: Tensor, scale: Tensor, compiled: bool) -> Tensor:
    return dout.new_empty(len(dout), codes.shape[1], dtype=torch.bfloat16)


def check_fp8(device: torch.device) -> None:
    """Raise a ConfigError if a device cannot multiply in fp8 with a scale for each row."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"fp8 needs a GPU of compute capability 8.9 or higher, but {torch.cuda.get_device_name(device)} has "
            f"{major}.{minor}; set precision.linears=bf16, and lora.quantize=int8, nf4 or none."
        )
    try:
        fp8_matmul(
            torch.ones(1, MULTIPLE, device=device),
            torch.ones(MULTIPLE, MULTIPLE, device=device),
            None,
            False,
            False,
            False,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"fp8 with a scale for each row does not work on {device} with torch {torch.__version__} ({one_line(error, 200)}); "
            "on a CPU it needs torch 2.13. Set precision.linears=bf16, and lora.quantize=int8, nf4 or none."
        ) from error


class Fp8Linear(nn.Linear):
    """Linear layer that multiplies in fp8. Its weight stays in the dtype in which the run stores weights.

    Attributes:
        compiled: whether the casts are compiled.
        bf16_grad_weight: whether the product for the weight's gradient runs in bf16.
    """

    compiled = False
    bf16_grad_weight = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., I], and return bf16 [..., O]."""
        rows = x.flatten(0, -2).to(torch.bfloat16)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        out = _Fp8Product.apply(rows, self.weight, bias, self.bf16_grad_weight, self.compiled)
        return out.unflatten(0, x.shape[:-1]) if x.dim() != 2 else out


class _Fp8Product(torch.autograd.Function):
    """Autograd function for x @ weight.T + bias in fp8."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, bf16_grad_weight: bool, compiled: bool
    ) -> Tensor:
        # The parameter itself, not a view of it: a view would keep the weight that ZeRO-3 has gathered.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.bf16_grad_weight = bf16_grad_weight
        ctx.compiled = compiled
        return fp8_matmul(x, weight, bias, False, False, compiled)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = None
        dweight = None
        dbias = None
        if ctx.needs_input_grad[0]:
            dx = fp8_matmul(dout, weight, None, False, True, ctx.compiled)
        if ctx.needs_input_grad[1] and ctx.bf16_grad_weight:
            dweight = (dout.t() @ x).to(weight.dtype)
        elif ctx.needs_input_grad[1] and len(x):
            dweight = fp8_matmul(dout, x, None, True, True, ctx.compiled).to(weight.dtype)
        elif ctx.needs_input_grad[1]:
            dweight = torch.zeros_like(weight)  # no tokens
        if ctx.needs_input_grad[2]:
            dbias = dout.sum(0, dtype=torch.float32).to(dout.dtype)
        return dx, dweight, dbias, None, None


class StoredFp8Product(torch.autograd.Function):
    """Autograd function for x @ weight.T + bias with a stored weight, see `fp8_stored`. Only x has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, compiled: bool
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.compiled = compiled
        return fp8_stored(x, codes, scale, bias, compiled)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return fp8_stored_backward(dout, *ctx.saved_tensors, ctx.compiled), None, None, None, None


@register_flop_formula(torch.ops.wands.fp8_matmul)
def _(a: Any, b: Any, bias: Any, a_columns: bool, b_columns: bool, *_: Any, **__: Any) -> int:
    summed = a[0] if a_columns else a[1]
    return int(2 * a[int(a_columns)] * summed * b[int(b_columns)])


@register_flop_formula([torch.ops.wands.fp8_stored, torch.ops.wands.fp8_stored_backward])
def _(x: Any, codes: Any, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * codes[0] * codes[1])
