"""Objects of one training process, which the jobs of a run share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from wands.checkpoint.ema import WeightAverage
from wands.config.recipe import Recipe
from wands.distributed.dims import ProcessGroups
from wands.distributed.engine_protocol import Engines
from wands.run.append_log import EventLog
from wands.run.trackers import Trackers
from wands.texts import Log
from wands.variants import Variant


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training process: this rank's engines, and where it writes.

    Attributes:
        start_step: number of optimizer steps that the run had made when this process started.
        total_steps: number of optimizer steps of the whole run.
        engines: maps the subfolder of each trained DiT to its DeepSpeed engine.
        averages: maps the subfolder of each trained DiT to the moving average of its weights; empty without `ema`.
        events: log of the run's events.
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
    engines: Engines
    averages: Mapping[str, WeightAverage]
    events: EventLog
    trackers: Trackers
    log: Log

    def weights_at(self, step: int) -> tuple[str, ...]:
        """Return the kinds of weights to evaluate and to sample: "raw", and after step 0 also "ema" if there is an average."""
        return ("raw", "ema") if self.averages and step else ("raw",)

    @contextmanager
    def inference(self, weights: str) -> Iterator[None]:
        """Switch the DiTs to inference with the "raw" or "ema" weights in a `with` block, and back, bit for bit, after it.

        Every rank must enter and leave the block between two optimizer steps. Do not save a checkpoint inside it, because with
        "ema" the weights and the averages are exchanged there.
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
