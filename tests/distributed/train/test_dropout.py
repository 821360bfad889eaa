"""Dropout in training: a clip has the same masks on every grid, in every pack, when a block runs twice, and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.runs import losses, make_run, run_training, weights
from tests.support.steps import Grid, Step, optimizer_step, save_random_lora, worst, zero
from tests.support.world import WorldPool
from wands.errors import ConfigError
from wands.model import dropout
from wands.train.summary import start_block

DROPS = ("lora.rank=4", "lora.targets=all-linear", "lora.dropout=0.2", "model.dropout=0.3")
STEP = ("train.bins_per_step=2",)


def mistaken_step(*args: Any) -> Step:
    """A step whose masks follow the rows that a rank holds, and not their places in the clip."""

    def by_row(samples: torch.Tensor, side: str, owner: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return right(samples, side, owner, torch.arange(len(place)))

    right = dropout._row_keys
    with mock.patch.object(dropout, "_row_keys", by_row):
        return optimizer_step(*args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "stage", "every_setting"),
    [
        (Grid(1, 1, 2), 3, False),
        pytest.param(Grid(1, 2, 1), 2, False, marks=pytest.mark.slow),
        pytest.param(Grid(2, 1, 1), 3, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradient_is_the_same_however_it_is_made(
    grid: Grid, stage: int, every_setting: bool, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (*STEP, *DROPS, f"lora.init_from={save_random_lora(tiny_pipeline, tmp_path)}")

    def step(
        grid: Grid, stage: int, *more: str, dtype: torch.dtype = torch.float64, make: Any = optimizer_step
    ):
        overrides = (*settings, *grid.overrides, *more)
        ranks = worlds[grid.world_size].run(make, tiny_pipeline, tmp_path, overrides, zero(stage), dtype)
        return ranks[0].gradients

    alone = step(Grid(1, 1, 1), 2)
    assert worst(step(Grid(1, 1, 1), 2, "packing.enabled=false"), alone) <= 1e-5
    assert worst(step(grid, stage), alone) <= 1e-5
    if not every_setting:
        return
    mistaken = step(Grid(1, 1, 1), 2, "packing.enabled=false", make=mistaken_step)
    assert worst(mistaken, step(Grid(1, 1, 1), 2, make=mistaken_step)) > 0.1
    for changed in ("train.seed=1", "lora.dropout=0"):
        assert worst(step(Grid(1, 1, 1), 2, changed), alone) > 0.1, changed
    narrow = {
        mode: step(Grid(1, 1, 2), 2, f"model.checkpointing={mode}", dtype=torch.float32)
        for mode in ("none", "selective", "full")
    }
    for mode in ("selective", "full"):
        assert all(torch.equal(narrow[mode][name], grad) for name, grad in narrow["none"].items()), mode


@pytest.mark.slow
def test_resume_is_bitwise(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    settings = ("model.dropout=0.2", "train.max_steps=4", "checkpoint.every=2", "model.checkpointing=full")
    settings += ("precision.compute=bf16",)
    straight = worlds[2].run(run_training, tiny_pipeline, tmp_path / "run", settings, zero(2))[0]
    last = weights(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000004").rename(tmp_path / "set aside")
    resumed = worlds[2].run(run_training, tiny_pipeline, tmp_path / "run", settings, zero(2), True)[0]
    assert losses(resumed) == losses(straight)
    again = weights(tmp_path / "run")
    assert all(torch.equal(again[name], value) for name, value in last.items())


def test_every_visit_has_its_key(tiny_pipeline: Path, tmp_path: Path):
    def keys(repeat_index: int, epoch: int, *settings: str) -> tuple[int, ...]:
        run = make_run(tiny_pipeline, tmp_path, settings, world_size=1)
        return run.collator([run.data.read(i) for i in (0, 1)], [0, repeat_index], epoch).dropout_keys

    drops = "model.dropout=0.1"
    first = keys(0, 0, drops)
    assert keys(1, 0, drops)[0] == first[0]
    others = [keys(1, 0, drops)[1], *keys(0, 1, drops), *keys(0, 0, drops, "train.seed=1")]
    assert len({*first, *others}) == len(first) + len(others)
    assert keys(0, 0) == ()  # nothing is made where nothing is dropped


def test_the_start_block_says_so(tiny_pipeline: Path, tmp_path: Path):
    run = make_run(tiny_pipeline, tmp_path, ("lora.rank=4", "lora.dropout=0.05"), world_size=1)
    assert "dropout: 0 of activations, 0.05 of the LoRA's inputs" in start_block(run)
    assert "dropout:" not in start_block(make_run(tiny_pipeline, tmp_path, world_size=1))


def test_all_of_it_cannot_be_dropped(tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.dropout"):
        make_run(tiny_pipeline, tmp_path, ("model.dropout=1",), world_size=1)
