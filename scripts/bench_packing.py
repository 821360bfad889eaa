"""Compare the packing of wands with common packing schemes, on synthetic lists of clip lengths (mixes).

A packing scheme assigns clips to bins of at most max_tokens tokens, and bins to training steps. A mix is a list of clip lengths
with a certain share of 720p clips and of 81-frame clips.

    python scripts/bench_packing.py            # a minute or two on one core, no GPU, no data

Each row of the table shows one scheme for one mix and one max_tokens. Columns:

fill         tokens / (bins x max_tokens). For wands, the last step is not counted, because its bins need not be full.
efficiency   sum of the mean costs of the ranks over all steps of an epoch, divided by the sum of the costs of the slowest ranks.
             Each rank has one bin per step. The cost is the exact number of FLOPs of a forward. With varlen attention, free room
             in a bin costs no time, so waiting for the slowest rank is the only waste. Columns for 1.3B and 14B, with 8 and 64
             data-parallel ranks.
bias         mean Kolmogorov-Smirnov distance between the clip lengths of a step and of the whole mix, minus the mean distance for
             random steps with equally many clips. At 0, a step is as similar to the mix as a random step. Below 0, it is more
             similar.
seconds      time to pack one epoch in pure Python and numpy. For wands, this is the time of the plan for 14B and 64 ranks.
better       names of the schemes that beat the scheme of this row for at least one of the four pairs (model, number of ranks).
             A scheme beats another scheme if no value of fill, efficiency and bias is worse, and at least one is better.

Two rows of wands never appear in the column `better`:

4 micro steps    4 bins per rank and step, as with gradient accumulation. The ranks of a micro step have bins of similar cost, but
                 the micro steps of a step have different costs. The steps are four times as large as in other rows.
windows of 2048  the clips are divided into windows of 2,048 neighbors on the disk. Each window is packed without the others.

The code of the schemes to compare with is as simple as possible.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from wands.data.packing import assign_bins, plan_epoch, storage_windows
from wands.variants import VARIANTS

MIXES = {"A": (0.3, 0.35), "B": (0.0, 0.35), "C": (0.6, 0.05)}  # share of 720p, share of 81-frame clips
CAPACITIES = (75_600, 131_072)
DP_SIZES = (8, 64)
MODELS = {"1.3B": VARIANTS["wan2.1-t2v-1.3b"].dit, "14B": VARIANTS["wan2.1-t2v-14b"].dit}

CASES = [(model, dp) for model in MODELS for dp in DP_SIZES]
Bins = list[list[int]]
Steps = Sequence[Sequence[Sequence[int]]]


def length_mix(share_720p: float, share_81: float, num_samples: int = 20_000) -> np.ndarray:
    """Return the numbers of tokens of random clips with five aspect ratios and 17 to 81 frames, int64 [num_samples].

    Args:
        share_720p: fraction of the clips with 720p. All other clips have 480p.
        share_81: fraction of the clips that are set to 81 frames. All other clips have a random number of frames.
        num_samples: number of clips.
    """
    draw = random.Random(0)
    lens = []
    for _ in range(num_samples):
        area = 720 * 1280 if draw.random() < share_720p else 480 * 832
        a, b = draw.choices([(16, 9), (9, 16), (4, 3), (3, 4), (1, 1)], [55, 20, 10, 7, 8])[0]
        height, width = (round(math.sqrt(area * x) / 16) * 16 for x in (b / a, a / b))
        frames = 81 if draw.random() < share_81 else draw.randrange(17, 82, 4)
        lens.append(((frames - 1) // 4 + 1) * (height // 16) * (width // 16))
    return np.array(lens)


def one_per_rank(lens: np.ndarray, max_tokens: int) -> Bins:
    """Put every clip into a separate bin: no packing."""
    return [[i] for i in range(len(lens))]


def first_fit(lens: np.ndarray, order: Sequence[int], max_tokens: int) -> Bins:
    """Put each clip, in the given order, into the first bin with enough room, or else into a new bin."""
    bins: Bins = []
    room = np.zeros(len(order))
    for i in order:
        fits = room[: len(bins)] >= lens[i]
        number = int(fits.argmax()) if fits.any() else len(bins)
        if number == len(bins):
            bins.append([])
            room[number] = max_tokens
        bins[number].append(i)
        room[number] -= lens[i]
    return bins


def best_fit(lens: np.ndarray, order: Sequence[int], max_tokens: int) -> Bins:
    """Put each clip, in the given order, into the fullest bin with enough room, or else into a new bin."""
    bins: Bins = []
    room = np.zeros(len(order))
    for i in order:
        candidates = np.where(room[: len(bins)] >= lens[i], room[: len(bins)], np.inf)
        number = int(candidates.argmin()) if len(bins) and np.isfinite(candidates.min()) else len(bins)
        if number == len(bins):
            bins.append([])
            room[number] = max_tokens
        bins[number].append(i)
        room[number] -= lens[i]
    return bins


def first_fit_buffered(lens: np.ndarray, max_tokens: int, buffer: int = 512) -> Bins:
    """Shuffle the clips, cut the order into chunks of `buffer` clips, and pack each chunk separately with `first_fit`."""
    order = np.random.default_rng(0).permutation(len(lens))
    chunks = [order[i : i + buffer] for i in range(0, len(order), buffer)]
    return [bin for chunk in chunks for bin in first_fit(lens, chunk, max_tokens)]


def decreasing(fit: Callable[..., Bins]) -> Callable[[np.ndarray, int], Bins]:
    """Return a function that packs a whole epoch at once with `fit`, longest clips first."""
    return lambda lens, max_tokens: fit(lens, np.argsort(-lens, kind="stable"), max_tokens)


def same_length(lens: np.ndarray, max_tokens: int) -> Bins:
    """Pack the clips into bins, so that all clips of a bin have equal length (bucketing)."""
    bins: Bins = []
    for length in np.unique(lens).tolist():
        clips = np.flatnonzero(lens == length).tolist()
        size = max_tokens // length
        bins += [clips[i : i + size] for i in range(0, len(clips), size)]
    return bins


def in_random_steps(bins: Bins, dp_size: int, lens: np.ndarray, cost_of: np.ndarray) -> list[Bins]:
    """Put the bins into random order, and cut the order into steps of `dp_size` bins.

    If the last step has fewer than `dp_size` bins, empty bins are added.
    """
    bins = [bins[i] for i in np.random.default_rng(1).permutation(len(bins))]
    bins += [[]] * (-len(bins) % dp_size)
    return [bins[i : i + dp_size] for i in range(0, len(bins), dp_size)]


def in_windows(num_steps: int) -> Callable[[Bins, int, np.ndarray, np.ndarray], list[Bins]]:
    """Return a function that forms training steps from bins of similar cost.

    The function puts the bins into random order, and cuts this order into windows of `num_steps` steps. Inside each window, it
    sorts the bins by cost. Consecutive bins then form a step.
    """

    def cut(bins: Bins, dp_size: int, lens: np.ndarray, cost_of: np.ndarray) -> list[Bins]:
        bins = [bin for step in in_random_steps(bins, dp_size, lens, cost_of) for bin in step]
        width = num_steps * dp_size
        windows = [
            sorted(bins[i : i + width], key=lambda bin: cost_of[bin].sum())
            for i in range(0, len(bins), width)
        ]
        bins = [bin for window in windows for bin in window]
        return [bins[i : i + dp_size] for i in range(0, len(bins), dp_size)]

    return cut


def in_buckets(bins: Bins, dp_size: int, lens: np.ndarray, cost_of: np.ndarray) -> list[Bins]:
    """Sort the bins by clip length, and cut the order into steps of `dp_size` bins.

    All clips of a bin have one length, so most steps contain clips of one length. A step at the border between two
    lengths contains both lengths. If the last step has fewer than `dp_size` bins, empty bins are added.
    """
    bins = sorted(bins, key=lambda bin: lens[bin].max(), reverse=True) + [[]] * (-len(bins) % dp_size)
    return [bins[i : i + dp_size] for i in range(0, len(bins), dp_size)]


SCHEMES: dict[str, tuple[Callable[[np.ndarray, int], Bins], Callable[..., list[Bins]]]] = {
    "one clip per rank": (one_per_rank, in_random_steps),
    "first-fit, buffer 512": (first_fit_buffered, in_random_steps),
    "first-fit decreasing": (decreasing(first_fit), in_random_steps),
    "best-fit decreasing": (decreasing(best_fit), in_random_steps),
    "  sorted over 4 steps": (decreasing(best_fit), in_windows(4)),
    "  sorted over 16 steps": (decreasing(best_fit), in_windows(16)),
    "  sorted over 64 steps": (decreasing(best_fit), in_windows(64)),
    "bucketing": (same_length, in_buckets),
}


def efficiency(steps: Steps, cost_of: np.ndarray) -> float:
    """Return the mean cost of the ranks divided by the cost of the slowest rank, both summed over all steps."""
    costs = np.array([[cost_of[list(bin)].sum() for bin in step] for step in steps])
    return costs.mean(axis=1).sum() / costs.max(axis=1).sum()


def length_bias(steps: Steps, lens: np.ndarray) -> float:
    """Return the mean over steps of the Kolmogorov-Smirnov distance between a step's clip lengths and all lengths `lens`."""
    values, counts = np.unique(lens, return_counts=True)
    whole = counts.cumsum() / len(lens)
    distances = []
    for step in steps:
        inside = np.sort(lens[[i for bin in step for i in bin]])
        distances.append(np.abs(np.searchsorted(inside, values, side="right") / len(inside) - whole).max())
    return float(np.mean(distances))


def bias_beyond_chance(steps: Steps, lens: np.ndarray) -> float:
    """Return the `length_bias` of the steps minus the `length_bias` of steps of randomly drawn clips.

    Random step number i has as many clips as step number i of `steps`.
    """
    steps = [step for step in steps if any(step)]
    ends = np.cumsum([sum(map(len, step)) for step in steps])[:-1]
    drawn = np.split(np.random.default_rng(2).permutation(len(lens)), ends)
    return length_bias(steps, lens) - length_bias([[part.tolist()] for part in drawn], lens)


@dataclass
class Row:
    """Result of a packing scheme for one mix (list of clip lengths) and one max_tokens (token limit of a packed sequence).

    Efficiency (see `efficiency`) and bias (see `bias_beyond_chance`) have a value for each (model, number of data-parallel
    ranks). `aside` marks the rows "4 micro steps" and "windows of 2048", which measure wands with a changed setting. The table
    shows these rows, but the column `better` of another row never names them.
    """

    name: str
    fill: float
    seconds: float
    aside: bool = False
    efficiency: dict[tuple[str, int], float] = field(default_factory=dict)
    bias: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, case: tuple[str, int], steps: Steps, lens: np.ndarray, cost_of: np.ndarray) -> None:
        self.efficiency[case] = efficiency(steps, cost_of)
        self.bias[case] = bias_beyond_chance(steps, lens)

    def beats(self, other: Row, case: tuple[str, int]) -> bool:
        """Return whether this row is at least as good as `other` in fill, efficiency and bias, and better in at least one.

        `case` is the pair (model, number of data-parallel ranks) whose efficiency and bias are compared.
        """
        mine = (self.fill, self.efficiency[case], -self.bias[case])
        theirs = (other.fill, other.efficiency[case], -other.bias[case])
        return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))

    def line(self, rows: Sequence[Row]) -> str:
        better = [
            row.name.strip() for row in rows if not row.aside and any(row.beats(self, case) for case in CASES)
        ]
        cells = [f"{self.name:<22}", f"{self.fill:6.3f}"]
        cells += [f"{self.efficiency[case]:6.3f}" for case in CASES]
        cells += [f"{self.bias[case]:6.3f}" for case in CASES]
        return "  ".join([*cells, f"{self.seconds:7.2f}", ", ".join(better) or "none"])


def rows_of(lens: np.ndarray, max_tokens: int) -> list[Row]:
    """Measure each packing scheme on clips with `lens` tokens. Return a row for each scheme; the rows of wands come last."""
    cost_of = {
        model: np.array([float(shape.forward_flops((length,))) for length in lens.tolist()])
        for model, shape in MODELS.items()
    }
    rows = []
    for name, (pack, cut) in SCHEMES.items():
        start = time.perf_counter()
        bins = pack(lens, max_tokens)
        row = Row(name, lens.sum() / len(bins) / max_tokens, time.perf_counter() - start)
        for model, dp in CASES:
            row.add((model, dp), cut(bins, dp, lens, cost_of[model]), lens, cost_of[model])
        rows.append(row)
    return [
        *rows,
        wands_row("wands", lens, max_tokens, cost_of),
        wands_row("  4 micro steps", lens, max_tokens, cost_of, micro_steps=4),
        wands_row("  windows of 2048", lens, max_tokens, cost_of, buffer_size=2048),
    ]


def wands_row(
    name: str,
    lens: np.ndarray,
    max_tokens: int,
    cost_of: dict[str, np.ndarray],
    micro_steps: int = 1,
    buffer_size: int | None = None,
) -> Row:
    """Plan an epoch with wands, and return its row of the table.

    Efficiency counts the time that ranks wait for the slowest rank in each micro step.

    Args:
        name: name of the row.
        lens: number of tokens of each clip.
        max_tokens: largest number of tokens in a bin.
        cost_of: maps each model to the cost of each clip.
        micro_steps: number of bins per rank and step.
        buffer_size: number of clips in a window that is packed separately; None packs the whole epoch at once.
    """
    row = Row(name, 1.0, 0.0, aside=micro_steps > 1 or buffer_size is not None)
    windows = None
    if buffer_size:
        windows = storage_windows(np.stack(np.divmod(np.arange(len(lens)), 512), axis=1), buffer_size, seed=0)
    for model, dp in CASES:
        start = time.perf_counter()
        plan = plan_epoch(
            lens,
            max_tokens=max_tokens,
            bins_per_step=dp * micro_steps,
            seed=0,
            epoch=0,
            cost=MODELS[model].forward_flops,
            level_bins=dp,
            windows=windows,
        )
        row.seconds = time.perf_counter() - start
        row.fill = min(row.fill, plan.fill)
        cost = cost_of[model]
        dealt = [assign_bins(step, dp, lambda bin, cost=cost: cost[list(bin)].sum()) for step in plan.steps]
        row.efficiency[model, dp] = efficiency([ranks for step in dealt for ranks in step], cost)
        row.bias[model, dp] = bias_beyond_chance(plan.steps, lens)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=20_000, help="clips of each mix [default: %(default)s]")
    parser.add_argument(
        "--large", type=int, default=1_000_000, help="number of clips of the last timing; 0 skips the timing"
    )
    args = parser.parse_args()
    heads = [
        "  ".join(f"{text:>6}" for text in (*line, *line))
        for line in zip(*[(m, f"dp{dp}") for m, dp in CASES], strict=True)
    ]
    wide = 4 * 6 + 3 * 2
    print(f"{'':<22}  {'':>6}  {'efficiency':<{wide}}  {'bias':<{wide}}")
    print(f"{'':<22}  {'':>6}  {heads[0]}")
    print(f"{'scheme':<22}  {'fill':>6}  {heads[1]}  {'seconds':>7}  better")
    ours: dict[int, list[Row]] = {}
    for mix, shares in MIXES.items():
        lens = length_mix(*shares, args.clips)
        for max_tokens in CAPACITIES:
            print(f"mix {mix}, {len(lens)} clips of {lens.mean():.0f} tokens, max_tokens {max_tokens}")
            rows = rows_of(lens, max_tokens)
            print("\n".join(row.line(rows) for row in rows), flush=True)
            ours.setdefault(max_tokens, []).append(next(row for row in rows if row.name == "wands"))
    for max_tokens, found in ours.items():
        least = min(min(row.efficiency.values()) for row in found)
        most = max(max(row.bias.values()) for row in found)
        fill = min(row.fill for row in found)
        print(f"wands at {max_tokens}: fill >= {fill:.3f}, efficiency >= {least:.3f}, bias <= {most:.3f}")
    if args.large:
        lens = np.tile(length_mix(*MIXES["A"]), -(-args.large // 20_000))[: args.large]
        start = time.process_time()
        cost = MODELS["14B"].forward_flops
        plan = plan_epoch(lens, max_tokens=CAPACITIES[0], bins_per_step=64, seed=0, epoch=0, cost=cost)
        seconds = time.process_time() - start
        print(f"planning {args.large} clips of mix A: {seconds:.1f} s of one core, {plan.num_steps} steps")


if __name__ == "__main__":
    main()
