"""Context-parallel attention in a test world: slice the inputs, attend, and join the results."""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.attention.ulysses import context_attention
from wands.attention.varlen import Segments, choose_backend, varlen_attention
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ParallelDims, ProcessGroups

HEADS = 4
DIM = 8


def make_inputs(seq_lens: tuple[int, ...], dtype: torch.dtype, heads: int = HEADS) -> list[Tensor]:
    """Return q, k, v and the gradient of the output for the whole pack, equal on every rank."""
    generator = torch.Generator().manual_seed(len(seq_lens) + sum(seq_lens))
    return [
        torch.randn(sum(seq_lens), heads, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(4)
    ]


def whole(inputs: list[Tensor], seq_lens: tuple[int, ...], backend: str = "reference") -> list[Tensor]:
    """Attend to the whole pack in one process, as the reference; return out, dq, dk and dv."""
    *leaves, dout = [x.clone().requires_grad_() for x in inputs]
    kernel = choose_backend(backend, "cpu", leaves[0].dtype)
    out = varlen_attention(*leaves, Segments.build(seq_lens), kernel)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


@cache
def groups_of(ring: int, ulysses: int) -> ProcessGroups:
    """Return the process groups of a world of dp x ring x ulysses ranks, created once per world."""
    if not dist.is_initialized():
        init_process_group()
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    return ProcessGroups.build(
        ParallelDims(world_size=world, rank=rank, ulysses_degree=ulysses, ring_degree=ring)
    )


def meta_of(layout: ContextLayout) -> PackedMeta:
    positions = torch.zeros(layout.num_tokens, 3, dtype=torch.int64)
    ones = (1,) * len(layout.seq_lens)
    return PackedMeta(
        positions=positions,
        segment_ids=layout.segment_ids,
        chunk_lens=layout.plan.chunk_lens,
        local_seq_lens=layout.local_seq_lens,
        text_lens=ones,
        visible=layout.plan.visible,
    )


def shard_rows(x: Tensor, layout: ContextLayout) -> Tensor:
    pads = (layout.token_index < 0).view(-1, 1, 1)
    return x[layout.token_index.clamp(min=0)].masked_fill(
        pads, 3.0
    )  # not zero, so that attention to padding changes results


def join(piece: Tensor, layout: ContextLayout, group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks in packed order, without padding, which must be finite."""
    assert torch.isfinite(piece).all()
    total = piece.new_zeros(sum(layout.seq_lens), *piece.shape[1:], dtype=torch.float64)
    total[layout.token_index[: layout.num_valid]] = piece[: layout.num_valid].double()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def attend(
    inputs: list[Tensor],
    seq_lens: tuple[int, ...],
    ring: int,
    ulysses: int,
    backend: str = "cpu",
) -> list[Tensor]:
    """Slice the pack, attend and differentiate on this rank, and join out, dq, dk and dv in float64."""
    groups = groups_of(ring, ulysses)
    layout = ContextLayout.build(
        seq_lens, ulysses_degree=ulysses, ring_degree=ring, cp_rank=groups.dims.cp_rank
    )
    kernel = choose_backend(backend, "cpu", inputs[0].dtype)
    attention = context_attention(kernel, groups.ulysses, groups.ring, groups.ring_grad)
    *leaves, dout = [shard_rows(x, layout).requires_grad_() for x in inputs]
    out = attention(*leaves, meta_of(layout))
    dout = dout.detach().clone()
    dout[layout.num_valid :] = 0  # a loss never counts pads
    grads = torch.autograd.grad(out, leaves, dout)
    return [join(x, layout, groups.cp) for x in (out.detach(), *grads)]
