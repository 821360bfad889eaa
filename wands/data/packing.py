"""Plan an epoch: the samples of each bin, the bins of each optimizer step, and the rank of each bin.

Ranks wait for the most expensive bin. With equal costs no rank would wait, but some steps would contain only long clips. As a
compromise, the bins are sorted by cost and divided into ranges, and the bins that ranks process at the same time are a mixture
from one range. Large ranges give typical sample lengths, small ranges short waits; `LEVEL` limits the waiting.

Every function is a pure function of lengths, seed and epoch, and sorts only by values that are equal on every machine: Philox
integers, exact integers, and sums in a fixed order. So every rank computes the same plan without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from wands.data.bins import Bin, count_bins, even_out, pack_bins
from wands.errors import DataError
from wands.flow.rng import permutation

Step = tuple[Bin, ...]
"""All bins of one optimizer step. In each micro step, each data-parallel rank processes one of them."""
Cost = Callable[[Sequence[int]], float] | tuple[float, float] | np.ndarray
"""Costs of the samples, whose sum is the cost of a bin, in one of three forms.

An additive function of the lengths L of the bin's samples, such as ``DiTShape.forward_flops``; the pair (a, b) in the cost a *
sum(L) + b * sum(L^2); or the cost of each sample, float64 [N].
"""

LEVEL = 0.987
"""Smallest allowed efficiency of the full steps of an epoch: the sum of the costs of all bins / the sum of their times.

The time of a bin, including waiting, is the highest cost in its range. Longer ranges make the sample lengths in a step more
similar to the whole data, but lower the efficiency.
"""

MAX_CUTS = 96
"""Largest number of ranges into which the bins, sorted by cost, are divided."""

WAITS = 1024
"""Number of units into which `_best_cuts` divides the longest allowed waiting time."""


@dataclass(frozen=True)
class EpochPlan:
    """All optimizer steps of one epoch, each with the same number of bins.

    Attributes:
        seq_lens: int64 [N], number of tokens of every sample, including samples that the epoch does not use.
        planned_totals: (samples, tokens) when the epoch was planned. Set only for a plan from a checkpoint, whose `steps` lack
            samples that were removed from the data since.
    """

    steps: tuple[Step, ...]
    seq_lens: np.ndarray
    max_tokens: int
    planned_totals: tuple[int, int] | None = None

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the epoch."""
        return len(self.steps)

    @property
    def fill(self) -> float:
        """Share of the bins' token capacity that samples use, without a last of several steps, whose bins are not full."""
        bins = [bin for step in self.steps[: max(1, self.num_steps - 1)] for bin in step if bin]
        return sum(int(self.seq_lens[i]) for bin in bins for i in bin) / (len(bins) * self.max_tokens)

    @cached_property
    def totals(self) -> tuple[int, int]:
        """(Number of samples, number of tokens) in all steps of the epoch, counted when the epoch was planned."""
        if self.planned_totals is not None:
            return self.planned_totals
        used = [i for step in self.steps for bin in step for i in bin]
        return len(used), int(self.seq_lens[used].sum())

    def length_bias(self) -> tuple[float, float]:
        """Return the mean Kolmogorov-Smirnov distance (0 to 1) between sample lengths in a step and in the epoch.

        The second number is the distance for random steps of the same size: the part that chance alone causes.
        """
        of_step = [[i for bin in step for i in bin] for step in self.steps]
        used = np.sort(np.concatenate(of_step))
        ends = np.cumsum([len(samples) for samples in of_step])
        at_random = np.split(used[permutation(len(used), "length bias")], ends[:-1])
        distance, of_chance = (_mean_distance(steps, self.seq_lens, used) for steps in (of_step, at_random))
        return distance, of_chance


def plan_epoch(
    seq_lens: np.ndarray,
    *,
    max_tokens: int,
    bins_per_step: int,
    seed: int,
    epoch: int,
    cost: Cost,
    keys: Sequence[str] | None = None,
    level_bins: int | None = None,
    windows: Sequence[np.ndarray] | None = None,
) -> EpochPlan:
    """Pack every sample into a bin, balance the costs of the bins, and group the bins into steps.

    Costs are balanced because the cost of attention grows with the square of a sample's length. The bins left over form the last
    step: they are split until there are `bins_per_step`, or only single samples, and empty bins fill the rest. The gradient over
    an epoch is unbiased: every sample is in one step, and all steps divide their loss by the same number.

    Each of the `windows` (int64 sample indices in reading order, none empty, no index twice) is packed separately. Bins that do
    not fill a step are combined with bins of the next windows. The number of steps is the same in every epoch if the lengths in
    each window are (see `count_steps`). `keys` is for error messages. `level_bins`, a divisor of `bins_per_step`, is the number
    of bins processed at the same time (default: all of a step), which get similar costs.

    Raises:
        DataError: if a sample has more than `max_tokens` tokens, or there is no sample.
    """
    seq_lens = np.asarray(seq_lens, dtype=np.int64)
    _check_lengths(seq_lens, max_tokens, keys)
    level_bins = level_bins or bins_per_step
    assert bins_per_step % level_bins == 0, (bins_per_step, level_bins)
    everything = np.arange(len(seq_lens))
    windows = windows if windows is not None else (everything,)
    costs = _sample_costs(seq_lens, cost)
    cost_array = np.array(costs, dtype=np.float64)
    steps: list[Step] = []
    waiting: list[Bin] = []
    for number, window in enumerate(windows):
        names = (everything if len(window) == len(seq_lens) else window).tolist()
        key = (seed if number == 0 else f"{seed}, window {number}", epoch)
        lens = seq_lens[names]
        window_costs = [costs[i] for i in names]
        bins = pack_bins(lens, cost_array[names], max_tokens, *key)
        bins = [bins[i] for i in permutation(len(bins), *key, "bins")]
        rest, bins = _separate_rest(bins, bins_per_step, window_costs)
        planned = group_into_steps(bins, bins_per_step, level_bins, window_costs, lens, key)
        for i in permutation(len(planned), *key, "steps"):
            steps.append(tuple(_rename(planned[i], names)))
        waiting += _rename(rest, names)
        if len(waiting) >= bins_per_step:
            step = waiting[:bins_per_step]
            waiting = waiting[bins_per_step:]
            leveled = even_out(step, seq_lens, cost_array, max_tokens, (seed, epoch, "left over", number))
            steps.append(tuple(leveled))
    if waiting:
        spread = _spread(waiting, bins_per_step, lambda bin: sum(costs[i] for i in bin))
        leveled = even_out(spread, seq_lens, cost_array, max_tokens, (seed, epoch, -1))
        steps.append((*leveled, *[()] * (bins_per_step - len(leveled))))
    plan = EpochPlan(tuple(steps), seq_lens, max_tokens)
    _check_whole(plan, windows, bins_per_step)
    return plan


def _rename(bins: Iterable[Bin], names: Sequence[int]) -> Iterator[Bin]:
    return (tuple([names[i] for i in bin]) for bin in bins)


def count_steps(
    seq_lens: np.ndarray, *, max_tokens: int, bins_per_step: int, windows: Sequence[np.ndarray] | None = None
) -> int:
    """Return the number of steps that `plan_epoch` plans. The order of the windows does not matter."""
    parts = [seq_lens] if windows is None else [seq_lens[rows] for rows in windows]
    return -(-sum(count_bins(part, max_tokens) for part in parts) // bins_per_step)


def storage_windows(places: np.ndarray, buffer_size: int, seed: int) -> list[np.ndarray]:
    """Divide the samples into windows of `buffer_size` (the last may be smaller) that are near each other on the disk.

    The shards are put in random order, and each is read in its stored order. The windows, int64 sample indices, are the same in
    every epoch, so every epoch has the same number of steps; only their order changes. `places` is int64 [N, 2], (shard,
    position).
    """
    stored = np.lexsort((places[:, 1], places[:, 0]))
    starts = np.flatnonzero(np.diff(places[stored, 0], prepend=-1))
    shards = np.split(stored, starts[1:])
    order = np.concatenate([shards[i] for i in permutation(len(shards), seed, "shards")])
    return np.split(order, range(buffer_size, len(order), buffer_size))


def _check_whole(plan: EpochPlan, windows: Sequence[np.ndarray], bins_per_step: int) -> None:
    """Assert that the plan has every sample once, no bin above its capacity, and `bins_per_step` bins in every step."""
    bins = [bin for step in plan.steps for bin in step]
    sizes = np.fromiter(map(len, bins), np.int64, len(bins))
    used = np.fromiter(chain.from_iterable(bins), np.int64, int(sizes.sum()))
    found, wanted = (
        np.bincount(rows, minlength=len(plan.seq_lens)) for rows in (used, np.concatenate(windows))
    )
    wrong = np.flatnonzero(found != wanted)
    assert not len(wrong), f"sample {wrong[0]} is in {found[wrong[0]]} bins, not in {wanted[wrong[0]]}"
    tokens = np.bincount(np.repeat(np.arange(len(bins)), sizes), plan.seq_lens[used], len(bins))
    assert tokens.max() <= plan.max_tokens, f"a bin has {int(tokens.max())} tokens"
    assert {len(step) for step in plan.steps} == {bins_per_step}


def assign_bins(bins: Sequence[Bin], dp_size: int, bin_cost: Callable[[Bin], float]) -> list[list[Bin]]:
    """Assign the bins of a step to data-parallel ranks: one list for each micro step, with one bin for each rank.

    The ranks get bins of decreasing cost in even micro steps, and of increasing cost in odd ones. So the total costs of the ranks
    are similar, too, which is all that matters with ZeRO 1 and 2: ranks wait only at the end of the step.
    """
    assert len(bins) % dp_size == 0, (len(bins), dp_size)
    ordered = sorted(bins, key=bin_cost, reverse=True)
    micro_steps = [ordered[i : i + dp_size] for i in range(0, len(ordered), dp_size)]
    return [ranks[::-1] if number % 2 else ranks for number, ranks in enumerate(micro_steps)]


def imbalance(steps: Iterable[Step], dp_size: int, bin_cost: Callable[[Bin], float]) -> float:
    """Return the sum of the highest bin costs of all micro steps, divided by the sum of the mean bin costs. 1 is optimal.

    1 divided by the result is the share of time in which ranks do not wait.
    """
    mean = slowest = 0.0
    for step in steps:
        for bins in assign_bins(step, dp_size, bin_cost):
            costs = [bin_cost(bin) for bin in bins]
            mean += sum(costs) / dp_size
            slowest += max(costs)
    return slowest / mean if mean else 1.0  # a step whose samples are all excluded


def bin_costs(seq_lens: np.ndarray, cost: Cost) -> Callable[[Bin], float]:
    """Return a function that computes the cost of a bin from the indices of its samples."""
    costs = _sample_costs(seq_lens, cost)
    return lambda bin: sum(costs[i] for i in bin)


def _sample_costs(seq_lens: np.ndarray, cost: Cost) -> list[float]:
    if isinstance(cost, np.ndarray):
        return cost.astype(np.float64).tolist()
    lengths, which = np.unique(seq_lens, return_inverse=True)
    if isinstance(cost, tuple):
        costs = [cost[0] * length + cost[1] * length * length for length in lengths.tolist()]
    else:
        costs = [cost((length,)) for length in lengths.tolist()]
    return [costs[i] for i in which.tolist()]


def _check_lengths(seq_lens: np.ndarray, max_tokens: int, keys: Sequence[str] | None) -> None:
    if len(seq_lens) == 0:
        raise DataError("the data is empty; set data.cache to the --out folder of a wands preprocess run.")
    assert seq_lens.min() > 0
    too_long = np.flatnonzero(seq_lens > max_tokens)
    if len(too_long):
        longest = int(seq_lens.argmax())
        name = keys[longest] if keys is not None else f"number {longest}"
        raise DataError(
            f"packing.max_tokens={max_tokens} is less than sample {name} needs ({seq_lens[longest]} tokens; "
            f"{len(too_long)} of {len(seq_lens)} samples are too long); set packing.max_tokens to at least "
            f"{seq_lens[longest]}, or preprocess with a smaller --max-frames or --max-pixels."
        )


def _separate_rest(
    bins: Sequence[Bin], bins_per_step: int, costs: Sequence[float]
) -> tuple[list[Bin], list[Bin]]:
    """Return (the `len(bins) % bins_per_step` bins of the last step, the other bins).

    `_spread` later splits the chosen bins. A sample that alone costs more than the mean of the new bins would let all ranks wait,
    so bins without such samples are chosen first, then those whose most expensive sample is cheapest.
    """
    num_rest = len(bins) % bins_per_step
    share = num_rest / bins_per_step * sum(costs) / len(bins)
    costliest = [max(share, *[costs[i] for i in bin]) for bin in bins]
    chosen = sorted(range(len(bins)), key=costliest.__getitem__)[:num_rest]
    others = sorted(set(range(len(bins))).difference(chosen))
    return [bins[i] for i in chosen], [bins[i] for i in others]


def _spread(bins: Sequence[Bin], bins_per_step: int, bin_cost: Callable[[Bin], float]) -> list[Bin]:
    """Split the most expensive bin until there are `bins_per_step` bins, or every bin has only one sample."""
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
    return spread


def _mean_distance(
    of_step: Sequence[Sequence[int] | np.ndarray], seq_lens: np.ndarray, used: np.ndarray
) -> float:
    lengths, which = np.unique(seq_lens, return_inverse=True)
    of_all = np.bincount(which[used], minlength=len(lengths)).cumsum() / len(used)
    distances = []
    for samples in of_step:
        inside = np.bincount(which[samples], minlength=len(lengths)).cumsum()
        distances.append(float(np.abs(inside / inside[-1] - of_all).max()))
    return sum(distances) / len(distances)


# ---- groups of bins with similar costs


def group_into_steps(
    bins: Sequence[Bin],
    bins_per_step: int,
    level_bins: int,
    costs: Sequence[float],
    seq_lens: np.ndarray,
    key: tuple[int | str, int],
) -> list[Step]:
    """Form optimizer steps from groups of `level_bins` bins of similar cost, which ranks process at the same time.

    1. Sort the bins by cost, and cut them into ranges.
    2. Sort each range by longest sample, and deal its bins out to groups in random order, so that long samples are spread.
    3. If a step has k groups, cut the groups, sorted by cost, into k parts. Each step gets one random group of each part.

    `bins_per_step` is a multiple of `level_bins` and divides `len(bins)`. `key` is (seed, epoch).
    """
    if not bins:
        return []

    def bin_cost(bin: Bin) -> float:
        return sum(costs[i] for i in bin)

    costs_of_bins = np.array([bin_cost(bin) for bin in bins], dtype=np.float64)
    order = np.argsort(-costs_of_bins, kind="stable")
    by_cost = [bins[i] for i in order.tolist()]
    lens = seq_lens.tolist()
    groups: list[Step] = []
    for first, end in _choose_cuts(by_cost, costs_of_bins[order], level_bins, seq_lens):
        cut = by_cost[first * level_bins : end * level_bins]
        cut.sort(key=lambda bin: sorted((lens[i] for i in bin), reverse=True), reverse=True)
        size = end - first
        dealt = np.concatenate([permutation(size, *key, "deal", first, row) for row in range(level_bins)])
        mixed: list[list[Bin]] = [[] for _ in range(size)]
        for bin, number in zip(cut, dealt.tolist(), strict=True):
            mixed[number].append(bin)
        groups += map(tuple, mixed)
    if level_bins == bins_per_step:
        return groups
    groups.sort(key=lambda group: sum(map(bin_cost, group)), reverse=True)
    num_steps = len(bins) // bins_per_step
    steps: list[Step] = [()] * num_steps
    for start in range(0, len(groups), num_steps):
        numbers = permutation(num_steps, *key, "groups", start).tolist()
        for group, number in zip(groups[start : start + num_steps], numbers, strict=True):
            steps[number] += group
    return steps


def _choose_cuts(
    bins: Sequence[Bin], costs: np.ndarray, level_bins: int, seq_lens: np.ndarray
) -> list[tuple[int, int]]:
    """Return (first, end) of each range of bins, the most expensive first, counted in groups of `level_bins` bins.

    The time of a bin, with waiting, is the highest cost in its range. Of all divisions that work for at least `LEVEL` of this
    time, the one whose ranges have sample lengths most similar to the whole data is chosen; if there is none, the smallest
    ranges.
    """
    num_groups = len(bins) // level_bins
    places = np.unique(np.linspace(0, num_groups, min(num_groups, MAX_CUTS) + 1).astype(np.int64))
    num_parts = len(places) - 1  # largest number of ranges
    before = np.concatenate([[0.0], costs.cumsum()])[places * level_bins]
    slowest = costs[places[:-1] * level_bins] * level_bins
    # Number of samples up to each length: share over all samples, and cumulative count over the smallest ranges.
    edges = np.unique(np.sort(seq_lens)[np.linspace(0, len(seq_lens) - 1, 128).astype(np.int64)])
    bucket = np.searchsorted(edges, seq_lens)
    part_of = np.repeat(np.arange(num_parts), np.diff(places) * level_bins).tolist()
    cells = np.array([(part, i) for part, bin in zip(part_of, bins, strict=True) for i in bin])
    held = np.bincount(cells[:, 0] * len(edges) + bucket[cells[:, 1]], minlength=num_parts * len(edges))
    up_to = np.zeros((num_parts + 1, len(edges)))
    up_to[1:] = held.reshape(num_parts, -1).cumsum(axis=0)
    of_all = np.bincount(bucket, minlength=len(edges)).cumsum() / len(seq_lens)

    bias = np.full((num_parts, num_parts + 1), np.inf)
    waits = np.full((num_parts, num_parts + 1), np.inf)
    for i in range(num_parts):
        sizes = places[i + 1 :] - places[i]
        inside = (up_to[i + 1 :] - up_to[i]).cumsum(axis=1)
        bias[i, i + 1 :] = np.abs(inside / inside[:, -1:] - of_all).max(axis=1) * sizes
        waits[i, i + 1 :] = sizes * slowest[i] - (before[i + 1 :] - before[i])
    cuts = _best_cuts(bias, waits, allowed=before[-1] / LEVEL - before[-1])
    return [(int(places[i]), int(places[j])) for i, j in pairwise(cuts)]


def _best_cuts(bias: np.ndarray, waits: np.ndarray, allowed: float) -> list[int]:
    """Return the boundaries, 0 to G, of the intervals of groups with the smallest total bias, by dynamic programming.

    bias[i, j] and waits[i, j], float64 [G, G+1], belong to the interval i to j - 1. The total of `waits` is at most `allowed`; if
    that is impossible, every interval has length 1.
    """
    num = len(bias)
    units = np.ceil(np.minimum(waits / max(allowed, 1e-300), 2.0) * WAITS).astype(np.int64)
    # Smallest bias up to a boundary, for each allowed waiting cost.
    best = np.full((num + 1, WAITS + 1), np.inf)
    best[0] = 0.0
    came_from = np.zeros((num + 1, WAITS + 1), dtype=np.int64)
    for j in range(1, num + 1):
        for i in range(j):
            wait = int(units[i, j])
            if wait > WAITS:
                continue
            total = best[i, : WAITS + 1 - wait] + bias[i, j]
            better = total < best[j, wait:]
            best[j, wait:][better] = total[better]
            came_from[j, wait:][better] = i
    if not np.isfinite(best[num, WAITS]):
        return list(range(num + 1))
    cuts = [num]
    spent = WAITS
    while cuts[-1]:
        i = int(came_from[cuts[-1], spent])
        spent -= int(units[i, cuts[-1]])
        cuts.append(i)
    return cuts[::-1]
