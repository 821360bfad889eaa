"""How full and how level the bins are: wands' plan beside the usual ways to pack, on mixes of Wan clips.

    python scripts/bench_packing.py            # under a minute on one core, no GPU, no data

fill         tokens / (bins x max_tokens); for wands of full steps: the last is spread thin on purpose.
1.3B, 14B    compute efficiency: mean over slowest rank, summed over the steps of an epoch, one bin per rank
             and step, cost = exact FLOPs of a forward of that model. With varlen attention an unfilled bin
             wastes nothing; waiting for the slowest rank is the whole waste.
length bias  mean over the steps at dp 64, for the worse model, of the Kolmogorov-Smirnov distance between a
             step's clip lengths and the data's. Schemes that order bins at random show its floor.
seconds      to pack one epoch (the plan for dp 64), pure Python and numpy.

The other schemes are written as plainly as possible on purpose: they are what the plan is checked against.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from wands.data.packing import plan_epoch
from wands.variants import VARIANTS

MIXES = {"A": (0.3, 0.35), "B": (0.0, 0.35), "C": (0.6, 0.05)}  # share of 720p, share of 81-frame clips
CAPACITIES = (75_600, 131_072)
DP_SIZES = (8, 64)
MODELS = {"1.3B": VARIANTS["wan2.1-t2v-1.3b"].dit, "14B": VARIANTS["wan2.1-t2v-14b"].dit}

Bins = list[list[int]]


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


REFERENCES: dict[str, Callable[[np.ndarray, int], Bins]] = {
    "one clip per rank": one_per_rank,
    "first-fit, buffer 512": first_fit_buffered,
    "first-fit decreasing": decreasing(first_fit),
    "best-fit decreasing": decreasing(best_fit),
}


def in_random_steps(bins: Bins, dp_size: int) -> list[Bins]:
    """Steps of dp_size bins in random order, the last one filled up with empty bins."""
    bins = [bins[i] for i in np.random.default_rng(1).permutation(len(bins))]
    bins += [[]] * (-len(bins) % dp_size)
    return [bins[i : i + dp_size] for i in range(0, len(bins), dp_size)]


def efficiency(steps: Sequence[Sequence[Sequence[int]]], cost_of: np.ndarray) -> float:
    """Mean over slowest rank."""
    costs = np.array([[cost_of[list(bin)].sum() for bin in step] for step in steps])
    return costs.mean(axis=1).sum() / costs.max(axis=1).sum()


def length_bias(steps: Sequence[Sequence[Sequence[int]]], lens: np.ndarray) -> float:
    """Mean Kolmogorov-Smirnov distance of a step's lengths from all lengths."""
    values, counts = np.unique(lens, return_counts=True)
    whole = counts.cumsum() / len(lens)
    distances = []
    for step in steps:
        inside = np.sort(lens[[i for bin in step for i in bin]])
        distances.append(np.abs(np.searchsorted(inside, values, side="right") / len(inside) - whole).max())
    return float(np.mean(distances))


def line(name: str, lens: np.ndarray, fill: float, steps: dict[tuple[str, int], list], seconds: float) -> str:
    """One scheme; `steps` by (model, dp)."""
    cells = [f"{name:<22}", f"{fill:6.3f}"]
    for model, shape in MODELS.items():
        cost_of = np.array([float(shape.forward_flops((length,))) for length in lens.tolist()])
        cells += [f"{efficiency(steps[model, dp], cost_of):6.3f}" for dp in DP_SIZES]
    bias = max(length_bias(steps[model, DP_SIZES[-1]], lens) for model in MODELS)
    return "  ".join([*cells, f"{bias:6.3f}", f"{seconds:7.2f}"])


def lines_of(lens: np.ndarray, max_tokens: int) -> list[str]:
    """One line per scheme."""
    lines = []
    for name, pack in REFERENCES.items():
        start = time.perf_counter()
        bins = pack(lens, max_tokens)
        seconds = time.perf_counter() - start
        by_dp = {dp: in_random_steps(bins, dp) for dp in DP_SIZES}
        steps = {(model, dp): by_dp[dp] for model in MODELS for dp in DP_SIZES}
        lines.append(line(name, lens, lens.sum() / len(bins) / max_tokens, steps, seconds))
    steps = {}
    for model, shape in MODELS.items():
        for dp in DP_SIZES:
            start = time.perf_counter()
            plan = plan_epoch(
                lens, max_tokens=max_tokens, bins_per_step=dp, seed=0, epoch=0, cost=shape.forward_flops
            )
            seconds = time.perf_counter() - start
            steps[model, dp] = plan.steps
    return [*lines, line("wands", lens, plan.fill, steps, seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--large", type=int, default=1_000_000, help="clips of the last timing; 0 leaves it out"
    )
    args = parser.parse_args()
    columns = [(model, f"dp{dp}") for model in MODELS for dp in DP_SIZES]
    models, dps = ("  ".join(f"{column[i]:>6}" for column in columns) for i in (0, 1))
    for mix, shares in MIXES.items():
        lens = length_mix(*shares)
        for max_tokens in CAPACITIES:
            title = (
                f"mix {mix}: {len(lens)} clips, {lens.mean():.0f} tokens on average; max_tokens {max_tokens}"
            )
            print(f"\n{title}\n{'':<22}  {'':>6}  {models}  {'length':>6}")
            print(f"{'scheme':<22}  {'fill':>6}  {dps}  {'bias':>6}  {'seconds':>7}")
            print("\n".join(lines_of(lens, max_tokens)), flush=True)
    if args.large:
        lens = np.tile(length_mix(*MIXES["A"]), -(-args.large // 20_000))[: args.large]
        start = time.perf_counter()
        cost = MODELS["14B"].forward_flops
        plan = plan_epoch(lens, max_tokens=CAPACITIES[0], bins_per_step=64, seed=0, epoch=0, cost=cost)
        seconds = time.perf_counter() - start
        print(f"\nplanning {args.large} clips of mix A: {seconds:.1f} s, {plan.num_steps} steps")


if __name__ == "__main__":
    main()
