"""Numbers by which losses are divided: every clip, or every token, of an epoch counts once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from wands.config.recipe import MockConfig, Recipe
from wands.data.datasets import MockDataset
from wands.data.sampler import PlanSampler, RepeatSchedule
from wands.objectives.flow_matching import FlowMatching
from wands.run.schedule import Schedule, plan_clips
from wands.variants import VARIANTS, DiTShape

REDUCTIONS = pytest.mark.parametrize("reduction", ["sample", "token"])
PATCH = DiTShape.patch_size


def build(lens: list[int], reduction: str, *, repeat: float = 1, **options: int) -> Schedule:
    """The schedule of clips of one latent frame, each with its number of tokens in one row."""
    visits = RepeatSchedule([len(lens)], [Fraction(str(repeat))], seed=0)
    lens_of_rows = np.array(lens)[visits.sample_of]
    frames, rows, columns = PATCH
    shapes = [(frames, rows, columns * length) for length in lens_of_rows.tolist()]
    variant = VARIANTS["wan2.1-t2v-1.3b"]
    mock = MockConfig(num_samples=len(shapes), shapes=shapes, text_lens=[3])
    data = MockDataset(mock, variant.dit, seed=0)
    objective = FlowMatching()
    objective.setup(Recipe.model_validate({"loss": {"reduction": reduction}}), variant)
    clips = plan_clips(data, PATCH, first_frame_ratio=0.0)
    sampler = PlanSampler(
        lens_of_rows,
        [f"clip{i}" for i in visits.sample_of],
        max_tokens=100,
        bins_per_step=2,
        seed=0,
        cost=(1.0, 0.01),
        schedule=visits,
        **options,
    )
    return Schedule(
        sampler=sampler,
        objective=objective,
        data=data,
        clips=clips,
        costs=objective.costs(clips),
        num_cond_tokens=lambda key, grid: 0,
    )


@REDUCTIONS
def test_every_sample_counts_once_in_an_epoch_whatever_its_step(reduction: str):
    """Steps of long clips have fewer samples: divided by their own number, these would count more."""
    schedule = build([100] * 12 + [10] * 63, reduction, epochs=1)
    weight = np.zeros(75)
    own = np.zeros(75)
    for plan in schedule.sampler.iterate():
        samples = [i for bin in plan.bins for i in bin]
        once = np.ones(len(samples)) if reduction == "sample" else schedule.num_tokens[samples]
        weight[samples] += once / schedule.denominator(plan) / schedule.total_steps
        own[samples] += once / schedule.count(plan) / schedule.total_steps
    expected = np.ones(75) if reduction == "sample" else schedule.num_tokens
    assert weight == pytest.approx(expected / expected.sum())
    if reduction == "sample":
        assert own[:12].mean() > 3 * own[12:].mean()  # what it would be


@REDUCTIONS
def test_the_logged_loss_is_the_mean_over_the_clips_or_tokens_of_the_step(reduction: str):
    schedule = build([30, 30, 45, 60, 20, 90, 75], reduction, epochs=1)
    for plan in schedule.sampler.iterate():
        assert schedule.count(plan) == (plan.num_samples if reduction == "sample" else plan.num_tokens)


@REDUCTIONS
@pytest.mark.parametrize("repeat", [0.3, 1.5])
def test_every_use_counts_once_in_an_epoch_that_uses_a_part_of_the_rows(reduction: str, repeat: float):
    schedule = build([30, 30, 45, 60, 20, 90, 75], reduction, repeat=repeat, epochs=7)
    steps = list(schedule.sampler.iterate())
    for epoch in range(7):
        mine = [plan for plan in steps if plan.epoch == epoch]
        used = [i for plan in mine for bin in plan.bins for i in bin]
        total = len(used) if reduction == "sample" else int(schedule.num_tokens[used].sum())
        for plan in mine:
            assert schedule.denominator(plan) == pytest.approx(total / len(mine), rel=1e-12)
