"""Numbers that follow from the number of clips."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import make_run
from wands.config.auto import usual_held_out, usual_interval, usual_steps
from wands.config.recipe_loading import load_recipe, shipped_recipes
from wands.train.prepare import settle_length


@pytest.mark.parametrize(
    ("steps_per_epoch", "steps"), [(1, 300), (3, 900), (5, 1500), (200, 1500), (375, 1500), (1000, 4000)]
)
def test_few_clips_are_trained_for_1500_steps_and_many_for_four_passes(steps_per_epoch: int, steps: int):
    assert usual_steps(steps_per_epoch, bins_per_step=1) == steps


def test_large_steps_are_fewer():
    assert usual_steps(5, bins_per_step=8) == 1500
    assert usual_steps(5, bins_per_step=32) == 375


@pytest.mark.parametrize(("steps", "interval"), [(1, 1), (300, 50), (1500, 250), (30_000, 500)])
def test_a_run_has_six_checkpoints(steps: int, interval: int):
    assert usual_interval(steps) == interval


@pytest.mark.parametrize(
    ("clips", "number"),
    [(1, 0), (11, 0), (12, 2), (39, 3), (40, 4), (199, 19), (200, 20), (1000, 20), (5000, 100)],
)
def test_how_many_clips_are_held_out(clips: int, number: int):
    assert usual_held_out(clips) == number


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("wan")])
def test_shipped_finetunes_fix_no_number_that_depends_on_the_clips(name: str):
    recipe = load_recipe(name)
    if name.endswith("-pretrain"):
        return
    assert (recipe.train.max_steps, recipe.checkpoint.every, recipe.data.holdout) == ("auto", "auto", "auto")
    assert recipe.eval
    assert 0 < recipe.optim.warmup < 1
    if recipe.lora:
        assert recipe.train.bins_per_step == 1


def test_a_run_has_numbers_in_place_of_auto():
    settled = settle_length(load_recipe("wan2.1-t2v-1.3b-lora"), 900)
    assert (settled.train.max_steps, settled.checkpoint.every) == (900, 150)
    own = settle_length(load_recipe(None, ["checkpoint.every=7"]), 900)
    assert (own.train.max_steps, own.checkpoint.every) == (None, 7)


def test_a_prepared_run_has_numbers_in_place_of_auto(tiny_pipeline: Path, tmp_path: Path):
    keys = ("train.max_steps=auto", "checkpoint.every=auto", "data.holdout=auto")
    run = make_run(tiny_pipeline, tmp_path, keys, world_size=1)
    steps = run.schedule.sampler.steps_per_epoch
    total = usual_steps(steps, run.recipe.train.bins_per_step)
    assert run.schedule.total_steps == run.recipe.train.max_steps == total
    assert run.recipe.checkpoint.every == usual_interval(total)
