"""The distribution of noise levels, against formulas written a second way."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wands.config.recipe import FlowConfig
from wands.flow.rng import philox
from wands.flow.sigmas import sample_sigma, shift_sigma, sigma_quantile, sigma_weight

SHIFTS = (1.0, 3.0, 5.0, 8.0, 12.0)
RANGES = ((0.0, 1.0), (0.875, 1.0), (0.0, 0.875), (0.9, 1.0), (0.0, 0.9), (0.3, 0.55))


class Quantiles:
    """Stands for a generator: its second number of each pair runs evenly through (0, 1)."""

    def __init__(self, count: int, pick: float = 0.999999) -> None:
        self.values = iter([v for i in range(count) for v in (pick, (i + 0.5) / count)])

    def random(self) -> float:
        return next(self.values)


def base_cdf(flow: FlowConfig) -> Callable[[np.ndarray], np.ndarray]:
    """CDF before the shift."""
    if flow.timestep_sampling == "uniform":
        return lambda x: x
    if flow.timestep_sampling == "logit_normal":

        def logit_normal(x: np.ndarray) -> np.ndarray:
            inner = np.clip(x, 1e-12, 1 - 1e-12)
            z = (np.log(inner / (1 - inner)) - flow.logit_mean) / flow.logit_std
            return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in np.atleast_1d(z)])

        return logit_normal
    u = np.linspace(0.0, 1.0, 200_001)
    values = 1 - u - flow.mode_scale * (np.cos(np.pi / 2 * u) ** 2 - 1 + u)
    return lambda x: np.interp(x, values[::-1], 1 - u[::-1])


def cdf(flow: FlowConfig, low: float, high: float) -> Callable[[np.ndarray], np.ndarray]:
    """CDF of the shifted mixture, cut to [low, high] in sigma: what a rejection sampler would converge to."""
    base = base_cdf(flow)
    s = flow.flow_shift

    def whole(x: np.ndarray) -> np.ndarray:
        x = np.atleast_1d(np.asarray(x, dtype=np.float64))
        return flow.mix_uniform * x + (1 - flow.mix_uniform) * base(x / (s - (s - 1) * x))

    bottom = whole(low)[0]
    top = whole(high)[0]
    return lambda x: (whole(x) - bottom) / (top - bottom)


def ks_distance(draws: np.ndarray, expected: Callable[[np.ndarray], np.ndarray]) -> float:
    ordered = np.sort(draws)
    theory = expected(ordered)
    n = len(draws)
    return max((np.arange(1, n + 1) / n - theory).max(), (theory - np.arange(n) / n).max())


@pytest.mark.parametrize(
    "shift", [*SHIFTS[:2], *(pytest.param(x, marks=pytest.mark.slow) for x in SHIFTS[2:])]
)
@pytest.mark.parametrize("mix_uniform", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
def test_draws_follow_the_formula_inside_every_range(sampling: str, mix_uniform: float, shift: float):
    flow = FlowConfig(
        timestep_sampling=sampling, mix_uniform=mix_uniform, flow_shift=shift, logit_mean=0.3, logit_std=1.2
    )
    n = 600
    for low, high in RANGES:
        generator = philox(0, "ks", sampling)
        draws = np.array([sample_sigma(generator, flow, low, high) for _ in range(n)])
        assert draws.min() >= low
        assert draws.max() <= high
        # The distance exceeds this once in a million for the right distribution.
        assert ks_distance(draws, cdf(flow, low, high)) < 2.7 / math.sqrt(n)


def test_the_ks_check_sees_a_wrong_distribution():
    flow = FlowConfig(flow_shift=5.0, mix_uniform=0.0)
    draws = np.array([shift_sigma(sigma, 3.0) for sigma in philox(0).random(600)])
    assert ks_distance(draws, cdf(flow, 0.0, 1.0)) > 2.7 / math.sqrt(600)


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_even_quantiles_hit_the_cdf_exactly(sampling: str, shift: float):
    flow = FlowConfig(timestep_sampling=sampling, mix_uniform=0.0, flow_shift=shift)
    for low, high in RANGES:
        generator = Quantiles(100)
        draws = np.sort([sample_sigma(generator, flow, low, high) for _ in range(100)])
        np.testing.assert_allclose(cdf(flow, low, high)(draws), (np.arange(100) + 0.5) / 100, atol=2e-5)


@pytest.mark.parametrize(
    "mix_uniform", [0.3, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))]
)
@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
def test_a_quantile_has_its_share_of_the_draws_below_it(sampling: str, mix_uniform: float):
    for shift in SHIFTS:
        flow = FlowConfig(
            timestep_sampling=sampling, mix_uniform=mix_uniform, flow_shift=shift, logit_mean=0.3
        )
        for low, high in RANGES:
            probabilities = np.arange(1, 10) / 10
            levels = np.array([sigma_quantile(flow, p, low, high) for p in probabilities])
            np.testing.assert_allclose(cdf(flow, low, high)(levels), probabilities, atol=2e-5)
    generator = philox(0, "quantiles")
    n = 4000
    draws = np.sort([sample_sigma(generator, flow, 0.3, 0.55) for _ in range(n)])
    for p in (0.1, 0.5, 0.9):
        below = np.searchsorted(draws, sigma_quantile(flow, p, 0.3, 0.55)) / n
        assert below == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / n))


MASS = {  # share of sigmas at or above the boundary, published table
    ("uniform", 0.875): {1: 0.125, 2: 0.222, 3: 0.300, 5: 0.417, 8: 0.533, 12: 0.632},
    ("uniform", 0.900): {1: 0.100, 2: 0.182, 3: 0.250, 5: 0.357, 8: 0.471, 12: 0.571},
    ("logit_normal", 0.875): {1: 0.026, 2: 0.105, 3: 0.198, 5: 0.368, 12: 0.705},
    ("logit_normal", 0.900): {1: 0.014, 2: 0.066, 3: 0.136, 5: 0.278, 12: 0.613},
}


@pytest.mark.parametrize(("sampling", "boundary"), MASS)
def test_mass_above_the_boundary(sampling: str, boundary: float):
    for shift, expected in MASS[sampling, boundary].items():
        flow = FlowConfig(timestep_sampling=sampling, logit_std=1.0, mix_uniform=0.0, flow_shift=shift)
        generator = Quantiles(2000)
        sigmas = np.array([sample_sigma(generator, flow) for _ in range(2000)])
        assert (sigmas >= boundary).mean() == pytest.approx(expected, abs=0.0011)


def test_mode_sampling_is_esser_equation_20():
    flow = FlowConfig(timestep_sampling="mode", mode_scale=1.29, flow_shift=1.0, mix_uniform=0.0)
    generator = Quantiles(1000)
    draws = np.sort([sample_sigma(generator, flow) for _ in range(1000)])
    u = (np.arange(1000) + 0.5) / 1000
    expected = np.sort(1 - u - 1.29 * (np.cos(np.pi / 2 * u) ** 2 - 1 + u))
    np.testing.assert_allclose(draws, expected, atol=1e-6)


def test_mixture_shares_out_by_mass_inside_the_range():
    # Shift 12 puts 0.632 of the shifted part above 0.875, but only 0.125 of the uniform part.
    flow = FlowConfig(timestep_sampling="uniform", flow_shift=12.0, mix_uniform=0.5)
    share = 0.5 * 0.125 / (0.5 * 0.125 + 0.5 * 0.6316)
    for pick, uniform in ((share - 0.01, True), (share + 0.01, False)):
        sigma = sample_sigma(Quantiles(1, pick), flow, 0.875, 1.0)
        assert (sigma == pytest.approx(0.9375)) is uniform


@given(
    sampling=st.sampled_from(["uniform", "logit_normal", "mode"]),
    shift=st.floats(0.1, 30.0),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted).filter(lambda b: b[1] - b[0] > 1e-6),
    mix=st.floats(0, 1),
    mean=st.floats(-8, 8),
    std=st.floats(0.05, 4),
    numbers=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
)
def test_a_draw_is_an_fp32_number_inside_the_range(sampling, shift, bounds, mix, mean, std, numbers):
    flow = FlowConfig(
        timestep_sampling=sampling, flow_shift=shift, mix_uniform=mix, logit_mean=mean, logit_std=std
    )
    generator = Quantiles(0)
    generator.values = iter(numbers)
    low, high = bounds
    sigma = sample_sigma(generator, flow, low, high)
    assert low <= sigma <= high
    assert sigma < high or high == 1.0
    assert float(np.float32(sigma)) == sigma


@pytest.mark.parametrize("boundary", [0.875, 0.9])
def test_touching_ranges_never_overlap_in_timesteps(boundary: float):
    # The expert is chosen by t >= 1000 * boundary, so fp32 rounding must not carry a sample across.
    flow = FlowConfig(flow_shift=1.0, mix_uniform=0.0)
    top = Quantiles(1)
    top.values = iter([0.5, 1 - 2.0**-53])
    bottom = Quantiles(1)
    bottom.values = iter([0.5, 0.0])
    below = torch.tensor(sample_sigma(top, flow, 0.0, boundary)) * 1000
    above = torch.tensor(sample_sigma(bottom, flow, boundary, 1.0)) * 1000
    assert float(below) < boundary * 1000 <= float(above)


@given(sigma=st.floats(0, 1), shift=st.floats(0.05, 20))
def test_shift_is_monotone_keeps_the_ends_and_has_its_inverse(sigma: float, shift: float):
    moved = shift_sigma(sigma, shift)
    assert 0.0 <= moved <= 1.0 + 1e-14  # float64 rounding; `sample_sigma` returns fp32 inside the range
    assert shift_sigma(moved, 1 / shift) == pytest.approx(sigma, abs=1e-9)
    assert (moved >= sigma - 1e-15) if shift >= 1 else (moved <= sigma + 1e-15)
    assert (shift_sigma(0.0, shift), shift_sigma(1.0, shift)) == (0.0, pytest.approx(1.0))


def test_weightings():
    sigmas = torch.linspace(0, 1, 10_001)
    none = sigma_weight(sigmas, FlowConfig(weighting="none"))
    linear = sigma_weight(sigmas, FlowConfig(weighting="linear", flow_shift=3.0))
    bell = sigma_weight(sigmas, FlowConfig(weighting="bell"))
    assert {w.dtype for w in (none, linear, bell)} == {torch.float32}
    assert torch.equal(none, torch.ones_like(sigmas))
    torch.testing.assert_close(linear, 1 + 3 * sigmas)
    assert float(torch.trapezoid(bell, sigmas)) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(bell, bell.flip(0), atol=1e-5, rtol=0)
    assert float(bell[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(bell[5000]) == pytest.approx(float(bell.max()))
    ratio = (math.exp(-2 * 0.3**2) - math.exp(-0.5)) / (1 - math.exp(-0.5))
    assert float(bell[2000] / bell[5000]) == pytest.approx(ratio, rel=1e-5)
