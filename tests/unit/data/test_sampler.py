"""Steps of a run: resumable from the step number alone, whole epochs, the same at any dp size."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wands.data.sampler as sampler_module
from tests.support.examples import examples
from wands.data.packing import assign_bins, plan_epoch
from wands.data.sampler import PlanSampler, RepeatSchedule, exact
from wands.errors import DataError

LENS = [30, 30, 45, 45, 45, 60, 60, 20, 20, 20, 20, 90, 75]


def build(lens: list[int] = LENS, keys: list[str] | None = None, **changes) -> PlanSampler:
    options = {"max_tokens": 100, "bins_per_step": 2, "seed": 0, "cost": (1.0, 0.01), **changes}
    return PlanSampler(np.array(lens), keys or [f"clip{i}" for i in range(len(lens))], **options)


def test_an_epoch_visits_every_sample_once_and_counts_it():
    sampler = build(epochs=3)
    assert sampler.total_steps == 3 * sampler.steps_per_epoch
    steps = list(sampler.iterate())
    assert [plan.step for plan in steps] == list(range(sampler.total_steps))
    for epoch in range(3):
        mine = [plan for plan in steps if plan.epoch == epoch]
        assert [plan.step_in_epoch for plan in mine] == list(range(sampler.steps_per_epoch))
        visited = [i for plan in mine for bin in plan.bins for i in bin]
        assert sorted(visited) == list(range(len(LENS)))
        assert sum(plan.num_samples for plan in mine) == len(LENS)
        assert sum(plan.num_tokens for plan in mine) == sum(LENS)
    first = steps[0]
    assert first.num_samples == sum(len(bin) for bin in first.bins)
    assert first.num_tokens == sum(LENS[i] for bin in first.bins for i in bin)


@examples(10)
@given(start=st.integers(0, 30))
def test_a_run_goes_on_from_any_step_as_if_never_stopped(start: int):
    whole = list(build(max_steps=31).iterate())
    assert list(build(max_steps=31).iterate(start)) == whole[start:]
    assert build(max_steps=31).step_plan(start) == whole[start]


def test_max_steps_wins_over_epochs_and_runs_into_the_next():
    sampler = build(epochs=1, max_steps=11)
    assert sampler.steps_per_epoch < 11
    steps = list(sampler.iterate())
    assert len(steps) == sampler.total_steps == 11
    assert steps[-1].epoch == 10 // sampler.steps_per_epoch
    assert build(max_steps=1).total_steps == 1


@examples(25)
@given(lens=st.lists(st.integers(1, 100), min_size=1, max_size=40), bins_per_step=st.integers(1, 6))
def test_every_epoch_has_as_many_steps(lens: list[int], bins_per_step: int):
    sampler = build(lens, bins_per_step=bins_per_step, epochs=4)
    for epoch in range(4):
        assert sampler.epoch_plan(epoch).num_steps == sampler.steps_per_epoch


def test_the_plan_of_an_epoch_is_made_once(monkeypatch: pytest.MonkeyPatch):
    made = []
    plan_epoch = sampler_module.plan_epoch

    def counted(*args, **kwargs):
        made.append(kwargs["epoch"])
        return plan_epoch(*args, **kwargs)

    monkeypatch.setattr(sampler_module, "plan_epoch", counted)
    list(build(epochs=3).iterate())
    assert made == [0, 1, 2]


def test_a_repeated_name_is_counted():
    sampler = build([30, 30, 30, 40], ["a", "b", "a", "a"], max_steps=4)
    plan = sampler.step_plan(0)
    assert plan.repeat_indices((0, 1, 2, 3)) == [0, 0, 1, 2]
    assert plan.repeat_indices((3, 0)) == [2, 0]
    assert plan.repeat_indices(()) == []
    visits = {
        (sampler.keys[i], o) for bin in plan.bins for i, o in zip(bin, plan.repeat_indices(bin), strict=True)
    }
    assert len(visits) == 4  # three visits to "a", each with different noise


def test_the_same_samples_form_the_step_at_any_dp_size():
    plan = build(bins_per_step=4).step_plan(0)
    cost = build().bin_cost
    at = {dp: assign_bins(plan.bins, dp, cost) for dp in (1, 2, 4)}
    assert {len(micro_steps) * dp for dp, micro_steps in at.items()} == {4}
    assert len({frozenset(Counter(bin for ranks in at[dp] for bin in ranks).items()) for dp in at}) == 1


def test_the_bins_that_are_levelled_are_the_plan_s():
    lens = [90] * 8 + [45] * 16 + [20] * 40
    found = build(lens, bins_per_step=8, level_bins=2).epoch_plan(0)
    assert (
        found.steps
        == plan_epoch(
            np.array(lens), max_tokens=100, bins_per_step=8, seed=0, epoch=0, cost=(1.0, 0.01), level_bins=2
        ).steps
    )
    assert found.steps != build(lens, bins_per_step=8).epoch_plan(0).steps


def test_too_long_samples_are_named_before_anything_runs():
    with pytest.raises(DataError, match=r"max_tokens=80.*clip11.*90 tokens"):
        build(max_tokens=80)


# Trap: fewer samples than data-parallel ranks, and somewhere a collective waits for ever.


def check_too_few_samples_are_refused() -> None:
    for num_samples, dp_size in ((3, 4), (0, 1)):
        with pytest.raises(DataError, match=f"{num_samples} samples, fewer than the {dp_size} data-parallel"):
            sampler_module.check_enough_samples(num_samples, dp_size)
    sampler_module.check_enough_samples(4, 4)


def test_too_few_samples_are_refused(monkeypatch: pytest.MonkeyPatch):
    check_too_few_samples_are_refused()
    monkeypatch.setattr(sampler_module, "check_enough_samples", lambda num_samples, dp_size: None)
    with pytest.raises(pytest.fail.Exception):
        check_too_few_samples_are_refused()


@pytest.mark.parametrize("num_samples", [4, 5, 7])
def test_a_data_set_smaller_than_a_step_still_gives_every_rank_its_forwards(num_samples: int):
    sampler = build([10] * num_samples, bins_per_step=8)
    for plan in sampler.iterate():
        micro_steps = assign_bins(plan.bins, 4, sampler.bin_cost)
        assert [len(ranks) for ranks in micro_steps] == [4, 4]
        assert all(micro_steps[0])  # no rank idles while another has two bins


# ---- epochs that visit other rows, or in windows of the storage


def shares(repeat: float, num: int = len(LENS)) -> RepeatSchedule:
    return RepeatSchedule([num], [exact(repeat)], seed=0)


def build_shares(repeat: float, **changes) -> PlanSampler:
    visits = shares(repeat)
    lens = [LENS[i] for i in visits.sample_of]
    keys = [f"clip{i}" for i in visits.sample_of]
    places = np.array([divmod(i, 4) for i in range(len(lens))])
    return build(lens, keys, schedule=visits, places=places, **changes)


@pytest.mark.parametrize(
    "buffer_size", [None, 5, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 100))]
)
@pytest.mark.parametrize("repeat", [0.3, 1.5, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2))])
def test_an_epoch_is_what_is_to_be_visited(repeat: float, buffer_size: int | None):
    sampler = build_shares(repeat, buffer_size=buffer_size, epochs=7)
    steps = list(sampler.iterate())
    assert sampler.total_steps == len(steps)
    assert [plan.epoch for plan in steps] == sorted(plan.epoch for plan in steps)
    for epoch in range(7):
        mine = [plan for plan in steps if plan.epoch == epoch]
        assert [plan.step_in_epoch for plan in mine] == list(range(sampler.num_steps(epoch)))
        assert mine[0].step == sampler.first_step(epoch)
        visited = sorted(i for plan in mine for bin in plan.bins for i in bin)
        assert visited == shares(repeat).rows(epoch).tolist()
        for plan in mine:  # each visit of the epoch counts alike
            assert plan.mean_samples == len(visited) / len(mine)
        named = [
            (sampler.keys[i], o)
            for plan in mine
            for bin in plan.bins
            for i, o in zip(bin, plan.repeat_indices(bin), strict=True)
        ]
        assert len(set(named)) == len(named)  # no noise is drawn twice


@pytest.mark.parametrize(("repeat", "buffer_size"), [(0.3, None), (1.5, 4)])
def test_a_run_of_unequal_epochs_goes_on_from_any_step(repeat: float, buffer_size: int | None):
    options = {"max_steps": 16, "buffer_size": buffer_size}
    whole = list(build_shares(repeat, **options).iterate())
    assert whole[-1].epoch > 1
    for start in (1, 7, 15):
        assert list(build_shares(repeat, **options).iterate(start)) == whole[start:]
    backwards = build_shares(repeat, **options)
    assert [backwards.step_plan(step) for step in (15, 0)] == [whole[15], whole[0]]


def test_epochs_may_differ_in_steps_and_are_counted_once_each(monkeypatch: pytest.MonkeyPatch):
    lens = [100] * 6 + [10] * 6  # which of them an epoch visits decides how many bins it has
    counted = []
    count_steps = sampler_module.count_steps
    monkeypatch.setattr(
        sampler_module,
        "count_steps",
        lambda *args, **kwargs: counted.append(1) or count_steps(*args, **kwargs),
    )
    sampler = build(lens, schedule=RepeatSchedule([12], [Fraction(1, 4)], 0), bins_per_step=1, epochs=40)
    found = [sampler.num_steps(epoch) for epoch in range(40)]
    assert len(set(found[:4])) > 1
    assert found == found[:4] * 10
    assert len(counted) == 4
    assert sampler.total_steps == sum(found)
    assert [sampler.epoch_of(sum(found[:epoch])) for epoch in range(40)] == list(range(40))
    assert [sampler.epoch_of(sum(found[: epoch + 1]) - 1) for epoch in range(40)] == list(range(40))


def test_whole_repeats_are_the_rows_of_the_data():
    """Nothing but the rows makes them: as a list of keys with repetitions."""
    visits = shares(2)
    doubled = build(LENS * 2, [f"clip{i}" for i in range(len(LENS))] * 2, max_steps=9)
    assert list(build_shares(2, max_steps=9).iterate()) == list(doubled.iterate())
    assert doubled.step_plan(0).repeat_indices((0, len(LENS))) == [0, 1]
    assert len(visits.sample_of) == 2 * len(LENS)
