"""Interface of an attention kernel: a forward pass that also returns the log-sum-exp, and a backward pass.

`REFERENCE` implements the interface in plain PyTorch.

Letters: Tq rows of q, Tk rows of k and v, H heads, D head dim. All tensors are packed, [rows, H, D], without a batch axis.
The rows are divided into segments, such as one segment per sample. Rows of q attend only to rows of k in the same
segment.

The backward pass takes `out` and `lse` as arguments instead of computing `out` and `lse` again. In ring attention, q
attends to several blocks of keys, one after another. The caller merges the results, and calls the backward pass of each
block with the *merged* `out` and `lse`. exp(score - lse) is then the attention probability of a key among the keys of all
blocks. The gradients of q from all blocks therefore add up to the gradient of q. Cross-attention to padded texts calls the
kernel once, with the keys of the text. varlen.py then merges the padding keys into `out` and `lse` without a kernel.
Sources: Dao et al. 2022, "FlashAttention", algorithm 4; Liu et al. 2023, "Ring Attention".

`docs/extending.md` has the steps to add a kernel.

What the two functions receive (`Backend.forward` and `Backend.backward` list all arguments and their shapes):

- q, k and v with the same number of heads H. With Ulysses, H can be the number of heads / the Ulysses degree.
- Dtypes: q, k, v, out and dout have one dtype. `lse` is fp32 (fp64 if q is fp64).
- Lengths of the segments: `lens_q` and `lens_k` are Python integers on the host. `cu_seqlens_q` and `cu_seqlens_k` are
  int32 on the device of q, and their last value is the end of the last segment. `max_seqlen_q` and `max_seqlen_k` are the
  largest lengths, as Python integers.
- Tensors that the functions must not change. In ring attention, k and v are being sent to another rank while the
  functions run.
- q, k, v, dout and out can be views whose last dimension is contiguous and whose other dimensions are not. `lse` is
  contiguous.
- `scale`, a factor: the scores are q @ k.T times `scale`, in every formula of this file.
- Padding at the end. In self-attention, the padding rows of q, k and v come after the last segment and are in no segment.
  In cross-attention, the padding rows of q count as rows of the last sample (`padded_seq_lens` in packed.py).
- A segment can have no rows of q, no rows of k, or a single row of k, for example a caption of one token. The functions
  are not called if no row of q has a key.
- In the backward pass, `lse` is -inf for rows of q that have no key in any block. A row whose keys are all in other blocks
  has a finite `lse`. +inf must work too: such a row adds nothing to any gradient, because exp(score - inf) is 0. No code of
  wands passes +inf yet; self_check.py tests it.
- In cross-attention on a GPU, the segments of the backward pass differ from those of the forward pass: rows of q are cut
  into pieces of at most 2,048, and each piece has its own copy of the keys (`_cut_queries` in varlen.py).
- The functions run on PyTorch's current CUDA stream (`torch.cuda.current_stream()`), so launch kernels there. Autocast to
  bf16 can be on during the forward pass; turn it off around matmuls of PyTorch that need another dtype.
- The functions must not wait for the GPU (no `.item()`, no copy to the host). tests/launch/test_fake_cuda.py tests this for
  the kernels of PyTorch in its list `KERNELS`, on CUDA tensors without memory. Kernels in Triton, CUDA kernels that wands
  compiles, and kernels of other packages need memory. Only the tests marked `gpu` run these kernels, and no test checks that
  they do not wait.

What the two functions return:

- New tensors, with any strides. Rows of q without keys, and rows of k without queries, may have any values: the
  `Backend` class overwrites these values in place.
- The results of a segment must not depend on the rows of other segments. One fp8 scale for a whole tensor breaks this rule.
- In the forward pass, equal arguments must give equal bits. The backward pass needs to give equal bits only if
  `torch.are_deterministic_algorithms_enabled()` is True. Training never enables deterministic algorithms. On a GPU, a
  resumed run therefore equals an uninterrupted run up to rounding errors. On a CPU, the runs are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wands.attention.packed import Segments, idle_rows

Grads = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""


@dataclass(frozen=True)
class Backend:
    """An attention kernel for packed sequences: rows of q attend only to rows of k in the same segment (sequence).

    Attributes:
        name: value of `attention.backend` that selects the kernel. Register the kernel in `BACKENDS` or `FLASH_BACKENDS`:
            self-attention looks up the kernel there by this name.
        run_forward: the kernel's forward pass, with the arguments and results of `forward`. Its results may contain any
            values in rows of q without keys, because `forward` overwrites these rows.
        run_backward: the kernel's backward pass, with the arguments and results of `backward`. Its results may contain any
            values in rows of q without keys and in rows of k without queries. `backward` overwrites these rows.
    """

    name: str
    run_forward: Callable[[Tensor, Tensor, Tensor, Segments, float], tuple[Tensor, Tensor]]
    run_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Segments, float], Grads]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Run attention in which rows of q attend only to rows of k in the same segment (such as a sample).

        Args:
            q: [Tq, H, D], for Tq rows, H heads and head dim D.
            k: [Tk, H, D].
            v: [Tk, H, D].
            segments: number of rows of q and of k in each segment.
            scale: factor on the attention scores: scores = scale * q @ k.T.

        Returns:
            (out, lse). out is the attention output, [Tq, H, D] in q's dtype. lse is the natural logarithm of the sum of
            exp(score) over the keys, [H, Tq] in fp32 (fp64 for fp64 inputs). Rows of q that attend to no key
            have out 0 and lse -inf.
        """
        if not any(segments.pairs()):  # some CUDA kernels fail, because their launch grid is empty
            return torch.zeros_like(q), new_lse(q)
        out, lse = self.run_forward(q, k, v, segments, scale)
        # Kernels return any `out` in these rows, and lse 0, +inf or any value.
        for rows in idle_rows(segments.lens_q, segments.lens_k, len(q)):
            out[rows] = 0
            lse[:, rows] = -torch.inf
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
    ) -> Grads:
        """Compute the gradients of q, k and v that come from one block of keys and values.

        In ring attention, q attends to several blocks of keys, and `k` and `v` are one of these blocks. `out` and `lse` are
        then the results over all blocks.

        Args:
            dout: [Tq, H, D], gradient of `out`.
            q: [Tq, H, D], for Tq rows, H heads and head dim D.
            k: [Tk, H, D], keys of this block.
            v: [Tk, H, D], values of this block.
            out: [Tq, H, D], attention output over all blocks.
            lse: [H, Tq], log-sum-exp of the scores over all blocks. If the caller sets the lse of a row of q to +inf, this
                row adds nothing to any gradient.
            segments: number of rows of q and of k in each segment. Rows of q attend only to rows of k in the same
                segment.
            scale: factor on the attention scores: scores = scale * q @ k.T.

        Returns:
            (dq, dk, dv) in the shapes and dtypes of q, k and v. Rows of q that attend to no key, and rows of k that no
            row of q attends to, have the gradient 0.
        """
        if not any(segments.pairs()):  # some CUDA kernels fail, because their launch grid is empty
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dq, dk, dv = self.run_backward(dout, q, k, v, out, lse.contiguous(), segments, scale)
        for rows in idle_rows(segments.lens_q, segments.lens_k, len(q)):
            dq[rows] = 0
        for rows in idle_rows(segments.lens_k, segments.lens_q, len(k)):
            dk[rows] = 0
            dv[rows] = 0
        return dq, dk, dv


def new_lse(q: Tensor) -> Tensor:
    """Return a log-sum-exp tensor for q [rows, heads, head dim]: [heads, rows] in fp32 (fp64 for fp64 q), filled with -inf."""
    return q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=fp32_or_wider(q))


def _reference_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(q)
    lse = new_lse(q)
    with torch.autocast(q.device.type, enabled=False):  # autocast would compute the scores in bf16
        for rows_q, rows_k in segments.pairs():
            scores = _heads_first(q[rows_q]) @ _heads_first(k[rows_k]).mT * scale
            lse[:, rows_q] = scores.logsumexp(-1)
            out[rows_q] = (scores.softmax(-1) @ _heads_first(v[rows_k])).transpose(0, 1).to(q.dtype)
    return out, lse


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> Grads:
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        for rows_q, rows_k in segments.pairs():
            qs = _heads_first(q[rows_q])
            ks = _heads_first(k[rows_k])
            vs = _heads_first(v[rows_k])
            douts = _heads_first(dout[rows_q])
            outs = _heads_first(out[rows_q])
            probs = (qs @ ks.mT * scale - lse[:, rows_q, None]).exp()
            dscores = probs * (douts @ vs.mT - (douts * outs).sum(-1, keepdim=True)) * scale
            dq[rows_q] = (dscores @ ks).transpose(0, 1).to(q.dtype)
            dk[rows_k] = (dscores.mT @ qs).transpose(0, 1).to(k.dtype)
            dv[rows_k] = (probs.mT @ douts).transpose(0, 1).to(v.dtype)
    return dq, dk, dv


def fp32_or_wider(x: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes scores and sums for `x`: fp64 if `x` is fp64, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x: Tensor) -> Tensor:
    """Transpose x [rows, heads, head dim] to [heads, rows, head dim], and cast the result to at least fp32."""
    return x.transpose(0, 1).to(fp32_or_wider(x))


REFERENCE = Backend("reference", _reference_forward, _reference_backward)
"""Softmax attention in plain PyTorch, one segment after another.

It runs on any device in any dtype. It stores whole score matrices, so its memory grows with the square of the segment
length.
"""
