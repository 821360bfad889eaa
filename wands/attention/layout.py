"""Assign the tokens of a bin to the ranks of a context-parallel group. No process groups are used.

First, the ring splits every sample into `ring_degree` chunks, and ring row r holds chunk r of each. All rows then have nearly
equal numbers of tokens *and* of (query, key) pairs; equal parts of the whole bin would not balance the pairs. Second, Ulysses
splits each row into `ulysses_degree` equal slices, which its all-to-all joins in the order of the tokens, so a kernel gets a
whole row. Padding is only at the end of a row, and makes all rows equally long.

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
    """Bytes that a rank sends for one attention layer."""

    ulysses_forward: int
    ulysses_backward: int
    ring_forward: int
    ring_backward: int


@dataclass(frozen=True)
class ContextPlan:
    """Split of a bin over all ranks of a context-parallel group.

    Attributes:
        seq_lens: number of tokens of each sample, in packed order.
        chunk_lens: entry [r][s] is the number of tokens of sample s in ring row r.
        row_len: number of tokens of every ring row, padding included; a multiple of `ulysses_degree`.
    """

    seq_lens: tuple[int, ...]
    ulysses_degree: int
    ring_degree: int
    chunk_lens: ChunkLens
    row_len: int

    @classmethod
    def build(cls, seq_lens: Sequence[int], *, ulysses_degree: int = 1, ring_degree: int = 1) -> ContextPlan:
        """Split samples with these numbers of tokens, all positive, in packed order."""
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
        """Padding tokens of all ranks of the context-parallel group."""
        return self.ring_degree * self.row_len - sum(self.seq_lens)

    def cost_balance(self) -> float:
        """Return the predicted attention time of the ring / the time with equally many (query, key) pairs on all ranks.

        In each round of the ring, all ranks wait for the rank with the most pairs.
        """
        lens = self.chunk_lens
        degree = self.ring_degree
        lockstep = sum(
            max(_num_pairs(lens[row], lens[(row - step) % degree]) for row in range(degree))
            for step in range(degree)
        )
        return lockstep * degree / sum(length * length for length in self.seq_lens)

    def comm_bytes(self, dim: int, itemsize: int, *, grad_itemsize: int = 4) -> CommBytes:
        """Predict the bytes that each rank sends for one attention layer.

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
    """Tokens of a bin that one rank holds.

    Attributes:
        plan: split of the bin over all ranks.
        token_index: int64 [L], index in the bin of each local token; -1 for the padding at the end.
        segment_ids: int64 [L], sample index of each local token. Padding has the index of the last sample.
        local_seq_lens: number of local tokens of each sample, without padding.
        token_ranges: (start, stop) of the local tokens among all tokens of each sample; (0, 0) if there are none.
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
        """Return the layout of one rank. `cp_rank` is ring rank * ulysses_degree + Ulysses rank."""
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
        """Number of tokens of each sample on all ranks together."""
        return self.plan.seq_lens

    @property
    def num_tokens(self) -> int:
        """Number of tokens on this rank with padding, equal on all ranks of the context-parallel group."""
        return len(self.token_index)

    @property
    def num_valid(self) -> int:
        """Number of tokens on this rank without padding."""
        return sum(self.local_seq_lens)


@lru_cache(maxsize=256)
def split_over_ring(seq_lens: tuple[int, ...], ring_degree: int) -> ChunkLens:
    """Divide the tokens of the samples among the ring rows: entry [r][s] is the number of tokens of sample s in ring row r.

    The rows get nearly equal numbers of tokens. A sample with fewer tokens than ring rows is in one row. The chunks of any other
    sample differ by at most one token.
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
    """Return the number of rounds of the ring: its number of ranks if any sample is split, else 1.

    All ranks compute it before they communicate, so that no rank waits for keys that are never sent.
    """
    has_cut = any(sum(length > 0 for length in lens) > 1 for lens in zip(*chunk_lens, strict=True))
    return len(chunk_lens) if has_cut else 1


def _num_pairs(lens_q: Sequence[int], lens_k: Sequence[int]) -> int:
    return sum(len_q * len_k for len_q, len_k in zip(lens_q, lens_k, strict=True))
