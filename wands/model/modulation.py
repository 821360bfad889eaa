"""Scale, shift and gate packed tokens with a table that has one row per timestep, not one row per token.

The tokens of a timestep are contiguous, so each row of the table applies to a slice of tokens. The backward pass sums
each slice in a fixed order. The backward pass is therefore deterministic, and the gradient of a sample does not depend on
the other packed samples. Tokens are saved for the backward pass only if the table needs a gradient. With a LoRA of only
attention and feed-forward, the table needs no gradient.

Letters: L tokens, M timesteps, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        ctx.lens = lens
        ctx.base_per_timestep = base_per_timestep
        ctx.base_dtype = base.dtype
        ctx.x_dtype = x.dtype
        dtype = torch.promote_types(torch.promote_types(base.dtype, x.dtype), factor.dtype)
        out = x.new_empty(x.shape, dtype=dtype)
        bases = base if base_per_timestep else base.split(lens)
        for b, rows, row, out_rows in zip(bases, x.split(lens), factor, out.split(lens), strict=True):
            torch.addcmul(b, rows, row, out=out_rows)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        parts = dout.split(ctx.lens)
        dx = torch.empty_like(dout, dtype=ctx.x_dtype)
        for rows, row, dx_rows in zip(parts, factor, dx.split(ctx.lens), strict=True):
            torch.mul(rows, row, out=dx_rows)
        dbase = None
        dfactor = None
        if not ctx.base_per_timestep:
            dbase = dout.to(ctx.base_dtype)
        elif ctx.needs_input_grad[0]:
            dbase = torch.stack([rows.sum(0, dtype=factor.dtype) for rows in parts])
        if x is not None:
            pairs = zip(parts, x.split(ctx.lens), strict=True)
            dfactor = torch.stack([(rows * x_rows).sum(0, dtype=factor.dtype) for rows, x_rows in pairs])
        return dbase, dx, dfactor, None, None
