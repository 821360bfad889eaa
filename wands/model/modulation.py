"""Scale, shift and gate of packed rows: one row of a table per sample, never expanded to one per token.

Samples are contiguous, so a table row meets its tokens as a slice. Forward writes each slice once; backward
sums each slice in a fixed order, so that it is deterministic and no sample's numbers depend on its
neighbours. Rows are kept for backward only where the table learns: a LoRA's does not.

Letters: L tokens, S samples, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def modulate(x: Tensor, factor: Tensor, shift: Tensor, lens: Sequence[int]) -> Tensor:
    """Compute x * factor + shift, each sample with its own row.

    Args:
        x: [L, D].
        factor: [S, D].
        shift: [S, D].
        lens: rows of each sample; they cover x.

    Returns:
        [L, D] in the wider dtype of x and the table.
    """
    return _Modulate.apply(x, factor, shift, tuple(lens))


def gated_add(residual: Tensor, update: Tensor, gate: Tensor, lens: Sequence[int]) -> Tensor:
    """Compute residual + update * gate, each sample with its own row of the gate.

    Args:
        residual: [L, D].
        update: [L, D].
        gate: [S, D].
        lens: rows of each sample; they cover residual.

    Returns:
        [L, D] in the widest dtype of the three.
    """
    return _GatedAdd.apply(residual, update, gate, tuple(lens))


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, shift: Tensor, lens: tuple[int, ...]) -> Tensor:
        learns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if learns else None, factor)
        ctx.lens, ctx.dtype = lens, x.dtype
        out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, factor.dtype))
        for sample, rows in _slices(lens, x):
            torch.addcmul(shift[sample], x[rows], factor[sample], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        dx = torch.empty_like(dout, dtype=ctx.dtype)
        for sample, rows in _slices(ctx.lens, dout):
            torch.mul(dout[rows], factor[sample], out=dx[rows])
        if x is None:
            return dx, None, None, None
        dfactor, dshift = torch.empty_like(factor), torch.empty_like(factor)
        for sample, rows in _slices(ctx.lens, dout):
            torch.sum(dout[rows] * x[rows], 0, out=dfactor[sample])
            torch.sum(dout[rows], 0, out=dshift[sample])
        return dx, dfactor, dshift, None


class _GatedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, update: Tensor, gate: Tensor, lens: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(update if ctx.needs_input_grad[2] else None, gate)
        ctx.lens, ctx.residual_dtype, ctx.update_dtype = lens, residual.dtype, update.dtype
        dtype = torch.promote_types(torch.promote_types(residual.dtype, update.dtype), gate.dtype)
        out = residual.new_empty(residual.shape, dtype=dtype)
        for sample, rows in _slices(lens, residual):
            torch.addcmul(residual[rows], update[rows], gate[sample], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        update, gate = ctx.saved_tensors
        dupdate = torch.empty_like(dout, dtype=ctx.update_dtype)
        for sample, rows in _slices(ctx.lens, dout):
            torch.mul(dout[rows], gate[sample], out=dupdate[rows])
        dresidual = dout.to(ctx.residual_dtype)
        if update is None:
            return dresidual, dupdate, None, None
        dgate = torch.empty_like(gate)
        for sample, rows in _slices(ctx.lens, dout):
            torch.sum(dout[rows] * update[rows], 0, out=dgate[sample])
        return dresidual, dupdate, dgate, None


def _slices(lens: tuple[int, ...], x: Tensor) -> Iterator[tuple[int, slice]]:
    assert sum(lens) == x.shape[0], f"{sum(lens)} rows of samples, {x.shape[0]} of the tensor"
    start = 0
    for sample, length in enumerate(lens):
        yield sample, slice(start, start + length)
        start += length
