"""Flash attention kernels: PyTorch's kernels for CPUs and for CUDA, cuDNN, and the flash-attn packages 2, 3 and 4.

Letters: T rows, H heads, D head dim. The calls fit torch 2.11 to 2.13, flash-attn 2.8.3, flash-attn-4 4.0.0b36, and the
``flash_attn_interface.py`` of flash-attn 3 since September 2025 (earlier ones have no default arguments and fail self_check.py).
For packed rows, every kernel returns the log-sum-exp as natural logarithms, fp32 [H, T].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from wands.attention.kernels.contract import Backend, Grads, new_lse
from wands.attention.packed import Segments

Lens = tuple[int, ...]
aten = torch.ops.aten


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, s: Segments, scale: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = new_lse(q)
    for rows_q, rows_k in s.pairs():  # an empty operand crashes the process
        part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(q[rows_q]), _batched(k[rows_k]), _batched(v[rows_k]), 0.0, False, scale=scale
        )
        out[rows_q] = part[0].transpose(0, 1)
        lse[:, rows_q] = part_lse[0]
    return out, lse


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Segments, scale: float
) -> Grads:
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    for rows_q, rows_k in s.pairs():
        tensors = [_batched(x) for x in (dout[rows_q], q[rows_q], k[rows_k], v[rows_k], out[rows_q])]
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse[None, :, rows_q], 0.0, False, scale=scale
        )
        for grad, rows, part in zip((dq, dk, dv), (rows_q, rows_k, rows_k), parts, strict=True):
            grad[rows] = part[0].transpose(0, 1)
    return dq, dk, dv


CPU = Backend("cpu", _cpu_forward, _cpu_backward)
"""PyTorch's flash attention for CPUs, called once per segment, which is faster than padding or masking."""


@dataclass(frozen=True)
class FlashBackend(Backend):
    """Flash attention kernel for CUDA in bf16 or fp16.

    Attributes:
        min_major: smallest major compute capability that runs both passes.
        max_major: largest major compute capability; None for all newer GPUs.
        package: pip package of the kernel; None if PyTorch or wands contains it.
        install: sentence of error messages; "{name}" becomes the kernel's name.
    """

    min_major: int
    max_major: int | None = None
    package: str | None = None
    install: str = "Run pip install -e '.[{name}]' in the folder of wands"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether a GPU with this (major, minor) compute capability runs both passes of the kernel."""
        return self.min_major <= capability[0] <= (self.max_major or capability[0])

    @property
    def capability(self) -> str:
        """Compute capabilities for error messages, such as "9.0 to 12.x"."""
        newest = "or newer" if self.max_major is None else f"to {self.max_major}.x"
        return f"{self.min_major}.0 {newest}"


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, s: Segments, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._flash_attention_forward(
        *(x.contiguous() for x in (q, k, v)),
        *(s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k, 0.0, False, False),
        scale=scale,
    )
    return out, lse


def _torch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Segments, scale: float
) -> Grads:
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the kernel reads it only for dropout
    return aten._flash_attention_backward(
        *(x.contiguous() for x in (dout, q, k, v, out, lse)),
        *(s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k, 0.0, False),
        *(rng_state, torch.empty(0, device=q.device)),
        scale=scale,
    )


def _flash2_forward(q: Tensor, k: Tensor, v: Tensor, s: Segments, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_interface as flash2

    out, lse, *_ = flash2._flash_attn_varlen_forward(
        *(q, k, v), **_options(s, scale), dropout_p=0.0, causal=False
    )
    return out, lse


def _flash2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Segments, scale: float
) -> Grads:
    from flash_attn import flash_attn_interface as flash2

    dq, dk, dv = _empty_grads(q, k, v)
    flash2._flash_attn_varlen_backward(
        *(dout, q, k, v, out, lse, dq, dk, dv),
        **_backward_options(s, scale),
        dropout_p=0.0,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
    )
    return dq, dk, dv


def _flash3_forward(q: Tensor, k: Tensor, v: Tensor, s: Segments, scale: float) -> tuple[Tensor, Tensor]:
    import flash_attn_interface as flash3

    out, lse, *_ = flash3._flash_attn_forward(q, k, v, **_options(s, scale))
    return out, lse


def _flash3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Segments, scale: float
) -> Grads:
    import flash_attn_interface as flash3

    dq, dk, dv = _empty_grads(q, k, v)
    flash3._flash_attn_backward(
        *(dout, q, k, v, out, lse), **_backward_options(s, scale), dq=dq, dk=dk, dv=dv
    )
    return dq, dk, dv


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, s: Segments, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import interface as flash4

    out, lse, *_ = flash4._flash_attn_fwd(q, k, v, **_options(s, scale), return_lse=True)
    return out, lse


def _flash4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Segments, scale: float
) -> Grads:
    from flash_attn.cute import interface as flash4

    # Unlike the other packages, dout comes after out.
    dq, dk, dv, *_ = flash4._flash_attn_bwd(q, k, v, out, dout, lse, **_backward_options(s, scale))
    return dq, dk, dv


def _options(s: Segments, scale: float) -> dict[str, Any]:
    """Return keyword arguments for both passes of the flash-attn packages 2, 3 and 4."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {name: getattr(s, name) for name in names} | {"softmax_scale": scale}


def _backward_options(s: Segments, scale: float) -> dict[str, Any]:
    return _options(s, scale) | {"deterministic": torch.are_deterministic_algorithms_enabled()}


def _empty_grads(q: Tensor, k: Tensor, v: Tensor) -> Grads:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _batched(x: Tensor) -> Tensor:
    """Return x [rows, heads, head dim] as a view [1, heads, rows, head dim]."""
    return x[None].transpose(1, 2)


def cudnn_backend(min_rows: int, short: Backend) -> FlashBackend:
    """Return a kernel that runs cuDNN on each long segment, and `short` on all other segments together.

    A segment is long if it has at least `min_rows` rows of q and also of k.

    cuDNN builds an execution plan for each new pair of lengths, in about 0.1 s, which is too long for the many lengths of short
    segments. PyTorch looks up a stored plan only by the shapes and strides of q, k and v. Other strides of dout or out would
    silently give wrong results, so all tensors are made contiguous.

    cuDNN needs a head dim that is a multiple of 8, and on most GPUs at most 128. Its log-sum-exp is [1, H, T, 1], or [1, H, T]
    before torch 2.9. Source: PyTorch's code.
    """
    forward_op = aten._scaled_dot_product_cudnn_attention

    def forward(q: Tensor, k: Tensor, v: Tensor, s: Segments, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = short.forward(q, k, v, _short_segments(s.lens_q, s.lens_k, min_rows, q.device), scale)
        for rows_q, rows_k in _long_pairs(s, min_rows):
            dense = [_batched(x.contiguous()) for x in (q[rows_q], k[rows_k], v[rows_k])]
            part, part_lse, *_ = forward_op(*dense, None, True, scale=scale)
            out[rows_q] = part[0].transpose(0, 1)
            lse[:, rows_q] = part_lse.reshape(len(lse), -1)
        return out, lse

    @cache
    def trailing_axes() -> tuple[int, ...]:
        """Return the axes after [1, H, T] in the log-sum-exp of this version of PyTorch: (1,) or ()."""
        row = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="meta")
        return forward_op(row, row, row, None, True)[1].shape[3:]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s: Segments, scale: float
    ) -> Grads:
        rest = _short_segments(s.lens_q, s.lens_k, min_rows, q.device)
        dq, dk, dv = short.backward(dout, q, k, v, out, lse, rest, scale)
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
        for rows_q, rows_k in _long_pairs(s, min_rows):
            tensors = dout[rows_q], q[rows_q], k[rows_k], v[rows_k], out[rows_q]
            dense = [_batched(x.contiguous()) for x in tensors]
            # cuDNN does not define what +inf means. exp(score - 1e30) is 0 as well.
            stats = lse[:, rows_q].clamp(max=1e30).reshape(1, len(lse), -1, *trailing_axes())
            options = unused, unused, None, None, None, len(tensors[1]), len(tensors[2]), 0.0, False
            grads = aten._scaled_dot_product_cudnn_attention_backward(*dense, stats, *options, scale=scale)
            dq[rows_q], dk[rows_k], dv[rows_k] = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv

    # PyTorch itself prefers cuDNN on 9.0 and 10.0. On 8.x, FlashAttention-2 is faster.
    return FlashBackend(f"cudnn:{min_rows}:{short.name}", forward, backward, min_major=9, max_major=10)


def _long_pairs(s: Segments, min_rows: int) -> list[tuple[slice, slice]]:
    return [(q, k) for q, k in s.pairs() if min(q.stop - q.start, k.stop - k.start) >= min_rows]


@lru_cache(maxsize=512)
def _short_segments(lens_q: Lens, lens_k: Lens, min_rows: int, device: torch.device) -> Segments:
    """Return segments in which each long segment is two: one with only its rows of q, one with only its rows of k."""
    pairs = zip(lens_q, lens_k, strict=True)
    parts = [((q, k),) if min(q, k) < min_rows else ((q, 0), (0, k)) for q, k in pairs]
    return Segments.build([q for q, _ in chain(*parts)], [k for _, k in chain(*parts)], device)


_TORCH = FlashBackend("torch", _torch_forward, _torch_backward, min_major=8)
FLASH_BACKENDS = (
    FlashBackend(
        "flash3",
        _flash3_forward,
        _flash3_backward,
        min_major=9,
        max_major=9,  # newer GPUs would start the kernels compiled for Hopper
        package="flash-attn-3",
        install="Run pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu130 (or another CUDA version)",
    ),
    # On 8.x, the package has a forward pass but no backward pass.
    FlashBackend(
        name="flash4",
        run_forward=_flash4_forward,
        run_backward=_flash4_backward,
        min_major=9,
        max_major=12,
        package="flash-attn-4",
    ),
    # Measured on an H100 with 12 heads: up to 1,024 tokens, FlashAttention-2 takes less time; from 2,048 on, cuDNN.
    replace(cudnn_backend(2048, _TORCH), name="cudnn"),
    FlashBackend("flash2", _flash2_forward, _flash2_backward, min_major=8, package="flash-attn"),
    _TORCH,
)
"""Kernels for CUDA. `attention.backend=auto` tries them in this order, except in bf16 training, which measures them.

flash3 comes before flash4 because it was written for Hopper GPUs.
"""
