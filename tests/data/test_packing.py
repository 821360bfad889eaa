"""The plan of an epoch: complete, reproducible, as full as best-fit decreasing and much more level."""

from __future__ import annotations

import hashlib
import time
from collections import Counter

import numpy as np
import pytest
from bench_packing import MIXES, best_fit, decreasing, length_mix
from hypothesis import given, settings
from hypothesis import strategies as st

import wands.data.packing as packing
from wands.data.packing import EpochPlan, assign_bins, bin_costs, plan_epoch
from wands.errors import DataError
from wands.variants import VARIANTS

COST = (1.0, 0.01)
SHAPE = VARIANTS["wan2.1-t2v-14b"].dit


def plan(
    lens, max_tokens: int = 100, bins_per_step: int = 4, seed: int = 0, epoch: int = 0, cost=COST
) -> EpochPlan:
    return plan_epoch(
        np.array(lens), max_tokens=max_tokens, bins_per_step=bins_per_step, seed=seed, epoch=epoch, cost=cost
    )


def samples_of(found: EpochPlan) -> list[int]:
    return [i for step in found.steps for bin in step for i in bin]


@settings(max_examples=150, deadline=None)
@given(
    lens=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    bins_per_step=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 50),
)
def test_invariants(lens: list[int], bins_per_step: int, seed: int, epoch: int):
    found = plan(lens, bins_per_step=bins_per_step, seed=seed, epoch=epoch)
    assert sorted(samples_of(found)) == list(range(len(lens)))
    for number, step in enumerate(found.steps):
        assert len(step) == bins_per_step
        assert all(sum(lens[i] for i in bin) <= 100 for bin in step)
        filled = [bool(bin) for bin in step]
        assert filled == sorted(filled, reverse=True)  # empty bins trail
        assert any(filled)
        if number + 1 < found.num_steps:
            assert all(filled)
        elif not all(filled):  # empty only when there is nothing left to split
            assert all(len(bin) <= 1 for bin in step)
    assert (
        found.num_steps == plan(lens, bins_per_step=bins_per_step, seed=seed + 1, epoch=epoch + 1).num_steps
    )


@settings(max_examples=60, deadline=None)
@given(lens=st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_never_more_bins_than_best_fit_decreasing(lens: list[int]):
    reference = len(decreasing(best_fit)(np.array(lens), 100))
    found = plan(lens, bins_per_step=1)
    assert sum(1 for step in found.steps for bin in step if bin) == reference


@pytest.mark.parametrize(
    ("mix", "max_tokens", "fill"), [("A", 75_600, 0.968), ("B", 131_072, 0.983), ("C", 131_072, 0.984)]
)
def test_realistic_lengths_are_packed_full_and_level(mix: str, max_tokens: int, fill: float):
    lens = length_mix(*MIXES[mix])
    start = time.process_time()
    found = plan(lens, max_tokens, 64, cost=SHAPE.forward_flops)
    assert time.process_time() - start < 3.0  # 0.1 to 0.3 s on an idle core
    assert found.fill >= fill
    assert found.imbalance(64, SHAPE.forward_flops) <= 1.035
    assert found.imbalance(8, SHAPE.forward_flops) <= 1.01

    bins = [tuple(bin) for bin in decreasing(best_fit)(lens, max_tokens)]
    order = np.random.default_rng(0).permutation(len(bins) // 64 * 64).reshape(-1, 64)
    random_steps = EpochPlan(tuple(tuple(bins[i] for i in step) for step in order), lens, max_tokens)
    assert random_steps.imbalance(64, SHAPE.forward_flops) > 1.08


def test_steps_keep_about_the_order_of_nothing():
    """Steps are shuffled: cost does not drift through the epoch."""
    lens = length_mix(*MIXES["A"], num_samples=6000)
    found = plan(lens, 75_600, 8, cost=SHAPE.forward_flops)
    cost = bin_costs(lens, SHAPE.forward_flops)
    per_step = [sum(cost(bin) for bin in step) for step in found.steps[:-1]]
    assert abs(np.corrcoef(per_step, np.arange(len(per_step)))[0, 1]) < 4 / len(per_step) ** 0.5


def test_the_plan_is_pinned():
    # Resuming on another machine must find the same plan; a change here breaks running jobs.
    lens = length_mix(*MIXES["A"], num_samples=500)
    found = plan(lens, 75_600, 8, seed=3, epoch=2, cost=SHAPE.forward_flops)
    assert hashlib.sha256(repr(found.steps).encode()).hexdigest()[:16] == "4a9e55de57549bd8"


def test_a_tight_fit_is_found():
    lens = [50, 30, 60, 30, 20, 50, 40, 20]  # 60+40, 50+50, 30+30+20+20: three full bins
    found = plan(lens, bins_per_step=1)
    assert sorted(sum(lens[i] for i in bin) for (bin,) in found.steps) == [100, 100, 100]
    assert found.fill == 1.0


def test_the_last_step_is_split_until_every_rank_has_work():
    found = plan([10] * 8, max_tokens=1000, bins_per_step=4)
    assert [len(bin) for bin in found.steps[0]] == [2, 2, 2, 2]
    assert [len(bin) for bin in plan([10] * 3, max_tokens=1000, bins_per_step=4).steps[0]] == [1, 1, 1, 0]


def test_bins_of_like_cost_share_a_step():
    lens = [90] * 8 + [
        10
    ] * 88  # bins of 90 + 10 and bins of ten tens: equally full, one costs eight times the other
    found = plan(lens, bins_per_step=2, cost=(0.0, 1.0))
    assert found.imbalance(2, (0.0, 1.0)) < 1.01
    bins = [bin for step in found.steps for bin in step]
    shuffled = np.random.default_rng(0).permutation(len(bins)).reshape(-1, 2)
    by_chance = EpochPlan(tuple(tuple(bins[i] for i in step) for step in shuffled), found.seq_lens, 100)
    assert by_chance.imbalance(2, (0.0, 1.0)) > 1.1


def test_a_sample_longer_than_a_bin_is_named():
    with pytest.raises(DataError) as error:
        plan_epoch(
            np.array([50, 101, 30, 140]),
            max_tokens=100, bins_per_step=1, seed=0, epoch=0, cost=COST, keys=["a", "b", "c", "long.mp4"],
        )  # fmt: skip
    message = str(error.value)
    assert "packing.max_tokens=100" in message
    assert "long.mp4" in message
    assert "140 tokens" in message
    assert "2 of 4" in message
    with pytest.raises(DataError, match="number 0"):
        plan([101])


def test_no_sample_is_an_error():
    with pytest.raises(DataError, match="no sample"):
        plan([])


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    dp_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_every_rank_gets_as_many_bins_and_the_step_is_the_same_at_any_dp(lens: list[int], dp_size: int):
    found = plan(lens, bins_per_step=12)
    cost = bin_costs(np.array(lens), COST)
    for step in found.steps:
        micro_steps = assign_bins(step, dp_size, cost)
        assert len(micro_steps) == 12 // dp_size
        assert all(len(ranks) == dp_size for ranks in micro_steps)
        assert Counter(bin for ranks in micro_steps for bin in ranks) == Counter(step)


def test_ranks_of_a_micro_step_get_like_bins_and_totals_level_too():
    lens = np.array([80, 70, 60, 50, 40, 30, 20, 10])
    bins = [(i,) for i in range(8)]
    cost = bin_costs(lens, (1.0, 0.0))
    micro_steps = assign_bins(bins, 2, cost)
    assert [[cost(bin) for bin in ranks] for ranks in micro_steps] == [[80, 70], [50, 60], [40, 30], [10, 20]]
    assert [sum(cost(ranks[rank]) for ranks in micro_steps) for rank in (0, 1)] == [180, 180]


def test_costs_as_coefficients_and_as_a_function_agree():
    lens = np.array([3, 5, 5, 9])
    a, b = (
        f(lens, c)((0, 2, 3))
        for f in [bin_costs]
        for c in [(2.0, 0.5), lambda ls: sum(2 * n + n * n / 2 for n in ls)]
    )
    assert a == b == 2 * 17 + (9 + 25 + 81) / 2


def test_imbalance_by_hand():
    lens = np.array([4, 2, 6])
    found = EpochPlan((((0,), (1,)), ((2,), ())), lens, 10)
    # slowest 4 and 6, mean 3 and 3
    assert found.imbalance(2, (1.0, 0.0)) == pytest.approx(10 / 6)
    assert found.imbalance(1, (1.0, 0.0)) == pytest.approx(1.0)
    assert found.fill == pytest.approx(6 / 20)  # of the full step


# Trap: the order is the same in each epoch, or the tail is dropped.


def check_epochs_differ_and_are_whole() -> None:
    lens = [30, 30, 45, 45, 45, 60, 60, 20, 20, 20, 20, 90]
    orders = []
    for epoch in range(3):
        found = plan(lens, bins_per_step=4, epoch=epoch)
        assert sorted(samples_of(found)) == list(range(len(lens)))
        orders.append(found.steps)
    assert len(set(orders)) == 3


def test_epochs_differ_and_are_whole(monkeypatch: pytest.MonkeyPatch):
    check_epochs_differ_and_are_whole()
    shuffle, spread = packing.permutation, packing._spread
    monkeypatch.setattr(
        packing, "permutation", lambda length, seed, epoch, what: shuffle(length, seed, 0, what)
    )
    with pytest.raises(AssertionError):
        check_epochs_differ_and_are_whole()
    monkeypatch.setattr(packing, "permutation", shuffle)
    monkeypatch.setattr(packing, "_spread", lambda bins, bins_per_step, cost: ((),) * bins_per_step)
    with pytest.raises(AssertionError):
        check_epochs_differ_and_are_whole()
    monkeypatch.setattr(packing, "_spread", spread)
    check_epochs_differ_and_are_whole()
