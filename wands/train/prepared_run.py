"""A run that has passed all checks: everything that is known before the process group starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wands.checkpoint.checkpoint_files import Checkpoint, TrainState
from wands.checkpoint.resume import list_changes
from wands.checkpoint.save import build_state
from wands.config.recipe import Recipe
from wands.data.collate import PackingCollator
from wands.data.datasets import Dataset
from wands.distributed.dims import ContextDegrees, ParallelDims
from wands.objectives.objective import Objective
from wands.planning.workload import Workload
from wands.plugin import Plugin
from wands.run.data_identity import DataIdentity
from wands.run.run_model import RunModel
from wands.run.schedule import Schedule
from wands.run.sizes import run_workload
from wands.sampling.requests import SampleRequest
from wands.train.batches import BatchReader
from wands.watch.rank_checks import run_digests


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Training run that has passed all checks, and whose steps are planned.

    Attributes:
        recipe: recipe with all defaults filled in.
        ds_config: config for `deepspeed.initialize`. Only its learning rate is not final: `build_engine` multiplies it by the
            factor of `optim.scale_lr`.
        held_out: data that is evaluated and not trained on; None if no clip is held out.
        degrees: Ulysses degree and ring degree.
        checkpoint: checkpoint that the run resumes from; None for a new run.
        samples: requests for the sample videos that the run generates.
        data_change: text about clips that were added, removed, or packed differently, since the checkpoint.
    """

    recipe: Recipe
    ds_config: dict[str, Any]
    model: RunModel
    data: Dataset
    held_out: Dataset | None
    identity: DataIdentity
    schedule: Schedule
    collator: PackingCollator
    objective: Objective
    plugin: Plugin
    world_size: int
    degrees: ContextDegrees
    checkpoint: Checkpoint | None
    samples: tuple[SampleRequest, ...]
    data_change: str | None

    @property
    def output_dir(self) -> Path:
        return Path(self.recipe.output_dir)

    def changes(self) -> list[str]:
        """Return the data and the settings that a resumed run changes, as texts; [] for a new run."""
        texts = [self.data_change] if self.data_change else []
        return texts + (list_changes(self.checkpoint.state, self.state) if self.checkpoint else [])

    @property
    def start_step(self) -> int:
        """Number of optimizer steps that the run has made: the step of the checkpoint."""
        return self.checkpoint.state.step if self.checkpoint else 0

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.grid(0).dp_size

    def grid(self, rank: int) -> ParallelDims:
        return ParallelDims(
            world_size=self.world_size,
            rank=rank,
            ulysses_degree=self.degrees.ulysses,
            ring_degree=self.degrees.ring,
            tensor_degree=self.recipe.parallel.tensor_degree,
        )

    def reader(self, dims: ParallelDims) -> BatchReader:
        return BatchReader(
            data=self.data,
            collator=self.collator,
            sampler=self.schedule.sampler,
            objective=self.objective,
            experts=self.model.experts,
            packs=self.recipe.packing.enabled,
            dims=dims,
        )

    @cached_property
    def state(self) -> TrainState:
        """State of the run before its first step, see `build_state`."""
        return build_state(
            self.recipe,
            self.ds_config,
            self.model,
            self.identity,
            self.objective,
            world_size=self.world_size,
            data_start=self.schedule.sampler.start,
        )

    def digests(self) -> dict[str, str]:
        """Return the digests that must be equal on all ranks, see `run_digests`."""
        return run_digests(
            recipe=self.recipe,
            ds_config=self.ds_config,
            model_config=self.model.config,
            degrees=self.degrees,
            objective=self.objective,
            identity=self.identity,
            sampler=self.schedule.sampler,
            samples=self.samples,
            step=self.start_step,
        )

    def workload(self, device_type: str) -> Workload:
        """Return the sizes that determine memory and step time. `device_type` is "cuda" or "cpu"."""
        return run_workload(
            self.recipe,
            self.ds_config,
            self.model,
            self.data,
            self.schedule,
            self.samples,
            world_size=self.world_size,
            degrees=self.degrees,
            device_type=device_type,
        )
