"""Whole training runs inside one test world: what a launcher would start, without the launcher."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from wands.checkpoint.checkpoint_files import Checkpoint, find_checkpoint
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.files import read_rows
from wands.run.run import TrainingRun
from wands.train import loop
from wands.train.engine import build_engine
from wands.train.loop import train
from wands.train.prepare import prepare_run
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
) -> TrainingRun:
    """A checked run on mock data for the world that the environment describes."""
    recipe = load_recipe(None, [*BASE, f"model.path={model}", f"output_dir={output_dir}", *overrides])
    return prepare_run(
        recipe,
        ds if ds is not None else {"zero_optimization": {"stage": 2}},
        world_size=world_size or int(os.environ.get("WORLD_SIZE", "1")),
        names=("zero.json", "recipe.yaml"),
        encoders=lambda path: {},
        checkpoint=checkpoint,
    )


def run_training(
    model: Path,
    output_dir: Path,
    overrides: tuple[str, ...] = (),
    ds: dict[str, Any] | None = None,
    resume: bool | Path = False,
    log: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Train, or go on from a run's newest checkpoint or the one at `resume`.

    Returns:
        The rows of metrics.jsonl on rank 0; other ranks return nothing.
    """
    checkpoint = find_checkpoint(output_dir if resume is True else resume) if resume else None
    run = make_run(model, output_dir, overrides, ds, checkpoint=checkpoint)
    rank, _, device = init_process_group()
    engines = []

    def build(*args: Any) -> Any:
        engines.append(build_engine(*args))
        return engines[-1]

    with mock.patch.object(loop, "build_engine", build), mock.patch.object(ProcessGroups, "build", groups_of):
        try:
            with Watchdog() as watchdog:
                train(run, rank, device, log, watchdog)
        finally:
            for _ in engines[:]:  # none where the ranks did not agree
                release(engines.pop())
    return read_rows(output_dir / "metrics.jsonl") if rank == 0 else []


_build_groups = ProcessGroups.build
_LINEAR = torch.nn.functional.linear


@cache
def groups_of(grid: ParallelDims, device: torch.device) -> ProcessGroups:
    """The groups of this rank, made once in the life of its process."""
    return _build_groups(grid, device)


def release(engine: Any) -> None:
    """Take an engine apart, so that the process can go on without it.

    What DeepSpeed's ZeRO-3 still holds on to would make each later engine slower, as there is more to look through for cycles.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()  # ZeRO-3 puts every model there and takes none away
    cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in cached.__closure__:  # the cache of a method keeps every model that has made a step
        cell.cell_contents.cache_clear()
    torch.nn.functional.linear = (
        _LINEAR  # it puts its own in the place of torch's, with other roundings in bf16
    )
    del engine
    gc.collect()


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """The loss series of a run."""
    return [row["loss"] for row in rows]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The full fp32 weights of a run's newest checkpoint."""
    from wands.checkpoint.checkpoint_files import load_exported_state

    return load_exported_state(run_dir)
