"""Fused pointwise operations of a transformer block: add, normalize, modulate, rotate and cast.

Each is an autograd function with a hand-written backward pass; each pass runs one custom operator, which `compiled_op` compiles,
to read and write memory less often. The plain code is the reference for the values: `AddNorm` and `NormRotate` in transformer.py,
and `gated_add` in modulation.py.
Letters: L tokens, M timesteps, C chunks, D width, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wands.compiled import compiled_op
from wands.transfer import to_device

CHUNK = 256
"""Number of tokens that are summed at once. The sums of the chunks of a timestep are then added."""


@lru_cache(maxsize=16)
def _timestep_rows(lens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return index tables for sums over the tokens of each timestep. All blocks share the cached result.

    The gradients of gate, factor and shift (one row per timestep) are sums over the tokens of a timestep. The tokens of each
    chunk of at most `CHUNK` are summed first, then the chunks: a fixed order, unlike that of `index_add_` on a GPU.

    Args:
        lens: number of tokens of each timestep; the sum is L.
        device: device of the tables.

    Returns:
        (ids, rows, valid, chunks). ids: int64 [L], timestep of each token. rows: int64 [C, CHUNK], tokens of each chunk, filled
        up with arbitrary indices. valid: fp32 [C, CHUNK, 1], 0 for such a filler, else 1. chunks: fp32 [M, C, 1], 1 if the chunk
        belongs to the timestep, else 0.
    """
    spans = [
        (timestep, start, end)
        for timestep, (length, end) in enumerate(zip(lens, accumulate(lens), strict=True))
        for start in range(end - length, end, CHUNK)
    ]
    owners, starts, ends = torch.tensor(spans, dtype=torch.int64).reshape(-1, 3).unbind(1)
    tokens = starts[:, None] + torch.arange(CHUNK)
    timesteps = torch.arange(len(lens))
    tables = (
        timesteps.repeat_interleave(torch.tensor(lens, dtype=torch.int64)),
        tokens.clamp(max=sum(lens) - 1),
        (tokens < ends[:, None]).float()[:, :, None],
        (timesteps[:, None] == owners).float()[:, :, None],
    )
    tables = to_device(tables, device)
    # The number of chunks varies, too, and `compiled_op` marks only dimension 0.
    torch._dynamo.maybe_mark_dynamic(tables[3], 1)
    return tables


def _sum_timesteps(x: Tensor, valid: Tensor, chunks: Tensor) -> Tensor:
    """Sum the chunks x [C, CHUNK, D] over the tokens of each timestep; return [M, D]. See `_timestep_rows` for the tables."""
    return (chunks * (x * valid).sum(1)).sum(1)


def add_norm_forward(
    hidden: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    factor: Tensor,
    shift: Tensor,
    ids: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (total, normed, mean, rstd) for the forward pass of `_AddNorm`. `ids` is the index of each token's timestep.

    total = hidden + update * gate, normed = layer_norm(total) * factor + shift. mean and 1 / rstd are the mean and the standard
    deviation of each token's sum. If `update` is None, the sum is `hidden`, and total is an empty tensor.
    """
    total = hidden
    if update is not None:
        total = hidden + (update if gate is None else update * gate[ids])
    mean = total.mean(1, keepdim=True)
    rstd = ((total - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    normed = ((total - mean) * rstd * factor[ids] + shift[ids]).to(dtype, copy=True)
    return hidden.new_empty(0) if update is None else total, normed, mean, rstd


def add_norm_backward(
    dtotal: Tensor | None,
    dnormed: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    factor: Tensor,
    timesteps: Sequence[Tensor],
    needs_gate: bool,
    needs_table: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (hidden, update, gate, factor, shift) of `add_norm_forward`.

    A gradient that is not computed is an empty tensor: those of update and gate if `update` is None, of gate without
    `needs_gate`, of factor and shift without `needs_table`. `dtotal` None means 0. `total` is `hidden` if `update` is None.
    Without `needs_gate`, only the dtype of `update` is used. `timesteps` is the result of `_timestep_rows`.
    """
    ids, rows, *masks = timesteps
    unit = (total - mean) * rstd
    dunit = dnormed * factor[ids]
    dhidden = rstd * (dunit - dunit.mean(1, keepdim=True) - unit * (dunit * unit).mean(1, keepdim=True))
    if dtotal is not None:
        dhidden = dhidden + dtotal
    dupdate, dgate, dfactor, dshift = (dhidden.new_empty(0) for _ in range(4))
    if update is not None:
        dupdate = (dhidden if gate is None else dhidden * gate[ids]).to(update.dtype, copy=True)
        if needs_gate:
            dgate = _sum_timesteps(dhidden[rows] * update[rows], *masks)
    if needs_table:
        dnormed = dnormed[rows].to(total.dtype)
        dfactor = _sum_timesteps(dnormed * ((total[rows] - mean[rows]) * rstd[rows]), *masks)
        dshift = _sum_timesteps(dnormed, *masks)
    return dhidden, dupdate, dgate, dfactor, dshift


def gated_add_forward(hidden: Tensor, update: Tensor, gate: Tensor, ids: Tensor) -> Tensor:
    """Return hidden + update * gate[ids]. `gate` has one row per timestep, and `ids` gives the row of `gate` for each token."""
    return hidden + update * gate[ids]


def gated_add_backward(
    dout: Tensor, update: Tensor, gate: Tensor, timesteps: Sequence[Tensor], needs_gate: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of (update, gate) of `gated_add_forward`; the gate's is empty without `needs_gate`."""
    ids, rows, *masks = timesteps
    dgate = _sum_timesteps(dout[rows] * update[rows], *masks) if needs_gate else dout.new_empty(0)
    return (dout * gate[ids]).to(update.dtype, copy=True), dgate


def norm_rotate_forward(
    x: Tensor, weight: Tensor, rotation: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalize tokens x [L, D] by their root mean square over all heads, and rotate each pair of adjacent channels.

    `rotation` is [L, 1, d/2, 2], (cosine, sine) of the angle of each pair; None does not rotate.

    Returns:
        (result [L, D], 1 / root mean square of each token [L, 1]).
    """
    # In fp32, also if x or the weight is bf16.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    return _rotate(wide * rstd * weight, rotation, 1.0).to(x.dtype, copy=True), rstd


def norm_rotate_backward(
    dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, rotation: Tensor | None, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of (x, weight) of `norm_rotate_forward`; the weight's is empty without `needs_weight`."""
    dunit = _rotate(dout.to(rstd.dtype), rotation, -1.0)
    unit = x.to(rstd.dtype) * rstd
    dx = rstd * (dunit * weight - unit * (dunit * weight * unit).mean(1, keepdim=True))
    dweight = (dunit * unit).sum(0).to(weight.dtype) if needs_weight else dunit.new_empty(0)
    return dx.to(x.dtype, copy=True), dweight


def _rotate(x: Tensor, rotation: Tensor | None, sign: float) -> Tensor:
    """Rotate tokens x [L, D] by the angles in `rotation` (`sign` 1), or back (`sign` -1), see `norm_rotate_forward`."""
    if rotation is None:
        return x
    cos = rotation[..., :1]
    sin = rotation[..., 1:] * sign
    pairs = x.unflatten(1, (-1, rotation.shape[2], 2))
    signs = torch.tensor([-1.0, 1.0], dtype=x.dtype, device=x.device)
    return (pairs * cos + pairs.flip(-1) * (sin * signs)).flatten(1)


def _kept(update: Tensor | None, needs_gate: bool) -> Tensor | None:
    """Return what hidden + update * gate saves: `update`, or without `needs_gate` an empty tensor of its dtype."""
    return update if needs_gate or update is None else update.new_empty(0)


_ADD_NORM = compiled_op(add_norm_forward)
_ADD_NORM_BACKWARD = compiled_op(add_norm_backward)
_GATED_ADD = compiled_op(gated_add_forward)
_GATED_ADD_BACKWARD = compiled_op(gated_add_backward)
_NORM_ROTATE = compiled_op(norm_rotate_forward)
_NORM_ROTATE_BACKWARD = compiled_op(norm_rotate_backward)


class _AddNorm(torch.autograd.Function):
    """Add an update to the residual stream; return the sum, and the sum's modulated layer norm in `dtype`.

    hidden is fp32 or fp64 [L, D]. update is [L, D]; None adds nothing. gate, factor and shift are [M, D], with one row for all
    tokens of a timestep; gate None means 1. `lens` are the numbers of tokens of the timesteps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        update: Tensor | None,
        gate: Tensor | None,
        factor: Tensor,
        shift: Tensor,
        lens: tuple[int, ...],
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        timesteps = ctx.timesteps = _timestep_rows(lens, hidden.device)
        total, normed, mean, rstd = _ADD_NORM(hidden, update, gate, factor, shift, timesteps[0], eps, dtype)
        total = hidden if update is None else total
        ctx.save_for_backward(total, mean, rstd, _kept(update, ctx.needs_input_grad[2]), gate, factor)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        _, needs_update, needs_gate, *needs_table = ctx.needs_input_grad[:5]
        needs = needs_gate, any(needs_table)
        grads = _ADD_NORM_BACKWARD(dtotal, dnormed, *ctx.saved_tensors, ctx.timesteps, *needs)
        needed = True, needs_update, needs_gate, *needs_table
        return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None, None


class _GatedAdd(torch.autograd.Function):
    """Autograd function for hidden + update * gate, as `wands.model.modulation.gated_add`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, update: Tensor, gate: Tensor, lens: tuple[int, ...]) -> Tensor:
        ctx.timesteps = _timestep_rows(lens, hidden.device)
        ctx.save_for_backward(_kept(update, ctx.needs_input_grad[2]), gate)
        return _GATED_ADD(hidden, update, gate, ctx.timesteps[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        needs_gate = ctx.needs_input_grad[2]
        dupdate, dgate = _GATED_ADD_BACKWARD(dout, *ctx.saved_tensors, ctx.timesteps, needs_gate)
        return dout, dupdate, dgate if needs_gate else None, None


class _NormRotate(torch.autograd.Function):
    """Autograd function of `norm_rotate_forward` for a complex rotation [L, 1, d/2]. The result has the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rotation: Tensor | None, eps: float) -> Tensor:
        # Compiled code has no complex numbers. The view as pairs of real numbers copies nothing.
        rotation = None if rotation is None else torch.view_as_real(rotation)
        out, rstd = _NORM_ROTATE(x, weight, rotation, eps)
        ctx.save_for_backward(x, rstd, weight, rotation)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        needs_weight = ctx.needs_input_grad[1]
        dx, dweight = _NORM_ROTATE_BACKWARD(dout, *ctx.saved_tensors, needs_weight)
        return dx, dweight if needs_weight else None, None, None


add_norm = _AddNorm.apply
gated_add = _GatedAdd.apply
norm_rotate = _NormRotate.apply
