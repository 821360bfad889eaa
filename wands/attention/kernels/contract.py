"""Interface of an attention kernel: a forward pass that also returns the log-sum-exp, and a backward pass.

`REFERENCE` implements it in plain PyTorch. `docs/extending.md` has the steps to add a kernel.

Letters: Tq rows of q, Tk rows of k and v, H heads, D head dim. Tensors are packed, [rows, H, D], without a batch axis. Rows of q
attend only to rows of k in the same segment.

The backward pass takes `out` and `lse` instead of computing them again. In ring attention, q attends to several blocks of keys,
and the backward pass of each block gets the *merged* `out` and `lse`: exp(score - lse) is then the probability of a key among the
keys of all blocks, so the gradients of q from all blocks add up. Cross-attention to padded texts calls the kernel with the keys
of the text; varlen.py merges the padding keys without a kernel. Sources: Dao et al. 2022, "FlashAttention", algorithm 4; Liu et
al. 2023, "Ring Attention".

Arguments of the two functions:

- q, k and v have the same number of heads. With Ulysses, H can be the number of heads / the Ulysses degree.
- q, k, v, out and dout have one dtype. `lse` is fp32 (fp64 if q is fp64) and contiguous. The others may be views whose last
  dimension is contiguous.
- `lens_q` and `lens_k` are Python integers. `cu_seqlens_q` and `cu_seqlens_k` are int32 on the device of q, and their last value
  is the end of the last segment.
- Do not change the tensors: in ring attention, k and v are being sent meanwhile.
- The scores are q @ k.T times `scale`.
- In self-attention, padding rows come after the last segment and are in no segment. In cross-attention, the padding rows of q
  count as rows of the last sample (`padded_seq_lens` in packed.py).
- A segment can have no rows of q, no rows of k, or a single row of k. The functions are not called if no row of q has a key.
- In the backward pass, `lse` is -inf for rows of q without a key in any block, and finite for a row whose keys are all in other
  blocks. With +inf, a row must add nothing to any gradient; only self_check.py passes it.
- In cross-attention on a GPU, the backward pass gets other segments than the forward pass: rows of q in pieces of at most 2,048,
  each with a copy of the keys (`_cut_queries` in varlen.py).
- Launch kernels on `torch.cuda.current_stream()`. In the forward pass, autocast to bf16 can be on; turn it off around matmuls of
  PyTorch that need another dtype.
- Do not wait for the GPU (no `.item()`, no copy to the host). tests/launch/test_fake_cuda.py tests this for the kernels of
  PyTorch in its list `KERNELS`. Other kernels need memory, run only in the tests marked `gpu`, and are not tested for waiting.

Results:

- New tensors, with any strides. Rows of q without keys, and rows of k without queries, may have any values: `Backend` overwrites
  them in place.
- A segment's results must not depend on the rows of other segments. One fp8 scale for a whole tensor breaks this rule.
- In the forward pass, equal arguments must give equal bits. The backward pass must do so only if
  `torch.are_deterministic_algorithms_enabled()`, which training never enables. A resumed run therefore equals an uninterrupted
  run bit for bit on a CPU, and up to rounding errors on a GPU.
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
    """Attention kernel for packed sequences.

    Attributes:
        name: value of `attention.backend`. Register the kernel in `BACKENDS` or `FLASH_BACKENDS`, where self-attention looks it
            up.
        run_forward: as `forward`, but with any values in rows of q without keys.
        run_backward: as `backward`, but with any values in rows of q without keys and in rows of k without queries.
    """

    name: str
    run_forward: Callable[[Tensor, Tensor, Tensor, Segments, float], tuple[Tensor, Tensor]]
    run_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Segments, float], Grads]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Run attention inside each segment.

        Returns:
            (out, lse). out is [Tq, H, D] in q's dtype. lse is the natural logarithm of the sum of exp(score), [H, Tq] in fp32
            (fp64 for fp64 inputs). Rows of q that attend to no key have out 0 and lse -inf.
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
        """Return the gradients of q, k and v that come from one block of keys.

        `out` and `lse` are the results over all blocks. A row of q whose lse is +inf adds nothing to any gradient. Rows of q
        without keys, and rows of k without queries, have the gradient 0.
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
    """Return a log-sum-exp for q [rows, heads, head dim]: [heads, rows] in fp32 (fp64 for fp64 q), filled with -inf."""
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
    """Return x [rows, heads, head dim] as [heads, rows, head dim] in at least fp32."""
    return x.transpose(0, 1).to(fp32_or_wider(x))


REFERENCE = Backend("reference", _reference_forward, _reference_backward)
"""Softmax attention in plain PyTorch, for any device and dtype. Memory grows with the square of the segment length."""
