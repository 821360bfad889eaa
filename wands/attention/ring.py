"""Ring attention on packed rows: keys and values travel, every rank attends to each block as it comes by.

Forward and backward are custom operators. To activation checkpointing they are single nodes, so its selective policy can
keep the forward's result instead of going round again, and torch.compile takes their gradient as given. An operator's
arguments are tensors, numbers and strings; that is why lengths come as a flat list and groups by name.

Letters: N rows of a ring row, H heads, D head dim, R ring degree, S samples.
Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; the backward is Dao et al. 2022, algorithm 4, with
each block given the log-sum-exp of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from wands.attention.backends import Backend, backend_named
from wands.attention.segments import Segments
from wands.parallel.layout import ChunkLens, RingSchedule


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_lens: ChunkLens,
    backend: Backend,
    group: dist.ProcessGroup | None = None,
    grad_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Attend inside samples that are spread over the rows of a ring; without a ring, inside one row.

    Args:
        q: [N, H, D], this rank's row; what lies behind its samples is padding and gives 0.
        k: [N, H, D].
        v: [N, H, D].
        chunk_lens: tokens of each sample in each row of the ring.
        backend: the kernel.
        group: the ring; None when R is 1.
        grad_group: the same ranks, another communicator, for the gradients of k and v.

    Returns:
        [N, H, D] in q's dtype.
    """
    degree = len(chunk_lens)
    assert degree == (group.size() if group else 1), f"{degree} rows in a ring of {group and group.size()}"
    names = [one.group_name if one else "" for one in (group, grad_group)]
    lens = [length for row in chunk_lens for length in row]
    out, _ = torch.ops.wands.ring_forward(q, k, v, lens, degree, *names, backend.name, q.shape[-1] ** -0.5)
    return out


@torch.library.custom_op("wands::ring_forward", mutates_args=())
def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: Sequence[int],
    degree: int,
    group: str,
    grad_group: str,
    backend: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `ring_attention`; returns out [N, H, D] and its log-sum-exp [H, N]."""
    ring, kernel = _schedule(tuple(lens), degree), backend_named(backend)
    if degree == 1:
        return kernel.forward(q, k, v, _segments(ring, 0, 0, q.device), scale)
    peers = _resolve_process_group(group)
    rank = dist.get_rank(peers)
    block: Tensor | None = torch.stack([k, v])
    out = torch.zeros_like(q, dtype=_wide(q), memory_format=torch.contiguous_format)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=_wide(q))
    for step in range(degree):
        source = ring.source(rank, step)
        coming = _pass_block(block, q, ring, rank, step, peers)  # under way while the kernel works
        if block is not None and ring.overlaps(rank, source):
            segments = _segments(ring, rank, source, q.device)
            _merge(out, lse, *kernel.forward(q, block[0], block[1], segments, scale))
        (block,) = coming.wait()
    return out.to(q.dtype), lse


@torch.library.custom_op("wands::ring_backward", mutates_args=())
def ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lens: Sequence[int],
    degree: int,
    group: str,
    grad_group: str,
    backend: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; those of k and v travel with their block, one hop behind it, and then home."""
    ring, kernel = _schedule(tuple(lens), degree), backend_named(backend)
    if degree == 1:
        return kernel.backward(dout, q, k, v, out, lse, _segments(ring, 0, 0, q.device), scale)
    peers, grad_peers = _resolve_process_group(group), _resolve_process_group(grad_group)
    rank = dist.get_rank(peers)
    block: Tensor | None = torch.stack([k, v])
    dq = torch.zeros_like(q, dtype=_wide(q), memory_format=torch.contiguous_format)
    home: Tensor | None = None  # dk and dv of this rank's own block
    grads = _Transfer(None, [None, None], grad_peers)
    for step in range(degree):
        source = ring.source(rank, step)
        coming = _pass_block(block, q, ring, rank, step, peers)
        dblock: Tensor | None = None
        if block is not None:
            dblock = torch.zeros_like(block, dtype=_wide(q))
            if ring.overlaps(rank, source):
                segments = _segments(ring, rank, source, q.device)
                parts = kernel.backward(dout, q, block[0], block[1], out, lse, segments, scale)
                for total, part in zip((dq, *dblock.unbind()), parts, strict=True):
                    total += part
        so_far, arrived = grads.wait()
        home = home if arrived is None else arrived
        if (
            dblock is not None and so_far is not None
        ):  # what the rows before this one found for the same block
            dblock += so_far
        grads = _pass_grads(dblock, q, ring, rank, step, grad_peers)
        if step == ring.hops[rank] == 0:
            home = dblock
        (block,) = coming.wait()
    _, arrived = grads.wait()
    home = home if arrived is None else arrived
    assert home is not None, "every block's gradients come home"
    dk, dv = home.unbind()
    # Copies: what an operator returns may not share memory.
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


def _pass_block(
    block: Tensor | None, q: Tensor, ring: RingSchedule, rank: int, step: int, group: dist.ProcessGroup
) -> _Transfer:
    """Send the block that is here to the next row and take that of the row before, where they are still needed."""
    send = receive = None
    if block is not None and step < ring.hops[ring.source(rank, step)]:
        send = (block, (rank + 1) % ring.degree)
    if step < ring.hops[ring.source(rank, step + 1)]:
        receive = (q.new_empty(2, *q.shape), (rank - 1) % ring.degree)
    return _Transfer(send, [receive], group)


def _pass_grads(
    dblock: Tensor | None, q: Tensor, ring: RingSchedule, rank: int, step: int, group: dist.ProcessGroup
) -> _Transfer:
    """Send the gradients after their block, or home after its last hop; take the next block's, and one's own."""
    send = receive = home = None
    source = ring.source(rank, step)
    if dblock is not None and ring.hops[source]:
        send = (dblock, (rank + 1) % ring.degree if step < ring.hops[source] else source)
    if step < ring.hops[ring.source(rank, step + 1)]:
        receive = (q.new_empty(2, *q.shape, dtype=_wide(q)), (rank - 1) % ring.degree)
    if step == ring.hops[rank] != 0:
        home = (q.new_empty(2, *q.shape, dtype=_wide(q)), (rank + step) % ring.degree)
    return _Transfer(send, [receive, home], group)


class _Transfer:
    """Buffers on their way between rows of a ring; they live here until they have arrived.

    Both ends of a message derive it from the schedule in the same round, so that no row waits for what nobody sends.
    """

    def __init__(
        self,
        send: tuple[Tensor, int] | None,
        receive: Sequence[tuple[Tensor, int] | None],
        group: dist.ProcessGroup,
    ) -> None:
        self._send = send
        self._received = [one[0] if one else None for one in receive]
        messages = [(dist.isend, send), *((dist.irecv, one) for one in receive)]
        ops = [dist.P2POp(op, one[0], group=group, group_peer=one[1]) for op, one in messages if one]
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[Tensor | None]:
        """The received buffers, in the order of `receive`."""
        for work in self._works:
            work.wait()
        return self._received


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold the attention to one block of keys into that of the blocks before, in place, in fp32 or wider."""
    merged = torch.logaddexp(lse, part_lse)
    finite = merged.masked_fill(merged == -torch.inf, 0.0)  # rows that have attended to nothing yet stay 0
    weight, part_weight = ((x - finite).exp().mT.unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(weight).addcmul_(part.to(out.dtype), part_weight)
    lse.copy_(merged)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@lru_cache(maxsize=256)
def _schedule(lens: tuple[int, ...], degree: int) -> RingSchedule:
    size = len(lens) // degree
    return RingSchedule.build(tuple(lens[row * size : (row + 1) * size] for row in range(degree)))


@lru_cache(maxsize=512)
def _segments(ring: RingSchedule, row: int, source: int, device: torch.device) -> Segments:
    """Made once for all layers: every `cu_seqlens` is a copy to the device."""
    return Segments.build(ring.chunk_lens[row], ring.chunk_lens[source], device)


@ring_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[1], q.shape[0], dtype=_wide(q)
    )


@ring_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.plan = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradient(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.wands.ring_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.plan)
    return *grads, *(None for _ in ctx.plan)


ring_forward.register_autograd(_gradient, setup_context=_remember)

OPERATOR = torch.ops.wands.ring_forward.default
"""What selective activation checkpointing must keep, or every ring goes round twice."""
