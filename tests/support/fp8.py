"""fp8 in float64: the casts by a table of all values of e4m3, and the products of a linear layer from them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wands.errors import ConfigError
from wands.model.fp8 import check_fp8

LARGEST = 448.0


def _multiplies_on_cpu() -> bool:
    try:
        check_fp8(torch.device("cpu"))
    except ConfigError:
        return False
    return True


needs_products = pytest.mark.skipif(not _multiplies_on_cpu(), reason="row-wise fp8 on a CPU needs torch 2.13")


def e4m3_values() -> Tensor:
    """All finite values of e4m3 that are not negative, ascending: the code of a value is its index."""
    exponent = torch.arange(16).repeat_interleave(8).double()
    mantissa = torch.arange(8).repeat(16).double() / 8
    normal = (1 + mantissa) * 2 ** (exponent - 7)
    subnormal = mantissa * 2.0**-6
    return torch.where(exponent == 0, subnormal, normal)[:-1]  # the last code is NaN


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast the rows of x to multiples of e4m3's values. Return (values without their scale, scale [rows, 1])."""
    values = e4m3_values()
    x = x.double()
    scales = []
    for row in x:
        largest = float(row.abs().max())
        exponent = -126
        if not math.isfinite(largest):
            scales.append(math.nan)
            continue
        # The smallest power of two with which the row fits. fp32 has no smaller one whose inverse it has, too.
        while largest > LARGEST * 2.0**exponent:
            exponent += 1
        scales.append(2.0**exponent)
    scale = torch.tensor(scales, dtype=torch.float64)[:, None]
    size = (x / scale).abs()
    above = torch.searchsorted(values, size.contiguous()).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    up = values[above] - size
    down = size - values[below]
    even = above % 2 == 0
    nearest = torch.where((up < down) | ((up == down) & even), above, below)
    nearest = torch.where(size == values[above], above, nearest)
    return values[nearest].copysign(x), scale


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times the transpose of b [N, K] with both cast, in float64."""
    (codes_a, scale_a) = cast_rows(a)
    (codes_b, scale_b) = cast_rows(b)
    return (codes_a * scale_a) @ (codes_b * scale_b).t()


def product_error(a: Tensor, b: Tensor) -> Tensor:
    """Largest distance of `product` from the product without casts, by the rounding of e4m3 alone.

    A value is off by 1/16 of itself, or by half of the smallest value, 2**-10, of its scale. For a' = a + da and b' = b + db,
    |a' b' - a b| <= |da| |b| + |a| |db| + |da| |db|.
    """

    def error(x: Tensor) -> Tensor:
        return torch.maximum(x.double().abs() / 16, cast_rows(x)[1] * 2.0**-10)

    size_a = a.double().abs()
    size_b = b.double().abs()
    error_a = error(a)
    error_b = error(b)
    return error_a @ size_b.t() + size_a @ error_b.t() + error_a @ error_b.t()
