"""Scale, shift and gate packed tokens with a table that has one row per timestep, not one row per token.

The tokens of a timestep are contiguous, so each row of the table applies to a slice of tokens. The backward pass sums
each slice in a fixed order. The backward pass is therefore deterministic, and the gradient of a sample does not depend on
the other packed samples. Tokens are saved for the backward pass only if the table needs a gradient. In LoRA training, the table
needs no gradient.

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
        [L, D] in the wider dtype of x and factor.
    """
    return _Modulate.apply(x, factor, shift, tuple(lens))


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
    return _GatedAdd.apply(residual, update, gate, tuple(lens))


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, shift: Tensor, lens: tuple[int, ...]) -> Tensor:
        table_needs_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if table_needs_grad else None, factor)
        ctx.lens, ctx.dtype = lens, x.dtype
        out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, factor.dtype))
        for i, rows in _slices(lens, x):
            torch.addcmul(shift[i], x[rows], factor[i], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        dx = torch.empty_like(dout, dtype=ctx.dtype)
        for i, rows in _slices(ctx.lens, dout):
            torch.mul(dout[rows], factor[i], out=dx[rows])
        if x is None:
            return dx, None, None, None
        dfactor, dshift = torch.empty_like(factor), torch.empty_like(factor)
        for i, rows in _slices(ctx.lens, dout):
            torch.sum(dout[rows] * x[rows], 0, out=dfactor[i])
            torch.sum(dout[rows], 0, out=dshift[i])
        return dx, dfactor, dshift, None


class _GatedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, update: Tensor, gate: Tensor, lens: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(update if ctx.needs_input_grad[2] else None, gate)
        ctx.lens, ctx.residual_dtype, ctx.update_dtype = lens, residual.dtype, update.dtype
        dtype = torch.promote_types(torch.promote_types(residual.dtype, update.dtype), gate.dtype)
        out = residual.new_empty(residual.shape, dtype=dtype)
        for i, rows in _slices(lens, residual):
            torch.addcmul(residual[rows], update[rows], gate[i], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        update, gate = ctx.saved_tensors
        dupdate = torch.empty_like(dout, dtype=ctx.update_dtype)
        for i, rows in _slices(ctx.lens, dout):
            torch.mul(dout[rows], gate[i], out=dupdate[rows])
        dresidual = dout.to(ctx.residual_dtype)
        if update is None:
            return dresidual, dupdate, None, None
        dgate = torch.empty_like(gate)
        for i, rows in _slices(ctx.lens, dout):
            torch.sum(dout[rows] * update[rows], 0, out=dgate[i])
        return dresidual, dupdate, dgate, None


def _slices(lens: tuple[int, ...], x: Tensor) -> Iterator[tuple[int, slice]]:
    assert sum(lens) == x.shape[0], f"the timesteps have {sum(lens)} tokens, but the tensor has {x.shape[0]}"
    start = 0
    for i, length in enumerate(lens):
        yield i, slice(start, start + length)
        start += length
