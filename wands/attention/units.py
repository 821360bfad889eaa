"""Token units: the parts of a packed sample that differ in the keys that their queries see.

A bidirectional sample is one unit, which sees itself. A causally trained sample has a unit for each copy of each chunk of frames.
The units of a sample follow each other in the pack, and the tokens of a unit are contiguous in its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from wands.attention.packed import Segments
from wands.transfer import to_device

Visible = tuple[tuple[int, int, int], ...]
"""(unit, first, end): the queries of the unit see the keys of the units `first` to `end` - 1.

The ranges of a unit do not overlap. Without entries, every unit sees itself."""

ALL_ROWS = slice(None)

LARGE_PIECE = 2**21
"""Smallest number of (query, key) pairs for which a piece is a separate call of the attention kernel."""
MOST_COPIES = 4
"""Largest number of copied keys / number of keys. Of many short chunks, the longest ranges become separate calls."""


class Unit(NamedTuple):
    """Part of a sample.

    Attributes:
        start: first token of the unit in its sample.
        stop: end of the tokens.
        sees: ranges (first, end) of units of the sample whose keys its queries see.
        chunk: number of the chunk of frames, from 0.
        is_context: whether the unit is a copy without loss, which other units see.
        is_second: whether its tokens are those of the sample's second clip (`wands.conditions.condition.SecondClip`).
    """

    start: int
    stop: int
    sees: tuple[tuple[int, int], ...] = ((0, 1),)
    chunk: int = 0
    is_context: bool = False
    is_second: bool = False

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


UnitRule = Callable[[tuple[int, int, int]], Sequence[Unit]]
"""Function from the tokens of a sample along (frame, row, column) to its units."""


def join_visible(samples: Sequence[Sequence[Unit]]) -> Visible:
    """Return which units of a bin see which, from the units of each sample; empty if every sample is one unit."""
    if all(units[0].sees == ((0, 1),) and len(units) == 1 for units in samples):
        return ()
    visible = []
    before = 0
    for units in samples:
        for number, unit in enumerate(units):
            visible += [(before + number, before + first, before + end) for first, end in unit.sees]
        before += len(units)
    return tuple(visible)


def num_pairs(lens_q: Sequence[int], lens_k: Sequence[int], visible: Visible) -> int:
    """Return the number of (query, key) pairs for the numbers of rows of q and of k in each unit."""
    if not visible:
        return sum(len_q * len_k for len_q, len_k in zip(lens_q, lens_k, strict=True))
    starts = [0, *accumulate(lens_k)]
    return sum(lens_q[unit] * (starts[end] - starts[first]) for unit, first, end in visible)


class Piece(NamedTuple):
    """One call of an attention kernel.

    Attributes:
        queries: rows of q.
        keys: rows of k and v: a slice, or int64 indices in which a row can occur several times.
        segments: segments of these rows.
    """

    queries: slice
    keys: slice | Tensor
    segments: Segments


@lru_cache(maxsize=64)
def pieces_of(
    lens_q: tuple[int, ...],
    lens_k: tuple[int, ...],
    visible: Visible,
    device: torch.device,
    large: int = LARGE_PIECE,
) -> tuple[Piece, ...]:
    """Divide the attention of units into calls of a kernel, in which a query sees keys that lie side by side.

    A kernel takes keys of a segment only if they are contiguous, and each key in one segment. So a large piece is a call with
    views of q, k and v, and many small pieces are one call with copies of the keys.

    Args:
        lens_q: number of rows of q in each unit.
        lens_k: number of rows of k in each unit.
        visible: which units see which. Empty: every unit sees itself, in one call.
        device: device of the result.
        large: smallest number of pairs of a large piece.
    """
    if not visible:
        return (Piece(ALL_ROWS, ALL_ROWS, Segments.build(lens_q, lens_k, device)),)
    starts_q = [0, *accumulate(lens_q)]
    starts_k = [0, *accumulate(lens_k)]
    pieces = []
    rounds: list[dict[int, tuple[int, int]]] = []  # of small pieces: unit to rows of k
    num_small = [0] * len(lens_q)
    ranges_of_keys = [(unit, starts_k[first], starts_k[end]) for unit, first, end in visible]
    longest = _longest_copy(
        [(end - first, lens_q[unit]) for unit, first, end in ranges_of_keys], large, sum(lens_k)
    )
    for unit, *bounds in ranges_of_keys:
        rows = bounds[0], bounds[1]
        num_keys = rows[1] - rows[0]
        pairs = lens_q[unit] * num_keys
        if pairs and (pairs >= large or num_keys > longest):
            segments = Segments.build((lens_q[unit],), (num_keys,), device)
            pieces.append(Piece(slice(starts_q[unit], starts_q[unit + 1]), slice(*rows), segments))
        elif pairs:
            if num_small[unit] == len(rounds):
                rounds.append({})
            rounds[num_small[unit]][unit] = rows
            num_small[unit] += 1
    for of_round in rounds:
        units = range(min(of_round), max(of_round) + 1)
        ranges = [of_round.get(unit, (0, 0)) for unit in units]
        index = torch.cat([torch.arange(first, end) for first, end in ranges])
        is_view = bool((index.diff() == 1).all())
        keys = slice(int(index[0]), int(index[-1]) + 1) if is_view else to_device(index, device)
        queries = slice(starts_q[units[0]], starts_q[units[-1] + 1])
        lens = [end - first for first, end in ranges]
        segments = Segments.build([lens_q[unit] for unit in units], lens, device)
        pieces.append(Piece(queries, keys, segments))
    return tuple(pieces)


def _longest_copy(ranges: Sequence[tuple[int, int]], large: int, num_keys: int) -> int:
    """Return the largest number of keys of a small piece, so that all copies have at most `MOST_COPIES` times the keys.

    `ranges` are (number of keys, number of queries) of each piece.
    """
    copied = 0
    longest = 0
    for length, same in groupby(sorted(keys for keys, queries in ranges if 0 < keys * queries < large)):
        copied += sum(same)
        if copied > MOST_COPIES * num_keys:
            break
        longest = length
    return longest
