"""Scale, shift and gate packed tokens with a table that has one row per timestep, not one row per token.

The tokens of a timestep are contiguous, so each row of the table applies to a slice of tokens. The backward pass sums
each slice in a fixed order. The backward pass is therefore deterministic, and the gradient of a sample does not depend on
the other packed samples. Tokens are saved for the backward pass only if the table needs a gradient. With a LoRA of only
attention and feed-forward, the table needs no gradient.

Letters: L tokens, M timesteps, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def modulate(x: Tensor, factor: Tensor, shift: Tensor, lens: Sequence[int]) -> Tensor:
    """Compute x * factor + shift, where all tokens of a timestep share one row of factor and shift.

    Args:
        x: [L, D], L tokens of width D.
        factor: [M, D], one row for each of M timesteps.
        shift: [M, D], one row for each timestep.
        lens: number of tokens of each timestep; the sum is L.

    Returns:
        [L, D] in the widest dtype of the three tensors.
    """
    return _ScaledAdd.apply(shift, x, factor, tuple(lens), True)


def gated_add(residual: Tensor, update: Tensor, gate: Tensor, lens: Sequence[int]) -> Tensor:
    """Compute residual + update * gate, where all tokens of a timestep share one row of the gate.

    Args:
        residual: [L, D], L tokens of width D.
        update: [L, D].
        gate: [M, D], one row for each of M timesteps.
        lens: number of tokens of each timestep; the sum is L.

    Returns:
        [L, D] in the widest dtype of the three tensors.
    """
    return _ScaledAdd.apply(residual, update, gate, tuple(lens), False)


class _ScaledAdd(torch.autograd.Function):
    """Autograd function for base + x * factor, where all tokens of a timestep share one row of factor.

    x has one row per token. If `base_per_timestep` is set, base has one row per timestep. Otherwise base has one row
    per token.
    """

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, x: Tensor, factor: Tensor, lens: tuple[int, ...], base_per_timestep: bool
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, factor)
        ctx.lens, ctx.base_per_timestep = lens, base_per_timestep
        ctx.base_dtype, ctx.x_dtype = base.dtype, x.dtype
        dtype = torch.promote_types(torch.promote_types(base.dtype, x.dtype), factor.dtype)
        out = x.new_empty(x.shape, dtype=dtype)
        for i, rows in _slices(lens, x):
            torch.addcmul(base[i if base_per_timestep else rows], x[rows], factor[i], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        dx = torch.empty_like(dout, dtype=ctx.x_dtype)
        sums_base = ctx.base_per_timestep and ctx.needs_input_grad[0]
        dbase = torch.empty_like(factor) if sums_base else None
        dfactor = torch.empty_like(factor) if x is not None else None
        for i, rows in _slices(ctx.lens, dout):
            torch.mul(dout[rows], factor[i], out=dx[rows])
            if dbase is not None:
                torch.sum(dout[rows], 0, out=dbase[i])
            if dfactor is not None:
                torch.sum(dout[rows] * x[rows], 0, out=dfactor[i])
        return dbase if ctx.base_per_timestep else dout.to(ctx.base_dtype), dx, dfactor, None, None


def _slices(lens: tuple[int, ...], x: Tensor) -> Iterator[tuple[int, slice]]:
    assert sum(lens) == x.shape[0], f"the timesteps have {sum(lens)} tokens, but the tensor has {x.shape[0]}"
    start = 0
    for i, length in enumerate(lens):
        yield i, slice(start, start + length)
        start += length
