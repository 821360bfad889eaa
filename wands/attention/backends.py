"""Attention kernels behind one contract of two functions: forward with log-sum-exp, and backward.

Letters: T rows, H heads, D head dim, S segments. All tensors are packed, [T, H, D], without a batch axis.

The backward takes ``out`` and ``lse`` instead of recomputing them, because a caller that has merged several
key blocks passes the *merged* ones: the probabilities exp(score - lse) are then the true ones of the whole
row, and each block's call yields exactly that block's share of the gradient.
Sources: Dao et al. 2022, algorithm 4; Liu et al. 2023.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from wands.attention.segments import Segments
from wands.errors import ConfigError

logger = logging.getLogger(__name__)
Triple = tuple[Tensor, Tensor, Tensor]

FLASH_CAPABILITY = (8, 0)
"""CUDA compute capability that the flash kernels need: Ampere."""


class Backend(Protocol):
    """An attention kernel over segments."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: [Tq, H, D].
            k: [Tk, H, D].
            v: [Tk, H, D].
            segments: who attends to whom.
            scale: factor on the scores.

        Returns:
            out [Tq, H, D] in q's dtype and lse [H, Tq], fp32 (fp64 for fp64): log of the sum of exp of the
            scaled scores. Rows that attend to nothing have out 0 and lse -inf.
        """
        ...

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
    ) -> Triple:
        """Gradients (dq, dk, dv) of these keys' share, given the final `out` and `lse` of every row."""
        ...


class ReferenceBackend:
    """Explicit softmax, segment by segment: any device and dtype, memory of a whole score matrix."""

    name = "reference"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        out = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=_score_dtype(q))
        with torch.autocast(q.device.type, enabled=False):  # it would take the matrix products back to bf16
            for rows_q, rows_k in segments.pairs():
                scores = _heads_first(q[rows_q]) @ _heads_first(k[rows_k]).mT * scale
                lse[:, rows_q] = scores.logsumexp(-1)
                out[rows_q] = (scores.softmax(-1) @ _heads_first(v[rows_k])).transpose(0, 1).to(q.dtype)
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
    ) -> Triple:
        """See Backend."""
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.autocast(q.device.type, enabled=False):
            for rows_q, rows_k in segments.pairs():
                qs, ks, vs = _heads_first(q[rows_q]), _heads_first(k[rows_k]), _heads_first(v[rows_k])
                douts, outs = _heads_first(dout[rows_q]), _heads_first(out[rows_q])
                probs = (qs @ ks.mT * scale - lse[:, rows_q, None]).exp()
                dscores = probs * (douts @ vs.mT - (douts * outs).sum(-1, keepdim=True)) * scale
                for grad, rows, value in (
                    (dq, rows_q, dscores @ ks),
                    (dk, rows_k, dscores.mT @ qs),
                    (dv, rows_k, probs.mT @ douts),
                ):
                    grad[rows] = value.transpose(0, 1).to(grad.dtype)
        return dq, dk, dv


class CpuBackend:
    """PyTorch's flash attention for CPUs, once per segment: a loop costs less than padding or masking."""

    name = "cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        out = torch.empty_like(q)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_score_dtype(q))
        for rows_q, rows_k in segments.pairs():  # an empty operand would kill the process
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batched(q[rows_q]), _batched(k[rows_k]), _batched(v[rows_k]), 0.0, False, scale=scale
            )
            out[rows_q] = part[0].transpose(0, 1)
            lse[:, rows_q] = part_lse[0]
        _clear_idle_rows(out, lse, segments)
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
    ) -> Triple:
        """See Backend."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows_q, rows_k in segments.pairs():
            tensors = [_batched(x) for x in (dout[rows_q], q[rows_q], k[rows_k], v[rows_k], out[rows_q])]
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors, lse[None, :, rows_q], 0.0, False, scale=scale
            )
            for grad, rows, part in zip((dq, dk, dv), (rows_q, rows_k, rows_k), parts, strict=True):
                grad[rows] = part[0].transpose(0, 1)
        _clear_idle_grads(dq, dk, dv, segments)
        return dq, dk, dv


class TorchBackend:
    """The variable-length flash attention that ships with PyTorch for CUDA: nothing else to install."""

    name = "torch"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        s = segments
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(x.contiguous() for x in (q, k, v)),
            *(s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k, 0.0, False, False),
            scale=scale,
        )
        _clear_idle_rows(out, lse, segments)
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
    ) -> Triple:
        """See Backend."""
        s = segments
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: never read
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(x.contiguous() for x in (dout, q, k, v, out, lse)),
            *(s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k, 0.0, False),
            *(rng_state, torch.empty(0, device=q.device)),
            scale=scale,
        )
        _clear_idle_grads(dq, dk, dv, segments)
        return dq, dk, dv


class Flash2Backend:
    """The flash-attn package, version 2."""

    name = "flash2"

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self._kernels = flash_attn_interface

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        s = segments
        out, lse, *_ = self._kernels._flash_attn_varlen_forward(
            *(q, k, v, s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=False,
        )
        _clear_idle_rows(out, lse, segments)
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
    ) -> Triple:
        """See Backend."""
        s = segments
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._kernels._flash_attn_varlen_backward(
            *(dout, q, k, v, out, lse.contiguous(), dq, dk, dv),
            *(s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=False,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        _clear_idle_grads(dq, dk, dv, segments)
        return dq, dk, dv


def choose_backend(name: str, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """Turn `attention.backend` into a kernel that can run there, and say which in the log.

    Args:
        name: auto, reference, cpu, torch or flash2.
        device: where q, k and v will live.
        dtype: their dtype, which is autocast's where autocast is on.

    Raises:
        ConfigError: the named kernel cannot run on that device, with that dtype, or is not installed.
    """
    kind = torch.device(device).type
    flash_dtype = dtype in (torch.bfloat16, torch.float16)
    has_flash2 = importlib.util.find_spec("flash_attn") is not None
    capability = torch.cuda.get_device_capability(device) if kind == "cuda" else (0, 0)
    asked = name
    if name == "auto":
        if kind == "cuda" and flash_dtype and capability >= FLASH_CAPABILITY:
            name = "flash2" if has_flash2 else "torch"
        else:
            name = "cpu" if kind == "cpu" else "reference"
    where = f"attention.backend={name} cannot run on {kind} in {str(dtype).removeprefix('torch.')}"
    if name in ("torch", "flash2"):
        if kind != "cuda" or not flash_dtype:
            raise ConfigError(f"{where} (its kernel needs CUDA and bf16 or fp16); use auto.")
        if capability < FLASH_CAPABILITY:
            have, need = (".".join(map(str, numbers)) for numbers in (capability, FLASH_CAPABILITY))
            raise ConfigError(f"{where} (compute capability {have}, its kernel needs {need}); use auto.")
    if name == "flash2" and not has_flash2:
        raise ConfigError(f"{where} (flash-attn is not installed); pip install 'wands[flash]', or use auto.")
    if name == "cpu" and kind != "cpu":
        raise ConfigError(f"{where} (its kernel is for CPUs); use auto.")
    _log_choice(f"auto: {name}" if asked == "auto" else name, kind, dtype)
    kernels: dict[str, type[Backend]] = {
        "reference": ReferenceBackend, "cpu": CpuBackend, "torch": TorchBackend, "flash2": Flash2Backend
    }  # fmt: skip
    return kernels[name]()


@cache
def _log_choice(choice: str, kind: str, dtype: torch.dtype) -> None:
    """Say it once in a process: the start block asks for the kernel too, not only the model."""
    logger.info("attention.backend=%s (%s, %s)", choice, kind, dtype)


def _score_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [H, T, D], in the dtype that scores are computed in."""
    return x.transpose(0, 1).to(_score_dtype(x))


def _batched(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x.transpose(0, 1)[None]


def _clear_idle_rows(out: Tensor, lse: Tensor, segments: Segments) -> None:
    """Kernels leave such rows undefined, or with lse +inf (flash-attn 2) or 0."""
    for rows in segments.idle_q(out.shape[0]):
        out[rows] = 0
        lse[:, rows] = -torch.inf


def _clear_idle_grads(dq: Tensor, dk: Tensor, dv: Tensor, segments: Segments) -> None:
    for rows in segments.idle_q(dq.shape[0]):
        dq[rows] = 0
    for rows in segments.idle_k(dk.shape[0]):
        dk[rows] = 0
        dv[rows] = 0
