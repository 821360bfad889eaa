"""Assign the tokens of a bin to the ranks of a context-parallel group. No process groups are used.

First, the ring splits every unit (units.py; a sample of bidirectional training is one) into `ring_degree` chunks, and ring row r
holds chunk r of each. All rows then have nearly equal numbers of tokens *and* of (query, key) pairs; equal parts of the whole bin
would not balance the pairs. Second, Ulysses splits each row into `ulysses_degree` equal slices, which its all-to-all joins in the
order of the tokens, so a kernel gets a whole row. Padding is only at the end of a row, and makes all rows equally long.

Letters: L local tokens of a rank with padding, S samples, R ring degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from wands.attention.packed import ChunkLens, segment_ids_of
from wands.attention.units import Unit, Visible, join_visible, num_pairs


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
        seq_lens: number of tokens of each unit, in packed order.
        chunk_lens: entry [r][u] is the number of tokens of unit u in ring row r.
        row_len: number of tokens of every ring row, padding included; a multiple of `ulysses_degree`.
        visible: which units see which; empty if every unit sees itself.
    """

    seq_lens: tuple[int, ...]
    ulysses_degree: int
    ring_degree: int
    chunk_lens: ChunkLens
    row_len: int
    visible: Visible = ()

    @classmethod
    def build(
        cls,
        seq_lens: Sequence[int],
        *,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        visible: Visible = (),
    ) -> ContextPlan:
        """Split units with these numbers of tokens, all positive, in packed order."""
        assert min(seq_lens, default=0) > 0, f"each unit needs a token, but the lengths are {[*seq_lens]}"
        chunk_lens = split_over_ring(tuple(seq_lens), ring_degree)
        longest = max(map(sum, chunk_lens))
        row_len = -(-longest // ulysses_degree) * ulysses_degree
        return cls(
            seq_lens=tuple(seq_lens),
            ulysses_degree=ulysses_degree,
            ring_degree=ring_degree,
            chunk_lens=chunk_lens,
            row_len=row_len,
            visible=visible,
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
            max(num_pairs(lens[row], lens[(row - step) % degree], self.visible) for row in range(degree))
            for step in range(degree)
        )
        return lockstep * degree / num_pairs(self.seq_lens, self.seq_lens, self.visible)

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
        sent = (ring_rounds(self.chunk_lens, self.visible) - 1) * 2 * self.row_len * (dim // ulysses)
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
        samples: units of each sample.
        token_index: int64 [L], index in the bin's clips of each local token; -1 for the padding at the end. Each copy of a clip
            has its tokens.
        segment_ids: int64 [L], sample index of each local token. Padding has the index of the last sample.
        unit_ids: int64 [L], unit index in the bin of each local token. Padding has the index of the last unit.
        local_seq_lens: number of local tokens of each sample, without padding.
        token_ranges: for each unit, (start, stop) of the local tokens in its sample's clip; (0, 0) if there are none.
    """

    plan: ContextPlan
    samples: tuple[tuple[Unit, ...], ...]
    token_index: Tensor
    segment_ids: Tensor
    unit_ids: Tensor
    local_seq_lens: tuple[int, ...]
    token_ranges: tuple[tuple[int, int], ...]

    @classmethod
    def build(
        cls,
        seq_lens: Sequence[int],
        *,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        cp_rank: int = 0,
        units: Sequence[Sequence[Unit]] | None = None,
    ) -> ContextLayout:
        """Return the layout of one rank.

        Args:
            seq_lens: number of tokens of each sample's clip, in packed order.
            ulysses_degree: number of ranks in a Ulysses group.
            ring_degree: number of ranks in a ring.
            cp_rank: ring rank * ulysses_degree + Ulysses rank.
            units: units of each sample. None: every sample is one unit, which sees itself.
        """
        samples = tuple(map(tuple, units)) if units else tuple((Unit(0, length),) for length in seq_lens)
        assert [max(unit.stop for unit in own) for own in samples] == [*seq_lens], (
            "units must cover their clip"
        )
        plan = ContextPlan.build(
            [unit.num_tokens for unit in chain(*samples)],
            ulysses_degree=ulysses_degree,
            ring_degree=ring_degree,
            visible=join_visible(samples),
        )
        assert 0 <= cp_rank < ulysses_degree * ring_degree, f"{cp_rank=} is not in the context-parallel group"
        ring_rank, ulysses_rank = divmod(cp_rank, ulysses_degree)
        num_tokens = plan.row_len // ulysses_degree
        begin = ulysses_rank * num_tokens  # start of this rank's slice of the ring row
        end = begin + num_tokens
        ranges = []
        index = []
        row_start = 0
        clip_starts = [0, *accumulate(seq_lens)]
        owners = [(sample, unit) for sample, own in enumerate(samples) for unit in own]
        for number, (sample, unit) in enumerate(owners):
            chunk_len = plan.chunk_lens[ring_rank][number]
            chunk_start = unit.start + sum(chunks[number] for chunks in plan.chunk_lens[:ring_rank])
            first = max(begin - row_start, 0)
            last = min(end - row_start, chunk_len)
            start, stop = (chunk_start + first, chunk_start + last) if first < last else (0, 0)
            ranges.append((start, stop))
            index.append(torch.arange(clip_starts[sample] + start, clip_starts[sample] + stop))
            row_start = row_start + chunk_len
        unit_lens = [stop - start for start, stop in ranges]
        num_pads = num_tokens - sum(unit_lens)
        unit_ids = segment_ids_of((*unit_lens[:-1], unit_lens[-1] + num_pads))
        sample_of = torch.tensor([sample for sample, _ in owners])
        ends = [0, *accumulate(map(len, samples))]
        lens = tuple(sum(unit_lens[first:last]) for first, last in pairwise(ends))
        return cls(
            plan=plan,
            samples=samples,
            token_index=torch.cat([*index, torch.full((num_pads,), -1)]),
            segment_ids=sample_of[unit_ids],
            unit_ids=unit_ids,
            local_seq_lens=lens,
            token_ranges=tuple(ranges),
        )

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Number of tokens of each sample's clip."""
        return tuple(max(unit.stop for unit in own) for own in self.samples)

    def timestep_parts(self, num_given: Sequence[int] = ()) -> list[TimestepPart]:
        """Return the local tokens of each timestep, in the order of the tokens; also of timesteps without tokens on this rank.

        `num_given` is the number of tokens at the start of each sample's clip that are given without noise. Empty means none. The
        context units of a sample share one timestep.
        """
        parts: list[TimestepPart] = []
        number = 0
        for sample, units in enumerate(self.samples):
            given = num_given[sample] if num_given else 0
            for unit in units:
                start, stop = self.token_ranges[number]
                local_given = max(min(stop, given) - start, 0)
                last = parts[-1] if parts else None
                if unit.start < given:
                    parts.append(TimestepPart(sample, number, local_given, is_given=True))
                if unit.is_context and last and last.is_context and last.sample == sample:
                    parts[-1] = last._replace(num_tokens=last.num_tokens + stop - start)
                elif unit.stop > given:
                    parts.append(
                        TimestepPart(sample, number, stop - start - local_given, is_context=unit.is_context)
                    )
                number += 1
        return parts

    def loss_units(self, num_given: Sequence[int] = ()) -> list[tuple[int, int, Unit]]:
        """Return (sample, index in the bin, unit) of each unit that has a loss. `num_given` is as in `timestep_parts`."""
        owners = [(sample, unit) for sample, units in enumerate(self.samples) for unit in units]
        return [
            (sample, number, unit)
            for number, (sample, unit) in enumerate(owners)
            if not unit.is_context and unit.stop > (num_given[sample] if num_given else 0)
        ]

    def clip_range(self, sample: int) -> tuple[int, int]:
        """Return the smallest (start, stop) with all local tokens of a sample's clip; (0, 0) if there are none."""
        first = sum(map(len, self.samples[:sample]))
        held = [(a, b) for a, b in self.token_ranges[first : first + len(self.samples[sample])] if a < b]
        return (min(a for a, _ in held), max(b for _, b in held)) if held else (0, 0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens on this rank with padding, equal on all ranks of the context-parallel group."""
        return len(self.token_index)

    @property
    def num_valid(self) -> int:
        """Number of tokens on this rank without padding."""
        return sum(self.local_seq_lens)


class TimestepPart(NamedTuple):
    """Adjacent local tokens with one timestep.

    Attributes:
        sample: index of the sample.
        unit: index in the bin of the (first) unit.
        num_tokens: number of local tokens.
        is_given: whether the tokens are given without noise, so that their timestep is 0.
        is_context: whether the tokens are of context units.
    """

    sample: int
    unit: int
    num_tokens: int
    is_given: bool = False
    is_context: bool = False


@lru_cache(maxsize=256)
def split_over_ring(seq_lens: tuple[int, ...], ring_degree: int) -> ChunkLens:
    """Divide the tokens of the units among the ring rows: entry [r][u] is the number of tokens of unit u in ring row r.

    The rows get nearly equal numbers of tokens. A unit with fewer tokens than ring rows is in one row. The chunks of any other
    unit differ by at most one token.
    """
    chunks = [[0] * len(seq_lens) for _ in range(ring_degree)]
    totals = [0] * ring_degree

    def give(row: int, unit: int, count: int) -> None:
        chunks[row][unit] += count
        totals[row] += count

    uncut = [unit for unit, length in enumerate(seq_lens) if length < ring_degree]
    for unit in sorted(uncut, key=lambda i: -seq_lens[i]):
        give(totals.index(min(totals)), unit, seq_lens[unit])
    for unit, length in enumerate(seq_lens):
        if length < ring_degree:
            continue
        base, remainder = divmod(length, ring_degree)
        # The remainder goes to the ring rows with the fewest tokens so far, so it rotates from unit to unit.
        lightest = sorted(range(ring_degree), key=totals.__getitem__)[:remainder]
        for row in range(ring_degree):
            give(row, unit, base + (row in lightest))
    return tuple(map(tuple, chunks))


@lru_cache(maxsize=256)
def ring_rounds(chunk_lens: ChunkLens, visible: Visible = ()) -> int:
    """Return the number of rounds of the ring: its number of ranks if any query sees a key on another rank, else 1.

    All ranks compute it before they communicate, so that no rank waits for keys that are never sent.
    """
    columns = list(zip(*chunk_lens, strict=True))
    for unit, first, end in visible or [(unit, unit, unit + 1) for unit in range(len(columns))]:
        rows = {
            row for lens in (columns[unit], *columns[first:end]) for row, length in enumerate(lens) if length
        }
        if len(rows) > 1:
            return len(chunk_lens)
    return 1
