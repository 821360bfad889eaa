"""Pack clips into as few bins as possible, then balance the cost of the bins by exchanging clips.

Three packing algorithms run, and the result with the fewest bins is used. Then pairs of bins exchange clips, differently in every
epoch. Example: clips of 6, 6, 4, 4 and 4 tokens, bins of 16 tokens, and a cost of length squared:

1. Packing gives the bins [6, 6, 4] and [4, 4], with the costs 88 and 32.
2. The bins exchange a 6 for a 4: [6, 4, 4] and [6, 4], with the costs 68 and 52.
3. Each length is replaced by a random clip of this length.

Steps 1 and 2 work on lengths, which is fast because many clips share a length. All costs are integers, whose sums are exact in
any order, so the bins are the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wands.flow.rng import permutation, philox

Bin = tuple[int, ...]
"""Sample indices of one forward pass. Empty bins, written as `()`, complete the last step of an epoch."""
Contents = list[list[int]]
"""Bins whose items are indices into an array of lengths in tokens, mostly that of the distinct lengths, ascending."""
Key = tuple[int | str, ...]
"""First arguments of `philox` (random number generator), such as seed and epoch. Equal keys give equal random choices."""

MAX_LENGTHS = 1024
"""Largest number of distinct lengths that are packed without rounding up to multiples of capacity / `ROUNDED`."""
ROUNDED = 4096
"""Number of equal units into which the capacity of a bin (`max_tokens`) is divided if lengths are rounded up to whole units."""
PART = 20_000
"""Typical number of clips of a part. From 2 * `PART` clips on, only one of several equal parts is packed, to save time."""
ROUNDS = 30
"""Number of rounds of exchanges between pairs of bins. More rounds improve the balance only a little."""
SPLITS = 512
"""Number of random splits that are compared for each pair of bins in a round of exchanges."""
EXACT = 2**32
"""Cost of the most expensive clip after scaling to integers. Float64 sums of millions of them are exact."""


def pack_bins(
    seq_lens: np.ndarray, sample_costs: np.ndarray, max_tokens: int, seed: int | str, epoch: int
) -> list[Bin]:
    """Pack all samples into bins of at most `max_tokens` tokens with balanced costs. Every epoch has the same number of bins.

    `seq_lens` is int64 [N], each at most `max_tokens`; `sample_costs` is float64 [N] in any unit. Return tuples of sample
    indices. With at most `PART` samples and `MAX_LENGTHS` distinct lengths, there are never more bins than with best-fit
    decreasing packing. Larger data is packed in parts or with rounded lengths, so there may be more.
    """
    short_lens, capacity = _few_lengths(seq_lens, max_tokens)
    lengths, first, which, counts = np.unique(
        short_lens, return_index=True, return_inverse=True, return_counts=True
    )
    costs = _as_integers(sample_costs[first])
    contents: Contents = []
    for number, (part, num_parts) in enumerate(_equal_parts(counts)):
        if part.any():
            fewest = fewest_bins(lengths, part, capacity)
            contents += level(fewest, lengths, costs, capacity, (seed, epoch, number)) * num_parts

    shuffled = permutation(len(seq_lens), seed, epoch, "samples")
    by_length = shuffled[np.argsort(which[shuffled], kind="stable")]
    waiting = [iter(group.tolist()) for group in np.split(by_length, counts.cumsum()[:-1])]
    bins = [tuple(next(waiting[index]) for index in bin) for bin in contents]
    if _is_function_of_length(seq_lens, sample_costs):
        return bins
    # The bins are level by length. Clips of one length can still have different costs.
    return even_out(bins, seq_lens, sample_costs, max_tokens, (seed, epoch, "costs"))


def _is_function_of_length(seq_lens: np.ndarray, sample_costs: np.ndarray) -> bool:
    _, first, which = np.unique(seq_lens, return_index=True, return_inverse=True)
    return bool((sample_costs[first][which] == sample_costs).all())


def count_bins(seq_lens: np.ndarray, max_tokens: int) -> int:
    """Return the number of bins that `pack_bins` makes in every epoch; faster, because it does not balance them."""
    seq_lens, max_tokens = _few_lengths(seq_lens, max_tokens)
    lengths, counts = np.unique(seq_lens, return_counts=True)
    parts = _equal_parts(counts)
    return sum(len(fewest_bins(lengths, part, max_tokens)) * num for part, num in parts if part.any())


def _few_lengths(seq_lens: np.ndarray, max_tokens: int) -> tuple[np.ndarray, int]:
    """Return (lengths, capacity). More than `MAX_LENGTHS` distinct lengths are rounded up to units of capacity / `ROUNDED`."""
    if len(np.unique(seq_lens)) > MAX_LENGTHS:
        return -(-seq_lens * ROUNDED // max_tokens), ROUNDED
    return seq_lens, max_tokens


def _equal_parts(counts: np.ndarray) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
    """Divide the samples into parts of about `PART` to 2 * `PART` samples with the same number of each length, and a remainder.

    Return (counts of one part, number of parts) and (counts of the remainder, 1). Fewer than 2 * `PART` samples are one part.
    """
    num_parts = max(1, int(counts.sum()) // PART)
    return (counts // num_parts, num_parts), (counts % num_parts, 1)


def even_out(
    bins: Sequence[Bin], seq_lens: np.ndarray, sample_costs: np.ndarray, max_tokens: int, key: Key
) -> list[Bin]:
    """Balance the costs of bins by exchanging samples. The number of bins does not change, and no bin becomes empty.

    `bins` has at least one bin, and each bin at least one sample.
    """
    samples = [i for bin in bins for i in bin]
    position_of = {sample: position for position, sample in enumerate(samples)}
    contents = [[position_of[i] for i in bin] for bin in bins]
    costs = _as_integers(sample_costs[samples])
    leveled = level(contents, seq_lens[samples], costs, max_tokens, key)
    return [tuple(samples[position] for position in bin) for bin in leveled]


def fewest_bins(lengths: np.ndarray, counts: np.ndarray, max_tokens: int) -> Contents:
    """Pack samples in three ways, and return the packing with the fewest bins, as lists of indices of `lengths`.

    1. `best_fit` suits data whose short samples fill the gaps that long samples leave.
    2. `fill_exactly` suits data where a few samples fill a bin. Of several suitable lengths, the longest is chosen.
    3. `fill_exactly` again, with a random choice.

    `lengths` is int64 [D], distinct and ascending; `counts` is int64 [D], the number of samples of each length.
    """
    random = iter(philox("fill").bit_generator.random_raw(int(counts.sum())).tolist())

    def any_length(candidates: np.ndarray, left: np.ndarray) -> int:
        """Return a random item of `candidates`, with probability proportional to r * n^2.

        r is the number of remaining samples of the length, n the number of such samples that fit into an empty bin.
        """
        reached = (left[candidates] * (max_tokens // lengths[candidates]) ** 2).cumsum()
        return int(candidates[np.searchsorted(reached, next(random) % int(reached[-1]), side="right")])

    packings = [
        best_fit(lengths, counts, max_tokens),
        fill_exactly(lengths, counts, max_tokens, lambda candidates, left: int(candidates[-1])),
        fill_exactly(lengths, counts, max_tokens, any_length),
    ]
    return min(packings, key=len)


def best_fit(lengths: np.ndarray, counts: np.ndarray, max_tokens: int) -> Contents:
    """Put each clip, longest first, into the fullest bin that has room for it, else into a new bin (see `fewest_bins`)."""
    bins: Contents = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # distinct amounts of free room: few, because there are few lengths
    for index in reversed(range(len(lengths))):
        length = int(lengths[index])
        for _ in range(counts[index]):
            position = bisect_left(rooms, length)
            if position < len(rooms):
                room = rooms[position]
                number = with_room[room].pop()
                if not with_room[room]:
                    del with_room[rooms.pop(position)]
            else:
                room = max_tokens
                number = len(bins)
                bins.append([])
            bins[number].append(index)
            if room - length not in with_room:
                insort(rooms, room - length)
            with_room.setdefault(room - length, []).append(number)
    return bins


def fill_exactly(
    lengths: np.ndarray, counts: np.ndarray, max_tokens: int, choose: Callable[[np.ndarray, np.ndarray], int]
) -> Contents:
    """Fill one bin after another as full as possible, each beginning with the longest sample left (see `fewest_bins`).

    `choose` gets the ascending indices of the lengths with which the bin can still become as full as possible, and the number of
    remaining samples of each length. It returns one of these indices.
    """
    left = counts.copy()
    bins: Contents = []
    sums = _Sums(lengths[left > 0], max_tokens)
    fresh = True  # whether the sums contain only lengths that are left
    for longest in reversed(range(len(lengths))):
        while left[longest]:
            bin = [longest]
            room = max_tokens - int(lengths[longest])
            left[longest] -= 1
            while True:
                best = sums.largest_below(room)
                candidates = np.flatnonzero((left > 0) & (lengths <= best))
                leading = candidates[sums.reachable[best - lengths[candidates]]]
                if not len(leading) and not fresh:
                    sums = _Sums(lengths[left > 0], max_tokens)
                    fresh = True
                    continue
                if not len(leading):  # nothing fits
                    break
                chosen = choose(leading, left)
                bin.append(chosen)
                room -= int(lengths[chosen])
                left[chosen] -= 1
                fresh = fresh and bool(left[chosen])
            fresh = fresh and bool(left[longest])
            bins.append(bin)
    return bins


class _Sums:
    """Table of the token counts up to `max_tokens` that are sums of the given lengths, each used any number of times."""

    def __init__(self, lengths: np.ndarray, max_tokens: int) -> None:
        bits = 1
        mask = (1 << (max_tokens + 1)) - 1
        for length in lengths.tolist():
            shift = length
            while shift <= max_tokens:  # add 1, 2, 4, ... samples of this length
                bits |= bits << shift & mask
                shift *= 2
        raw = np.frombuffer(bits.to_bytes(max_tokens // 8 + 1, "little"), dtype=np.uint8)
        self.reachable = np.unpackbits(raw, bitorder="little")[: max_tokens + 1].view(bool)
        self._bits = bits

    def largest_below(self, room: int) -> int:
        return (self._bits & (2 << room) - 1).bit_length() - 1


def level(bins: Contents, lengths: np.ndarray, costs: np.ndarray, max_tokens: int, key: Key) -> Contents:
    """Balance the costs of bins in `ROUNDS` rounds, in which pairs of bins exchange samples.

    The rounds alternate between three kinds of pairs:

    1. The most expensive bin with the cheapest bin, the second most expensive with the second cheapest, and so on.
    2. An expensive bin with a random cheap bin.
    3. Two random bins.

    For each pair, `SPLITS` random splits of its samples are compared. The split with the most similar costs replaces the pair if
    it is better and no bin exceeds `max_tokens`. The items of `bins` are indices into `lengths` and `costs` (both int64); samples
    of equal length may share an index.
    """
    empty = len(lengths)
    width = max(map(len, bins))
    contents = np.full((len(bins), width), empty)  # index of an empty length of 0 tokens, which sorts last
    for number, bin in enumerate(bins):
        contents[number, : len(bin)] = sorted(bin)
    tokens_of = np.append(lengths, 0).astype(np.float64)
    cost_of = np.append(costs, 0).astype(np.float64)
    for number in range(ROUNDS):
        cost = cost_of[contents].sum(axis=1)
        words = philox(*key, "splits", number).bit_generator.random_raw(SPLITS * 2 * width // 64)
        splits = np.unpackbits(words.astype("<u8").view(np.uint8)).reshape(2 * width, SPLITS)
        for first, second in _pairs(cost, number, key):
            both = np.sort(np.concatenate([contents[first], contents[second]], axis=1), axis=1)
            used = int((both != empty).sum(axis=1).max())
            both = both[:, :used]
            split = splits[:used].astype(np.float64)
            tokens = tokens_of[both] @ split
            spent = cost_of[both] @ split
            fits = np.maximum(tokens, tokens_of[both].sum(axis=1, keepdims=True) - tokens) <= max_tokens
            apart = np.abs(2 * spent - cost_of[both].sum(axis=1, keepdims=True))
            best = np.where(fits, apart, np.inf).argmin(axis=1)
            rows = np.arange(len(both))
            mine = splits[:used, best].T.astype(bool)
            halves = [np.sort(np.where(chosen, both, empty), axis=1) for chosen in (mine, ~mine)]
            better = fits[rows, best] & (apart[rows, best] < np.abs(cost[first] - cost[second]))
            better &= np.all([(half[:, width:] == empty).all(axis=1) for half in halves], axis=0)
            for bin_numbers, half in zip((first, second), halves, strict=True):
                contents[bin_numbers[better], : min(used, width)] = half[better, :width]
                contents[bin_numbers[better], used:] = empty
    return [[index for index in bin if index != empty] for bin in contents.tolist()]


def _as_integers(costs: np.ndarray) -> np.ndarray:
    return np.rint(costs / costs.max() * EXACT).astype(np.int64)


def _pairs(cost: np.ndarray, number: int, key: Key) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the pairs that exchange samples in a round (see `level`), as two arrays of at most 256 bin numbers."""
    half = len(cost) // 2
    order = np.argsort(-cost, kind="stable")
    shuffled = permutation(len(cost), *key, "pairs", number)
    costly = order[:half]
    cheap = order[len(order) - half :]
    first, second = (
        (costly, cheap[::-1]),
        (costly, cheap[np.argsort(shuffled[:half], kind="stable")]),
        (shuffled[:half], shuffled[half : 2 * half]),
    )[number % 3]
    for start in range(0, half, 256):
        yield first[start : start + 256], second[start : start + 256]
