"""Ulysses attention: DeepSpeed's DistributedAttention with ring attention as the local attention.

The two all-to-alls, `to_heads` and `to_tokens`, are custom operators, each the backward pass of the other. Activation
checkpointing sees each as one operation, and can keep the received tensors instead of sending them again.

Letters: L local tokens of a rank, U Ulysses degree, N = L * U tokens of a Ulysses group, H heads, D head dim. Sources: Jacobs et
al. 2023, "DeepSpeed Ulysses"; Fang and Zhao 2024, "USP".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention, single_all_to_all
from torch import Tensor

from wands.attention.kernels.registry import Backend
from wands.attention.packed import PackedMeta
from wands.attention.ring import RingAttention, named_group

BATCH_AXIS = 0
TOKEN_AXIS = 1
HEAD_AXIS = 2
"""Axes of a tensor of shape [batch, tokens, heads, head dim]."""


def context_attention(
    backend: Backend,
    ulysses: dist.ProcessGroup | None = None,
    ring: dist.ProcessGroup | None = None,
    ring_grad: dist.ProcessGroup | None = None,
) -> UlyssesAttention | RingAttention:
    """Return the self-attention of packed samples over a context-parallel group: (q, k, v, meta) to the output.

    q, k, v and the output are [L, H, D]; meta is the `PackedMeta` of this rank's tokens. A group is None if its degree is 1.
    `ring_grad` is a second communicator over `ring`, see `RingAttention`.
    """
    attention = RingAttention(backend, ring, ring_grad)
    return attention if ulysses is None else UlyssesAttention(attention, ulysses)


class UlyssesAttention(DistributedAttention):
    """DeepSpeed's DistributedAttention for packed tokens. The number of ranks in `group` must divide the number of heads.

    q, k and v are sent in one all-to-all, where DeepSpeed's own forward pass sends three. The results are equal bit for bit.
    """

    def __init__(self, local_attention: RingAttention, group: dist.ProcessGroup) -> None:
        def batched_attention(q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
            return local_attention(q[0], k[0], v[0], meta)[None]

        super().__init__(batched_attention, group, scatter_idx=HEAD_AXIS, gather_idx=TOKEN_AXIS)
        self._group = group.group_name, group.size()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
        """Return the self-attention inside each sample for q, k and v [L, H, D]. Only `meta.chunk_lens` is used."""
        q, k, v = torch.ops.wands.to_heads(torch.stack([q, k, v]), *self._group).unbind()  # [N, H / U, D]
        out: Tensor = self.local_attn(q[None], k[None], v[None], meta)
        return torch.ops.wands.to_tokens(out, *self._group)[0]


@torch.library.custom_op("wands::to_heads", mutates_args=())
def to_heads(x: Tensor, group: str, degree: int) -> Tensor:
    """Exchange local tokens with all heads for all tokens of the Ulysses group with some heads.

    x is [B, L, H, D], and the result [B, L * U, H / U, D]; `degree` is U and must divide H.
    """
    return _all_to_all(x, HEAD_AXIS, TOKEN_AXIS, group)


@torch.library.custom_op("wands::to_tokens", mutates_args=())
def to_tokens(x: Tensor, group: str, degree: int) -> Tensor:
    """Undo `to_heads`: x is [B, L * U, H / U, D], and the result [B, L, H, D]."""
    return _all_to_all(x, TOKEN_AXIS, HEAD_AXIS, group)


def _all_to_all(x: Tensor, scatter_axis: int, gather_axis: int, group: str) -> Tensor:
    return single_all_to_all(x, scatter_axis, gather_axis, BATCH_AXIS, named_group(group))


@to_heads.register_fake
def _(x: Tensor, group: str, degree: int) -> Tensor:
    batch, tokens, heads, dim = x.shape
    return x.new_empty(batch, tokens * degree, heads // degree, dim)


@to_tokens.register_fake
def _(x: Tensor, group: str, degree: int) -> Tensor:
    batch, tokens, heads, dim = x.shape
    return x.new_empty(batch, tokens // degree, heads * degree, dim)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.group = inputs


def _to_heads_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.wands.to_tokens(grad, *ctx.group), None, None


def _to_tokens_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.wands.to_heads(grad, *ctx.group), None, None


to_heads.register_autograd(_to_heads_backward, setup_context=_setup_context)
to_tokens.register_autograd(_to_tokens_backward, setup_context=_setup_context)

OPERATORS = {
    "attn_input": (torch.ops.wands.to_heads.default,),
    "attn_output": (torch.ops.wands.ring_forward.default, torch.ops.wands.to_tokens.default),
}
"""Maps tensor names of `wands.model.checkpointing` to operators whose results activation checkpointing can keep."""
