"""Clips into bins: as few bins as can be found, and of as even a cost as swaps between them reach.

Three plain packers compete for the fewest bins; how many there are follows from the lengths alone. Then bins
give each other clips until their costs are level, in another way every epoch. All of it works on lengths, of
which there are few, not on clips; clips of one length take the places in random order. Sums are of integers,
exact in any order: the bins are the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wands.flow.rng import permutation, philox

Bin = tuple[int, ...]
"""Sample indices that are packed into one forward; () is an empty bin that pads the last step."""
Contents = list[list[int]]
"""Bins of lengths: numbers into the ascending array of distinct lengths."""

MAX_LENGTHS = 1024
"""More distinct lengths than this are rounded up to shares of a bin, so that clips still share lengths."""
ROUNDED = 4096
"""Shares of a bin that such lengths are rounded up to."""
PART = 20_000
"""Clips that are packed at once; larger data is that many equal parts with equal bins."""
ROUNDS = 30
"""Rounds of swaps; what further ones gain is small."""
SPLITS = 512
"""Ways to split the clips of two bins anew that a round tries."""
EXACT = 2**32
"""Cost of the costliest clip, as an integer: sums of millions are exact in float64."""


def pack_bins(
    seq_lens: np.ndarray, sample_costs: np.ndarray, max_tokens: int, seed: int | str, epoch: int
) -> list[Bin]:
    """Fill bins to `max_tokens` and level their cost.

    Args:
        seq_lens: int64 [N], tokens of every sample, none above `max_tokens`.
        sample_costs: float64 [N], equal for equal lengths.
        max_tokens: capacity of a bin.
        seed: `train.seed`, or what else the random choices are keyed by.
        epoch: other epochs fill as many bins in another way.

    Returns:
        Bins with every sample exactly once. They are no more than best-fit decreasing needs, where at most
        `PART` samples have at most `MAX_LENGTHS` lengths.
    """
    seq_lens, max_tokens = _few_lengths(seq_lens, max_tokens)
    lengths, first, which, counts = np.unique(
        seq_lens, return_index=True, return_inverse=True, return_counts=True
    )
    costs = _as_integers(sample_costs[first])
    contents: Contents = []
    for number, (some, times) in enumerate(_equal_parts(counts)):
        if some.any():
            packed = level(
                fewest_bins(lengths, some, max_tokens), lengths, costs, max_tokens, (seed, epoch, number)
            )
            contents += packed * times

    shuffled = permutation(len(seq_lens), seed, epoch, "samples")
    by_length = shuffled[np.argsort(which[shuffled], kind="stable")]
    waiting = [iter(group.tolist()) for group in np.split(by_length, counts.cumsum()[:-1])]
    return [tuple(next(waiting[one]) for one in bin) for bin in contents]


def count_bins(seq_lens: np.ndarray, max_tokens: int) -> int:
    """How many bins `pack_bins` fills, without levelling them: the same in every epoch.

    Args:
        seq_lens: int64 [N], tokens of every sample, none above `max_tokens`.
        max_tokens: capacity of a bin.
    """
    seq_lens, max_tokens = _few_lengths(seq_lens, max_tokens)
    lengths, counts = np.unique(seq_lens, return_counts=True)
    parts = _equal_parts(counts)
    return sum(len(fewest_bins(lengths, some, max_tokens)) * times for some, times in parts if some.any())


def _few_lengths(seq_lens: np.ndarray, max_tokens: int) -> tuple[np.ndarray, int]:
    """Lengths and capacity, in shares of a bin where there are too many lengths."""
    if len(np.unique(seq_lens)) > MAX_LENGTHS:
        return -(-seq_lens * ROUNDED // max_tokens), ROUNDED
    return seq_lens, max_tokens


def _equal_parts(counts: np.ndarray) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
    """Samples of each length that are packed at once and how often; and those that are left, once."""
    num_parts = max(1, int(counts.sum()) // PART)
    return (counts // num_parts, num_parts), (counts % num_parts, 1)


def even_out(
    bins: Sequence[Bin],
    seq_lens: np.ndarray,
    sample_costs: np.ndarray,
    max_tokens: int,
    key: tuple[int | str, ...],
) -> list[Bin]:
    """The same samples in as many bins, none empty, of more even cost.

    Args:
        bins: none of them empty, together with at least one sample.
        seq_lens: int64 [N].
        sample_costs: float64 [N].
        max_tokens: capacity of a bin.
        key: of the random choices.
    """
    samples = [i for bin in bins for i in bin]
    place = {sample: number for number, sample in enumerate(samples)}
    contents = [[place[i] for i in bin] for bin in bins]
    costs = _as_integers(sample_costs[samples])
    leveled = level(contents, seq_lens[samples], costs, max_tokens, key)
    return [tuple(samples[one] for one in bin) for bin in leveled]


def fewest_bins(lengths: np.ndarray, counts: np.ndarray, max_tokens: int) -> Contents:
    """The best of best-fit decreasing and of filling each bin exactly, in two ways.

    Which is best depends on the data: taking the longest that leads to a full bin wastes least where few
    clips fill a bin, best fit where the short clips must last to the end.

    Args:
        lengths: int64 [D], ascending.
        counts: int64 [D], samples of each length.
        max_tokens: capacity of a bin.
    """
    random = iter(philox("fill").bit_generator.random_raw(int(counts.sum())).tolist())

    def any_length(candidates: np.ndarray, left: np.ndarray) -> int:
        """At random, as often as there are samples, and short ones more often, as many of them fit."""
        reached = (left[candidates] * (max_tokens // lengths[candidates]) ** 2).cumsum()
        return int(candidates[np.searchsorted(reached, next(random) % int(reached[-1]), side="right")])

    found = [
        best_fit(lengths, counts, max_tokens),
        fill_exactly(lengths, counts, max_tokens, lambda candidates, left: int(candidates[-1])),
        fill_exactly(lengths, counts, max_tokens, any_length),
    ]
    return min(found, key=len)


def best_fit(lengths: np.ndarray, counts: np.ndarray, max_tokens: int) -> Contents:
    """Longest first, each into the fullest bin that has room, else into a new one."""
    bins: Contents = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # distinct amounts of room: few, for clips come in few lengths
    for one in reversed(range(len(lengths))):
        length = int(lengths[one])
        for _ in range(counts[one]):
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                number = with_room[room].pop()
                if not with_room[room]:
                    del with_room[rooms.pop(place)]
            else:
                room, number = max_tokens, len(bins)
                bins.append([])
            bins[number].append(one)
            if room - length not in with_room:
                insort(rooms, room - length)
            with_room.setdefault(room - length, []).append(number)
    return bins


def fill_exactly(
    lengths: np.ndarray, counts: np.ndarray, max_tokens: int, choose: Callable[[np.ndarray, np.ndarray], int]
) -> Contents:
    """Longest first, and beside it lengths whose sum comes as near to the room as any sum of those left.

    Args:
        lengths: int64 [D], ascending.
        counts: int64 [D], samples of each length.
        max_tokens: capacity of a bin.
        choose: (those of the lengths that lead to the best sum, samples left of every length) -> one of them.
    """
    left = counts.copy()
    bins: Contents = []
    sums = _Sums(lengths[left > 0], max_tokens)
    fresh = True  # sums are of the lengths that are left, not also of some that ran out
    for longest in reversed(range(len(lengths))):
        while left[longest]:
            bin, room = [longest], max_tokens - int(lengths[longest])
            left[longest] -= 1
            while True:
                best = sums.largest_below(room)
                candidates = np.flatnonzero((left > 0) & (lengths <= best))
                leading = candidates[sums.reachable[best - lengths[candidates]]]
                if not len(leading) and not fresh:
                    sums, fresh = _Sums(lengths[left > 0], max_tokens), True
                    continue
                if not len(leading):  # nothing fits
                    break
                one = choose(leading, left)
                bin.append(one)
                room -= int(lengths[one])
                left[one] -= 1
                fresh = fresh and bool(left[one])
            fresh = fresh and bool(left[longest])
            bins.append(bin)
    return bins


class _Sums:
    """Which sums up to `max_tokens` any number of samples of some lengths can have."""

    def __init__(self, lengths: np.ndarray, max_tokens: int) -> None:
        bits, mask = 1, (1 << (max_tokens + 1)) - 1
        for length in lengths.tolist():
            shift = length
            while shift <= max_tokens:  # once, twice, four times as many
                bits |= bits << shift & mask
                shift *= 2
        raw = np.frombuffer(bits.to_bytes(max_tokens // 8 + 1, "little"), dtype=np.uint8)
        self.reachable = np.unpackbits(raw, bitorder="little")[: max_tokens + 1].view(bool)
        self._bits = bits

    def largest_below(self, room: int) -> int:
        return (self._bits & (2 << room) - 1).bit_length() - 1


def level(
    bins: Contents, lengths: np.ndarray, costs: np.ndarray, max_tokens: int, key: tuple[int | str, ...]
) -> Contents:
    """Let pairs of bins split their samples anew, so that their costs come nearer to each other.

    A costly bin meets a cheap one, any one, or any meet any, in turn; the best of `SPLITS` random splits that
    keeps both within `max_tokens` is taken if it is better than the present one.

    Args:
        bins: of lengths.
        lengths: int64 [D].
        costs: int64 [D], of a sample of each length.
        max_tokens: capacity of a bin.
        key: of the random choices.
    """
    nothing, width = len(lengths), max(map(len, bins))
    contents = np.full((len(bins), width), nothing)  # padded with a length of nothing, which sorts last
    for number, bin in enumerate(bins):
        contents[number, : len(bin)] = sorted(bin)
    tokens_of, cost_of = np.append(lengths, 0).astype(np.float64), np.append(costs, 0).astype(np.float64)
    for number in range(ROUNDS):
        cost = cost_of[contents].sum(axis=1)
        words = philox(*key, "splits", number).bit_generator.random_raw(SPLITS * 2 * width // 64)
        splits = np.unpackbits(words.astype("<u8").view(np.uint8)).reshape(2 * width, SPLITS)
        for one, other in _pairs(cost, number, key):
            both = np.sort(np.concatenate([contents[one], contents[other]], axis=1), axis=1)
            used = int((both != nothing).sum(axis=1).max())
            both, split = both[:, :used], splits[:used].astype(np.float64)
            tokens, spent = tokens_of[both] @ split, cost_of[both] @ split
            fits = np.maximum(tokens, tokens_of[both].sum(axis=1, keepdims=True) - tokens) <= max_tokens
            apart = np.abs(2 * spent - cost_of[both].sum(axis=1, keepdims=True))
            best = np.where(fits, apart, np.inf).argmin(axis=1)
            rows = np.arange(len(both))
            mine = splits[:used, best].T.astype(bool)
            halves = [np.sort(np.where(chosen, both, nothing), axis=1) for chosen in (mine, ~mine)]
            better = fits[rows, best] & (apart[rows, best] < np.abs(cost[one] - cost[other]))
            better &= np.all([(half[:, width:] == nothing).all(axis=1) for half in halves], axis=0)
            for number_of, half in zip((one, other), halves, strict=True):
                contents[number_of[better], : min(used, width)] = half[better, :width]
                contents[number_of[better], used:] = nothing
    return [[one for one in bin if one != nothing] for bin in contents.tolist()]


def _as_integers(costs: np.ndarray) -> np.ndarray:
    return np.rint(costs / costs.max() * EXACT).astype(np.int64)


def _pairs(
    cost: np.ndarray, number: int, key: tuple[int | str, ...]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bins that meet in a round, a few hundred pairs at a time."""
    half = len(cost) // 2
    order = np.argsort(-cost, kind="stable")
    shuffled = permutation(len(cost), *key, "pairs", number)
    costly, cheap = order[:half], order[len(order) - half :]
    one, other = (
        (costly, cheap[::-1]),
        (costly, cheap[np.argsort(shuffled[:half], kind="stable")]),
        (shuffled[:half], shuffled[half : 2 * half]),
    )[number % 3]
    for start in range(0, half, 256):
        yield one[start : start + 256], other[start : start + 256]
