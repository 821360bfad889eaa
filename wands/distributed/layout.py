"""Which tokens of a packed batch a rank holds: index arithmetic only, no process group.

A pack is cut twice. The ring cuts every sample into `ring_degree` chunks and gives row r the r-th chunk of each: all rows then
hold nearly the same number of tokens *and* of score pairs, which a cut of the pack end to end would not give. Ulysses cuts each
row into `ulysses_degree` equal slices; its all-to-all joins them again in rank order, which is the row's own order, so that
the chunk lengths describe what a kernel sees. Only the tail of a row is padded, to the common length.

Letters: T tokens of the whole pack, L tokens of this rank, S samples, R ring degree, U Ulysses degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

ChunkLens = tuple[tuple[int, ...], ...]
"""[R][S]: tokens of each sample in each ring row."""


@dataclass(frozen=True)
class CommBytes:
    """Bytes that one rank sends for one attention layer."""

    ulysses_forward: int
    ulysses_backward: int
    ring_forward: int
    ring_backward: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.ulysses_forward + self.ulysses_backward + self.ring_forward + self.ring_backward


@dataclass(frozen=True)
class ContextPlan:
    """How a pack lies on a whole context-parallel group.

    Attributes:
        seq_lens: tokens of each sample, in packed order.
        ulysses_degree: ranks that share heads.
        ring_degree: ranks that share each sample's tokens.
        chunk_lens: tokens of each sample in each ring row.
        row_len: rows of every ring row, tail padding included; a multiple of `ulysses_degree`.
    """

    seq_lens: tuple[int, ...]
    ulysses_degree: int
    ring_degree: int
    chunk_lens: ChunkLens
    row_len: int

    @classmethod
    def build(cls, seq_lens: Sequence[int], *, ulysses_degree: int = 1, ring_degree: int = 1) -> ContextPlan:
        """Cut a pack.

        Args:
            seq_lens: tokens of each sample, in packed order; all positive.
            ulysses_degree: ranks that share heads.
            ring_degree: ranks that share each sample's tokens.
        """
        assert min(seq_lens, default=0) > 0, f"samples of {list(seq_lens)} tokens"
        chunk_lens = split_over_ring(tuple(seq_lens), ring_degree)
        longest = max(map(sum, chunk_lens))
        row_len = -(-longest // ulysses_degree) * ulysses_degree
        return cls(tuple(seq_lens), ulysses_degree, ring_degree, chunk_lens, row_len)

    @property
    def num_pads(self) -> int:
        """Padding rows of all ranks together."""
        return self.ring_degree * self.row_len - sum(self.seq_lens)

    def cost_balance(self) -> float:
        """Time of the ring in lock-step over that of an even split of the score pairs; 1 is perfect."""
        lens, degree = self.chunk_lens, self.ring_degree
        lockstep = sum(
            max(_pairs(lens[row], lens[(row - step) % degree]) for row in range(degree))
            for step in range(degree)
        )
        return lockstep * degree / sum(length * length for length in self.seq_lens)

    def comm_bytes(self, dim: int, itemsize: int, *, grad_itemsize: int = 4) -> CommBytes:
        """Predict the traffic of one attention layer, the same on every rank.

        Args:
            dim: heads x head dim of the model.
            itemsize: bytes of an element of q, k and v.
            grad_itemsize: bytes of an element of the gradients of k and v that travel round the ring.
        """
        ulysses = self.ulysses_degree
        # q, k, v and out each leave all but the rank's own part of the heads.
        exchanged = 4 * (self.row_len // ulysses) * (dim - dim // ulysses) * itemsize
        # Keys and values go to every other row, and so do their gradients: from the next row round to home.
        sent = (ring_rounds(self.chunk_lens) - 1) * 2 * self.row_len * (dim // ulysses)
        return CommBytes(exchanged, exchanged, sent * itemsize, sent * (itemsize + grad_itemsize))


@dataclass(frozen=True)
class ContextLayout:
    """One rank's share of a pack.

    Attributes:
        plan: how the pack lies on the whole group.
        token_index: int64 [L], the packed token at each local place; -1 is tail padding.
        segment_ids: int64 [L], the sample of each local token; tail padding counts as the last sample.
        local_lens: tokens of each sample that this rank holds, padding left out.
        token_ranges: the same as (start, stop) among the sample's own tokens; (0, 0) where it holds none.
    """

    plan: ContextPlan
    token_index: Tensor
    segment_ids: Tensor
    local_lens: tuple[int, ...]
    token_ranges: tuple[tuple[int, int], ...]

    @classmethod
    def build(
        cls, seq_lens: Sequence[int], *, ulysses_degree: int = 1, ring_degree: int = 1, cp_rank: int = 0
    ) -> ContextLayout:
        """Lay out a pack for one rank of a context-parallel group.

        Args:
            seq_lens: tokens of each sample, in packed order.
            ulysses_degree: ranks that share heads.
            ring_degree: ranks that share each sample's tokens.
            cp_rank: ring rank * ulysses_degree + Ulysses rank.
        """
        plan = ContextPlan.build(seq_lens, ulysses_degree=ulysses_degree, ring_degree=ring_degree)
        assert 0 <= cp_rank < ulysses_degree * ring_degree, f"cp_rank {cp_rank}"
        row, part = divmod(cp_rank, ulysses_degree)
        size = plan.row_len // ulysses_degree
        begin, end = part * size, (part + 1) * size
        ranges, index, place, start = [], [], 0, 0
        for sample, length in enumerate(plan.seq_lens):
            here = plan.chunk_lens[row][sample]
            before = sum(chunks[sample] for chunks in plan.chunk_lens[:row])
            first, last = max(begin - place, 0), min(end - place, here)
            ranges.append((before + first, before + last) if first < last else (0, 0))
            index.append(torch.arange(start + ranges[-1][0], start + ranges[-1][1]))
            place, start = place + here, start + length
        lens = tuple(stop - first for first, stop in ranges)
        num_pads = size - sum(lens)
        ids = segment_ids_of((*lens[:-1], lens[-1] + num_pads))
        token_index = torch.cat([*index, torch.full((num_pads,), -1)])
        return cls(plan, token_index, ids, lens, tuple(ranges))

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens of each sample of the whole pack."""
        return self.plan.seq_lens

    @property
    def num_tokens(self) -> int:
        """Rows that this rank holds, tail padding included: the same on all ranks of the group."""
        return len(self.token_index)

    @property
    def num_valid(self) -> int:
        """Rows before the tail padding."""
        return sum(self.local_lens)


@dataclass(frozen=True)
class PackedMeta:
    """All that the model must know of the tokens it is given.

    Attributes:
        positions: int64 [L, 3], each token's (frame, row, column) inside its own sample.
        segment_ids: int64 [L], each token's sample, ascending.
        chunk_lens: tokens of each sample in each ring row, for self-attention; one row without a ring.
        seq_lens: local tokens of each sample; tail padding, if any, comes behind the last.
        text_lens: text tokens of each sample, trimmed.
        timestep_lens: local tokens of each timestep, where a sample may have several; one per sample by default.
        timestep_samples: the sample of each timestep, where a sample may have several; likewise.
        sample_keys: 64 random bits of each sample's visit, for dropout; none where nothing is dropped.
    """

    positions: Tensor
    segment_ids: Tensor
    chunk_lens: ChunkLens
    seq_lens: tuple[int, ...]
    text_lens: tuple[int, ...]
    timestep_lens: tuple[int, ...] = ()
    timestep_samples: tuple[int, ...] = ()
    sample_keys: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert sum(self.timestep_lens or self.seq_lens) == sum(self.seq_lens), (
            f"timesteps of {sum(self.timestep_lens)} tokens, samples of {sum(self.seq_lens)}"
        )
        assert len(self.seq_lens) == len(self.text_lens), (
            f"{len(self.seq_lens)} samples, {len(self.text_lens)} texts"
        )
        assert self.positions.shape == (len(self.segment_ids), 3), tuple(self.positions.shape)

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Local rows of each sample, the tail padding given to the last one: these cover all L rows."""
        return self._covering(self.seq_lens)

    @property
    def timestep_row_lens(self) -> tuple[int, ...]:
        """Local rows of each timestep; like `row_lens` they cover all L rows."""
        return self._covering(self.timestep_lens or self.seq_lens)

    def _covering(self, lens: tuple[int, ...]) -> tuple[int, ...]:
        *rest, last = lens
        return *rest, last + len(self.segment_ids) - sum(lens)

    def to(self, device: torch.device | str) -> PackedMeta:
        """The same, its tensors on `device`."""
        return replace(
            self,
            positions=self.positions.to(device, non_blocking=True),
            segment_ids=self.segment_ids.to(device, non_blocking=True),
        )


@lru_cache(maxsize=256)
def split_over_ring(seq_lens: tuple[int, ...], ring_degree: int) -> ChunkLens:
    """Cut every sample into chunks that differ by at most one token, rows that stay as even as that allows.

    A sample shorter than the ring stays whole on one row: cut, it would leave empty chunks and still travel.

    Args:
        seq_lens: tokens of each sample.
        ring_degree: rows.
    """
    chunks = [[0] * len(seq_lens) for _ in range(ring_degree)]
    totals = [0] * ring_degree

    def give(row: int, sample: int, count: int) -> None:
        chunks[row][sample] += count
        totals[row] += count

    whole = [sample for sample, length in enumerate(seq_lens) if length < ring_degree]
    for sample in sorted(whole, key=lambda i: -seq_lens[i]):
        give(totals.index(min(totals)), sample, seq_lens[sample])
    for sample, length in enumerate(seq_lens):
        if length < ring_degree:
            continue
        base, rest = divmod(length, ring_degree)
        # The extra tokens go to the rows that have the least so far: from sample to sample they rotate.
        lightest = sorted(range(ring_degree), key=totals.__getitem__)[:rest]
        for row in range(ring_degree):
            give(row, sample, base + (row in lightest))
    return tuple(map(tuple, chunks))


@lru_cache(maxsize=256)
def ring_rounds(chunk_lens: ChunkLens) -> int:
    """Rounds in which a row meets a block of keys: one per row, or its own alone when no sample is cut.

    All ranks know it before they talk, so that none waits for what nobody sends.
    """
    cut = any(sum(length > 0 for length in lens) > 1 for lens in zip(*chunk_lens, strict=True))
    return len(chunk_lens) if cut else 1


def segment_ids_of(seq_lens: Sequence[int]) -> Tensor:
    """The sample of each token of a pack, int64 [T]."""
    return torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens, dtype=torch.int64))


def _pairs(queries: Sequence[int], keys: Sequence[int]) -> int:
    return sum(q * k for q, k in zip(queries, keys, strict=True))
