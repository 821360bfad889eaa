"""Series of steps with context parallelism: losses, accumulation of gradients."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.context_runs import TWO_BY_TWO
from tests.support.runs import assert_same_bits, run_training
from tests.support.steps import (
    DS_CONFIGS,
    GRIDS,
    Grid,
    zero,
)
from tests.support.world import WorldPool
from wands.distributed.dims import ParallelDims

# Twenty AdamW steps amplify the order in which float32 numbers are added; seen: 2e-7.
SERIES_TOLERANCE = 2e-6


# ---- whole runs

# Seven clips of 1, 9, 12, 24, 7, 15 and 2 tokens, two steps an epoch.
SERIES = (
    "data.mock={num_samples: 7, shapes: [[1,2,2],[1,6,6],[3,4,4],[4,4,6],[7,2,2],[5,2,6],[2,2,2]], text_lens: [60,512,30,100,7]}",
    "train.log_samples=true",
    "optim.schedule=cosine",
    "optim.warmup=3",
)
Clips = dict[tuple[int, int, str, int], tuple[float, float]]


def run_series(
    grid: Grid,
    ds: dict[str, Any],
    steps: int,
    worlds: WorldPool,
    model: Path,
    out: Path,
    more: tuple[str, ...] = (),
) -> tuple[list[dict[str, Any]], Clips]:
    """The rows of a run, and sigma and error of every clip by (step, epoch, name, repeat_index)."""
    overrides = (*SERIES, f"train.max_steps={steps}", *grid.overrides, *more)
    rows = worlds[grid.world_size].run(run_training, model, out, overrides, ds)[0]
    written = {
        int(path.stem.removeprefix("samples-rank")): [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in out.glob("samples-rank*.jsonl")
    }
    # one rank of each group that shares bins, and each clip once
    standing = [
        ParallelDims(
            world_size=grid.world_size,
            rank=rank,
            ulysses_degree=grid.ulysses,
            ring_degree=grid.ring,
            tensor_degree=grid.tensor,
        )
        for rank in range(grid.world_size)
    ]
    assert written.keys() == {one.rank for one in standing if one.is_first_of_bin}
    clips = [
        ((row["step"], row["epoch"], row["sample_id"], row["repeat_index"]), (row["sigma"], row["loss"]))
        for part in written.values()
        for row in part
    ]
    assert len(dict(clips)) == len(clips)
    return rows, dict(clips)


@pytest.fixture(scope="module")
def series(
    worlds: WorldPool, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[list[dict[str, Any]], Clips]]:
    """A run of so many steps in one process without ZeRO."""
    out = tmp_path_factory.mktemp("series")
    return cache(lambda steps: run_series(GRIDS[0], zero(0), steps, worlds, tiny_pipeline, out / str(steps)))


@pytest.mark.parametrize(
    ("grid", "ds_name", "steps"),
    [
        *(
            pytest.param(
                grid,
                list(DS_CONFIGS)[i % len(DS_CONFIGS)],
                8,
                marks=pytest.mark.slow,
            )
            for i, grid in enumerate(GRIDS)
        ),
        *(pytest.param(*pair, 20, marks=pytest.mark.full) for pair in itertools.product(GRIDS, DS_CONFIGS)),
    ],
    ids=str,
)
def test_the_loss_series_is_that_of_one_process(
    grid: Grid,
    ds_name: str,
    steps: int,
    series: Callable[[int], tuple[list[dict[str, Any]], Clips]],
    worlds: WorldPool,
    tiny_pipeline: Path,
    tmp_path: Path,
):
    rows, clips = run_series(grid, DS_CONFIGS[ds_name], steps, worlds, tiny_pipeline, tmp_path)
    theirs, their_clips = series(steps)
    assert len(theirs) == steps
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx(
            [row[key] for row in theirs], rel=SERIES_TOLERANCE
        ), key
    for key in ("step", "epoch", "lr", "tokens", "samples"):
        assert [row[key] for row in rows] == [row[key] for row in theirs], key
    # A model that does not move would agree with anything.
    assert len({row["loss"] for row in theirs}) == steps
    assert clips.keys() == their_clips.keys()
    assert len(clips) == sum(row["samples"] for row in theirs)
    for clip, (sigma, loss) in clips.items():
        assert sigma == their_clips[clip][0], clip
        assert loss == pytest.approx(their_clips[clip][1], rel=SERIES_TOLERANCE), clip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        (TWO_BY_TWO, 2),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(TWO_BY_TWO, 3), (Grid(2, 2, 1), 2)]),
    ],
    ids=str,
)
def test_k_plus_k_is_2k_bitwise(
    grid: Grid, stage: int, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    """Stopping and resuming changes no bit of losses, gradient norms or weights."""
    world = worlds[grid.world_size]
    settings = (*SERIES, *grid.overrides, "train.max_steps=6", "flow.cfg_dropout=0.3")
    straight = world.run(run_training, tiny_pipeline, tmp_path / "a", settings, zero(stage))[0]
    halves = (*settings, "checkpoint.every=3", "checkpoint.keep=5")
    world.run(run_training, tiny_pipeline, tmp_path / "b", halves, zero(stage))
    checkpoints = tmp_path / "b" / "checkpoints"
    (checkpoints / "step_00000006").rename(tmp_path / "gone")  # as if the run had died before it was saved
    (checkpoints / "latest").write_text("step_00000003")
    resumed = world.run(run_training, tiny_pipeline, tmp_path / "b", halves, zero(stage), True)[0]

    assert [row["step"] for row in straight] == [1, 2, 3, 4, 5, 6]
    assert len({row["loss"] for row in straight}) == 6
    assert_same_bits(straight, resumed, tmp_path / "a", tmp_path / "b")
