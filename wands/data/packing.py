"""Plan an epoch: samples of each bin, bins of each optimizer step, rank of each bin.

Every function is a pure function of lengths, seed and epoch. So every rank derives the whole plan alone, before the first
byte of data is read. Sorting uses raw Philox words, exact integers and sums in a fixed order: the plan is the same on every
machine.
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
"""Smallest ratio of the mean to the slowest bin of a step, over the full steps of an epoch. The plan uses the tolerance
for steps whose lengths are as mixed as the data's."""

MAX_CUTS = 96
"""Number of positions in the sorted bins at which groups of steps may be separated."""

WAITS = 1024
"""Resolution of waiting time when these positions are chosen."""


@dataclass(frozen=True)
class EpochPlan:
    """All optimizer steps of one epoch.

    Attributes:
        steps: steps -> bins -> sample indices. Every step has the same number of bins.
        seq_lens: int64 [N], tokens of every sample, also of samples that the epoch does not use.
        max_tokens: capacity of a bin.
    """

    steps: tuple[Step, ...]
    seq_lens: np.ndarray
    max_tokens: int

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the epoch."""
        return len(self.steps)

    @property
    def fill(self) -> float:
        """Used share of the bins' token capacity.

        The last step spreads the remaining samples over its bins, so it counts only if it is the only step.
        """
        bins = [bin for step in self.steps[: max(1, self.num_steps - 1)] for bin in step if bin]
        return sum(int(self.seq_lens[i]) for bin in bins for i in bin) / (len(bins) * self.max_tokens)

    def imbalance(self, dp_size: int, cost: Cost) -> float:
        """Return the cost of the slowest rank divided by the mean, summed over the micro steps; 1 is optimal.

        The inverse is the share of time in which ranks do not wait.

        Args:
            dp_size: ranks with different bins; it divides the bins of a step.
            cost: cost of a pack.
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
        """Return the Kolmogorov-Smirnov distance between a step's lengths and the data set's, 0 to 1.

        Returns:
            Mean distance over the steps, and the mean distance of random steps with equally many samples, which is the
            value by chance.
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
    """Fill bins to `max_tokens`, balance their cost, and put bins of similar cost into one step.

    Equal token counts take very different time, because attention grows with the square of each sample. `pack_bins` balances
    the bins as far as possible. The choice of a step's bins balances the rest, such as bins with one long sample: bins are
    sorted by cost, cut into groups such that lengths inside steps stay most similar to the data's, and mixed inside each
    group; then the steps are shuffled. The gradient over an epoch is unbiased, as every sample is in one step and has
    the same weight in every step (`StepPlan.denominators`). `EpochPlan.length_bias` measures the similarity of lengths
    inside a step. The remaining bins form the last step. They are split until every rank has work, and then padded with ().

    With `windows`, each window is packed separately. Its remaining bins wait for the remaining bins of the next windows to
    form a step, so that only the last step of the epoch is padded.

    The number of steps depends on the lengths alone (of all samples, or of each window), never on the epoch:
    `count_steps`.

    Args:
        seq_lens: int [N], tokens of every sample.
        max_tokens: capacity of a bin.
        bins_per_step: bins of one optimizer step, over all ranks and micro steps.
        seed: `train.seed`.
        epoch: every epoch is packed and ordered differently.
        cost: cost of a pack.
        keys: sample ids, for the error message.
        level_bins: number of bins whose costs are balanced to each other, for ranks that wait for each other in every micro
            step; it divides `bins_per_step`. A step of several such groups gets costly and cheap groups, so that its
            lengths are more diverse. None: all bins of a step.
        windows: int64 arrays of sample indices, none empty, no index twice: the samples of the epoch in the order of
            reading. None: all samples in one window.

    Returns:
        A plan with every sample of the windows exactly once.

    Raises:
        DataError: if a sample is longer than a bin, or there is no sample.
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
    """Return the number of steps that `plan_epoch` plans from these windows in any order, without planning."""
    if windows is None:
        return -(-count_bins(seq_lens, max_tokens) // bins_per_step)
    return -(-sum(count_bins(seq_lens[rows], max_tokens) for rows in windows) // bins_per_step)


def storage_windows(places: np.ndarray, buffer_size: int, seed: int) -> list[np.ndarray]:
    """Group samples that are packed together if the storage is read in pieces (`packing.buffer_size`).

    Shards, each in its stored order, are put in random order and cut into windows of `buffer_size` samples. The windows
    are the same in every epoch, so that every epoch has equally many steps; only the order of windows changes.

    Args:
        places: int64 [N, 2], shard and position of every sample.
        buffer_size: samples of a window; the last window may have fewer.
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
    """Return the remaining bins, too few for a step, and the full steps in random order."""
    bin_cost = bin_costs(seq_lens, cost)
    sample_costs = _sample_costs(seq_lens, cost)
    bins = pack_bins(seq_lens, sample_costs, max_tokens, *key)
    bins = [bins[i] for i in permutation(len(bins), *key, "bins")]
    rest, bins = _separate_rest(bins, bins_per_step, sample_costs)
    groups = _level_steps(bins, level_bins, bin_cost, seq_lens, key)
    steps = _mix_groups(groups, bins_per_step, bin_cost, key)
    return rest, [steps[i] for i in permutation(len(steps), *key, "steps")]


def _namer(rows: np.ndarray) -> Callable[[Bin], Bin]:
    names = rows.tolist()
    return lambda bin: tuple([names[i] for i in bin])


def _check_whole(plan: EpochPlan, windows: Sequence[np.ndarray], bins_per_step: int) -> None:
    """Assert that every sample occurs once, no bin exceeds its capacity, and every step has all bins."""
    bins = [bin for step in plan.steps for bin in step]
    sizes = np.fromiter(map(len, bins), np.int64, len(bins))
    used = np.fromiter(chain.from_iterable(bins), np.int64, int(sizes.sum()))
    wanted = np.zeros(len(plan.seq_lens), np.int64)
    for rows in windows:
        wanted[rows] += 1
    found = np.bincount(used, minlength=len(wanted))
    wrong = np.flatnonzero(found != wanted)
    assert not len(wrong), f"sample {wrong[0]} is in {found[wrong[0]]} bins, not in {wanted[wrong[0]]}"
    tokens = np.bincount(np.repeat(np.arange(len(bins)), sizes), plan.seq_lens[used], len(bins))
    assert tokens.max() <= plan.max_tokens, f"a bin has {int(tokens.max())} tokens"
    assert {len(step) for step in plan.steps} == {bins_per_step}


def assign_bins(bins: Sequence[Bin], dp_size: int, bin_cost: Callable[[Bin], float]) -> list[list[Bin]]:
    """Assign the bins of a step to ranks, so that the ranks of a micro step get bins of similar cost.

    The direction alternates between micro steps. So ranks that wait for each other only at the end of the step (ZeRO 1 and
    2) are balanced, too.

    Args:
        bins: bins of one step.
        dp_size: divides the number of bins.
        bin_cost: cost of a bin of sample indices, from `bin_costs`.

    Returns:
        For each micro step, for each dp rank, its bin.
    """
    assert len(bins) % dp_size == 0, (len(bins), dp_size)
    ordered = sorted(bins, key=bin_cost, reverse=True)
    micro_steps = [ordered[i : i + dp_size] for i in range(0, len(ordered), dp_size)]
    return [ranks[::-1] if number % 2 else ranks for number, ranks in enumerate(micro_steps)]


def bin_costs(seq_lens: np.ndarray, cost: Cost) -> Callable[[Bin], float]:
    """Return the function that computes the cost of a bin of sample indices from an additive cost of lengths."""
    of_length, which = _costs_of_lengths(seq_lens, cost)
    of_sample = [of_length[i] for i in which.tolist()]
    return lambda bin: sum(of_sample[i] for i in bin)


def _sample_costs(seq_lens: np.ndarray, cost: Cost) -> np.ndarray:
    """Return the cost of every sample, float64 [N]."""
    of_length, which = _costs_of_lengths(seq_lens, cost)
    return np.array(of_length, dtype=np.float64)[which]


def _costs_of_lengths(seq_lens: np.ndarray, cost: Cost) -> tuple[list[float], np.ndarray]:
    """Return the cost of each distinct length, ascending, and the index of every sample's length."""
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
            f"packing.max_tokens={max_tokens} is less than sample {name} needs ({seq_lens[longest]} tokens; "
            f"{len(too_long)} of {len(seq_lens)} samples are too long); set packing.max_tokens to at least "
            f"{seq_lens[longest]}, or preprocess with a smaller --max-frames or --max-pixels."
        )


def _separate_rest(
    bins: Sequence[Bin], bins_per_step: int, sample_costs: np.ndarray
) -> tuple[list[Bin], list[Bin]]:
    """Separate the bins that are too few for a step from all other bins.

    The remaining bins are spread over the ranks of a whole step, where all ranks would wait for one long sample. So the
    function chooses the first bins of which no single sample costs more than a rank's share of this step. If there are too
    few, the bins follow whose costliest sample is cheapest.
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
    """Sort bins by cost, cut them into groups of whole steps, and mix inside each group.

    Every step of a group gets its share of the bins with long samples and of the bins with short samples.
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
    """Build steps with one group from each cost range, from the costliest to the cheapest."""
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
    """Cut bins, costliest first, into groups that satisfy LEVEL and are most similar to the data.

    Args:
        bins: bins of all full steps, costliest first.
        costs: float64, cost of each bin.
        bins_per_step: divides the number of bins.
        seq_lens: int64 [N].

    Returns:
        (first, end) of each group, in steps.
    """
    num_steps = len(bins) // bins_per_step
    places = np.unique(np.linspace(0, num_steps, min(num_steps, MAX_CUTS) + 1).astype(np.int64))
    num_groups = len(places) - 1  # the finest
    before = np.concatenate([[0.0], costs.cumsum()])[places * bins_per_step]
    slowest = costs[places[:-1] * bins_per_step] * bins_per_step
    # Cumulative share of samples up to each length, for all samples and for each finest group.
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
    """Find the cuts of 0..G with the least total bias whose waits do not exceed a limit, by dynamic programming.

    Args:
        bias: float64 [G, G+1], bias of the interval from the row to the column.
        waits: float64 [G, G+1], waiting cost of the interval; never negative.
        allowed: limit of the sum of waits. If no cuts satisfy it, all cuts are made.

    Returns:
        0, the cuts between, G.
    """
    num = len(bias)
    units = np.ceil(np.minimum(waits / max(allowed, 1e-300), 2.0) * WAITS).astype(np.int64)
    best = np.full((num + 1, WAITS + 1), np.inf)  # best bias up to a cut, by the waiting allowed
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
    """Split the costliest bin in two halves of similar cost until there are `bins_per_step` bins or none can be split."""
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
