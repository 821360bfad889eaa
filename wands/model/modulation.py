"""Scale, shift and gate packed tokens with a table that has one row per timestep, not one row per token.

The tokens of a timestep are contiguous. The backward pass sums each slice in a fixed order, so it is deterministic, and the
gradient of a sample does not depend on the other packed samples. Tokens are saved for it only if the table needs a gradient,
which it does not with a LoRA of attention and feed-forward.
Letters: L tokens, M timesteps, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def modulate(x: Tensor, factor: Tensor, shift: Tensor, lens: Sequence[int]) -> Tensor:
    """Return x * factor + shift, [L, D] in the widest dtype. factor and shift are [M, D]; timestep m has `lens[m]` tokens."""
    return _ScaledAdd.apply(shift, x, factor, tuple(lens), True)


def gated_add(residual: Tensor, update: Tensor, gate: Tensor, lens: Sequence[int]) -> Tensor:
    """Return residual + update * gate, [L, D] in the widest dtype. gate is [M, D]; timestep m has `lens[m]` tokens."""
    return _ScaledAdd.apply(residual, update, gate, tuple(lens), False)


class _ScaledAdd(torch.autograd.Function):
    """Autograd function for base + x * factor, where base has one row per timestep (`base_per_timestep`) or per token."""

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
