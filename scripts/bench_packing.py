"""How full, how level and how mixed the bins of a step are: wands' plan beside the usual ways to pack, on mixes of Wan clips.

    python scripts/bench_packing.py            # a minute or two on one core, no GPU, no data

One table. A row is a scheme on a mix of clips and a capacity of bins, and its columns are
fill         tokens / (bins x max_tokens); for wands of full steps: the last is spread thin on purpose.
efficiency   mean over slowest rank, summed over the steps of an epoch, one bin per rank and step, cost = exact FLOPs of a
             forward of that model. With varlen attention an unfilled bin wastes nothing; waiting for the slowest rank is the
             whole waste. For 1.3B and 14B, 8 and 64 data-parallel ranks.
bias         mean over the steps of the Kolmogorov-Smirnov distance between a step's clip lengths and the data's, less what
             random steps of as many clips have: 0 is a step as by chance, below 0 one that is more like the data.
seconds      to pack one epoch (for wands the plan for 14B and dp 64), pure Python and numpy.
micro steps  wands with steps of 4 bins on every rank and level_bins = dp, as with gradient accumulation: every micro step is
             level, and a step takes costly and cheap ones. Its steps are four times as large, so it beats nobody here.
better       schemes that are at least as good in all three and better in one, in any of the four cases.

The other schemes are written as plainly as possible on purpose: they are what the plan is checked against.
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
    """Token counts of clips at 480p or 720p in five aspect ratios, 17 to 81 frames; int64 [num_samples]."""
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
    """No packing."""
    return [[i] for i in range(len(lens))]


def first_fit(lens: np.ndarray, order: Sequence[int], max_tokens: int) -> Bins:
    """The first bin that has room."""
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
    """The fullest bin that has room."""
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
    """First-fit in arrival order over a buffer that is emptied before it is filled again."""
    order = np.random.default_rng(0).permutation(len(lens))
    chunks = [order[i : i + buffer] for i in range(0, len(order), buffer)]
    return [bin for chunk in chunks for bin in first_fit(lens, chunk, max_tokens)]


def decreasing(fit: Callable[..., Bins]) -> Callable[[np.ndarray, int], Bins]:
    """The whole epoch at once, longest first."""
    return lambda lens, max_tokens: fit(lens, np.argsort(-lens, kind="stable"), max_tokens)


def same_length(lens: np.ndarray, max_tokens: int) -> Bins:
    """Bucketing: a bin holds as many clips of one length as fit."""
    bins: Bins = []
    for length in np.unique(lens).tolist():
        clips = np.flatnonzero(lens == length).tolist()
        size = max_tokens // length
        bins += [clips[i : i + size] for i in range(0, len(clips), size)]
    return bins


def in_random_steps(bins: Bins, dp_size: int, lens: np.ndarray, cost_of: np.ndarray) -> list[Bins]:
    """Steps of dp_size bins in random order, the last one filled up with empty bins."""
    bins = [bins[i] for i in np.random.default_rng(1).permutation(len(bins))]
    bins += [[]] * (-len(bins) % dp_size)
    return [bins[i : i + dp_size] for i in range(0, len(bins), dp_size)]


def in_windows(num_steps: int) -> Callable[[Bins, int, np.ndarray, np.ndarray], list[Bins]]:
    """Bins in random order, sorted by cost over every so many steps."""

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
    """A step's bins are of one bucket, but where a bucket ends."""
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
    """Mean over slowest rank."""
    costs = np.array([[cost_of[list(bin)].sum() for bin in step] for step in steps])
    return costs.mean(axis=1).sum() / costs.max(axis=1).sum()


def length_bias(steps: Steps, lens: np.ndarray) -> float:
    """Mean Kolmogorov-Smirnov distance of a step's lengths from all lengths."""
    values, counts = np.unique(lens, return_counts=True)
    whole = counts.cumsum() / len(lens)
    distances = []
    for step in steps:
        inside = np.sort(lens[[i for bin in step for i in bin]])
        distances.append(np.abs(np.searchsorted(inside, values, side="right") / len(inside) - whole).max())
    return float(np.mean(distances))


def bias_beyond_chance(steps: Steps, lens: np.ndarray) -> float:
    """`length_bias` less that of random steps of as many clips."""
    steps = [step for step in steps if any(step)]
    ends = np.cumsum([sum(map(len, step)) for step in steps])[:-1]
    drawn = np.split(np.random.default_rng(2).permutation(len(lens)), ends)
    return length_bias(steps, lens) - length_bias([[part.tolist()] for part in drawn], lens)


@dataclass
class Row:
    """What one scheme reaches on one mix and capacity; efficiency and bias by (model, dp). Rows `aside` are not compared."""

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
        """At least as good in fill, efficiency and bias, and better in one."""
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
    """One row per scheme, wands last."""
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
    """The plan, for steps of so many bins on every rank; ranks wait for each other in each micro step."""
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
    parser.add_argument("--clips", type=int, default=20_000, help="of each mix [default: %(default)s]")
    parser.add_argument(
        "--large", type=int, default=1_000_000, help="clips of the last timing; 0 leaves it out"
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
