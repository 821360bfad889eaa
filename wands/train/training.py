"""Objects of one training process, which the jobs of a run share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wands.checkpoint.ema import WeightAverage
from wands.config.recipe import Recipe
from wands.distributed.dims import ProcessGroups
from wands.run.append_log import EventLog
from wands.run.trackers import Trackers
from wands.texts import Log
from wands.variants import Variant


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training process: this rank's engines, and where it writes.

    Attributes:
        recipe: recipe of the run.
        variant: kind of Wan model.
        output_dir: run folder.
        start_step: number of optimizer steps that the run had made when this process started.
        total_steps: number of optimizer steps of the whole run.
        rank: rank of this process.
        device: device of this process.
        groups: process groups of this rank.
        engines: maps the subfolder of each trained DiT to its DeepSpeed engine.
        averages: maps the subfolder of each trained DiT to the moving average of its weights; empty without `ema`.
        events: log of the run's events.
        trackers: experiment trackers of the run.
        log: function that prints a line for the user on rank 0.
    """

    recipe: Recipe
    variant: Variant
    output_dir: Path
    start_step: int
    total_steps: int
    rank: int
    device: torch.device
    groups: ProcessGroups
    engines: Mapping[str, Any]
    averages: Mapping[str, WeightAverage]
    events: EventLog
    trackers: Trackers
    log: Log

    def weights_at(self, step: int) -> tuple[str, ...]:
        """Return the kinds of weights to evaluate and to sample: "raw", and "ema" if there is a moving average.

        At step 0, "ema" is left out, because the moving average then equals the weights.
        """
        return ("raw", "ema") if self.averages and step else ("raw",)

    @contextmanager
    def inference(self, weights: str) -> Iterator[None]:
        """Switch the DiTs to inference in a `with` block. After the block, restore the state of the training bit for bit.

        Every rank must enter and leave the block between two optimizer steps. Do not save a checkpoint inside the block,
        because with "ema" the weights and the averages are exchanged there.

        Args:
            weights: "raw", or "ema" for the moving average of the weights.
        """
        averages = self.averages if weights == "ema" else {}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            for part, average in averages.items():
                average.exchange(self.engines[part])
            try:
                for engine in self.engines.values():
                    engine.eval()
                yield
            finally:
                for engine in self.engines.values():
                    engine.train()
                torch.cuda.empty_cache()
                for part, average in averages.items():
                    average.exchange(self.engines[part])
