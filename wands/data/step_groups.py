"""Group the bins (packed batches) of an epoch into optimizer steps.

The bins of a step have similar costs. The distribution of the sample lengths in a step is similar to the distribution
in the whole data.

Ranks wait for the slowest bin of a step. Steps of bins with equal costs would avoid the waiting, but such steps would
contain only long or only short clips. So the bins are sorted by cost and divided into ranges. The bins inside each
range are mixed. `LEVEL` limits the waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from wands.data.bins import Bin
from wands.flow.rng import permutation

Step = tuple[Bin, ...]
"""Bins of one optimizer step, over all ranks and micro steps."""

LEVEL = 0.987
"""Smallest allowed efficiency: the mean cost of a step's bins divided by the highest cost, over the full steps of an
epoch. Longer ranges of bins make the lengths inside steps more similar to the data, but lower this efficiency."""

MAX_CUTS = 96
"""Largest number of ranges into which the sorted bins are divided."""

WAITS = 1024
"""Number of units into which the allowed waiting time is divided. The dynamic programming that chooses the ranges counts
waiting time in whole units."""


def group_into_steps(
    bins: Sequence[Bin],
    bins_per_step: int,
    level_bins: int,
    costs: Sequence[float],
    seq_lens: np.ndarray,
    key: tuple[int | str, int],
) -> list[Step]:
    """Form full optimizer steps from groups of `level_bins` bins (packed batches) with similar costs. Different ranks
    process the bins of a group at the same time.

    1. The bins are sorted by cost and cut into ranges of bins with similar costs.
    2. In each range, the bins are sorted by their longest samples and dealt out in turn to the groups of the range, so
       that these groups get equally many bins with long samples.
    3. If a step has k groups, all groups are sorted by cost and cut into k tiers of equal size. Each step gets one random
       group of each tier.

    Args:
        bins: bins of all full steps, as sample indices.
        bins_per_step: number of bins of a step. The number of all bins is a multiple of this number.
        level_bins: number of bins of a group. `bins_per_step` is a multiple of this number.
        costs: cost of each sample.
        seq_lens: int64 [N], number of tokens of each sample.
        key: (seed, epoch), which determines the random choices in items 2 and 3 above. The seed can be a number or a text.
    """
    if not bins:
        return []

    def bin_cost(bin: Bin) -> float:
        return sum(costs[i] for i in bin)

    bin_costs = np.array([bin_cost(bin) for bin in bins], dtype=np.float64)
    order = np.argsort(-bin_costs, kind="stable")
    by_cost = [bins[i] for i in order.tolist()]
    lens = seq_lens.tolist()
    groups: list[Step] = []
    for first, end in _choose_cuts(by_cost, bin_costs[order], level_bins, seq_lens):
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
    """Divide the bins, sorted by cost, into ranges. `group_into_steps` forms each group from the bins of one range.

    The efficiency of a group is the mean cost of its bins divided by the highest cost. Of all ways to divide the bins
    that keep the efficiency at `LEVEL` or above, choose the way in which the sample lengths of each range are most
    similar to the sample lengths of the whole data. If no way reaches `LEVEL`, choose the smallest ranges.

    Args:
        bins: bins of all full steps, the most expensive bin first.
        costs: float64, cost of each bin.
        level_bins: number of bins of a group. It divides the number of bins.
        seq_lens: int64 [N], number of tokens of each sample.

    Returns:
        (first, end) of each range, counted in groups of `level_bins` bins.
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
    """Divide G groups of bins, sorted by cost, into intervals whose biases have the smallest sum, by dynamic programming.

    The total waiting cost of the intervals (time in which ranks wait for the most expensive bin) may not exceed `allowed`.

    Args:
        bias: float64 [G, G+1]. bias[i, j] is the bias of the groups i to j - 1. It measures how much the
            lengths of their samples differ from the lengths in the whole data.
        waits: float64 [G, G+1]. waits[i, j] is the waiting cost of the groups i to j - 1, never negative.
        allowed: limit of the total waiting cost. If no division satisfies the limit, every interval has length 1.

    Returns:
        Boundaries of the intervals, ascending from 0 to G.
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
    cuts, spent = [num], WAITS
    while cuts[-1]:
        i = int(came_from[cuts[-1], spent])
        spent -= int(units[i, cuts[-1]])
        cuts.append(i)
    return cuts[::-1]
