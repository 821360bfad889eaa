"""Hybrid context parallelism: DeepSpeed's Ulysses all-to-all round the ring, one callable for the model.

The two exchanges are custom operators, each the other's gradient: like the ring they are single nodes to activation
checkpointing, which can keep what has arrived instead of sending it again.

Letters: L local tokens, N = L * ulysses_degree rows of a ring row, H heads, D head dim.
Sources: Jacobs et al. 2023, "DeepSpeed Ulysses"; Fang and Zhao 2024, "USP".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from wands.attention.kernels.registry import Backend
from wands.attention.ring import OPERATOR, ring_attention
from wands.distributed.layout import ChunkLens, PackedMeta

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
            from deepspeed.sequence.layer import DistributedAttention

            self._plain = DistributedAttention(
                self._one_row, ulysses, scatter_idx=SCATTER_HEADS, gather_idx=GATHER_TOKENS
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
        """[L, H, D] three times and where the tokens are -> [L, H, D]."""
        if self.ulysses is None:
            return ring_attention(q, k, v, meta.chunk_lens, self.backend, *self._ring)
        if not self.fused:
            return self._plain(q[None], k[None], v[None], BATCH_FIRST, None, meta.chunk_lens)[0]
        peers = (self.ulysses.group_name, self.ulysses.size())
        rows = torch.ops.wands.to_heads(torch.stack([q, k, v]), *peers)  # [3, N, H / U, D]
        q, k, v = rows[:, None].unbind()
        return torch.ops.wands.to_tokens(self._one_row(q, k, v, meta.chunk_lens), *peers)[0]

    def _one_row(self, q: Tensor, k: Tensor, v: Tensor, chunk_lens: ChunkLens) -> Tensor:
        """[1, N, H / U, D]: a whole ring row in its own order, some of the heads."""
        return ring_attention(q[0], k[0], v[0], chunk_lens, self.backend, *self._ring)[None]


@torch.library.custom_op("wands::to_heads", mutates_args=())
def to_heads(x: Tensor, group: str, degree: int) -> Tensor:
    """Exchange the tokens of all heads for all tokens of some heads, inside a Ulysses group.

    Args:
        x: [B, L, H, D].
        group: by its name.
        degree: U, ranks in the group; it divides H.

    Returns:
        [B, N, H / U, D].
    """
    return _exchange(x, SCATTER_HEADS, GATHER_TOKENS, group)


@torch.library.custom_op("wands::to_tokens", mutates_args=())
def to_tokens(x: Tensor, group: str, degree: int) -> Tensor:
    """Undo `to_heads`: [B, N, H / U, D] -> [B, L, H, D]."""
    return _exchange(x, GATHER_TOKENS, SCATTER_HEADS, group)


def _exchange(x: Tensor, scatter: int, gather: int, group: str) -> Tensor:
    from deepspeed.sequence.layer import single_all_to_all

    return single_all_to_all(x, scatter, gather, BATCH_FIRST, _resolve_process_group(group))


@to_heads.register_fake
def _(x: Tensor, group: str, degree: int) -> Tensor:
    batch, tokens, heads, dim = x.shape
    return x.new_empty(batch, tokens * degree, heads // degree, dim)


@to_tokens.register_fake
def _(x: Tensor, group: str, degree: int) -> Tensor:
    batch, tokens, heads, dim = x.shape
    return x.new_empty(batch, tokens // degree, heads * degree, dim)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.peers = inputs


def _back_to_tokens(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.wands.to_tokens(grad, *ctx.peers), None, None


def _back_to_heads(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.wands.to_heads(grad, *ctx.peers), None, None


to_heads.register_autograd(_back_to_tokens, setup_context=_remember)
to_tokens.register_autograd(_back_to_heads, setup_context=_remember)

OPERATORS = {
    "attn_input": (torch.ops.wands.to_heads.default,),
    "attn_output": (OPERATOR, torch.ops.wands.to_tokens.default),
}
"""Whose results activation checkpointing keeps under which name. Without a Ulysses group nothing is exchanged, and with
`fused=False` DeepSpeed's own exchanges cannot be kept."""
