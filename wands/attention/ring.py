"""Ring attention on packed sequences.

The key blocks (keys and values) of the ranks travel around the ring, and every rank attends to each block. With Ulysses, a rank
of the ring has all tokens of its ring row, for some of the heads.

Both passes are custom operators, so activation checkpointing sees each as one operation and can keep the result of the forward
pass instead of running the ring again. A custom operator takes only tensors, numbers, strings and lists of numbers: the table of
chunk lengths is passed as one flat list, and process groups by name.

Letters: N tokens of one rank of the ring, H heads, D head dim, R ring degree. Sources: Liu et al. 2023, "Ring
Attention with Blockwise Transformers". Backward pass: Dao et al. 2022, "FlashAttention", algorithm 4; the gradient of a key block
needs the log-sum-exp over all key blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import record_function
from torch.utils.flop_counter import flop_registry, register_flop_formula

from wands.attention.kernels.contract import fp32_or_wider, new_lse
from wands.attention.kernels.registry import Backend, get_backend
from wands.attention.layout import ring_rounds
from wands.attention.packed import ChunkLens, PackedMeta
from wands.attention.units import ALL_ROWS, Piece, Visible, num_pairs, pieces_of


@dataclass(frozen=True)
class RingAttention:
    """Self-attention inside each sample, or between its units (units.py). The tokens are spread over the ranks of a ring.

    Attributes:
        backend: attention kernel.
        group: ranks of the ring; None if the ring has one rank.
        grad_group: a second communicator over the same ranks, for the gradients of k and v. With a single communicator, transfers
            of k and v would wait for transfers of gradients.
    """

    backend: Backend
    group: dist.ProcessGroup | None = None
    grad_group: dist.ProcessGroup | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
        """Return the output for q, k and v [N, H, D], in q's dtype. Rows after the last sample are padding with output 0.

        Only `meta.chunk_lens` and `meta.visible` are used.
        """
        degree = len(meta.chunk_lens)
        num_ranks = self.group.size() if self.group else 1
        assert degree == num_ranks, f"chunk_lens has {degree} rows, but the ring has {num_ranks} ranks"
        names = [peers.group_name if peers else "" for peers in (self.group, self.grad_group)]
        lens = [length for row in meta.chunk_lens for length in row]
        visible = [number for entry in meta.visible for number in entry]
        pairs = pairs_of_rank(meta.chunk_lens, meta.visible, self.group.rank() if self.group else 0)
        scale = q.shape[-1] ** -0.5
        options = lens, degree, visible, pairs, *names, self.backend.name, scale
        out, _ = torch.ops.wands.ring_forward(q, k, v, *options)
        return out


@torch.library.custom_op("wands::ring_forward", mutates_args=())
def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: Sequence[int],
    degree: int,
    visible: Sequence[int],
    pairs: int,
    group: str,
    grad_group: str,
    backend: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output [N, H, D] and the log-sum-exp [H, N] of `RingAttention` for q, k and v [N, H, D].

    `lens` has the number of tokens of each unit on the first rank of the ring, then on the second, and so on. `visible` has three
    numbers for each entry of `meta.visible`. `pairs` is the number of this rank's (query, key) pairs, for counted FLOPs. `group`
    is the name of the ring's process group, empty if `degree` is 1. Only the backward pass uses `grad_group`.
    """
    chunk_lens = _split_rows(tuple(lens), degree)
    seen = _triples(tuple(visible))
    kernel = get_backend(backend)
    if degree == 1 and not seen:
        [piece] = pieces_of(chunk_lens[0], chunk_lens[0], seen, q.device)
        out, lse = kernel.forward(q, k, v, piece.segments, scale)
        return out.contiguous(), lse.contiguous()  # some kernels return tensors with the memory layout of q
    ring = named_group(group) if degree > 1 else None
    rank = dist.get_rank(ring) if ring else 0
    rounds = ring_rounds(chunk_lens, seen)
    out = torch.zeros_like(q, dtype=fp32_or_wider(q), memory_format=torch.contiguous_format)
    lse = new_lse(q)
    block = torch.stack([k, v])
    for step in range(rounds):
        transfer = (
            _RingTransfer(block, ring) if ring and step + 1 < rounds else None
        )  # runs parallel to the kernel
        for queries, keys, segments in pieces_of(
            chunk_lens[rank], chunk_lens[(rank - step) % degree], seen, q.device
        ):
            part = kernel.forward(q[queries], block[0][keys], block[1][keys], segments, scale)
            _merge(out[queries], lse[:, queries], *part)
        block = transfer.wait() if transfer else block
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
    visible: Sequence[int],
    pairs: int,
    group: str,
    grad_group: str,
    backend: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) for `ring_forward`, whose results are `out` and `lse`.

    In each step, a rank computes the part of a key block's gradient that comes from its own queries. The sum of the parts travels
    with the block, one step behind: the first rank after the owner starts it, each later rank adds its part, and the owner
    finally adds the part that it computed in the first step.
    """
    chunk_lens = _split_rows(tuple(lens), degree)
    seen = _triples(tuple(visible))
    kernel = get_backend(backend)
    if degree == 1 and not seen:
        [piece] = pieces_of(chunk_lens[0], chunk_lens[0], seen, q.device)
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, piece.segments, scale)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    ring = named_group(group) if degree > 1 else None
    grad_ring = named_group(grad_group) if degree > 1 else None
    rank = dist.get_rank(ring) if ring else 0
    rounds = ring_rounds(chunk_lens, seen)
    dq = torch.zeros_like(q, dtype=fp32_or_wider(q), memory_format=torch.contiguous_format)
    block = torch.stack([k, v])
    grad_transfer: _RingTransfer | None = None
    for step in range(rounds):
        transfer = _RingTransfer(block, ring) if ring and step + 1 < rounds else None
        pieces = pieces_of(chunk_lens[rank], chunk_lens[(rank - step) % degree], seen, q.device)
        dblock = _add_piece_gradients(kernel, pieces, dq, block, (dout, q, out, lse), scale)
        if step == 0:
            own_dblock = dblock  # this rank's summand of the gradient of this rank's block; never sent
        else:
            if grad_transfer:
                dblock += grad_transfer.wait()
            assert grad_ring is not None
            grad_transfer = _RingTransfer(dblock, grad_ring)
        block = transfer.wait() if transfer else block
    if grad_transfer:
        own_dblock += grad_transfer.wait()
    dk, dv = own_dblock.unbind()
    # Copy dk and dv, because the results of an operator must not share memory.
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


def _add_piece_gradients(
    kernel: Backend,
    pieces: Sequence[Piece],
    dq: Tensor,
    block: Tensor,
    of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Add the gradient of q that comes from a block of keys and values [2, N, H, D] to `dq`. Return the gradient of the block.

    `of_queries` is (dout, q, out, lse). The result has the dtype of `dq`.
    """
    dout, q, out, lse = of_queries
    dblock = None
    for rows, keys, segments in pieces:
        of_rows = q[rows], block[0][keys], block[1][keys], out[rows], lse[:, rows]
        dq_part, *dkv_part = kernel.backward(dout[rows], *of_rows, segments, scale)
        dq[rows] += dq_part
        if keys == ALL_ROWS:
            return torch.stack(dkv_part).to(dq.dtype)
        dblock = dq.new_zeros(block.shape) if dblock is None else dblock
        for total, part in zip(dblock, dkv_part, strict=True):
            if isinstance(keys, slice):
                total[keys] += part
            else:  # copies of keys
                total.index_add_(0, keys, part.to(total.dtype))
    return dq.new_zeros(block.shape) if dblock is None else dblock


def named_group(name: str) -> dist.ProcessGroup:
    """Return the process group with a name, by which custom operators know it."""
    resolve: Callable[[Any], dist.ProcessGroup] = _resolve_process_group  # declared for a type of torch 2.13
    return resolve(name)


class _RingTransfer:
    """Asynchronous transfer: send a tensor to the next rank of the ring, and receive one from the previous rank."""

    def __init__(self, block: Tensor, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        self._sent = block
        self._received = torch.empty_like(block)
        messages = (dist.isend, block, rank + 1), (dist.irecv, self._received, rank - 1)
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(op, tensor, group=group, group_peer=peer % size) for op, tensor, peer in messages]
        )

    def wait(self) -> Tensor:
        """Wait for both transfers, and return the received tensor."""
        with record_function("ring hop"):
            for work in self._works:
                work.wait()
        return self._received


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the result of one more key block, [N, H, D] and [H, N], into `out` and `lse` (fp32 or wider), in place."""
    # The two weights add up to 1. exp(lse - merged) would bring the rounding error of a large log-sum-exp to `out`, but not to
    # the probabilities of the backward pass, and the gradients of large scores would be several times less accurate.
    weight = torch.sigmoid(block_lse - lse).nan_to_num(0.0)  # the output of rows without a key so far stays 0
    out.lerp_(block_out.to(out.dtype), weight.mT.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


@lru_cache(maxsize=256)
def _split_rows(lens: tuple[int, ...], degree: int) -> ChunkLens:
    num_units = len(lens) // degree
    return tuple(lens[row * num_units : (row + 1) * num_units] for row in range(degree))


@lru_cache(maxsize=256)
def _triples(numbers: tuple[int, ...]) -> Visible:
    return tuple(zip(*(iter(numbers),) * 3, strict=True))


@ring_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), new_lse(q)


@ring_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@lru_cache(maxsize=256)
def pairs_of_rank(chunk_lens: ChunkLens, visible: Visible, rank: int) -> int:
    """Return the number of (query, key) pairs of one rank of a ring, with keys on all ranks."""
    of_all = [sum(lens) for lens in zip(*chunk_lens, strict=True)]
    return num_pairs(chunk_lens[rank], of_all, visible)


def attention_flops(q_shape: Sequence[int], pairs: int) -> int:
    """Return the FLOPs of `ring_forward`: two matmuls, the scores and the weighted sum of the values.

    `q_shape` is (tokens, heads, head dim). `pairs` is the number of (query, key) pairs.
    """
    return 4 * pairs * q_shape[1] * q_shape[2]


BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass / the forward pass: five matmuls instead of two, as in FlashAttention."""


@register_flop_formula(torch.ops.wands.ring_forward)
def _(q: Any, k: Any, v: Any, lens: Any, degree: int, visible: Any, pairs: int, *_: Any, **__: Any) -> int:
    return attention_flops(q, pairs)


@register_flop_formula(torch.ops.wands.ring_backward)
def _(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any, **__: Any) -> int:
    return int(BACKWARD_FLOPS * flop_registry[torch.ops.wands.ring_forward](q, k, v, *options))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.wands.ring_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *grads, *(None for _ in ctx.options)


ring_forward.register_autograd(_backward, setup_context=_setup_context)
