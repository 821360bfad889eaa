"""Whole training runs inside one test world: what a launcher would start, without the launcher."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from wands.checkpoint.checkpoint_files import Checkpoint, find_checkpoint
from wands.config.recipe_loading import load_recipe
from wands.data.collate import RankSlice
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import attention_backend, build_engine, build_model
from wands.files import read_rows
from wands.objectives.flow_matching import FlowMatching
from wands.objectives.objective import Loss, Model, Prepared
from wands.plugin import Plugin
from wands.train.jobs import FinishedStep, Job
from wands.train.loop import train
from wands.train.prepare import prepare_run
from wands.train.prepared_run import PreparedRun
from wands.train.training import Training
from wands.variants import Expert
from wands.watch.watchdog import Watchdog

# Seven clips of unequal length: 8, 12, 2, 24, 6, 16 and 9 tokens.
MOCK = "data.mock={num_samples: 7, shapes: [[2,4,4],[3,4,4],[2,2,2],[4,4,6],[1,4,6],[2,4,8],[1,6,6]], text_lens: [5,9,3]}"
BASE = (
    MOCK,
    "packing.max_tokens=24",
    "train.bins_per_step=2",
    "precision.compute=fp32",
    "optim.lr=1e-3",
    "checkpoint.every=0",
)


def make_run(
    model: Path,
    output_dir: Path,
    overrides: tuple[str, ...] = (),
    ds: dict[str, Any] | None = None,
    world_size: int | None = None,
    checkpoint: Checkpoint | None = None,
    plugin: Plugin | None = None,
) -> PreparedRun:
    """A checked run on mock data for the world that the environment describes."""
    recipe = load_recipe(None, [*BASE, f"model.path={model}", f"output_dir={output_dir}", *overrides])
    return prepare_run(
        recipe,
        ds if ds is not None else {"zero_optimization": {"stage": 2}},
        world_size=world_size or int(os.environ.get("WORLD_SIZE", "1")),
        names=("zero.json", "recipe.yaml"),
        encoders=lambda path: {},
        checkpoint=checkpoint,
        plugin=plugin,
    )


def run_training(
    model: Path,
    output_dir: Path,
    overrides: tuple[str, ...] = (),
    ds: dict[str, Any] | None = None,
    resume: bool | Path = False,
    log: Callable[[str], None] = lambda text: None,
    plugin: Plugin | None = None,
) -> list[dict[str, Any]]:
    """Train, or go on from a run's newest checkpoint or the one at `resume`.

    Returns:
        The rows of metrics.jsonl on rank 0; other ranks return nothing.
    """
    checkpoint = find_checkpoint(output_dir if resume is True else resume) if resume else None
    run = make_run(model, output_dir, overrides, ds, checkpoint=checkpoint, plugin=plugin)
    return train_run(run, log)


def train_run(run: PreparedRun, log: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Train a prepared run; rank 0 returns the rows of metrics.jsonl."""
    rank, _, device = init_process_group()
    with Watchdog() as watchdog:
        train(run, rank, device, log, watchdog)
    gc.collect()  # an engine that is gone would make the next one slower
    return read_rows(run.output_dir / "metrics.jsonl") if rank == 0 else []


def model_of(
    run: PreparedRun, groups: ProcessGroups, device: torch.device, expert: Expert | None = None
) -> torch.nn.Module:
    """The DiT of a run as its training builds it, without an engine."""
    return build_model(
        run.recipe,
        run.ds_config,
        expert or run.model.experts[0],
        groups=groups,
        device=device,
        backend=attention_backend(run.recipe, run.model.shape.head_dim, device),
        resumes=run.checkpoint is not None,
        config=run.model.config,
    )


def engine_of(run: PreparedRun, model: torch.nn.Module, groups: ProcessGroups | None = None) -> Any:
    """The DeepSpeed engine of a run around a model; `release_engine` takes it apart."""
    return build_engine(model, run.ds_config, run.recipe, run.schedule.total_steps, groups=groups)


class Spy(Job):
    """A job that calls functions of a test: at the start with the training process, after each step with the finished step."""

    def __init__(
        self,
        started: Callable[[Training], object] = lambda training: None,
        stepped: Callable[[Training, FinishedStep], object] = lambda training, step: None,
    ) -> None:
        self._started = started
        self._stepped = stepped

    def start(self, training: Training) -> None:
        self._training = training
        self._started(training)

    def run(self, step: FinishedStep) -> None:
        self._stepped(self._training, step)


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """The loss series of a run."""
    return [row["loss"] for row in rows]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The full fp32 weights of a run's newest checkpoint."""
    from wands.checkpoint.checkpoint_files import load_exported_state

    return load_exported_state(run_dir)


def assert_same_bits(
    straight: list[dict[str, Any]], resumed: list[dict[str, Any]], run_dir: Path, resumed_dir: Path
) -> None:
    """A resumed run has the steps, losses, learning rates, gradient norms and weights of one that never stopped."""
    for name in ("step", "loss", "lr", "grad_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in straight], name
    ours = weights(run_dir)
    theirs = weights(resumed_dir)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Hooked(FlowMatching):
    """The default objective, which calls functions of a test: before the first loss of each step, and after each update.

    Both get the number of the step in this process, from 1.
    """

    def __init__(
        self,
        before: Callable[[int], object] = lambda step: None,
        after: Callable[[int, Mapping[str, Any]], object] = lambda step, engines: None,
    ) -> None:
        self._before = before
        self._after = after
        self._begun = 0
        self._ended = 0

    def loss(self, model: Model, part: RankSlice, prepared: Prepared) -> Loss:
        if self._begun == self._ended:
            self._begun += 1
            self._before(self._begun)
        return super().loss(model, part, prepared)

    def after_step(self, engines: Mapping[str, Any]) -> None:
        self._ended += 1
        self._after(self._ended, engines)
