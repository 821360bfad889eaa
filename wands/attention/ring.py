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

from wands.attention.kernels.registry import Backend, backend_named
from wands.attention.packed import Segments
from wands.distributed.layout import ChunkLens, ring_rounds


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
    """See `ring_attention`; returns out [N, H, D] and its log-sum-exp [H, N]. `grad_group` is on its way to the backward."""
    chunk_lens, kernel = _by_row(tuple(lens), degree), backend_named(backend)
    if degree == 1:
        out, lse = kernel.forward(q, k, v, _segments(chunk_lens[0], chunk_lens[0], q.device), scale)
        return out.contiguous(), lse.contiguous()  # some kernels keep the order of q's axes in memory
    peers = _resolve_process_group(group)
    rank, rounds = dist.get_rank(peers), ring_rounds(chunk_lens)
    out = torch.zeros_like(q, dtype=_wide(q), memory_format=torch.contiguous_format)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=_wide(q))
    block = torch.stack([k, v])
    for step in range(rounds):
        coming = _PassOn(block, peers) if step + 1 < rounds else None  # under way while the kernel works
        segments = _segments(chunk_lens[rank], chunk_lens[(rank - step) % degree], q.device)
        _merge(out, lse, *kernel.forward(q, block[0], block[1], segments, scale))
        block = coming.wait() if coming else block
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
    """Gradients of q, k and v; those of k and v begin at the next row, follow their block, and come home at last."""
    chunk_lens, kernel = _by_row(tuple(lens), degree), backend_named(backend)
    if degree == 1:
        segments = _segments(chunk_lens[0], chunk_lens[0], q.device)
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, segments, scale)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    peers, grad_peers = _resolve_process_group(group), _resolve_process_group(grad_group)
    rank, rounds = dist.get_rank(peers), ring_rounds(chunk_lens)
    dq = torch.zeros_like(q, dtype=_wide(q), memory_format=torch.contiguous_format)
    block = torch.stack([k, v])
    home: Tensor | None = None  # what this row finds for its own block; the others' finds travel
    behind: _PassOn | None = None
    for step in range(rounds):
        coming = _PassOn(block, peers) if step + 1 < rounds else None
        segments = _segments(chunk_lens[rank], chunk_lens[(rank - step) % degree], q.device)
        part, *parts = kernel.backward(dout, q, block[0], block[1], out, lse, segments, scale)
        dq += part
        dblock = torch.stack(parts).to(_wide(q))
        if step == 0:
            home = dblock
        else:
            if behind:
                dblock += behind.wait()
            behind = _PassOn(dblock, grad_peers)
        block = coming.wait() if coming else block
    assert home is not None
    if behind:
        home += behind.wait()
    dk, dv = home.unbind()
    # Copies: what an operator returns may not share memory.
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


class _PassOn:
    """A buffer on its way to the next row of the ring, and the one that the row before sends meanwhile."""

    def __init__(self, block: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._sent, self._received = block, torch.empty_like(block)
        messages = (dist.isend, block, rank + 1), (dist.irecv, self._received, rank - 1)
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(op, tensor, group=group, group_peer=peer % size) for op, tensor, peer in messages]
        )

    def wait(self) -> Tensor:
        """What has arrived."""
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
def _by_row(lens: tuple[int, ...], degree: int) -> ChunkLens:
    size = len(lens) // degree
    return tuple(lens[row * size : (row + 1) * size] for row in range(degree))


@lru_cache(maxsize=512)
def _segments(lens_q: tuple[int, ...], lens_k: tuple[int, ...], device: torch.device) -> Segments:
    """Made once for all layers: every `cu_seqlens` is a copy to the device."""
    return Segments.build(lens_q, lens_k, device)


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
