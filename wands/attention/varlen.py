"""Variable-length attention on packed rows, with gradients, for keys that are all on this rank.

The model uses it for cross-attention. Self-attention uses ring.py, even on a single rank.

Letters: T rows, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wands.attention.kernels.registry import Backend, choose_backend
from wands.attention.packed import Segments
from wands.compiled import compiled_op
from wands.transfer import to_device

__all__ = ["Backend", "PaddedSegments", "Segments", "choose_backend", "padded_attention", "varlen_attention"]


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, backend: Backend) -> Tensor:
    """Return the attention inside each segment, [Tq, H, D] in q's dtype. Rows of q that attend to no key are 0.

    q is [Tq, H, D], k and v are [Tk, H, D].
    """
    return _VarlenAttention.apply((segments, None, backend, False), q, k, v)


@dataclass(frozen=True)
class PaddedSegments:
    """Segments padded to an equal number of keys, with copies of one padding key that are not stored and not masked.

    Attributes:
        segments: rows of q and of k in each segment, without padding.
        log_num_pads: fp64 [Tq], for each row of q the natural logarithm of the number of copies in its segment; -inf for none.
    """

    segments: Segments
    log_num_pads: Tensor

    @classmethod
    def build(
        cls, lens_q: Sequence[int], lens_k: Sequence[int], padded_len: int, device: torch.device | str = "cpu"
    ) -> PaddedSegments:
        """Build segments whose rows of k are padded from `lens_k` to `padded_len` in every segment."""
        assert max(lens_k) <= padded_len, f"a segment of {max(lens_k)} keys is longer than {padded_len=}"
        log_num_pads = torch.tensor([padded_len - length for length in lens_k], dtype=torch.float64).log()
        rows = log_num_pads.repeat_interleave(torch.tensor(lens_q))
        return to_device(cls(Segments.build(lens_q, lens_k), rows), device)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pad_k: Tensor,
    pad_v: Tensor,
    padded: PaddedSegments,
    backend: Backend,
    compiled: bool = False,
) -> Tensor:
    """Return the attention inside segments that are padded with copies of `pad_k`, [Tq, H, D] in q's dtype.

    The padding is not masked, but costs almost nothing: n equal keys have the softmax weight n * exp(score), so they count as one
    key with the score `score + log(n)`, which is merged with the attention to the keys in `k`.

    q is [Tq, H, D], k and v are [Tk, H, D] without the copies, pad_k and pad_v are [H, D]. `compiled` uses torch.compile for the
    computations with the padding key.
    """
    options = padded.segments, padded.log_num_pads, backend, compiled
    return _VarlenAttention.apply(options, q, k, v, pad_k, pad_v)


_Options = tuple[Segments, Tensor | None, Backend, bool]


class _VarlenAttention(torch.autograd.Function):
    """Autograd function of `varlen_attention` (tensors q, k, v) and `padded_attention` (also pad_k, pad_v)."""

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Tensor) -> Tensor:
        segments, log_num_pads, backend, compiled = ctx.options = options
        q, k, v, *pads = tensors
        scale = q.shape[-1] ** -0.5
        out, lse = backend.forward(q, k, v, segments, scale)
        if pads:
            merge: Callable[..., Any] = _MERGE_PADS if compiled else merge_pads
            out, lse = merge(out, lse.mT, q, *pads, log_num_pads, scale)
        ctx.save_for_backward(out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, *pads = ctx.saved_tensors
        segments, log_num_pads, backend, compiled = ctx.options
        scale = q.shape[-1] ** -0.5
        piece_len = _piece_len(dout)
        if piece_len is None or segments.max_seqlen_q <= piece_len:
            dq, *grads = backend.backward(dout, q, k, v, out, lse, segments, scale)
        else:
            pieces, rows = _cut_queries(segments.lens_q, segments.lens_k, piece_len, q.device)
            dq, *copies = backend.backward(dout, q, k[rows], v[rows], out, lse, pieces, scale)
            grads = [
                torch.zeros_like(x, dtype=lse.dtype).index_add_(0, rows, copy.to(lse.dtype)).to(x.dtype)
                for x, copy in zip((k, v), copies, strict=True)
            ]
        if pads:
            merge: Callable[..., Any] = _MERGE_PADS_BACKWARD if compiled else merge_pads_backward
            dq, *pad_grads = merge(dout, dq, q, *pads, out, lse.mT, log_num_pads, scale)
            grads += pad_grads
        return None, dq, *grads


def merge_pads(
    out: Tensor, lse: Tensor, q: Tensor, pad_k: Tensor, pad_v: Tensor, log_num_pads: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Merge the attention to n copies of one padding key with the attention to all other keys.

    The result is (out [T, H, D], lse [H, T]) over all keys. No attention kernel is used.

    Args:
        out: [T, H, D], attention output over the other keys.
        lse: [T, H], log-sum-exp over the other keys. T comes first, because `compiled_op` requires this.
        q: [T, H, D].
        pad_k: [H, D], the padding key.
        pad_v: [H, D], value of the padding key.
        log_num_pads: [T], natural logarithm of n for each row of q; -inf if n is 0.
        scale: factor on the attention scores.
    """
    lse = lse.mT
    pad_lse = _scores(q.to(lse.dtype), pad_k.to(lse.dtype)) * scale + log_num_pads.to(lse.dtype)
    # Softmax weights of the padding keys and of the other keys, each computed by itself. For a short text with many padding
    # keys, 1 - pad_weight would be only rounding error.
    pad_weight, weight = (torch.sigmoid(x).mT.unsqueeze(-1) for x in (pad_lse - lse, lse - pad_lse))
    merged = torch.addcmul(out * weight, pad_v.to(lse.dtype), pad_weight)
    return merged.to(out.dtype), torch.logaddexp(lse, pad_lse)


def merge_pads_backward(
    dout: Tensor,
    dq: Tensor,
    q: Tensor,
    pad_k: Tensor,
    pad_v: Tensor,
    out: Tensor,
    lse: Tensor,
    log_num_pads: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of (q, pad_k, pad_v) for `merge_pads`.

    `out` and `lse` are its results, with `lse` transposed to [T, H]. `dq` is the gradient of q from the other keys, and is added
    to the returned one.
    """
    dtype = q.dtype
    lse = lse.mT
    q, dout, pad_k, pad_v = (x.to(lse.dtype) for x in (q, dout, pad_k, pad_v))
    # exp(score - (lse - log n)) is the probability of all n padding keys together.
    probs = (_scores(q, pad_k) * scale + log_num_pads.to(lse.dtype) - lse).exp()
    dscores = probs * (_scores(dout, pad_v) - (dout * out).sum(-1).mT) * scale
    dpad_k = _weighted_sum(dscores, q)
    dpad_v = _weighted_sum(probs, dout)
    dq = torch.addcmul(dq.to(lse.dtype), dscores.mT.unsqueeze(-1), pad_k)
    return dq.to(dtype), dpad_k.to(dtype), dpad_v.to(dtype)


def _scores(x: Tensor, key: Tensor) -> Tensor:
    """Return the dot product of each row of x [T, H, D] with `key` [H, D], for each head: [H, T]."""
    if torch.compiler.is_compiling():
        return (x * key).sum(-1).mT  # this is fused with the operations around it; a matrix product is not
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("thd,hd->ht", x, key)


def _weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Return the sum of x [T, H, D] over T with `weights` [H, T]: [H, D]."""
    if torch.compiler.is_compiling():
        return (weights.mT.unsqueeze(-1) * x).sum(0)
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("ht,thd->hd", weights, x)


_MERGE_PADS = compiled_op(merge_pads)
_MERGE_PADS_BACKWARD = compiled_op(merge_pads_backward)


@lru_cache(maxsize=256)
def _cut_queries(
    lens_q: tuple[int, ...], lens_k: tuple[int, ...], piece_len: int, device: torch.device
) -> tuple[Segments, Tensor]:
    """Cut segments into pieces of at most `piece_len` rows of q, each with a copy of its segment's keys: (pieces, rows of k).

    The backward pass of flash attention starts one thread block for each head and about 128 keys of a segment. A caption has few
    keys, so most of the GPU would be idle. The caller must sum the gradients of the copies k[rows].
    """
    pieces = [
        (min(piece_len, len_q - begin), len_k, end_k)
        for len_q, len_k, end_k in zip(lens_q, lens_k, accumulate(lens_k), strict=True)
        for begin in range(0, max(len_q, 1), piece_len)
    ]
    rows = [row for _, len_k, end_k in pieces for row in range(end_k - len_k, end_k)]
    segments = Segments.build([len_q for len_q, *_ in pieces], [len_k for _, len_k, _ in pieces], device)
    return segments, to_device(torch.tensor(rows), device)


def _piece_len(dout: Tensor) -> int | None:
    """Return the rows of q above which the backward pass cuts a segment; None on a CPU.

    On a GPU, 2048 lets about 30,000 rows of q give enough pieces to keep the whole GPU busy.
    """
    return 2048 if dout.is_cuda else None
