"""Causal training: every parameter's gradient equals stock diffusers under a dense mask, on every grid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.causal import stock_causal_gradients
from tests.support.runs import make_run
from tests.support.steps import Grid, optimizer_step, worst, zero
from tests.support.world import WorldPool

TOLERANCE = 1e-5  # as in test_gradients.py
STEP = ("train.bins_per_step=2", "packing.max_tokens=48", "flow.weighting=linear")
TEACHER = ("objective.name=teacher_forcing", "objective.chunk_frames=1")
DIFFUSION = ("objective.name=diffusion_forcing", "objective.chunk_frames=1")
RULES = {
    "teacher": TEACHER,
    "teacher, chunks of two": (*TEACHER[:1], "objective.chunk_frames=2", "loss.reduction=token"),
    "teacher, first frame": (
        *TEACHER[:1],
        "objective.chunk_frames=2",
        "objective.independent_first_frame=true",
    ),
    "teacher, window": (
        *TEACHER,
        "objective.window_frames=1",
        "objective.sink_frames=1",
        "objective.context_noise=0.2",
    ),
    "diffusion": DIFFUSION,
    "diffusion, window": (*DIFFUSION, "objective.window_frames=1"),
}
GRIDS = [Grid(1, 1, 1), Grid(1, 2, 1), Grid(1, 3, 1), Grid(1, 1, 2), Grid(1, 2, 2), Grid(2, 1, 1)]


@pytest.mark.parametrize(
    "rule",
    [pytest.param(name, marks=() if name == "teacher, window" else pytest.mark.slow) for name in RULES],
)
@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, marks=() if grid == Grid(1, 2, 1) else pytest.mark.slow) for grid in GRIDS],
    ids=str,
)
def test_the_gradient_is_that_of_a_dense_mask(
    grid: Grid, rule: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = (*STEP, *RULES[rule])
    ranks = worlds[grid.world_size].run(
        optimizer_step, tiny_pipeline, tmp_path, (*overrides, *grid.overrides), zero(2), torch.float64
    )
    theirs = stock_causal_gradients(
        tiny_pipeline, make_run(tiny_pipeline, tmp_path / "stock", overrides, world_size=grid.world_size)
    )
    assert all(float(grad.abs().max()) > 0 for grad in theirs.values())
    assert worst(ranks[0].gradients, theirs) <= TOLERANCE
