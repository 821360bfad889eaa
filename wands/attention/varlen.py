"""Variable-length attention on packed rows (tokens), with gradients.

All keys to which a rank's queries attend must be on this rank. The model uses the functions of this module for
cross-attention. Self-attention uses ring.py, even on a single rank.

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
    """Run attention in which rows of q attend only to rows of k in the same segment (such as a sample).

    Args:
        q: [Tq, H, D], for Tq rows, H heads and head dim D.
        k: [Tk, H, D].
        v: [Tk, H, D].
        segments: number of rows of q and of k in each segment.
        backend: attention kernel.

    Returns:
        [Tq, H, D] in q's dtype. Rows of q that attend to no key are 0.
    """
    return _VarlenAttention.apply((segments, None, backend, False), q, k, v)


@dataclass(frozen=True)
class PaddedSegments:
    """Attention segments (such as samples) that are padded to an equal number of keys, with copies of one padding key.

    The padding is not masked: each row of q attends to the keys of its segment and to the copies. The copies are not stored.
    `padded_attention` uses the padding key once, and adds the logarithm of the number of copies to the score of this key.

    Attributes:
        segments: number of rows of q and of k in each segment, without padding.
        log_num_pads: fp64 [Tq], for each of the Tq rows of q: natural logarithm of the number of copies in the row's segment.
            The logarithm is -inf in a segment without copies.
    """

    segments: Segments
    log_num_pads: Tensor

    @classmethod
    def build(
        cls, lens_q: Sequence[int], lens_k: Sequence[int], padded_len: int, device: torch.device | str = "cpu"
    ) -> PaddedSegments:
        """Build padded segments from the number of rows in each segment (such as a sample).

        Args:
            lens_q: number of rows of q in each segment.
            lens_k: number of rows of k in each segment, without padding.
            padded_len: number of rows of k in every segment, with padding.
            device: device of q, k and v.
        """
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
    """Run attention inside segments (such as samples) that are padded to an equal number of keys, with copies of `pad_k`.

    The padding is not masked. The copies cost almost nothing. In the softmax, n equal keys together have the weight
    n * exp(score). The function therefore treats the n copies as one key with the score `score + log(n)`. The attention to
    this key is then merged with the attention to the keys in `k`.

    Args:
        q: [Tq, H, D], for Tq rows, H heads and head dim D.
        k: [Tk, H, D], without the copies of `pad_k`.
        v: [Tk, H, D], without the copies of `pad_v`.
        pad_k: [H, D], the padding key.
        pad_v: [H, D], value of the padding key.
        padded: number of rows of q and of k in each segment, and number of copies of the padding key.
        backend: attention kernel.
        compiled: use torch.compile for the computations with the padding key, forward and backward.

    Returns:
        [Tq, H, D] in q's dtype.
    """
    options = padded.segments, padded.log_num_pads, backend, compiled
    return _VarlenAttention.apply(options, q, k, v, pad_k, pad_v)


_Options = tuple[Segments, Tensor | None, Backend, bool]


class _VarlenAttention(torch.autograd.Function):
    """Autograd function of `varlen_attention` and `padded_attention`.

    `options` are (segments, `PaddedSegments.log_num_pads`, attention kernel, whether to use torch.compile). `tensors` are q, k
    and v; for `padded_attention`, they are q, k, v, pad_k and pad_v (the key and the value of the padding).
    """

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

    All n copies have the same score, which is computed once for each head and row of q, without an attention kernel.

    Args:
        out: [T, H, D], attention output over the other keys.
        lse: [T, H], log-sum-exp of the scores over the other keys. The axis T comes first, because `compiled_op` requires this.
        q: [T, H, D], T rows (tokens) of H heads of width D.
        pad_k: [H, D], the padding key.
        pad_v: [H, D], value of the padding key.
        log_num_pads: [T], natural logarithm of n for each row of q; -inf if n is 0.
        scale: factor on the attention scores.

    Returns:
        (out, lse), the attention output [T, H, D] and the log-sum-exp [H, T] of the scores over all keys.
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

    `merge_pads` merges the attention to n copies of one padding key into the attention to all other keys. `log_num_pads`
    contains ln(n) for each row of q. `out` and `lse` are the results of `merge_pads`, with `lse` transposed to [T, H], and `dout`
    is the gradient of `out`. The argument `dq` is the gradient of q from the other keys. The returned gradient of q is the sum of
    `dq` and the gradient of q from the n copies of the padding key.
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
    """Return the dot product of each row of x [T, H, D] with `key` [H, D], separately for each head: [H, T]."""
    if torch.compiler.is_compiling():
        return (x * key).sum(-1).mT  # this is fused with the operations around it; a matrix product is not
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("thd,hd->ht", x, key)


def _weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Return the weighted sum of x [T, H, D] over T. `weights` is [H, T], and the result is [H, D]."""
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
    """Cut attention segments into pieces with at most `piece_len` rows of q. Each piece gets a copy of its segment's rows of k.

    The cut makes the backward pass of cross-attention faster. On a GPU, the backward pass of flash attention starts one
    thread block for each head and each block of about 128 keys. In cross-attention, a segment has few keys (the tokens of a
    caption), so most of the GPU would be idle without the cut. The caller must sum the gradients of all copies of a key or
    value.

    Returns:
        (pieces, rows). In `pieces`, each piece is a separate segment. `rows` is an int64 tensor of indices, so that
        k[rows] contains the copies of all pieces, piece after piece.
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
    """Return the number of rows of q (queries) above which the backward pass cuts a segment into pieces.

    On a GPU, the number is 2048. About 30,000 rows of q then give enough pieces to keep the whole GPU busy. If `dout` is on a
    CPU, return None, because segments are not cut there.
    """
    return 2048 if dout.is_cuda else None
