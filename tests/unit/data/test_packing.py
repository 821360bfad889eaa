"""The plan of an epoch: complete, reproducible, at least as full as best-fit decreasing and much more level."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from bench_packing import MIXES, best_fit, decreasing, length_bias, length_mix
from hypothesis import given
from hypothesis import strategies as st

import wands.data.packing as packing
from tests.support.examples import examples
from wands.data.bins import pack_bins
from wands.data.packing import (
    EpochPlan,
    assign_bins,
    bin_costs,
    count_steps,
    imbalance,
    plan_epoch,
    storage_windows,
)
from wands.errors import DataError
from wands.variants import VARIANTS

COST = (1.0, 0.01)
SHAPE = VARIANTS["wan2.1-t2v-14b"].dit


def plan(
    lens,
    max_tokens: int = 100,
    bins_per_step: int = 4,
    seed: int = 0,
    epoch: int = 0,
    cost=COST,
    level_bins: int | None = None,
    windows: Sequence[np.ndarray] | None = None,
) -> EpochPlan:
    return plan_epoch(
        np.array(lens),
        max_tokens=max_tokens,
        bins_per_step=bins_per_step,
        seed=seed,
        epoch=epoch,
        cost=cost,
        level_bins=level_bins,
        windows=windows,
    )


def samples_of(found: EpochPlan) -> list[int]:
    return [i for step in found.steps for bin in step for i in bin]


@examples(150)
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


@examples(60)
@given(lens=st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_never_more_bins_than_best_fit_decreasing(lens: list[int]):
    reference = len(decreasing(best_fit)(np.array(lens), 100))
    found = plan(lens, bins_per_step=1)
    assert sum(1 for step in found.steps for bin in step if bin) <= reference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "max_tokens", "fill", "bias"),
    [
        ("A", 75_600, 0.97, 0.45),
        ("A", 131_072, 0.985, 0.28),
        ("B", 75_600, 0.97, 0.17),
        ("B", 131_072, 0.99, 0.07),
    ],
)
def test_realistic_lengths_are_packed_full_and_level(mix: str, max_tokens: int, fill: float, bias: float):
    lens = length_mix(*MIXES[mix])
    found = plan(lens, max_tokens, 64, cost=SHAPE.forward_flops)
    assert found.fill >= fill
    assert imbalance(found.steps, 64, bin_costs(found.seq_lens, SHAPE.forward_flops)) <= 1 / 0.985
    assert imbalance(found.steps, 8, bin_costs(found.seq_lens, SHAPE.forward_flops)) <= 1 / 0.985
    assert found.length_bias()[0] <= bias

    bins = [tuple(bin) for bin in decreasing(best_fit)(lens, max_tokens)]
    order = np.random.default_rng(0).permutation(len(bins) // 64 * 64).reshape(-1, 64)
    random_steps = EpochPlan(tuple(tuple(bins[i] for i in step) for step in order), lens, max_tokens)
    assert imbalance(random_steps.steps, 64, bin_costs(random_steps.seq_lens, SHAPE.forward_flops)) > 1.08


@examples(60)
@given(
    lens=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    level_bins=st.integers(1, 4),
    micro_steps=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_steps_of_several_groups_are_whole_too(
    lens: list[int], level_bins: int, micro_steps: int, epoch: int
):
    size = level_bins * micro_steps
    found = plan(lens, bins_per_step=size, epoch=epoch, level_bins=level_bins)
    assert sorted(samples_of(found)) == list(range(len(lens)))
    assert all(len(step) == size for step in found.steps)
    assert all(sum(lens[i] for i in bin) <= 100 for step in found.steps for bin in step)
    assert found.num_steps == plan(lens, bins_per_step=size).num_steps


@pytest.mark.slow
def test_levelling_micro_steps_alone_keeps_steps_mixed():
    lens = length_mix(*MIXES["A"], num_samples=8000)
    cost = SHAPE.forward_flops
    whole = plan(lens, 75_600, 32, cost=cost)
    apart = plan(lens, 75_600, 32, cost=cost, level_bins=8)
    assert imbalance(apart.steps, 8, bin_costs(apart.seq_lens, cost)) <= 1 / 0.98
    assert apart.fill == pytest.approx(whole.fill, abs=0.002)
    assert apart.length_bias()[0] < 0.4 * whole.length_bias()[0]
    assert apart.length_bias()[0] < 1.5 * apart.length_bias()[1]  # about what chance does
    assert (
        imbalance(apart.steps, 32, bin_costs(apart.seq_lens, cost))
        > 1.2
        > imbalance(whole.steps, 32, bin_costs(whole.seq_lens, cost))
    )  # not for ranks that all wait


def test_full_steps_keep_to_the_level():
    lens = length_mix(*MIXES["C"], num_samples=5000)
    found = plan(lens, 131_072, 8, cost=SHAPE.forward_flops)
    full = EpochPlan(found.steps[:-1], lens, 131_072)
    assert (
        1.0 / packing.LEVEL - 0.01
        < imbalance(full.steps, 8, bin_costs(full.seq_lens, SHAPE.forward_flops))
        <= 1.0 / packing.LEVEL
    )


@examples(100)
@given(data=st.data(), num=st.integers(1, 7), allowed=st.floats(0.5, 20.0))
def test_the_cuts_are_the_best_of_all(data: st.DataObject, num: int, allowed: float):
    draws = st.floats(0.0, 5.0)
    bias = np.full((num, num + 1), np.inf)
    waits = np.full((num, num + 1), np.inf)
    for i, j in itertools.combinations(range(num + 1), 2):
        bias[i, j] = data.draw(draws)
        waits[i, j] = data.draw(draws) if j - i > 1 else 0.0

    def total(cuts: Sequence[int], of: np.ndarray) -> float:
        return sum(of[i, j] for i, j in itertools.pairwise(cuts))

    found = packing._best_cuts(bias, waits, allowed)
    assert (found[0], found[-1]) == (0, num)
    assert total(found, waits) <= allowed
    slack = num / packing.WAITS  # waiting is counted in units, rounded up
    for size in range(num):
        for inner in itertools.combinations(range(1, num), size):
            cuts = (0, *inner, num)
            if total(cuts, waits) <= allowed * (1 - slack):
                assert total(found, bias) <= total(cuts, bias) + 1e-9


def test_when_no_cuts_level_enough_all_are_made():
    waits = np.full((3, 4), 5.0)
    assert packing._best_cuts(np.zeros((3, 4)), waits, 1.0) == [0, 1, 2, 3]


@pytest.mark.parametrize("bins_per_step", [4, 16])
def test_length_bias_is_the_plain_one_and_chance_has_its_share(bins_per_step: int):
    lens = length_mix(*MIXES["A"], num_samples=2000)
    found = plan(lens, 75_600, bins_per_step, cost=SHAPE.forward_flops)
    bias, chance = found.length_bias()
    assert bias == pytest.approx(length_bias(found.steps, lens))
    sizes = np.cumsum([sum(map(len, step)) for step in found.steps])[:-1]
    drawn = np.split(np.random.default_rng(0).permutation(len(lens)), sizes)
    assert chance == pytest.approx(length_bias([[part.tolist()] for part in drawn], lens), rel=0.15)
    assert bias > chance  # bins that one clip fills alone cannot be mixed and level
    alike = plan([50] * 64, bins_per_step=4)
    assert alike.length_bias() == (0.0, 0.0)


@pytest.mark.slow
def test_steps_keep_about_the_order_of_nothing():
    """Steps are shuffled: cost does not drift through the epoch."""
    lens = length_mix(*MIXES["A"], num_samples=6000)
    found = plan(lens, 75_600, 8, cost=SHAPE.forward_flops)
    cost = bin_costs(lens, SHAPE.forward_flops)
    per_step = [sum(cost(bin) for bin in step) for step in found.steps[:-1]]
    assert abs(np.corrcoef(per_step, np.arange(len(per_step)))[0, 1]) < 4 / len(per_step) ** 0.5


def test_the_plan_is_pinned():
    # Every machine must make the same plan. CONTRIBUTING.md says what a change of the plan needs.
    lens = length_mix(*MIXES["A"], num_samples=500)
    found = plan(lens, 75_600, 8, seed=3, epoch=2, cost=SHAPE.forward_flops)
    assert hashlib.sha256(repr(found.steps).encode()).hexdigest()[:16] == "a288ba1a34005073"


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
    assert imbalance(found.steps, 2, bin_costs(found.seq_lens, (0.0, 1.0))) < 1.01
    bins = [bin for step in found.steps for bin in step]
    shuffled = np.random.default_rng(0).permutation(len(bins)).reshape(-1, 2)
    by_chance = EpochPlan(tuple(tuple(bins[i] for i in step) for step in shuffled), found.seq_lens, 100)
    assert imbalance(by_chance.steps, 2, bin_costs(by_chance.seq_lens, (0.0, 1.0))) > 1.1


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
    with pytest.raises(DataError, match="the data is empty"):
        plan([])


@examples(60)
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
    assert imbalance(found.steps, 2, bin_costs(found.seq_lens, (1.0, 0.0))) == pytest.approx(10 / 6)
    assert imbalance(found.steps, 1, bin_costs(found.seq_lens, (1.0, 0.0))) == pytest.approx(1.0)
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
    shuffle = packing.permutation
    spread = packing._spread
    monkeypatch.setattr(
        packing, "permutation", lambda length, seed, epoch, *what: shuffle(length, seed, 0, *what)
    )
    pack = packing.pack_bins
    monkeypatch.setattr(
        packing,
        "pack_bins",
        lambda lens, costs, max_tokens, seed, epoch: pack(lens, costs, max_tokens, seed, 0),
    )
    with pytest.raises(AssertionError):
        check_epochs_differ_and_are_whole()
    monkeypatch.setattr(packing, "permutation", shuffle)
    monkeypatch.setattr(packing, "_spread", lambda bins, bins_per_step, cost: bins[:1])
    with pytest.raises(AssertionError):
        check_epochs_differ_and_are_whole()
    monkeypatch.setattr(packing, "_spread", spread)
    check_epochs_differ_and_are_whole()


# ---- windows of slow storage


def places_of(num_samples: int, per_shard: int) -> np.ndarray:
    """Keys are sorted, shards are not: sample i lies where a fixed shuffle puts it."""
    place = np.random.default_rng(3).permutation(num_samples)
    return np.stack(np.divmod(place, per_shard), axis=1)


@examples(100)
@given(
    lens=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    bins_per_step=st.integers(1, 6),
    per_shard=st.integers(1, 20),
    buffer_size=st.integers(1, 90),
    epoch=st.integers(0, 3),
)
def test_windows_lose_nothing_and_pad_only_the_end(
    lens: list[int], bins_per_step: int, per_shard: int, buffer_size: int, epoch: int
):
    windows = storage_windows(places_of(len(lens), per_shard), buffer_size, seed=0)
    assert sorted(np.concatenate(windows).tolist()) == list(range(len(lens)))
    assert [len(window) for window in windows[:-1]] == [buffer_size] * (len(windows) - 1)
    assert len(windows[-1]) <= buffer_size
    found = plan(lens, bins_per_step=bins_per_step, epoch=epoch, windows=windows)
    assert sorted(samples_of(found)) == list(range(len(lens)))
    assert all(len(step) == bins_per_step for step in found.steps)
    assert all(sum(lens[i] for i in bin) <= 100 for step in found.steps for bin in step)
    assert all(all(step) for step in found.steps[:-1])
    options = {"max_tokens": 100, "bins_per_step": bins_per_step}
    assert found.num_steps == count_steps(np.array(lens), windows=windows[::-1], **options)
    assert plan(lens, bins_per_step=bins_per_step).num_steps == count_steps(np.array(lens), **options)


def test_one_window_of_everything_is_the_plan_without_windows():
    lens = length_mix(*MIXES["A"], num_samples=500)
    windows = storage_windows(places_of(500, 64), 500, seed=0)
    assert len(windows) == 1
    assert plan(lens, 131_072, windows=windows).steps == plan(lens, 131_072).steps


def test_the_visited_are_the_data_of_a_plan():
    lens = np.array([100] * 40 + [10] * 40)
    found = plan(lens, windows=[np.arange(40, 80)])
    assert sorted(samples_of(found)) == list(range(40, 80))
    assert found.length_bias() == (0.0, 0.0)  # the long ones are not part of it
    assert found.steps != plan(lens[40:]).steps
    assert [[tuple(i - 40 for i in bin) for bin in step] for step in found.steps] == [
        list(step) for step in plan(lens[40:]).steps
    ]


def opened(order: Sequence[int], places: np.ndarray, num_handles: int = 32) -> int:
    """Number of times that a reader opens a shard, when it keeps `num_handles` of them open."""
    kept: dict[int, None] = {}
    count = 0
    for shard in places[list(order), 0].tolist():
        count += shard not in kept
        kept.pop(shard, None)
        kept[shard] = None
        if len(kept) > num_handles:
            del kept[next(iter(kept))]
    return count


@pytest.mark.slow
def test_windows_read_each_shard_in_one_go():
    """The purpose of `packing.buffer_size`, with 5,000 clips in 79 shards and windows of 16 shards."""
    lens = length_mix(*MIXES["A"], num_samples=5000)
    places = places_of(len(lens), 64)
    windows = storage_windows(places, 1024, seed=0)
    at_once, in_windows = (
        plan(lens, 131_072, 8, cost=SHAPE.forward_flops, windows=w) for w in (None, windows)
    )
    assert opened(samples_of(at_once), places) > len(lens) / 2  # most reads are in a shard that is shut
    assert opened(samples_of(in_windows), places) < 2 * 79
    assert in_windows.fill > at_once.fill - 0.01
    assert (
        imbalance(in_windows.steps, 8, bin_costs(in_windows.seq_lens, SHAPE.forward_flops))
        < imbalance(at_once.steps, 8, bin_costs(at_once.seq_lens, SHAPE.forward_flops)) + 0.01
    )


# ---- a plan that loses or doubles a sample never reaches the GPU


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda bins: [bins[0][1:], *bins[1:]], r"sample \d+ is in 0 bins, not in 1"),
        (lambda bins: [*bins[:-1], (*bins[-1], bins[0][0])], r"sample \d+ is in 2 bins, not in 1"),
        (lambda bins: [bins[0] + bins[1], *bins[2:]], "a bin has 1[0-9]{2} tokens"),
    ],
)
def test_a_mistake_in_the_packer_is_noticed(monkeypatch: pytest.MonkeyPatch, mistake, said: str):
    lens = [40, 60, 30, 70, 50, 45, 20, 75]
    plan(lens, bins_per_step=1)
    monkeypatch.setattr(packing, "pack_bins", lambda *args: mistake(pack_bins(*args)))
    with pytest.raises(AssertionError, match=said):
        plan(lens, bins_per_step=1)
