"""Variable-length attention on packed rows, with gradients.

Letters: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wands.attention.backends import Backend, Triple, choose_backend
from wands.attention.segments import Segments

__all__ = ["Backend", "Segments", "choose_backend", "padded_attention", "varlen_attention"]


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, backend: Backend, scale: float | None = None
) -> Tensor:
    """Attend inside segments, never across them.

    Args:
        q: [Tq, H, D].
        k: [Tk, H, D].
        v: [Tk, H, D].
        segments: who attends to whom.
        backend: the kernel.
        scale: factor on the scores; 1/sqrt(D) when None.

    Returns:
        [Tq, H, D] in q's dtype; 0 in rows that attend to nothing.
    """
    return _VarlenAttention.apply(q, k, v, segments, backend, _scale(q, scale))


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pad_k: Tensor,
    pad_v: Tensor,
    num_pads: Sequence[int],
    segments: Segments,
    backend: Backend,
    scale: float | None = None,
) -> Tensor:
    """Attend inside segments as if each segment of k ended with `num_pads` copies of one more row.

    n equal keys weigh n*exp(score) in the softmax, so they are merged through the log-sum-exp as one key with
    score + log(n): the result is that of the long rows, and key and value are computed once per pack.

    Args:
        q: [Tq, H, D].
        k: [Tk, H, D], without the copies.
        v: [Tk, H, D].
        pad_k: [H, D], the row that is repeated, the same for all segments.
        pad_v: [H, D].
        num_pads: how often it is repeated in each segment; zero is legal.
        segments: who attends to whom; q must be covered entirely.
        backend: the kernel.
        scale: factor on the scores; 1/sqrt(D) when None.

    Returns:
        [Tq, H, D] in q's dtype.
    """
    assert sum(segments.lens_q) == q.shape[0], "rows of q behind the last segment have no number of pads"
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    log_pads = torch.tensor(num_pads, dtype=score_dtype).log()  # -inf where there are none
    lens_q = torch.tensor(segments.lens_q)
    log_pads = log_pads.repeat_interleave(lens_q).to(q.device, non_blocking=True)
    return _PaddedAttention.apply(q, k, v, pad_k, pad_v, log_pads, segments, backend, _scale(q, scale))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, backend: Backend, scale: float
    ) -> Tensor:
        out, lse = backend.forward(q, k, v, segments, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.backend, ctx.scale = segments, backend, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.backend.backward(dout, *ctx.saved_tensors, ctx.segments, ctx.scale)
        return *grads, None, None, None


class _PaddedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pad_k: Tensor,
        pad_v: Tensor,
        log_pads: Tensor,
        segments: Segments,
        backend: Backend,
        scale: float,
    ) -> Tensor:
        out, lse = backend.forward(q, k, v, segments, scale)
        pad_scores = _pad_scores(q, pad_k, log_pads, scale)
        total = torch.logaddexp(lse, pad_scores)
        keep, take = ((x - total).exp().mT[..., None] for x in (lse, pad_scores))
        out = (out * keep).addcmul_(take, pad_v).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total, pad_k, pad_v, log_pads)
        ctx.segments, ctx.backend, ctx.scale = segments, backend, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, pad_k, pad_v, log_pads = ctx.saved_tensors
        grads: Triple = ctx.backend.backward(dout, q, k, v, out, lse, ctx.segments, ctx.scale)
        dq, dk, dv = grads
        # The pads' share of a flash backward, written out: the kernel above knows nothing of them.
        probs = (_pad_scores(q, pad_k, log_pads, ctx.scale) - lse).exp()  # [H, T]
        dscores = probs * (_dot(dout, pad_v) - _dot(dout, out)) * ctx.scale
        dq = torch.addcmul(dq, dscores.mT[..., None], pad_k).to(q.dtype)
        dpad_k = _weighted_sum(dscores.to(q.dtype), q)
        dpad_v = _weighted_sum(probs.to(q.dtype), dout)
        return dq, dk, dv, dpad_k, dpad_v, None, None, None, None


def _pad_scores(q: Tensor, pad_k: Tensor, log_pads: Tensor, scale: float) -> Tensor:
    return _dot(q, pad_k) * scale + log_pads


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Product over D of [T, H, D] with [T, H, D] or [H, D] -> [H, T], in the dtype of scores."""
    score_dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.linalg.vecdot(a.to(score_dtype), b.to(score_dtype)).mT


def _weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """[H, T] with [T, H, D] -> [H, D]."""
    return torch.bmm(weights[:, None], rows.transpose(0, 1))[:, 0]
