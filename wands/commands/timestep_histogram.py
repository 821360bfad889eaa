"""Text histogram of the timesteps that a training run with a given `flow` section of the recipe would sample."""

from __future__ import annotations

import numpy as np

from wands.config.recipe import FlowConfig
from wands.flow.rng import philox
from wands.flow.sigmas import BASE_TOKENS, NUM_TRAIN_TIMESTEPS, sample_sigma

BAR_WIDTH, NUM_BARS = 50, 20
NUM_SAMPLES = 20_000
"""Number of random timesteps. The standard error of a bar is then below 0.4 % of all samples."""


def timestep_histogram(flow: FlowConfig, seed: int, sigma_range: tuple[float, float] = (0.0, 1.0)) -> str:
    """Return a text histogram of random timesteps. The timesteps are sampled and shifted as in training.

    Args:
        flow: `flow` section of a recipe.
        seed: random seed.
        sigma_range: (lowest, highest) noise level of the trained expert.

    Returns:
        ASCII lines: a heading, one line per bar from high noise to low noise, and a line with the mean and the
        quantiles.
    """
    generator = philox(seed, "histogram")
    sigmas = [sample_sigma(generator, flow, *sigma_range) for _ in range(NUM_SAMPLES)]
    timesteps = np.array(sigmas) * NUM_TRAIN_TIMESTEPS
    counts, edges = np.histogram(timesteps, bins=NUM_BARS, range=(0, NUM_TRAIN_TIMESTEPS))
    heights = np.round(BAR_WIDTH * counts / counts.max()).astype(int)
    rows = zip(edges, edges[1:], counts / NUM_SAMPLES, heights, strict=False)
    bars = [f"{low:6.0f} - {high:4.0f}  {share:6.1%}  {'#' * height}" for low, high, share, height in rows]
    quantiles = ", ".join(f"{q}% {np.percentile(timesteps, q):.0f}" for q in (5, 25, 50, 75, 95))
    summary = f"mean {timesteps.mean():.0f}; {quantiles}"
    return "\n".join([_heading(flow), "  timestep     share", *reversed(bars), summary])


def _heading(flow: FlowConfig) -> str:
    details = {"logit_normal": f"({flow.logit_mean:g}, {flow.logit_std:g})", "mode": f"({flow.mode_scale:g})"}
    sampling = flow.timestep_sampling + details.get(flow.timestep_sampling, "")
    mixture = f", {flow.mix_uniform:.0%} uniform unshifted" if flow.mix_uniform else ""
    by_size = f", for a clip of {BASE_TOKENS:,} tokens" * flow.shift_by_size
    return f"{flow.preset}: {sampling}, flow_shift {flow.flow_shift:g}{mixture}{by_size}"
