"""Objects of one training process: DeepSpeed engines, moving averages, process groups, event log and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wands.distributed.dims import ProcessGroups
from wands.train.ema import WeightAverage
from wands.train.events import EventLog
from wands.train.run import Log, TrainingRun
from wands.train.trackers import Trackers


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
