"""Variable-length attention on packed rows, with gradients.

Letters: T rows, H heads, D head dim, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wands.attention.kernels.registry import Backend, choose_backend
from wands.attention.packed import Segments

__all__ = [
    "Backend",
    "PaddedSegments",
    "Segments",
    "choose_backend",
    "padded_attention",
    "varlen_attention",
]


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


@dataclass(frozen=True)
class PaddedSegments:
    """Segments whose keys end with copies of one more row, the same for all, up to a common length.

    Attributes:
        segments: the pairs without the copies.
        everyone: all rows of q against the one row.
        log_pads: fp64 [Tq], log of the number of copies that each row of q sees; -inf where there are none.
    """

    segments: Segments
    everyone: Segments
    log_pads: Tensor

    @classmethod
    def build(
        cls, lens_q: Sequence[int], lens_k: Sequence[int], padded_len: int, device: torch.device | str = "cpu"
    ) -> PaddedSegments:
        """Make them from lengths.

        Args:
            lens_q: rows of q in each segment.
            lens_k: rows of k in each segment, without the copies.
            padded_len: rows of k in each segment, with the copies.
            device: where q, k and v live.
        """
        assert max(lens_k) <= padded_len, f"a segment of {max(lens_k)} keys is longer than {padded_len}"
        num_rows = sum(lens_q)
        log_pads = torch.tensor([padded_len - length for length in lens_k], dtype=torch.float64).log()
        repeats = torch.tensor(lens_q).to(device, non_blocking=True)
        log_pads = log_pads.to(device, non_blocking=True).repeat_interleave(repeats, output_size=num_rows)
        everyone = Segments.build([num_rows], [1], device)
        return cls(Segments.build(lens_q, lens_k, device), everyone, log_pads)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pad_k: Tensor,
    pad_v: Tensor,
    padded: PaddedSegments,
    backend: Backend,
    scale: float | None = None,
) -> Tensor:
    """Attend inside segments as if each segment of k ended with its copies of `pad_k`.

    n equal keys weigh n*exp(score) in the softmax, so they are one block of one key whose log-sum-exp is
    score + log(n), merged with the other keys: the result of the long rows at the price of the short.

    Args:
        q: [Tq, H, D].
        k: [Tk, H, D], without the copies.
        v: [Tk, H, D].
        pad_k: [H, D].
        pad_v: [H, D].
        padded: who attends to whom, and to how many copies.
        backend: the kernel.
        scale: factor on the scores; 1/sqrt(D) when None.

    Returns:
        [Tq, H, D] in q's dtype.
    """
    return _PaddedAttention.apply(q, k, v, pad_k, pad_v, padded, backend, _scale(q, scale))


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
        padded: PaddedSegments,
        backend: Backend,
        scale: float,
    ) -> Tensor:
        out, lse = backend.forward(q, k, v, padded.segments, scale)
        _, pad_lse = backend.forward(q, pad_k[None], pad_v[None], padded.everyone, scale)
        pad_lse = pad_lse + padded.log_pads.to(lse.dtype)
        # Of the softmax, what the copies take and what is left; each rounded from fp32 by itself. In bf16, 1 - share would be
        # nothing but rounding where a short text stands before its many copies.
        share, rest = (torch.sigmoid(x).mT[..., None].to(out.dtype) for x in (pad_lse - lse, lse - pad_lse))
        out = torch.addcmul(out * rest, pad_v, share)
        ctx.save_for_backward(q, k, v, pad_k, pad_v, out, torch.logaddexp(lse, pad_lse))
        ctx.padded, ctx.backend, ctx.scale = padded, backend, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, pad_k, pad_v, out, lse = ctx.saved_tensors
        padded, backward = ctx.padded, ctx.backend.backward
        dq, dk, dv = backward(dout, q, k, v, out, lse, padded.segments, ctx.scale)
        # exp(score - (lse - log n)) is the probability of all n copies together.
        pad_lse = lse - padded.log_pads.to(lse.dtype)
        pad_block = (q, pad_k[None], pad_v[None], out, pad_lse, padded.everyone, ctx.scale)
        pad_dq, dpad_k, dpad_v = backward(dout, *pad_block)
        return dq + pad_dq, dk, dv, dpad_k[0], dpad_v[0], None, None, None
