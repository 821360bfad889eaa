"""The plan of an epoch: which samples form a bin, which bins form a step, which rank forwards which bin.

Everything here is a pure function of the lengths, the seed and the epoch, so every rank derives the whole
plan alone, before the first byte of data is read. Sorting uses raw Philox words and exact Python sums: the
plan is the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from operator import itemgetter

import numpy as np

from wands.errors import DataError
from wands.flow.keys import permutation

Bin = tuple[int, ...]
"""Sample indices that are packed into one forward; () is an empty bin that pads the last step."""
Step = tuple[Bin, ...]
Cost = Callable[[Sequence[int]], float] | tuple[float, float]
"""Cost of a pack from its samples' lengths, additive over samples, such as ``DiTShape.forward_flops``; or its
coefficients (a, b) in a * sum(L) + b * sum(L^2)."""

LEVEL = 0.98
"""Mean over slowest bin of a step that the plan aims at, by sorting bins over as few steps as will do."""

TAIL_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6)
"""Shares of the tokens, in the shortest samples, placed for fill instead of level cost; tried in turn."""


@dataclass(frozen=True)
class EpochPlan:
    """All optimizer steps of one epoch.

    Attributes:
        steps: steps -> bins -> sample indices. Every step has the same number of bins.
        seq_lens: int64 [N], tokens of every sample.
        max_tokens: capacity of a bin.
    """

    steps: tuple[Step, ...]
    seq_lens: np.ndarray
    max_tokens: int

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return len(self.steps)

    @property
    def fill(self) -> float:
        """Share of the bins' token capacity that is used.

        The last step takes what is left over and spreads it over its bins, so it counts only when it is
        alone.
        """
        bins = [bin for step in self.steps[: max(1, self.num_steps - 1)] for bin in step if bin]
        return sum(int(self.seq_lens[i]) for bin in bins for i in bin) / (len(bins) * self.max_tokens)

    def imbalance(self, dp_size: int, cost: Cost) -> float:
        """Cost of the slowest rank over the mean, summed over the micro steps of the epoch: 1 at best.

        Its inverse is the share of the ranks' time that is not spent waiting.

        Args:
            dp_size: ranks that forward different bins; it divides the bins of a step.
            cost: of a pack.
        """
        bin_cost = bin_costs(self.seq_lens, cost)
        mean = slowest = 0.0
        for step in self.steps:
            for bins in assign_bins(step, dp_size, bin_cost):
                costs = [bin_cost(bin) for bin in bins]
                mean += sum(costs) / dp_size
                slowest += max(costs)
        return slowest / mean


def plan_epoch(
    seq_lens: np.ndarray,
    *,
    max_tokens: int,
    bins_per_step: int,
    seed: int,
    epoch: int,
    cost: Cost,
    keys: Sequence[str] | None = None,
) -> EpochPlan:
    """Fill bins to `max_tokens`, level their cost, and put bins of like cost into the same step.

    Equal token counts are very unequal time, for attention grows with the square of each sample. So bins are
    packed level, as far as that needs no more bins than best-fit decreasing does. What is still uneven is
    evened out inside steps: bins are sorted by cost over windows of as few random steps as reach LEVEL, cut
    into steps, and the steps are shuffled. Every epoch's gradient is unbiased; the lengths inside one step
    are somewhat more alike than the data's. The bins that are left over form the last step; they are split
    until every rank has work, and only then padded with ().

    The number of steps depends on the lengths alone, never on the epoch.

    Args:
        seq_lens: int [N], tokens of every sample.
        max_tokens: capacity of a bin.
        bins_per_step: bins of one optimizer step, over all ranks and micro steps.
        seed: `train.seed`.
        epoch: other epochs are packed and ordered differently.
        cost: of a pack.
        keys: names of the samples, for the error message.

    Returns:
        A plan with every sample exactly once.

    Raises:
        DataError: a sample is longer than a bin, or there is no sample.
    """
    seq_lens = np.asarray(seq_lens, dtype=np.int64)
    _check_lengths(seq_lens, max_tokens, keys)
    bin_cost = bin_costs(seq_lens, cost)
    bins = _pack(seq_lens, max_tokens, seed, epoch, bin_cost)
    bins = [bins[i] for i in permutation(len(bins), seed, epoch, "bins")]

    num_full = len(bins) // bins_per_step
    steps = _level_steps(bins[: num_full * bins_per_step], bins_per_step, bin_cost)
    steps = [steps[i] for i in permutation(num_full, seed, epoch, "steps")]
    if rest := bins[num_full * bins_per_step :]:
        steps.append(_spread(rest, bins_per_step, bin_cost))
    return EpochPlan(tuple(steps), seq_lens, max_tokens)


def assign_bins(bins: Sequence[Bin], dp_size: int, bin_cost: Callable[[Bin], float]) -> list[list[Bin]]:
    """Deal the bins of a step to ranks, so that the ranks of a micro step get bins of like cost.

    The direction alternates from one micro step to the next: ranks that wait for each other only at the end
    of the step (ZeRO 1 and 2) are level as well.

    Args:
        bins: of one step.
        dp_size: divides their number.
        bin_cost: of a bin of sample indices, from `bin_costs`.

    Returns:
        For each micro step, for each dp rank, its bin.
    """
    assert len(bins) % dp_size == 0, (len(bins), dp_size)
    ordered = sorted(bins, key=bin_cost, reverse=True)
    micro_steps = [ordered[i : i + dp_size] for i in range(0, len(ordered), dp_size)]
    return [ranks[::-1] if number % 2 else ranks for number, ranks in enumerate(micro_steps)]


def bin_costs(seq_lens: np.ndarray, cost: Cost) -> Callable[[Bin], float]:
    """The cost of a bin of sample indices, for a cost that is given by lengths and additive over samples."""
    lengths, which = np.unique(seq_lens, return_inverse=True)
    if isinstance(cost, tuple):
        of_length = [cost[0] * length + cost[1] * length * length for length in lengths.tolist()]
    else:
        of_length = [cost((length,)) for length in lengths.tolist()]
    of_sample = [of_length[i] for i in which.tolist()]
    return lambda bin: sum(of_sample[i] for i in bin)


def _check_lengths(seq_lens: np.ndarray, max_tokens: int, keys: Sequence[str] | None) -> None:
    if len(seq_lens) == 0:
        raise DataError("data has no sample; preprocess at least one clip.")
    assert seq_lens.min() > 0
    too_long = np.flatnonzero(seq_lens > max_tokens)
    if len(too_long):
        longest = int(seq_lens.argmax())
        name = keys[longest] if keys is not None else f"number {longest}"
        raise DataError(
            f"packing.max_tokens={max_tokens} is less than sample {name} has ({seq_lens[longest]} tokens; "
            f"{len(too_long)} of {len(seq_lens)} samples are too long); set packing.max_tokens to at least "
            f"{seq_lens[longest]}, or preprocess with a smaller --max-frames or --max-pixels."
        )


def _pack(
    seq_lens: np.ndarray, max_tokens: int, seed: int, epoch: int, bin_cost: Callable[[Bin], float]
) -> list[Bin]:
    """As many bins as best-fit decreasing needs, which follows from the lengths alone, but level.

    Samples of about the same length change places from epoch to epoch.
    """
    lengths, costs = seq_lens.tolist(), [bin_cost((i,)) for i in range(len(seq_lens))]
    shuffled = permutation(len(seq_lens), seed, epoch, "samples")
    longest_first = shuffled[np.argsort(-seq_lens[shuffled], kind="stable")]
    fullest = _Bins(lengths, max_tokens)
    fullest.fill(longest_first.tolist(), may_open=True)

    coarse = seq_lens[shuffled] // (max_tokens // 64 + 1)
    order = shuffled[np.argsort(-coarse, kind="stable")]
    tokens_before = seq_lens[order].cumsum() - seq_lens[order]
    for share in TAIL_SHARES:
        num_level = int(np.searchsorted(tokens_before, (1.0 - share) * seq_lens.sum()))
        level = _Bins(lengths, max_tokens, len(fullest.samples))
        head, tail = order[:num_level].tolist(), order[num_level:].tolist()
        if level.level(head, costs) and level.fill(tail, may_open=False) and all(level.samples):
            return [tuple(bin) for bin in level.samples]
    return [tuple(bin) for bin in fullest.samples]


class _Bins:
    """Bins being packed: their samples and the room they have left."""

    def __init__(self, lengths: list[int], max_tokens: int, num_bins: int = 0) -> None:
        self.lengths = lengths
        self.max_tokens = max_tokens
        self.samples: list[list[int]] = [[] for _ in range(num_bins)]
        self.room = [max_tokens] * num_bins

    def level(self, order: list[int], costs: list[float]) -> bool:
        """Put each sample, in `order`, into the bin of least cost that has room; False if there is none."""
        by_cost: list[tuple[float, int]] = [(0, number) for number in range(len(self.room))]
        by_room: list[
            tuple[int, int, float]
        ] = []  # (-room, number, cost) of bins too full for an earlier sample
        for sample in order:
            length = self.lengths[sample]
            while by_room and -by_room[0][0] >= length:
                _, number, cost = heappop(by_room)
                heappush(by_cost, (cost, number))
            while by_cost and self.room[by_cost[0][1]] < length:
                cost, number = heappop(by_cost)
                heappush(by_room, (-self.room[number], number, cost))
            if not by_cost:
                return False
            cost, number = by_cost[0]
            self.samples[number].append(sample)
            self.room[number] -= length
            heapreplace(by_cost, (cost + costs[sample], number))
        return True

    def fill(self, order: list[int], may_open: bool) -> bool:
        """Put each sample, in `order`, into the fullest bin with room, else a new one; False if barred."""
        with_room: dict[int, list[int]] = {}
        for number, room in enumerate(self.room):
            with_room.setdefault(room, []).append(number)
        rooms = sorted(with_room)  # distinct amounts of room: few, for clips come in few lengths
        for sample in order:
            place = bisect_left(rooms, self.lengths[sample])
            if place < len(rooms):
                numbers = with_room[rooms[place]]
                number = numbers.pop()
                if not numbers:
                    del with_room[rooms.pop(place)]
            elif may_open:
                number = len(self.samples)
                self.samples.append([])
                self.room.append(self.max_tokens)
            else:
                return False
            self.samples[number].append(sample)
            self.room[number] -= self.lengths[sample]
            if self.room[number] not in with_room:
                insort(rooms, self.room[number])
            with_room.setdefault(self.room[number], []).append(number)
        return True


def _level_steps(bins: list[Bin], bins_per_step: int, bin_cost: Callable[[Bin], float]) -> list[Step]:
    """Cut bins into full steps, sorted by cost over windows of as few steps as reach LEVEL."""
    costed = [(bin_cost(bin), bin) for bin in bins]
    num_steps, window = len(bins) // bins_per_step, 1
    while True:
        width = window * bins_per_step
        chunks = [sorted(costed[i : i + width], key=itemgetter(0)) for i in range(0, len(costed), width)]
        ordered = [pair for chunk in chunks for pair in chunk]
        slowest = sum(ordered[i][0] for i in range(bins_per_step - 1, len(ordered), bins_per_step))
        if window >= num_steps or sum(cost for cost, _ in ordered) >= LEVEL * slowest * bins_per_step:
            steps = (ordered[i : i + bins_per_step] for i in range(0, len(ordered), bins_per_step))
            return [tuple(bin for _, bin in step) for step in steps]
        window *= 2


def _spread(bins: Sequence[Bin], bins_per_step: int, bin_cost: Callable[[Bin], float]) -> Step:
    """Split the costliest bin in two halves of like cost until there are `bins_per_step`; pad with () when
    none splits.
    """
    spread = list(bins)
    while len(spread) < bins_per_step:
        divisible = [i for i, bin in enumerate(spread) if len(bin) > 1]
        if not divisible:
            break
        whole = spread.pop(max(divisible, key=lambda i: bin_cost(spread[i])))
        halves: tuple[list[int], list[int]] = ([], [])
        for sample in sorted(whole, key=lambda i: bin_cost((i,)), reverse=True):
            min(halves, key=lambda half: bin_cost(tuple(half))).append(sample)
        spread += [tuple(half) for half in halves]
    return tuple(spread) + ((),) * (bins_per_step - len(spread))
