"""Assign the tokens of a bin (packed samples) to the ranks of a context-parallel group. The module uses no process groups.

A bin is the list of samples that are packed into one sequence for one forward pass. The bin is split twice. First, the
ring splits every sample into `ring_degree` chunks, and ring row r holds chunk r of each sample. All ring rows then have
nearly equal numbers of tokens *and* of (query, key) pairs. A split of the whole bin into equal parts would not balance
the pairs. Second, Ulysses splits each ring row into `ulysses_degree` equal slices. The all-to-all of Ulysses joins the
slices in the order of the ranks, which is the order of the tokens in the ring row. So an attention kernel gets a whole
ring row, and the chunk lengths are the lengths of the samples in this row. Padding is added only at the end of a ring
row, so that all ring rows have the same length.

Letters: L local tokens of a rank with padding, S samples, R ring degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from wands.attention.packed import ChunkLens, segment_ids_of


class CommBytes(NamedTuple):
    """Number of bytes that a rank sends for one attention layer.

    The fields count the bytes of the Ulysses all-to-alls and the bytes of the ring transfers, each for the forward pass
    and for the backward pass.
    """

    ulysses_forward: int
    ulysses_backward: int
    ring_forward: int
    ring_backward: int


@dataclass(frozen=True)
class ContextPlan:
    """Split of a bin (the samples packed into one sequence) over all ranks of a context-parallel group.

    A ring row is the part of the bin that one Ulysses group (the ranks that divide the attention heads among themselves)
    holds.

    Attributes:
        seq_lens: number of tokens of each sample, in packed order.
        ulysses_degree: number of ranks that divide the attention heads among themselves.
        ring_degree: number of ring rows.
        chunk_lens: entry [r][s] is the number of tokens of sample s in ring row r.
        row_len: number of tokens of every ring row, with padding at the end; a multiple of `ulysses_degree`.
    """

    seq_lens: tuple[int, ...]
    ulysses_degree: int
    ring_degree: int
    chunk_lens: ChunkLens
    row_len: int

    @classmethod
    def build(cls, seq_lens: Sequence[int], *, ulysses_degree: int = 1, ring_degree: int = 1) -> ContextPlan:
        """Split the packed samples over the ranks of a context-parallel group, and return the split.

        Args:
            seq_lens: number of tokens of each sample, in packed order. Every number must be positive.
            ulysses_degree: number of ranks that divide the attention heads among themselves.
            ring_degree: number of ranks in a ring.
        """
        assert min(seq_lens, default=0) > 0, f"each sample needs a token, but the lengths are {[*seq_lens]}"
        chunk_lens = split_over_ring(tuple(seq_lens), ring_degree)
        longest = max(map(sum, chunk_lens))
        row_len = -(-longest // ulysses_degree) * ulysses_degree
        return cls(
            seq_lens=tuple(seq_lens),
            ulysses_degree=ulysses_degree,
            ring_degree=ring_degree,
            chunk_lens=chunk_lens,
            row_len=row_len,
        )

    @property
    def num_pads(self) -> int:
        """Number of padding tokens, summed over all ranks of the context-parallel group."""
        return self.ring_degree * self.row_len - sum(self.seq_lens)

    def cost_balance(self) -> float:
        """Predict the attention time of the ring, divided by the time if all ranks had equally many (query, key) pairs.

        The best result is 1. In each round of the ring, all ranks wait for the rank with the most pairs.
        """
        lens = self.chunk_lens
        degree = self.ring_degree
        lockstep = sum(
            max(_num_pairs(lens[row], lens[(row - step) % degree]) for row in range(degree))
            for step in range(degree)
        )
        return lockstep * degree / sum(length * length for length in self.seq_lens)

    def comm_bytes(self, dim: int, itemsize: int, *, grad_itemsize: int = 4) -> CommBytes:
        """Predict the number of bytes that each rank sends for one attention layer.

        Args:
            dim: number of attention heads times size of a head.
            itemsize: bytes per element of q, k and v.
            grad_itemsize: bytes per element of the gradients of k and v that the ring sends.
        """
        ulysses = self.ulysses_degree
        # A rank sends q, k, v and out, except the heads that the rank keeps.
        exchanged = 4 * (self.row_len // ulysses) * (dim - dim // ulysses) * itemsize
        # Keys and values are sent to every other ring row. Their gradients are sent the same number of times.
        sent = (ring_rounds(self.chunk_lens) - 1) * 2 * self.row_len * (dim // ulysses)
        return CommBytes(
            ulysses_forward=exchanged,
            ulysses_backward=exchanged,
            ring_forward=sent * itemsize,
            ring_backward=sent * (itemsize + grad_itemsize),
        )


@dataclass(frozen=True)
class ContextLayout:
    """Tokens of a bin (the samples packed into one sequence) that one rank holds.

    L is the number of tokens on this rank, padding included.

    Attributes:
        plan: split of the bin over all ranks of the context-parallel group.
        token_index: int64 [L], index in the bin of each local token (token on this rank). Padding is at the end and has
            the index -1.
        segment_ids: int64 [L], sample index of each local token. Padding has the index of the last sample.
        local_seq_lens: number of tokens of each sample on this rank, without padding.
        token_ranges: (start, stop) for each sample: the range of the local tokens among all tokens of the sample. The
            range is (0, 0) if this rank holds no token of the sample.
    """

    plan: ContextPlan
    token_index: Tensor
    segment_ids: Tensor
    local_seq_lens: tuple[int, ...]
    token_ranges: tuple[tuple[int, int], ...]

    @classmethod
    def build(
        cls, seq_lens: Sequence[int], *, ulysses_degree: int = 1, ring_degree: int = 1, cp_rank: int = 0
    ) -> ContextLayout:
        """Compute the tokens of a bin (the samples packed into one sequence) that one rank holds.

        Args:
            seq_lens: number of tokens of each sample, in packed order.
            ulysses_degree: number of ranks that divide the attention heads among themselves.
            ring_degree: number of ranks in a ring.
            cp_rank: index of the rank in the context-parallel group: ring rank * ulysses_degree + Ulysses rank.
        """
        plan = ContextPlan.build(seq_lens, ulysses_degree=ulysses_degree, ring_degree=ring_degree)
        assert 0 <= cp_rank < ulysses_degree * ring_degree, f"{cp_rank=} is not in the context-parallel group"
        ring_rank, ulysses_rank = divmod(cp_rank, ulysses_degree)
        num_tokens = plan.row_len // ulysses_degree
        begin = ulysses_rank * num_tokens  # start of this rank's slice of the ring row
        end = begin + num_tokens
        ranges = []
        index = []
        row_start = bin_start = 0
        for sample, length in enumerate(plan.seq_lens):
            chunk_len = plan.chunk_lens[ring_rank][sample]
            chunk_start = sum(chunks[sample] for chunks in plan.chunk_lens[:ring_rank])
            first = max(begin - row_start, 0)
            last = min(end - row_start, chunk_len)
            start, stop = (chunk_start + first, chunk_start + last) if first < last else (0, 0)
            ranges.append((start, stop))
            index.append(torch.arange(bin_start + start, bin_start + stop))
            row_start = row_start + chunk_len
            bin_start = bin_start + length
        lens = tuple(stop - start for start, stop in ranges)
        num_pads = num_tokens - sum(lens)
        segment_ids = segment_ids_of((*lens[:-1], lens[-1] + num_pads))
        token_index = torch.cat([*index, torch.full((num_pads,), -1)])
        return cls(
            plan=plan,
            token_index=token_index,
            segment_ids=segment_ids,
            local_seq_lens=lens,
            token_ranges=tuple(ranges),
        )

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Number of tokens of each sample of the bin, on all ranks together."""
        return self.plan.seq_lens

    @property
    def num_tokens(self) -> int:
        """Number of tokens on this rank, with padding. The number is equal on all ranks of the context-parallel group."""
        return len(self.token_index)

    @property
    def num_valid(self) -> int:
        """Number of tokens on this rank, without padding."""
        return sum(self.local_seq_lens)


@lru_cache(maxsize=256)
def split_over_ring(seq_lens: tuple[int, ...], ring_degree: int) -> ChunkLens:
    """Divide the tokens of the samples among the ring rows, so that the ring rows have nearly equal numbers of tokens.

    A ring row is the part of the packed samples that one Ulysses group processes. The ranks of a Ulysses group divide the
    attention heads among themselves. A sample with fewer tokens than ring rows is not split: all its tokens are in one
    ring row. Any other sample is split into one chunk per ring row, and its chunks differ by at most one token.

    Args:
        seq_lens: number of tokens of each sample.
        ring_degree: number of ring rows.

    Returns:
        Table of lengths: entry [r][s] is the number of tokens of sample s in ring row r.
    """
    chunks = [[0] * len(seq_lens) for _ in range(ring_degree)]
    totals = [0] * ring_degree

    def give(row: int, sample: int, count: int) -> None:
        chunks[row][sample] += count
        totals[row] += count

    uncut = [sample for sample, length in enumerate(seq_lens) if length < ring_degree]
    for sample in sorted(uncut, key=lambda i: -seq_lens[i]):
        give(totals.index(min(totals)), sample, seq_lens[sample])
    for sample, length in enumerate(seq_lens):
        if length < ring_degree:
            continue
        base, remainder = divmod(length, ring_degree)
        # The remainder goes to the ring rows with the fewest tokens so far, so it rotates from sample to sample.
        lightest = sorted(range(ring_degree), key=totals.__getitem__)[:remainder]
        for row in range(ring_degree):
            give(row, sample, base + (row in lightest))
    return tuple(map(tuple, chunks))


@lru_cache(maxsize=256)
def ring_rounds(chunk_lens: ChunkLens) -> int:
    """Return the number of rounds of the ring. In each round, a rank attends to the keys of one rank of the ring.

    If a sample is split over several ranks, there are as many rounds as ranks in the ring. Otherwise, there is one round. All
    ranks compute the number of rounds before they communicate, so that no rank waits for keys that are never sent.

    Args:
        chunk_lens: entry [r][s] is the number of tokens of sample s on rank r of the ring.
    """
    has_cut = any(sum(length > 0 for length in lens) > 1 for lens in zip(*chunk_lens, strict=True))
    return len(chunk_lens) if has_cut else 1


def _num_pairs(lens_q: Sequence[int], lens_k: Sequence[int]) -> int:
    return sum(len_q * len_k for len_q, len_k in zip(lens_q, lens_k, strict=True))
