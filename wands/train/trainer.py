"""Objects of one training process: DeepSpeed engines, moving averages, process groups, event log and trackers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from wands.checkpoint.ema import WeightAverage
from wands.distributed.dims import ProcessGroups
from wands.run.append_log import EventLog
from wands.run.run import Log, TrainingRun
from wands.run.trackers import Trackers


@dataclass(frozen=True)
class Trainer:
    """Objects of one training process that the parts of the training loop share.

    Attributes:
        run: the checked training run.
        rank: rank of this process.
        device: device of this process.
        groups: process groups of this rank.
        engines: maps the subfolder of each trained DiT to its DeepSpeed engine.
        averages: maps the subfolder of each trained DiT to the moving average of its weights; empty without `ema`.
        events: log of the run's events.
        trackers: experiment trackers of the run.
        log: function that prints a line for the user on rank 0.
    """

    run: TrainingRun
    rank: int
    device: torch.device
    groups: ProcessGroups
    engines: Mapping[str, Any]
    averages: Mapping[str, WeightAverage]
    events: EventLog
    trackers: Trackers
    log: Log

    def weights_at(self, step: int) -> tuple[str, ...]:
        """Return the kinds of weights to evaluate and to generate videos with: "raw" (the trained weights), and "ema" if there
        is a moving average of the weights.

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
