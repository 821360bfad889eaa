"""The moving average: that of one process that has all weights, however ZeRO and context parallelism cut them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.train.runs import make_job, release, run_job
from tests.train.steps import DS_CONFIGS, Grid, zero
from tests.world import WorldPool
from wands.config import EmaSection
from wands.errors import CheckpointError, ConfigError
from wands.train import ema, loop
from wands.train.checkpoint import find_checkpoint, load_exported_state

Weights = dict[str, torch.Tensor]
PLAIN = ("ema.decay=0.7", "ema.warmup=false")
STEPS = ("train.max_steps=4", "checkpoint.every=2", "checkpoint.keep=3")
RUNS = {
    "alone": (Grid(1, 1, 1), zero(2)),
    "zero0": (Grid(2, 1, 1), zero(0)),
    "zero1": (Grid(2, 1, 1), zero(1)),
    "zero2": (Grid(2, 1, 1), zero(2)),
    "zero3": (Grid(2, 1, 1), zero(3)),
    "offload": (Grid(2, 1, 1), DS_CONFIGS["zero3_offload"]),
    "cp": (Grid(2, 1, 2), zero(3)),
}


# ---- the dumb way


def whole_weights(engine: Any) -> Weights:
    """All trained fp32 weights of an engine, on every rank; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: (parameter if (full := safe_get_full_fp32_param(parameter)) is None else full).detach().clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def watched_run(*args: Any) -> list[Weights]:
    """A run, and on rank 0 the weights before it and after each of its steps (of both experts one after the other)."""
    series: list[Weights] = []

    def step_and_look(engine: Any, *rest: Any) -> Any:
        if not series:
            series.append(whole_weights(engine))
        result = step(engine, *rest)
        series.append(whole_weights(engine))
        return result

    step = loop.train_step
    with mock.patch.object(loop, "train_step", step_and_look):
        rows = run_job(*args)
    return series if rows else []


def averaged(series: list[Weights], decay: float) -> Weights:
    """torch's own average, of a module that has all weights."""

    def module(weights: Weights) -> torch.nn.ParameterDict:
        return torch.nn.ParameterDict({name.replace(".", "/"): value for name, value in weights.items()})

    average = AveragedModel(module(series[0]), multi_avg_fn=get_ema_multi_avg_fn(decay))
    for weights in series:  # its first update copies
        average.update_parameters(module(weights))
    return {name.replace("/", "."): value.detach() for name, value in average.module.items()}


def same(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def files_of(step: Path) -> dict[str, bytes]:
    return {str(path.relative_to(step)): path.read_bytes() for path in sorted(step.rglob("ema_rank_*"))}


# ---- runs


@pytest.fixture(scope="module")
def finished(
    tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool
) -> Callable[[str], tuple[Path, list[Weights]]]:
    """Run folder and weights of one of RUNS, which trains when it is first asked for."""
    done: dict[str, tuple[Path, list[Weights]]] = {}

    def run(name: str) -> tuple[Path, list[Weights]]:
        if name not in done:
            (grid, ds), folder = RUNS[name], tmp_path_factory.mktemp(name)
            overrides = (*PLAIN, *STEPS, *grid.overrides)
            done[name] = folder, worlds[grid.world_size].run(watched_run, tiny_pipeline, folder, overrides, ds)[0]
        return done[name]

    return run


@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_average_of_one_process(name: str, finished: Callable[[str], tuple[Path, list[Weights]]]):
    folder, series = finished(name)
    assert len(series) == 5
    for steps in (2, 4):
        found = load_exported_state(folder / "checkpoints" / f"step_{steps:08d}", ema=True)
        assert same(found, averaged(series[: steps + 1], 0.7))
    last = load_exported_state(folder)
    assert same(last, series[-1])
    assert not same(found, last)
