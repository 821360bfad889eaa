"""Hybrid context parallelism: DeepSpeed's Ulysses all-to-all round the ring, one callable for the model.

Letters: L local tokens, N = L * ulysses_degree rows of a ring row, H heads, D head dim.
Sources: Jacobs et al. 2023, "DeepSpeed Ulysses"; Fang and Zhao 2024, "USP".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wands.attention.backends import Backend
from wands.attention.ring import ring_attention
from wands.parallel.layout import ChunkLens, PackedMeta

SCATTER_HEADS, GATHER_TOKENS, BATCH_FIRST = 2, 1, 0
"""Of a [B, L, H, D] tensor: the axis that is cut, the axis that grows, and where the batch is."""


class ContextAttention:
    """Self-attention of packed tokens that are spread over a context-parallel group, or over no group at all.

    Args:
        backend: the kernel that each rank runs.
        ulysses: ranks that share heads.
        ring: ranks that share samples.
        ring_grad: the same ranks, another communicator.
        fused: send q, k and v in one all-to-all instead of DeepSpeed's three; the same bits arrive.
    """

    def __init__(
        self,
        backend: Backend,
        ulysses: dist.ProcessGroup | None = None,
        ring: dist.ProcessGroup | None = None,
        ring_grad: dist.ProcessGroup | None = None,
        *,
        fused: bool = True,
    ) -> None:
        self.backend, self.ulysses, self.fused = backend, ulysses, fused
        self._ring = (ring, ring_grad)
        if ulysses is not None:
            from deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll

            self._all_to_all = _SeqAllToAll.apply
            self._plain = DistributedAttention(
                self._one_row, ulysses, scatter_idx=SCATTER_HEADS, gather_idx=GATHER_TOKENS
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
        """[L, H, D] three times and where the tokens are -> [L, H, D]."""
        if self.ulysses is None:
            return ring_attention(q, k, v, meta.chunk_lens, self.backend, *self._ring)
        if not self.fused:
            return self._plain(q[None], k[None], v[None], BATCH_FIRST, None, meta.chunk_lens)[0]
        rows = self._exchange(torch.stack([q, k, v]), SCATTER_HEADS, GATHER_TOKENS)  # [3, N, H / U, D]
        q, k, v = rows[:, None].unbind()
        out = self._one_row(q, k, v, meta.chunk_lens)
        return self._exchange(out, GATHER_TOKENS, SCATTER_HEADS)[0]

    def _one_row(self, q: Tensor, k: Tensor, v: Tensor, chunk_lens: ChunkLens) -> Tensor:
        """[1, N, H / U, D]: a whole ring row in its own order, some of the heads."""
        return ring_attention(q[0], k[0], v[0], chunk_lens, self.backend, *self._ring)[None]

    def _exchange(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        return self._all_to_all(self.ulysses, x, scatter, gather, BATCH_FIRST)
