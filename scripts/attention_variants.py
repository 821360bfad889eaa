"""Implementations of self-attention that bench_attention.py compares: the attention of wands, and simple references.

Each implementation runs over several ranks. Letters in shapes: L rows (tokens and padding) of this rank, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wands.attention.kernels.registry import Backend
from wands.attention.layout import ContextLayout, ContextPlan
from wands.attention.packed import PackedMeta
from wands.attention.ring import RingAttention
from wands.attention.ulysses import context_attention
from wands.attention.varlen import Segments, varlen_attention
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.transfer import to_device

HEAD_DIM = 128


@dataclass
class Variant:
    """Method to compute self-attention, as one rank runs it.

    Attributes:
        name: name in the table.
        rows: int64 [L], index of the packed token in each local row; -1 for a row without a token.
        attend: function from q, k, v [L, H, D] to out; None on a rank that computes nothing.
        formula: predicted bytes that one rank sends in forward and backward; 0 without a prediction.
        times: wall time and CPU time of each round, in seconds.
    """

    name: str
    rows: Tensor
    attend: Callable[..., Tensor] | None
    formula: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)

    def shard(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        pads = (self.rows < 0).view(-1, 1, 1)
        *leaves, dout = [x[self.rows.clamp(min=0)].masked_fill(pads, 0.0) for x in inputs]
        return [*(x.requires_grad_() for x in leaves), dout]

    def join(self, pieces: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
        """Combine the tokens of all ranks into float64 tensors of the whole bin, in packed order.

        Args:
            pieces: tensors with the rows (tokens and padding) of this rank, such as the result of `run`.
            num_tokens: number of tokens of the whole bin.
        """
        held = self.rows >= 0
        wholes = []
        for piece in pieces:
            whole = piece.new_zeros(num_tokens, *piece.shape[1:], dtype=torch.float64)
            whole[self.rows[held]] = piece[held].double()
            if dist.is_initialized():
                dist.all_reduce(whole)
            wholes.append(whole)
        return wholes

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run forward and backward of this variant on the rows (tokens and padding) of this rank.

        Args:
            inputs: result of `Variant.shard`: this rank's rows of q, k, v and the gradient of the output.

        Returns:
            The output, and the gradients of q, k and v. If `attend` is None, this rank computes nothing, and all four tensors
            are empty.
        """
        if self.attend is None:
            return [inputs[0].new_empty(0, *inputs[0].shape[1:])] * 4
        *leaves, dout = inputs
        out = self.attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def make_inputs(lens: Sequence[int], heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return random q, k, v and output gradient of a whole bin, equal on every rank: four [tokens, H, D]."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lens), heads, HEAD_DIM)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]


def single_kernel(lens: Sequence[int], backend: Backend, device: torch.device, rank: int) -> Variant:
    segments = Segments.build(lens, device=device)
    rows = torch.arange(sum(lens) if rank == 0 else 0, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, segments, backend)

    return Variant("single kernel", rows, attend if rank == 0 else None)


def blocks_of_a_ring(
    lens: Sequence[int], degree: int, backend: Backend, device: torch.device, rank: int
) -> Variant:
    layouts = [ContextLayout.build(lens, ring_degree=degree, cp_rank=row) for row in range(degree)]
    index = [layout.token_index[: layout.num_valid].to(device) for layout in layouts]
    chunks = layouts[0].plan.chunk_lens
    pairs = {
        (r, s): Segments.build(chunks[r], chunks[s], device) for r in range(degree) for s in range(degree)
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Blocks.apply(q, k, v, index, pairs, backend)

    rows = torch.arange(sum(lens) if rank == 0 else 0, device=device)
    return Variant(f"blocks of a ring of {degree}", rows, attend if rank == 0 else None)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Any, pairs: Any, backend: Backend
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5
        results = torch.empty_like(q)
        ctx.plan = (index, pairs, backend, scale)
        ctx.lse = []
        for r, rows in enumerate(index):
            parts = [backend.forward(q[rows], k[s], v[s], pairs[r, i], scale) for i, s in enumerate(index)]
            lse = torch.stack([part for _, part in parts]).logsumexp(0)
            shares = [(part - lse).exp().mT[..., None] for _, part in parts]
            results[rows] = sum(o * w for (o, _), w in zip(parts, shares, strict=True)).to(q.dtype)
            ctx.lse.append(lse)
        ctx.save_for_backward(q, k, v, results)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (index, pairs, backend, scale) = ctx.plan
        (q, k, v, out) = ctx.saved_tensors
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for r, rows in enumerate(index):
            for s, keys in enumerate(index):
                tensors = (dout[rows], q[rows], k[keys], v[keys], out[rows], ctx.lse[r])
                parts = backend.backward(*tensors, pairs[r, s], scale)
                for grad, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                    grad[where] += part
        return *(grad.to(q.dtype) for grad in grads), None, None, None


@cache
def groups_of(ring: int, ulysses: int, device: torch.device) -> ProcessGroups:
    return ProcessGroups.build(
        ParallelDims(
            world_size=dist.get_world_size(), rank=dist.get_rank(), ulysses_degree=ulysses, ring_degree=ring
        ),
        device,
    )


def context_parallel(
    name: str,
    inputs: Sequence[Tensor],
    lens: Sequence[int],
    degrees: tuple[int, int],
    backend: Backend,
) -> Variant:
    """Return a `Variant` that runs the context-parallel attention of wands (ring, Ulysses or both).

    Args:
        name: name in the table.
        inputs: result of `make_inputs`.
        lens: number of tokens of each sample.
        degrees: (ring degree, Ulysses degree). Their product is the world size.
        backend: attention kernel.
    """
    device = inputs[0].device
    (ring, ulysses) = degrees
    groups = groups_of(ring, ulysses, device)
    layout = groups.dims.layout(lens)
    attention = context_attention(backend, groups.ulysses, groups.ring, groups.ring_grad)
    positions = torch.zeros(layout.num_tokens, 3, dtype=torch.int64)
    ones = (1,) * len(lens)
    meta = PackedMeta(
        positions=positions,
        segment_ids=layout.segment_ids,
        chunk_lens=layout.plan.chunk_lens,
        local_seq_lens=layout.local_seq_lens,
        text_lens=ones,
    )
    meta = to_device(meta, device)
    formula = sum(layout.plan.comm_bytes(inputs[0][0].numel(), inputs[0].itemsize))
    return Variant(name, layout.token_index.to(device), lambda q, k, v: attention(q, k, v, meta), formula)


def all_gather_kv(inputs: Sequence[Tensor], lens: Sequence[int], backend: Backend) -> Variant:
    world = dist.get_world_size()
    rank = dist.get_rank()
    device = inputs[0].device
    layouts = [ContextLayout.build(lens, ring_degree=world, cp_rank=i) for i in range(world)]
    segments = Segments.build(layouts[rank].local_seq_lens, lens, device)
    gathered = torch.cat([layout.token_index for layout in layouts])
    order = torch.empty(sum(lens), dtype=torch.int64)  # packed token -> gathered row
    order[gathered[gathered >= 0]] = (gathered >= 0).nonzero()[:, 0]
    order = order.to(device)
    shard = 2 * layouts[rank].num_tokens * inputs[0][0].numel() * inputs[0].itemsize
    return Variant(
        "all-gather of k, v",
        layouts[rank].token_index.to(device),
        lambda q, k, v: _GatherKV.apply(q, k, v, order, segments, backend),
        2 * (world - 1) * shard,
    )


class _GatherKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, order: Tensor, segments: Segments, backend: Backend
    ) -> Tensor:
        kv = torch.stack([k, v], dim=1)
        gathered = kv.new_empty(dist.get_world_size() * len(kv), *kv.shape[1:])
        dist.all_gather_into_tensor(gathered, kv)
        keys, values = (gathered[order, i] for i in (0, 1))
        out, lse = backend.forward(q, keys, values, segments, q.shape[-1] ** -0.5)
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.plan = (order, segments, backend, gathered.shape)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        order, segments, backend, shape = ctx.plan
        q, *_ = ctx.saved_tensors
        dq, dk, dv = backend.backward(dout, *ctx.saved_tensors, segments, q.shape[-1] ** -0.5)
        grads = dk.new_zeros(shape)
        grads[order, 0] = dk
        grads[order, 1] = dv
        mine = grads.new_empty(len(q), *shape[1:])
        dist.reduce_scatter_tensor(mine, grads)
        return dq, mine[:, 0], mine[:, 1], None, None, None


def padded_samples(inputs: Sequence[Tensor], lens: Sequence[int], backend: Backend) -> Variant:
    world = dist.get_world_size()
    rank = dist.get_rank()
    device = inputs[0].device
    groups = groups_of(world, 1, device)
    chunk_lens = []
    rows = []
    for row in range(world):
        columns: list[int] = []
        index: list[Tensor] = []
        start = 0
        for length in lens:
            chunk = -(-length // (2 * world))
            tokens = torch.cat([torch.arange(i * chunk, (i + 1) * chunk) for i in (row, 2 * world - 1 - row)])
            valid = int((tokens < length).sum())
            # The pads of each rank are a separate segment: pads attend only to pads, and no token attends to them.
            columns += [valid, *(2 * chunk - valid if i == row else 0 for i in range(world))]
            index.append(torch.where(tokens < length, start + tokens, -1))
            start += length
        chunk_lens.append(tuple(columns))
        rows.append(torch.cat(index))
    plan = ContextPlan(
        seq_lens=tuple(lens),
        ulysses_degree=1,
        ring_degree=world,
        chunk_lens=tuple(chunk_lens),
        row_len=len(rows[rank]),
    )
    formula = sum(plan.comm_bytes(inputs[0][0].numel(), inputs[0].itemsize))
    attention = RingAttention(
        backend, groups.ring, groups.ring_grad
    )  # reads only `chunk_lens` of its last argument
    return Variant(
        f"padded samples (+{plan.num_pads} pads)",
        rows[rank].to(device),
        lambda q, k, v: attention(q, k, v, plan),
        formula,
    )


def variants_of(inputs: Sequence[Tensor], lens: Sequence[int], backend: Backend) -> list[Variant]:
    """Return the variants of self-attention that the ranks of this run can compute.

    The first variant is `single kernel`: rank 0 calls the attention kernel once for the whole bin, without communication.
    """
    device = inputs[0].device
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    ring_degrees = (world,) if world > 1 else (2, 4, 8)
    variants = [single_kernel(lens, backend, device, rank)]
    variants += [blocks_of_a_ring(lens, degree, backend, device, rank) for degree in ring_degrees]
    if world == 1:
        return variants
    rows = [(f"ulysses {world}", (1, world)), (f"ring {world}", (world, 1))]
    if world > 2 and world % 2 == 0:
        rows += [(f"hybrid: ring 2 x ulysses {world // 2}", (2, world // 2))]
    variants += [context_parallel(name, inputs, lens, degrees, backend) for name, degrees in rows]
    return [*variants, all_gather_kv(inputs, lens, backend), padded_samples(inputs, lens, backend)]
