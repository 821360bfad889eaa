"""The plan of an epoch: which samples form a bin, which bins form a step, which rank forwards which bin.

Everything here is a pure function of the lengths, the seed and the epoch, so every rank derives the whole
plan alone, before the first byte of data is read. Sorting uses raw Philox words, exact integers and sums in a
fixed order: the plan is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from wands.data.bins import Bin, count_bins, even_out, pack_bins
from wands.errors import DataError
from wands.flow.rng import permutation

Step = tuple[Bin, ...]
Cost = Callable[[Sequence[int]], float] | tuple[float, float]
"""Cost of a pack from its samples' lengths, additive over samples, such as ``DiTShape.forward_flops``; or its
coefficients (a, b) in a * sum(L) + b * sum(L^2)."""

LEVEL = 0.987
"""Mean over slowest bin of a step, over the full steps of an epoch, that the plan keeps to; it spends the rest
on steps whose lengths are as mixed as the data's."""

MAX_CUTS = 96
"""Places between sorted bins where steps of unlike cost may be parted: enough, and quick."""

WAITS = 1024
"""Steps in which waiting is counted when these places are chosen."""


@dataclass(frozen=True)
class EpochPlan:
    """All optimizer steps of one epoch.

    Attributes:
        steps: steps -> bins -> sample indices. Every step has the same number of bins.
        seq_lens: int64 [N], tokens of every sample, also of those that this epoch does not visit.
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

    def length_bias(self) -> tuple[float, float]:
        """How unlike the data's the lengths inside a step are: 0 is alike, 1 is nothing in common.

        Returns:
            Mean over the steps of the Kolmogorov-Smirnov distance between the lengths of a step's samples and
            of all samples; and the same for random steps of as many samples, which is what chance does.
        """
        of_step = [[i for bin in step for i in bin] for step in self.steps]
        visited = np.sort(np.concatenate(of_step))
        ends = np.cumsum([len(samples) for samples in of_step])
        at_random = np.split(visited[permutation(len(visited), "length bias")], ends[:-1])
        distance, of_chance = (
            _mean_distance(steps, self.seq_lens, visited) for steps in (of_step, at_random)
        )
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
    """Fill bins to `max_tokens`, level their cost, and put bins of like cost into the same step.

    Equal token counts are very unequal time, for attention grows with the square of each sample. `pack_bins`
    makes bins as level as it can; what is still uneven, such as bins that one long sample fills alone, is
    evened out by the choice of a step's bins: sorted by cost, cut where it leaves the lengths inside steps
    most like the data's, mixed between two cuts, and the steps shuffled. Over an epoch the gradient is
    unbiased, as every sample is in one step and counts there as in any other (`StepPlan.denominators`); how
    much more alike the lengths inside one step are is `EpochPlan.length_bias`. The bins that are left over
    form the last step; they are split until every rank has work, and only then padded with ().

    With `windows` each is packed for itself, one after the other. The bins that a window leaves over wait
    for those of the next ones to make up a step, so that only the last step of the epoch is padded.

    The number of steps depends on the lengths alone (of all samples, or of those of each window), never on
    the epoch: `count_steps`.

    Args:
        seq_lens: int [N], tokens of every sample.
        max_tokens: capacity of a bin.
        bins_per_step: bins of one optimizer step, over all ranks and micro steps.
        seed: `train.seed`.
        epoch: other epochs are packed and ordered differently.
        cost: of a pack.
        keys: names of the samples, for the error message.
        level_bins: bins that are levelled to each other, for ranks that wait for each other in every micro step;
            it divides `bins_per_step`. A step of several such groups takes costly and cheap ones, so that its
            lengths are less alike. None: all bins of a step.
        windows: int64 arrays of sample indices, none empty, no index twice: what the epoch visits, in the
            order in which it is read. None: everything, in one window.

    Returns:
        A plan with every sample of the windows exactly once.

    Raises:
        DataError: a sample is longer than a bin, or there is no sample.
    """
    seq_lens = np.asarray(seq_lens, dtype=np.int64)
    _check_lengths(seq_lens, max_tokens, keys)
    assert level_bins is None or bins_per_step % level_bins == 0, (bins_per_step, level_bins)
    everything = np.arange(len(seq_lens))
    if windows is None:
        windows = (everything,)
    sample_costs = _sample_costs(seq_lens, cost)
    steps: list[Step] = []
    waiting: list[Bin] = []
    for number, rows in enumerate(windows):
        whole = len(rows) == len(seq_lens)
        rest, planned = _plan_window(
            seq_lens if whole else seq_lens[rows],
            max_tokens=max_tokens,
            bins_per_step=bins_per_step,
            key=(seed if number == 0 else f"{seed}, window {number}", epoch),
            cost=cost,
            level_bins=level_bins or bins_per_step,
        )
        named = (lambda bin: bin) if whole else _namer(rows)
        steps += [tuple(map(named, step)) for step in planned]
        waiting += map(named, rest)
        if len(waiting) >= bins_per_step:
            step, waiting = waiting[:bins_per_step], waiting[bins_per_step:]
            key = (seed, epoch, "left over", number)
            steps.append(tuple(even_out(step, seq_lens, sample_costs, max_tokens, key)))
    if waiting:
        spread = _spread(waiting, bins_per_step, bin_costs(seq_lens, cost))
        leveled = even_out(spread, seq_lens, sample_costs, max_tokens, (seed, epoch, -1))
        steps.append((*leveled, *[()] * (bins_per_step - len(leveled))))
    plan = EpochPlan(tuple(steps), seq_lens, max_tokens)
    _check_whole(plan, windows, bins_per_step)
    return plan


def count_steps(
    seq_lens: np.ndarray, *, max_tokens: int, bins_per_step: int, windows: Sequence[np.ndarray] | None = None
) -> int:
    """Steps of any epoch that `plan_epoch` plans from these windows, in any order, without planning it."""
    if windows is None:
        return -(-count_bins(seq_lens, max_tokens) // bins_per_step)
    return -(-sum(count_bins(seq_lens[rows], max_tokens) for rows in windows) // bins_per_step)


def storage_windows(places: np.ndarray, buffer_size: int, seed: int) -> list[np.ndarray]:
    """Samples that are packed together when the storage is read in pieces: `packing.buffer_size`.

    Shards, each in the order in which it is stored, stand in random order and are cut into windows of
    `buffer_size` samples. Which samples share a window is the same in every epoch, so that every epoch has
    as many steps; their order is the epoch's.

    Args:
        places: int64 [N, 2], shard of every sample and where in it the sample lies.
        buffer_size: samples of a window; the last one may have fewer.
        seed: `train.seed`.

    Returns:
        int64 arrays of sample indices; together each index once.
    """
    stored = np.lexsort((places[:, 1], places[:, 0]))
    starts = np.flatnonzero(np.diff(places[stored, 0], prepend=-1))
    shards = np.split(stored, starts[1:])
    order = np.concatenate([shards[i] for i in permutation(len(shards), seed, "shards")])
    return np.split(order, range(buffer_size, len(order), buffer_size))


def _plan_window(
    seq_lens: np.ndarray,
    *,
    max_tokens: int,
    bins_per_step: int,
    key: tuple[int | str, int],
    cost: Cost,
    level_bins: int,
) -> tuple[list[Bin], list[Step]]:
    """The bins that are too few for a step, and the full steps, in random order."""
    bin_cost = bin_costs(seq_lens, cost)
    sample_costs = _sample_costs(seq_lens, cost)
    bins = pack_bins(seq_lens, sample_costs, max_tokens, *key)
    bins = [bins[i] for i in permutation(len(bins), *key, "bins")]
    rest, bins = _part_rest(bins, bins_per_step, sample_costs)
    groups = _level_steps(bins, level_bins, bin_cost, seq_lens, key)
    steps = _mix_groups(groups, bins_per_step, bin_cost, key)
    return rest, [steps[i] for i in permutation(len(steps), *key, "steps")]


def _namer(rows: np.ndarray) -> Callable[[Bin], Bin]:
    names = rows.tolist()
    return lambda bin: tuple([names[i] for i in bin])


def _check_whole(plan: EpochPlan, windows: Sequence[np.ndarray], bins_per_step: int) -> None:
    """What no plan may break: every sample of the windows once, no bin over its capacity, no step short of bins."""
    bins = [bin for step in plan.steps for bin in step]
    sizes = np.fromiter(map(len, bins), np.int64, len(bins))
    visited = np.fromiter(chain.from_iterable(bins), np.int64, int(sizes.sum()))
    wanted = np.zeros(len(plan.seq_lens), np.int64)
    for rows in windows:
        wanted[rows] += 1
    found = np.bincount(visited, minlength=len(wanted))
    wrong = np.flatnonzero(found != wanted)
    assert not len(wrong), f"sample {wrong[0]} is in {found[wrong[0]]} bins, not in {wanted[wrong[0]]}"
    tokens = np.bincount(np.repeat(np.arange(len(bins)), sizes), plan.seq_lens[visited], len(bins))
    assert tokens.max() <= plan.max_tokens, f"a bin has {int(tokens.max())} tokens"
    assert {len(step) for step in plan.steps} == {bins_per_step}


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
    of_length, which = _costs_of_lengths(seq_lens, cost)
    of_sample = [of_length[i] for i in which.tolist()]
    return lambda bin: sum(of_sample[i] for i in bin)


def _sample_costs(seq_lens: np.ndarray, cost: Cost) -> np.ndarray:
    """float64 [N]."""
    of_length, which = _costs_of_lengths(seq_lens, cost)
    return np.array(of_length, dtype=np.float64)[which]


def _costs_of_lengths(seq_lens: np.ndarray, cost: Cost) -> tuple[list[float], np.ndarray]:
    """The cost of each distinct length, ascending, and which of them every sample has."""
    lengths, which = np.unique(seq_lens, return_inverse=True)
    if isinstance(cost, tuple):
        return [cost[0] * length + cost[1] * length * length for length in lengths.tolist()], which
    return [cost((length,)) for length in lengths.tolist()], which


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


def _part_rest(
    bins: Sequence[Bin], bins_per_step: int, sample_costs: np.ndarray
) -> tuple[list[Bin], list[Bin]]:
    """The bins that are too few for a step, and all others, which make up whole steps.

    The rest is spread over the ranks of a whole step, where all would wait for one long sample. So it is the
    first bins of which no sample alone costs more than a rank's share of that step; if there are too few of
    them, the bins follow whose costliest sample is the cheapest.
    """
    num_rest = len(bins) % bins_per_step
    costs = sample_costs.tolist()
    share = num_rest / bins_per_step * sum(costs) / len(bins)
    costliest = [max(share, *[costs[i] for i in bin]) for bin in bins]
    chosen = sorted(range(len(bins)), key=costliest.__getitem__)[:num_rest]
    others = sorted(set(range(len(bins))).difference(chosen))
    return [bins[i] for i in chosen], [bins[i] for i in others]


def _level_steps(
    bins: Sequence[Bin],
    bins_per_step: int,
    bin_cost: Callable[[Bin], float],
    seq_lens: np.ndarray,
    key: tuple[int | str, int],
) -> list[Step]:
    """Sort bins by cost, part them into groups of whole steps, and mix inside each group.

    Every step of a group gets its share of the bins with long samples and of those with short ones.
    """
    if not bins:
        return []
    costs = np.array([bin_cost(bin) for bin in bins], dtype=np.float64)
    order = np.argsort(-costs, kind="stable")
    by_cost = [bins[i] for i in order.tolist()]
    lens = seq_lens.tolist()
    steps: list[Step] = []
    for first, end in _group_steps(by_cost, costs[order], bins_per_step, seq_lens):
        group = by_cost[first * bins_per_step : end * bins_per_step]
        group.sort(key=lambda bin: sorted((lens[i] for i in bin), reverse=True), reverse=True)
        size = end - first
        dealt = np.concatenate([permutation(size, *key, "deal", first, row) for row in range(bins_per_step)])
        of_step: list[list[Bin]] = [[] for _ in range(size)]
        for bin, step in zip(group, dealt.tolist(), strict=True):
            of_step[step].append(bin)
        steps += map(tuple, of_step)
    return steps


def _mix_groups(
    groups: Sequence[Step],
    bins_per_step: int,
    bin_cost: Callable[[Bin], float],
    key: tuple[int | str, int],
) -> list[Step]:
    """Steps of one group from each share of the groups, from the costliest to the cheapest."""
    if not groups or len(groups[0]) == bins_per_step:
        return list(groups)
    by_cost = sorted(groups, key=lambda group: sum(map(bin_cost, group)), reverse=True)
    num_steps = len(groups) * len(groups[0]) // bins_per_step
    steps: list[Step] = [()] * num_steps
    for start in range(0, len(groups), num_steps):
        order = permutation(num_steps, *key, "groups", start).tolist()
        for group, step in zip(by_cost[start : start + num_steps], order, strict=True):
            steps[step] += group
    return steps


def _group_steps(
    bins: Sequence[Bin], costs: np.ndarray, bins_per_step: int, seq_lens: np.ndarray
) -> list[tuple[int, int]]:
    """Where to part bins, costliest first, so that groups keep to LEVEL and are most like the data.

    Args:
        bins: of all full steps, costliest first.
        costs: float64, theirs.
        bins_per_step: divides their number.
        seq_lens: int64 [N].

    Returns:
        (first, end) of each group, in steps.
    """
    num_steps = len(bins) // bins_per_step
    places = np.unique(np.linspace(0, num_steps, min(num_steps, MAX_CUTS) + 1).astype(np.int64))
    num_groups = len(places) - 1  # the finest
    before = np.concatenate([[0.0], costs.cumsum()])[places * bins_per_step]
    slowest = costs[places[:-1] * bins_per_step] * bins_per_step
    # The share of the data's samples up to each of some lengths, for all and for each finest group.
    edges = np.unique(np.sort(seq_lens)[np.linspace(0, len(seq_lens) - 1, 128).astype(np.int64)])
    bucket = np.searchsorted(edges, seq_lens)
    group_of = np.repeat(np.arange(num_groups), np.diff(places) * bins_per_step).tolist()
    cells = np.array([(group, i) for group, bin in zip(group_of, bins, strict=True) for i in bin])
    held = np.bincount(cells[:, 0] * len(edges) + bucket[cells[:, 1]], minlength=num_groups * len(edges))
    up_to = np.zeros((num_groups + 1, len(edges)))
    up_to[1:] = held.reshape(num_groups, -1).cumsum(axis=0)
    of_all = np.bincount(bucket, minlength=len(edges)).cumsum() / len(seq_lens)

    bias = np.full((num_groups, num_groups + 1), np.inf)
    waits = np.full((num_groups, num_groups + 1), np.inf)
    for i in range(num_groups):
        steps = places[i + 1 :] - places[i]
        inside = (up_to[i + 1 :] - up_to[i]).cumsum(axis=1)
        bias[i, i + 1 :] = np.abs(inside / inside[:, -1:] - of_all).max(axis=1) * steps
        waits[i, i + 1 :] = steps * slowest[i] - (before[i + 1 :] - before[i])
    cuts = _best_cuts(bias, waits, allowed=before[-1] / LEVEL - before[-1])
    return [(int(places[i]), int(places[j])) for i, j in pairwise(cuts)]


def _best_cuts(bias: np.ndarray, waits: np.ndarray, allowed: float) -> list[int]:
    """The cuts of 0..G of least total bias whose waits add up to no more than is allowed, by dynamic programming.

    Args:
        bias: float64 [G, G+1], of the interval from the row to the column.
        waits: likewise; never negative.
        allowed: if no cuts keep to it, all are made.

    Returns:
        0, the cuts between, G.
    """
    num = len(bias)
    units = np.ceil(np.minimum(waits / max(allowed, 1e-300), 2.0) * WAITS).astype(np.int64)
    best = np.full((num + 1, WAITS + 1), np.inf)  # up to a cut, with no more waiting than so much
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
    cuts, spent = [num], WAITS
    while cuts[-1]:
        i = int(came_from[cuts[-1], spent])
        spent -= int(units[i, cuts[-1]])
        cuts.append(i)
    return cuts[::-1]


def _spread(bins: Sequence[Bin], bins_per_step: int, bin_cost: Callable[[Bin], float]) -> list[Bin]:
    """Split the costliest bin in two halves of like cost until there are `bins_per_step` or none splits."""
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
    of_step: Sequence[Sequence[int] | np.ndarray], seq_lens: np.ndarray, visited: np.ndarray
) -> float:
    lengths, which = np.unique(seq_lens, return_inverse=True)
    of_all = np.bincount(which[visited], minlength=len(lengths)).cumsum() / len(visited)
    distances = []
    for samples in of_step:
        inside = np.bincount(which[samples], minlength=len(lengths)).cumsum()
        distances.append(float(np.abs(inside / inside[-1] - of_all).max()))
    return sum(distances) / len(distances)
