"""Variable-length attention on packed rows, with gradients. All keys of this rank's queries must be on this rank.

The model uses these functions for cross-attention. Self-attention goes through ring.py, also on a single rank.

Letters: T rows, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wands.attention.kernels.registry import Backend, choose_backend
from wands.attention.packed import Segments

__all__ = ["Backend", "PaddedSegments", "Segments", "choose_backend", "padded_attention", "varlen_attention"]


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, backend: Backend, scale: float | None = None
) -> Tensor:
    """Run attention in which rows of q attend only to rows of k in the same segment.

    Args:
        q: [Tq, H, D], for Tq rows, H heads and head dim D.
        k: [Tk, H, D].
        v: [Tk, H, D].
        segments: number of rows of q and of k in each segment.
        backend: attention kernel.
        scale: factor on the attention scores; None means 1/sqrt(D).

    Returns:
        [Tq, H, D] in q's dtype. Rows of q that attend to no key are 0.
    """
    return _VarlenAttention.apply(q, k, v, segments, backend, _scale(q, scale))


@dataclass(frozen=True)
class PaddedSegments:
    """Attention segments whose keys are padded to a common length. The padding consists of copies of one key.

    The copies are not stored.

    Attributes:
        segments: rows of q and of k in each segment, without padding.
        pad_segment: one segment that contains all rows of q and the single padding key.
        log_num_pads: fp64 [Tq] for Tq rows of q, logarithm of the number of padding keys that each row of q attends to. The
            logarithm is -inf for rows without padding keys.
    """

    segments: Segments
    pad_segment: Segments
    log_num_pads: Tensor

    @classmethod
    def build(
        cls, lens_q: Sequence[int], lens_k: Sequence[int], padded_len: int, device: torch.device | str = "cpu"
    ) -> PaddedSegments:
        """Build padded segments from lengths.

        Args:
            lens_q: number of rows of q in each segment.
            lens_k: number of rows of k in each segment, without padding.
            padded_len: number of rows of k in each segment, with padding.
            device: device of q, k and v.
        """
        assert max(lens_k) <= padded_len, f"a segment of {max(lens_k)} keys is longer than {padded_len=}"
        num_rows = sum(lens_q)
        log_num_pads = torch.tensor([padded_len - length for length in lens_k], dtype=torch.float64).log()
        repeats = torch.tensor(lens_q).to(device, non_blocking=True)
        log_num_pads = log_num_pads.to(device, non_blocking=True)
        log_num_pads = log_num_pads.repeat_interleave(repeats, output_size=num_rows)
        pad_segment = Segments.build([num_rows], [1], device)
        return cls(Segments.build(lens_q, lens_k, device), pad_segment, log_num_pads)


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
    """Run attention inside segments whose keys are padded with copies of the key `pad_k`.

    The padding costs almost nothing. In the softmax, n equal keys have the weight n * exp(score). The function therefore
    treats the padding as one key whose log-sum-exp is `score + log(n)`, and merges the result with the attention to the
    other keys.

    Args:
        q: [Tq, H, D], for Tq rows, H heads and head dim D.
        k: [Tk, H, D], without padding.
        v: [Tk, H, D], without padding.
        pad_k: [H, D], key of the padding.
        pad_v: [H, D], value of the padding.
        padded: rows of q and of k in each segment, and the number of padding keys.
        backend: attention kernel.
        scale: factor on the attention scores; None means 1/sqrt(D).

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
        _, pad_lse = backend.forward(q, pad_k[None], pad_v[None], padded.pad_segment, scale)
        pad_lse = pad_lse + padded.log_num_pads.to(lse.dtype)
        # Softmax weights of the padding keys and of the other keys, each rounded from fp32. For a short text with many padding
        # keys, 1 - pad_weight in bf16 would be only rounding error.
        pad_weight, weight = (
            torch.sigmoid(x).mT[..., None].to(out.dtype) for x in (pad_lse - lse, lse - pad_lse)
        )
        out = torch.addcmul(out * weight, pad_v, pad_weight)
        ctx.save_for_backward(q, k, v, pad_k, pad_v, out, torch.logaddexp(lse, pad_lse))
        ctx.padded, ctx.backend, ctx.scale = padded, backend, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, pad_k, pad_v, out, lse = ctx.saved_tensors
        padded, backward = ctx.padded, ctx.backend.backward
        dq, dk, dv = backward(dout, q, k, v, out, lse, padded.segments, ctx.scale)
        # exp(score - (lse - log n)) is the probability of all n padding keys together.
        pad_lse = lse - padded.log_num_pads.to(lse.dtype)
        pad_block = (q, pad_k[None], pad_v[None], out, pad_lse, padded.pad_segment, ctx.scale)
        pad_dq, dpad_k, dpad_v = backward(dout, *pad_block)
        return dq + pad_dq, dk, dv, dpad_k[0], dpad_v[0], None, None, None
