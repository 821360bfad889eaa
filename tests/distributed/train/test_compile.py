"""Training with `model.compile=on` against `off`: the same losses. Only tests with the marker `full` compile code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import losses, run_training
from tests.support.steps import zero
from tests.support.world import WorldPool

STEPS = ("train.max_steps=4", "optim.warmup=1")
CASES = {
    "one process": (1, 2, ()),
    "zero 3, ring": (2, 3, ("parallel.ring_degree=2",)),
    "lora, zero 2, ulysses, selective": (
        2,
        2,
        ("lora={rank: 2, dropout: 0.1}", "parallel.ulysses_degree=2", "model.checkpointing=selective"),
    ),
    "zero 3, full, dropout": (2, 3, ("model.checkpointing=full", "model.dropout=0.1")),
}


def run_as(stance: str, *args: Any) -> list[dict[str, Any]]:
    with torch.compiler.set_stance(stance):
        return run_training(*args)


def compare(case: str, stance: str, pipeline: Path, folder: Path, worlds: WorldPool) -> None:
    world_size, stage, settings = CASES[case]
    series = {}
    for compiled in ("on", "off"):
        args = pipeline, folder / compiled, (*STEPS, *settings, f"model.compile={compiled}"), zero(stage)
        series[compiled] = losses(worlds[world_size].run(run_as, stance, *args)[0])
    assert len(set(series["off"])) == 4
    assert series["on"] == pytest.approx(series["off"], rel=2e-6)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "one process" else pytest.mark.slow) for case in CASES],
)
def test_losses_are_the_same(case: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    compare(case, "force_eager", tiny_pipeline, tmp_path, worlds)


@pytest.mark.full
def test_compiled_losses_are_the_same(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    compare("zero 3, full, dropout", "default", tiny_pipeline, tmp_path, worlds)
