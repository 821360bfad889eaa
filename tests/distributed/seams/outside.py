"""Outside code for the tests of the seams: what a package that knows only `import wands` adds to a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import wands
from examples.held_to_base import HeldToBase


class Momentum(torch.optim.SGD):
    """A torch optimizer with a state, as an outside package would bring it."""


def momentum(named: Sequence[tuple[str, Any]], lr: float) -> torch.optim.Optimizer:
    return Momentum([parameter for _, parameter in named], lr=100 * lr, momentum=0.9)


class StepNames(wands.Job):
    """Writes a line per step into the run folder, on every rank."""

    def start(self, training: wands.Training) -> None:
        self.path: Path = training.output_dir / f"steps_{training.rank}.txt"

    def run(self, step: wands.FinishedStep) -> None:
        with self.path.open("a") as file:
            file.write(f"{step.number} {step.metrics['loss']!r}\n")


def halved(optim: Any, total_steps: int) -> Any:
    """A schedule that halves the rate after half of the steps."""
    return lambda step: 1.0 if step < total_steps / 2 else 0.5


plugin = wands.Plugin(
    objective=HeldToBase(weight=1.0, warmup=2), optimizer=momentum, schedule=halved, jobs=(StepNames(),)
)
