"""Pack clips into as few bins as possible, then balance the cost of the bins by exchanging clips.

Three simple packers compete for the fewest bins; the number of bins depends on the lengths alone. Then pairs of bins
exchange clips until their costs are balanced, differently in every epoch. All steps work on distinct lengths, because there are
fewer lengths than clips. The clips of a length fill the positions in random order. All sums are sums of integers, exact in any
order, so the bins are the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wands.flow.rng import permutation, philox

Bin = tuple[int, ...]
"""Sample indices of one forward pass; () is an empty bin that pads the last step."""
Contents = list[list[int]]
"""Bins of lengths: indices into the ascending array of distinct lengths."""

MAX_LENGTHS = 1024
"""If there are more distinct lengths, they are rounded up to fractions of a bin, so that clips share lengths."""
ROUNDED = 4096
"""Number of fractions of a bin to which such lengths are rounded up."""
PART = 20_000
"""Number of clips packed at once; larger data is cut into equal parts with equal bins."""
ROUNDS = 30
"""Number of rounds of exchanges; more rounds improve the balance only a little."""
SPLITS = 512
"""Number of random splits of the clips of two bins that each pair of bins tries in a round."""
EXACT = 2**32
"""Integer cost of the most expensive clip. Sums of millions of such costs are exact in float64."""


def pack_bins(
    seq_lens: np.ndarray, sample_costs: np.ndarray, max_tokens: int, seed: int | str, epoch: int
) -> list[Bin]:
    """Fill bins to `max_tokens` and balance their cost.

    Args:
        seq_lens: int64 [N], tokens of every sample, none above `max_tokens`.
        sample_costs: float64 [N], equal for equal lengths.
        max_tokens: capacity of a bin.
        seed: `train.seed`, or another key of the random choices.
        epoch: every epoch has equally many bins with other contents.

    Returns:
        Bins with every sample exactly once, not more bins than best-fit decreasing needs if at most `PART` samples have
        at most `MAX_LENGTHS` lengths.
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
    """Return the number of bins of `pack_bins`, which is the same in every epoch, without balancing them.

    Args:
        seq_lens: int64 [N], tokens of every sample, none above `max_tokens`.
        max_tokens: capacity of a bin.
    """
    seq_lens, max_tokens = _few_lengths(seq_lens, max_tokens)
    lengths, counts = np.unique(seq_lens, return_counts=True)
    parts = _equal_parts(counts)
    return sum(len(fewest_bins(lengths, some, max_tokens)) * times for some, times in parts if some.any())


def _few_lengths(seq_lens: np.ndarray, max_tokens: int) -> tuple[np.ndarray, int]:
    """Return lengths and capacity, in fractions of a bin if there are too many distinct lengths."""
    if len(np.unique(seq_lens)) > MAX_LENGTHS:
        return -(-seq_lens * ROUNDED // max_tokens), ROUNDED
    return seq_lens, max_tokens


def _equal_parts(counts: np.ndarray) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
    """Return (samples of each length, repetitions) for equal parts, and for the remaining samples."""
    num_parts = max(1, int(counts.sum()) // PART)
    return (counts // num_parts, num_parts), (counts % num_parts, 1)


def even_out(
    bins: Sequence[Bin],
    seq_lens: np.ndarray,
    sample_costs: np.ndarray,
    max_tokens: int,
    key: tuple[int | str, ...],
) -> list[Bin]:
    """Balance the cost of bins without changing their number; no bin becomes empty.

    Args:
        bins: non-empty bins, at least one.
        seq_lens: int64 [N].
        sample_costs: float64 [N].
        max_tokens: capacity of a bin.
        key: key of the random choices.
    """
    samples = [i for bin in bins for i in bin]
    place = {sample: number for number, sample in enumerate(samples)}
    contents = [[place[i] for i in bin] for bin in bins]
    costs = _as_integers(sample_costs[samples])
    leveled = level(contents, seq_lens[samples], costs, max_tokens, key)
    return [tuple(samples[one] for one in bin) for bin in leveled]


def fewest_bins(lengths: np.ndarray, counts: np.ndarray, max_tokens: int) -> Contents:
    """Return the best of three packings: best-fit decreasing, and exact filling with two choices of lengths.

    The best packing depends on the data. If few clips fill a bin, the longest length that leads to a full bin
    wastes least. If short clips must last until the end, best fit wastes least.

    Args:
        lengths: int64 [D], ascending.
        counts: int64 [D], samples of each length.
        max_tokens: capacity of a bin.
    """
    random = iter(philox("fill").bit_generator.random_raw(int(counts.sum())).tolist())

    def any_length(candidates: np.ndarray, left: np.ndarray) -> int:
        """Choose at random by number of samples; short lengths more often, because more of them fit."""
        reached = (left[candidates] * (max_tokens // lengths[candidates]) ** 2).cumsum()
        return int(candidates[np.searchsorted(reached, next(random) % int(reached[-1]), side="right")])

    packings = [
        best_fit(lengths, counts, max_tokens),
        fill_exactly(lengths, counts, max_tokens, lambda candidates, left: int(candidates[-1])),
        fill_exactly(lengths, counts, max_tokens, any_length),
    ]
    return min(packings, key=len)


def best_fit(lengths: np.ndarray, counts: np.ndarray, max_tokens: int) -> Contents:
    """Put each clip, longest first, into the fullest bin with room, or into a new bin."""
    bins: Contents = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # distinct amounts of room: few, because there are few lengths
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
    """Start each bin with the longest remaining length, and add the lengths whose sum is closest to the free room.

    Args:
        lengths: int64 [D], ascending.
        counts: int64 [D], samples of each length.
        max_tokens: capacity of a bin.
        choose: (lengths that lead to the best sum, samples left of every length) -> the chosen length.
    """
    left = counts.copy()
    bins: Contents = []
    sums = _Sums(lengths[left > 0], max_tokens)
    fresh = True  # whether the sums contain only lengths that are left
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
    """Sums up to `max_tokens` that any numbers of samples of the given lengths can have."""

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
    """Balance costs: pairs of bins exchange samples, so that the costs of the two bins become more similar.

    The rounds alternate between three kinds of pairs: an expensive bin and the cheap bin at the same rank, an expensive bin and a
    random cheap bin, two random bins. A pair tries `SPLITS` random splits of its samples. The best split that keeps both bins
    within `max_tokens` replaces the present split, if it is better.

    Args:
        bins: bins of lengths.
        lengths: int64 [D].
        costs: int64 [D], cost of a sample of each length.
        max_tokens: capacity of a bin.
        key: key of the random choices.
    """
    nothing, width = len(lengths), max(map(len, bins))
    contents = np.full((len(bins), width), nothing)  # padded with an empty length, which sorts last
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
    """Yield the pairs of bins of a round, 256 pairs at a time."""
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
