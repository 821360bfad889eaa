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

How to add a kernel:

1. Write the kernel's two functions (`run_forward`, `run_backward`): in flash.py for a `FlashBackend`, otherwise in a new
   file. Put Triton code into a new file next to flash.py. Import the new file inside the two functions. wands has no build
   step: compile CUDA code at the first use with torch.utils.cpp_extension.load, and list the CUDA files in `package-data`
   of pyproject.toml. Alternatively, publish the kernel as a package (step 3).
   For a kernel that runs on CUDA in bf16 or fp16, add a `FlashBackend` to `FLASH_BACKENDS`. `attention.backend=auto`
   skips a kernel that fails the check of its results in the run's dtype or head dim. Training in bf16 measures the kernels
   that pass this check, and uses the kernel with the smallest sum of times over several segment lengths. cuDNN can also be
   combined with another kernel (`fastest_backend` in wands/engine/attention_choice.py). Everywhere else, `auto` uses the
   first kernel of the list that passes, so the list begins with the kernels that are expected to be fastest.
   For any other kernel, add a `Backend` to `BACKENDS` in registry.py, and add the kernel's requirements to
   `_unmet_requirement`. Examples are a kernel for CPUs, and an fp8 kernel whose errors exceed `TOLERANCE` and
   `LSE_TOLERANCE` of self_check.py. A new kernel that is not a `FlashBackend` is not checked at the start of a run.
   Training runs the kernel only if the user sets `attention.backend` to the kernel's name. `wands infer` and
   `wands selftest` never run the kernel: `infer --attention-backend` accepts only auto and native, and `selftest` has no
   option for the attention kernel.
2. Add the kernel's name to `AttentionConfig.backend` in wands/config/recipe.py, to the docstring of this field, and to
   the docstring of `choose_backend` in registry.py, and add a line to CHANGELOG.md.
3. For an optional package, import the package inside the two functions. Add an extra to pyproject.toml and to the table
   of extras in docs/quickstart.md. Add the package to `ONE_IMPORTER` in tests/unit/test_layering.py.
4. Add tests and documentation:
   - A `FlashBackend`: add the kernel's name to `CUDA_BACKENDS` of tests/support/plain.py, with the module that the kernel
     imports (the module of a package, `triton`, or `torch`). In tests/unit/attention/test_kernels.py, add the name to the
     tests of `auto`, which list the order of all kernels. For a package, also add a fake module with the package's
     signatures, so that machines without a GPU test the two functions. Add the name to the order of `auto` in
     docs/performance.md and in the help text of `InferOptions.attention_backend`. In wands/planning/hardware.py, add the
     kernel's measured speeds on the GPUs that run the kernel: the TFLOP/s of the forward pass and of the backward pass,
     each divided by `PEAK_TFLOPS`. Measure one clip of 32,760 tokens with 12 heads. For `auto`, `wands plan` uses the
     speeds of the fastest kernel that hardware.py lists for the GPU. If the new kernel is the fastest, also update the
     predictions in docs/performance.md and docs/long-videos.md.
   - A CPU kernel: add its name and its dtypes to `CPU_DTYPES` of tests/support/plain.py. Also add its name to the tests
     of padding rows, autocast and self-check in test_kernels.py.
   - Any other CUDA kernel, such as the fp8 kernel of step 1: in test_kernels.py, write a test marked `gpu`, with the
     steps of `check_against_plain` and the kernel's own tolerance.

   Add every CUDA kernel to the table in docs/performance.md. `bash scripts/gpu.sh --only attention` measures the TFLOP/s
   of all kernels that run on the GPU, for several numbers of heads and clips. Then run scripts/build_reference.py.
5. Run `python -m pytest tests/unit/attention -m gpu`, which compares the kernel with float64 attention on the GPU. The
   tests use bf16 and fp16, and head dims 64 and 128. Wan needs only bf16 and head dim 128. If the kernel supports no
   other dtype or head dim, skip the unsupported cases in `test_cuda_backend_keeps_the_contract`.
   `bash scripts/gpu.sh --only step --set attention.backend=NAME --out FOLDER` measures whole training steps with the
   kernel. Run it again with another kernel and another folder to compare them.
   Also run `python scripts/bench_attention.py --device cuda`, which measures every `FlashBackend` that runs on the machine.
   With one GPU, it computes the blocks of rings of 2, 4 and 8 ranks, and compares the merged result with a single call of
   the kernel. For the kernel, Ulysses differs from a single process only in the number of heads and in the strides, which
   the tests vary. With several GPUs, it runs Ulysses and the ring of wands over NCCL, and compares their results with a
   single call.
   Once per process, a training run checks each `FlashBackend` that it may use (self_check.py), and rejects a kernel whose
   results are wrong.

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
    out, lse = torch.zeros_like(q), new_lse(q)
    with torch.autocast(q.device.type, enabled=False):  # autocast would compute the scores in bf16
        for rows_q, rows_k in segments.pairs():
            scores = _heads_first(q[rows_q]) @ _heads_first(k[rows_k]).mT * scale
            lse[:, rows_q] = scores.logsumexp(-1)
            out[rows_q] = (scores.softmax(-1) @ _heads_first(v[rows_k])).transpose(0, 1).to(q.dtype)
    return out, lse


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> Grads:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        for rows_q, rows_k in segments.pairs():
            qs, ks, vs = _heads_first(q[rows_q]), _heads_first(k[rows_k]), _heads_first(v[rows_k])
            douts, outs = _heads_first(dout[rows_q]), _heads_first(out[rows_q])
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
