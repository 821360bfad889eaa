"""Plain PyTorch attention, random packed rows, and the kernels to test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wands.attention.kernels.flash import FlashBackend
from wands.attention.kernels.registry import Backend, choose_backend, get_backend
from wands.attention.packed import Segments

HEADS = 3
DIM = 16
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
CPU_DTYPES = [("reference", dtype) for dtype in TOLERANCE] + [("cpu", dtype) for dtype in TOLERANCE]
CUDA_BACKENDS = {
    "torch": "torch",
    "cudnn:64:torch": "torch",
    "flash2": "flash_attn.flash_attn_interface",
    "flash3": "flash_attn_interface",
    "flash4": "flash_attn.cute.interface",
}


def make_inputs(lens_q, lens_k, dtype, device="cpu", dim=DIM) -> list[Tensor]:
    """Return random q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    rows = (sum(lens_q), sum(lens_k), sum(lens_k), sum(lens_q))
    return [torch.randn(n, HEADS, dim, generator=generator).to(device, dtype) for n in rows]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute dense float64 attention with a block mask; rows without keys have out 0 and lse -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    id_q = torch.repeat_interleave(torch.arange(len(segments.lens_q)), torch.tensor(segments.lens_q)).to(
        q.device
    )
    id_k = torch.repeat_interleave(torch.arange(len(segments.lens_k)), torch.tensor(segments.lens_k)).to(
        q.device
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(id_q[:, None] != id_k, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


def cuda_backend(name: str) -> Backend:
    """Return the kernel after its check; skip the test if the package is not installed or the GPU is not supported."""
    pytest.importorskip(CUDA_BACKENDS[name])
    backend = get_backend(name)
    assert isinstance(backend, FlashBackend)
    if not backend.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"needs compute capability {backend.capability}")
    choose_backend(name.partition(":")[0], "cuda", torch.bfloat16)
    return backend
