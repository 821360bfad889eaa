"""Draw, shift and weight noise levels (sigma).

sigma is the fraction of noise in x_t = (1 - sigma) * x0 + sigma * noise, where x0 is the clean sample. The timestep that the
model gets is 1000 * sigma. Single values are Python floats (float64); `sample_sigma` rounds its result to fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from wands.config.recipe import FlowConfig

NUM_TRAIN_TIMESTEPS = 1000
"""Timestep of pure noise (sigma 1). Wan's sinusoidal timestep features expect timesteps from 0 to 1000."""

BASE_TOKENS = 32760
"""Tokens of a clip of 832 x 480 pixels and 81 frames. With `flow.shift_by_size`, its shift is exactly `flow.flow_shift`."""

_NORMAL = NormalDist()


def shift_sigma(sigma: float, shift: float) -> float:
    """Return shift * sigma / (1 + (shift - 1) * sigma). A shift above 1 increases sigma. The inverse is a shift by 1 / shift.

    Source: Esser et al. 2024 (arXiv 2403.03206), eq. 23.
    """
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def with_clip_shift(flow: FlowConfig, num_tokens: int) -> FlowConfig:
    """Return a copy of `flow` with the shift for a clip of `num_tokens`: flow.flow_shift * sqrt(num_tokens / `BASE_TOKENS`).

    If `flow.shift_by_size` is off, return `flow` unchanged. Source: Esser et al. 2024 (arXiv 2403.03206), eq. 23 with n =
    `BASE_TOKENS`.
    """
    if not flow.shift_by_size:
        return flow
    return flow.model_copy(update={"flow_shift": flow.flow_shift * math.sqrt(num_tokens / BASE_TOKENS)})


def sample_sigma(
    generator: np.random.Generator,
    flow: FlowConfig,
    low: float = 0.0,
    high: float = 1.0,
    stratum: float | None = None,
) -> float:
    """Draw a noise level, rounded to fp32, from the recipe's distribution truncated to the range from `low` to `high`.

    The distribution mixes `flow.timestep_sampling` after the shift by `flow.flow_shift` with a uniform distribution of weight
    `flow.mix_uniform`, which is not shifted. The inverse CDF is truncated instead of rejecting draws, so every call takes exactly
    two numbers from the generator.

    `high` itself is excluded unless it is 1, so that the ranges of two experts do not overlap. A `stratum` from 0 to 1 determines
    sigma instead of the two random numbers; evenly spread strata give the distribution.
    """
    assert 0.0 <= low < high <= 1.0, f"low={low} and high={high} must satisfy 0 <= low < high <= 1"
    pick = generator.random()
    quantile = max(generator.random(), 2.0**-54)  # random() may return 0, whose inverse CDF is infinite
    base_low, base_high = (shift_sigma(bound, 1.0 / flow.flow_shift) for bound in (low, high))
    uniform_mass = flow.mix_uniform * (high - low)
    base_mass = (1.0 - flow.mix_uniform) * _mass(flow, base_low, base_high)
    if stratum is not None:
        pick = stratum
        share = uniform_mass / ((uniform_mass + base_mass) or 1.0)
        quantile = max(pick / share if pick < share else (pick - share) / (1.0 - share), 2.0**-54)
    # In a range whose mass underflows in float64, sigma is uniform.
    if base_mass <= 0.0 or pick * (uniform_mass + base_mass) < uniform_mass:
        sigma = low + (high - low) * quantile
    else:
        sigma = shift_sigma(_truncated_ppf(flow, quantile, base_low, base_high), flow.flow_shift)
    return _to_fp32_inside(sigma, low, high)


def sigma_quantile(flow: FlowConfig, quantile: float, low: float = 0.0, high: float = 1.0) -> float:
    """Return the noise level below which a draw of `sample_sigma` falls with probability `quantile`, rounded to fp32."""
    base_low = shift_sigma(low, 1.0 / flow.flow_shift)

    def mass(sigma: float) -> float:
        base = _mass(flow, base_low, shift_sigma(sigma, 1.0 / flow.flow_shift))
        return flow.mix_uniform * (sigma - low) + (1.0 - flow.mix_uniform) * base

    whole = mass(high)

    def is_below(sigma: float) -> bool:
        return (mass(sigma) / whole if whole > 0.0 else (sigma - low) / (high - low)) < quantile

    return _to_fp32_inside(_bisect(is_below, low, high)[0], low, high)


def sigma_weight(sigmas: Tensor, flow: FlowConfig) -> Tensor:
    """Return the loss weight of each noise level, fp32 [S], according to `flow.weighting`.

    "none": 1. "linear": 1 + flow_shift * sigma. "bell": c (g(sigma) - g(0)) with g(sigma) = exp(-2 (sigma - 1/2)^2), which is 0
    at sigma 0 and 1; c makes the mean over sigma from 0 to 1 equal to 1.
    """
    if flow.weighting == "none":
        return torch.ones_like(sigmas)
    if flow.weighting == "linear":
        return 1.0 + flow.flow_shift * sigmas
    ends = math.exp(-0.5)
    mean = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - ends  # mean over [0, 1] of the numerator below
    return (torch.exp(-2.0 * (sigmas - 0.5) ** 2) - ends) / mean


def _mass(flow: FlowConfig, low: float, high: float) -> float:
    """Return the probability of a sigma between `low` and `high` in `flow.timestep_sampling`, before the shift."""
    if flow.timestep_sampling == "uniform":
        return high - low
    if flow.timestep_sampling == "logit_normal":
        below, above = _z_bounds(flow, low, high)
        return _NORMAL.cdf(above) - _NORMAL.cdf(below)
    return _mode_inverse(low, flow.mode_scale) - _mode_inverse(high, flow.mode_scale)


def _truncated_ppf(flow: FlowConfig, quantile: float, low: float, high: float) -> float:
    """Map a quantile from 0 to 1 to a sigma in [low, high] of `flow.timestep_sampling`, before the shift.

    sigma falls as `quantile` grows for "mode", and for "logit_normal" if logit(low) > `flow.logit_mean`. Source: Esser et al.
    2024 (arXiv 2403.03206), eq. 19 (logit-normal) and 20 (mode).
    """
    if flow.timestep_sampling == "uniform":
        return low + (high - low) * quantile
    if flow.timestep_sampling == "logit_normal":
        below, above = _z_bounds(flow, low, high)
        start = _NORMAL.cdf(below)
        end = _NORMAL.cdf(above)
        probability = min(max(start + (end - start) * quantile, 5e-324), 1.0 - 2.0**-53)
        z = _NORMAL.inv_cdf(probability)
        logit = flow.logit_mean + flow.logit_std * (-z if _mirrored(flow, low) else z)
        return 1.0 / (1.0 + math.exp(-logit)) if logit > -700.0 else 0.0
    start = _mode_inverse(high, flow.mode_scale)
    end = _mode_inverse(low, flow.mode_scale)
    return _mode(start + (end - start) * quantile, flow.mode_scale)


def _z_bounds(flow: FlowConfig, low: float, high: float) -> tuple[float, float]:
    """Return the z-scores of the logits of `low` and `high`, (logit - flow.logit_mean) / flow.logit_std.

    If both logits are above the mean, return (-z of `high`, -z of `low`): the normal CDF is then near 0, where float64 is more
    precise than near 1.
    """
    z = [(_logit(bound) - flow.logit_mean) / flow.logit_std for bound in (low, high)]
    return (-z[1], -z[0]) if _mirrored(flow, low) else (z[0], z[1])


def _mirrored(flow: FlowConfig, low: float) -> bool:
    return _logit(low) > flow.logit_mean


def _logit(value: float) -> float:
    if value <= 0.0:
        return -math.inf
    return math.inf if value >= 1.0 else math.log(value / (1.0 - value))


def _mode(uniform: float, scale: float) -> float:
    """Map `uniform` in [0, 1] to a sigma that falls from 1 to 0, for `flow.timestep_sampling: mode`.

    If scale > 0, sigma falls most slowly at `uniform` = 0.5.
    """
    return 1.0 - uniform - scale * (math.cos(math.pi * uniform / 2) ** 2 - 1.0 + uniform)


def _mode_inverse(value: float, scale: float) -> float:
    """Invert `_mode`, which has no inverse in closed form."""
    left, right = _bisect(lambda uniform: _mode(uniform, scale) > value, 0.0, 1.0)
    return 0.5 * (left + right)


def _bisect(is_below: Callable[[float], bool], left: float, right: float) -> tuple[float, float]:
    for _ in range(60):
        middle = 0.5 * (left + right)
        left, right = (middle, right) if is_below(middle) else (left, middle)
    return left, right


def _to_fp32_inside(sigma: float, low: float, high: float) -> float:
    """Round sigma to fp32 so that sigma and the fp32 timestep 1000 * sigma stay in the range, without `high` unless it is 1.

    Ordinary rounding could move a sample into the range of the other expert.
    """
    value = np.float32(min(max(sigma, low), high))
    up = np.float32(2.0)
    down = np.float32(-1.0)
    while min(float(value) - low, _timestep(value) - NUM_TRAIN_TIMESTEPS * low) < 0.0:
        value = np.nextafter(value, up)
    while high < 1.0 and max(float(value) - high, _timestep(value) - NUM_TRAIN_TIMESTEPS * high) >= 0.0:
        value = np.nextafter(value, down)
    return float(value)


def _timestep(sigma: np.float32) -> float:
    return float(sigma * np.float32(NUM_TRAIN_TIMESTEPS))
