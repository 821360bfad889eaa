"""The plan of an epoch: which samples form a bin, which bins form a step, which rank forwards which bin.

Everything here is a pure function of the lengths, the seed and the epoch, so every rank derives the whole
plan alone, before the first byte of data is read. Sorting uses raw Philox words and exact Python sums: the
plan is the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wands.errors import DataError
from wands.flow.keys import permutation, philox

Bin = tuple[int, ...]
"""Sample indices that are packed into one forward; () is an empty bin that pads the last step."""
Step = tuple[Bin, ...]
Cost = Callable[[Sequence[int]], float] | tuple[float, float]
"""Cost of a pack from its samples' lengths, additive over samples, such as ``DiTShape.forward_flops``; or its
coefficients (a, b) in a * sum(L) + b * sum(L^2)."""

SORT_WINDOW_STEPS = 32
"""Bins of this many steps are sorted by cost before they are cut into steps.

More steps level the ranks better and make the lengths inside a step more alike; past 64 little is gained.
"""


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
    sort_window_steps: int = SORT_WINDOW_STEPS,
) -> EpochPlan:
    """Fill bins to `max_tokens`, and put bins of like cost into the same step.

    Bins come from best-fit decreasing over the whole epoch. Equal token counts are very unequal time, for
    attention grows with the square of each sample, so bins are sorted by cost inside random windows, cut
    into steps, and the steps are shuffled: every epoch's gradient is unbiased, a single step's lengths are
    more alike than the data's. The bins that are left over form the last step; they are split until every
    rank has work, and only then padded with ().

    The number of steps depends on the lengths alone, never on the epoch.

    Args:
        seq_lens: int [N], tokens of every sample.
        max_tokens: capacity of a bin.
        bins_per_step: bins of one optimizer step, over all ranks and micro steps.
        seed: `train.seed`.
        epoch: other epochs are packed and ordered differently.
        cost: of a pack.
        keys: names of the samples, for the error message.
        sort_window_steps: see SORT_WINDOW_STEPS.

    Returns:
        A plan with every sample exactly once.

    Raises:
        DataError: a sample is longer than a bin, or there is no sample.
    """
    seq_lens = np.asarray(seq_lens, dtype=np.int64)
    _check_lengths(seq_lens, max_tokens, keys)
    bin_cost = bin_costs(seq_lens, cost)
    bins = _pack(seq_lens, max_tokens, seed, epoch)
    bins = [bins[i] for i in permutation(len(bins), seed, epoch, "bins")]

    num_full = len(bins) // bins_per_step
    steps: list[Step] = []
    for start in range(0, num_full, sort_window_steps):
        end = min(start + sort_window_steps, num_full)
        window = sorted(bins[start * bins_per_step : end * bins_per_step], key=bin_cost)
        steps += [tuple(window[i : i + bins_per_step]) for i in range(0, len(window), bins_per_step)]
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


def _pack(seq_lens: np.ndarray, max_tokens: int, seed: int, epoch: int) -> list[Bin]:
    """Best-fit decreasing with ties, and where it costs no bin also the order, broken at random.

    The number of bins of the plain order follows from the lengths alone; an order jittered by up to a
    quarter, which lets even samples of unlike length meet different neighbours each epoch, is taken only if
    it needs as many.
    """
    generator = philox(seed, epoch, "pack")
    words = np.asarray(generator.bit_generator.random_raw(2 * len(seq_lens)), dtype=np.uint64)
    ties, jitter = words[: len(seq_lens)], words[len(seq_lens) :]
    plain = _best_fit(seq_lens, np.lexsort((ties, -seq_lens)), max_tokens)
    jittered_lens = seq_lens * (1.0 + 0.25 * (jitter / 2.0**64))
    jittered = _best_fit(seq_lens, np.argsort(-jittered_lens, kind="stable"), max_tokens)
    return jittered if len(jittered) == len(plain) else plain


def _best_fit(seq_lens: np.ndarray, order: np.ndarray, max_tokens: int) -> list[Bin]:
    """Put each sample, in `order`, into the fullest bin that still has room for it."""
    lengths = seq_lens.tolist()
    bins: list[list[int]] = []
    room_left: list[int] = []  # distinct amounts of room, ascending: few, for clips come in few lengths
    with_room: dict[int, list[int]] = {}
    for sample in order.tolist():
        length = lengths[sample]
        place = bisect_left(room_left, length)
        if place < len(room_left):
            room = room_left[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], room_left[place]
            bins[number].append(sample)
        else:
            room, number = max_tokens, len(bins)
            bins.append([sample])
        room -= length
        if room in with_room:
            with_room[room].append(number)
        elif room > 0:
            with_room[room] = [number]
            insort(room_left, room)
    return [tuple(bin) for bin in bins]


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
