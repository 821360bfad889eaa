"""Warnings of a run that can learn nothing: at its start, and in the line of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.held_to_base import HeldToBase
from tests.support.runs import make_run
from wands.plugin import Plugin
from wands.train.metrics import describe_step
from wands.train.summary import start_block


@pytest.mark.parametrize(
    ("warmup", "is_short"), [(0, False), (0.5, False), (3, False), (4, True), (100, True)]
)
def test_a_run_that_is_all_warm_up_is_named(
    warmup: float, is_short: bool, tiny_pipeline: Path, tmp_path: Path
):
    run = make_run(tiny_pipeline, tmp_path, ("train.max_steps=4", f"optim.warmup={warmup}"), world_size=1)
    warning = f"WARNING: all 4 steps are warm-up (optim.warmup={warmup:g}), so that little is learned"
    assert (warning in start_block(run)) == is_short


def test_an_outside_objective_is_named(tiny_pipeline: Path, tmp_path: Path):
    outside = make_run(tiny_pipeline, tmp_path, world_size=1, plugin=Plugin(objective=HeldToBase()))
    row = "objective   held_to_base (version 1), forwards of a bin: 1 with gradient, 1 without"
    assert row in start_block(outside)
    assert "objective " not in start_block(make_run(tiny_pipeline, tmp_path, world_size=1))


@pytest.mark.parametrize(("norm", "text"), [(0.0, "grad 0 (no weight is trained)  "), (1e-9, "grad 0.000  ")])
def test_a_gradient_of_zero_is_named(norm: float, text: str):
    names = ("step", "loss", "lr", "samples", "tokens", "tokens_per_second", "seconds", "data_wait", "tflops")
    row = dict.fromkeys((*names, "fill", "imbalance"), 1) | {
        "mfu": None,
        "grad_norm": norm,
        "eta_seconds": 3661.2,
    }
    assert text in describe_step(row, 4)
    assert describe_step(row, 4).endswith("  1:01:01 left")
