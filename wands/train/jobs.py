"""Work of a run between its steps: logs, held-out loss, comparisons, checkpoints, samples, pushes, and outside jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wands.data.sampler import StepPlan
from wands.run.step_result import StepResult

if TYPE_CHECKING:
    from wands.train.training import Training


@dataclass(kw_only=True)
class FinishedStep:
    """A step that has updated the weights, and what is decided about the run after it. Equal on all ranks, except `results`.

    Attributes:
        plan: packing plan of the step.
        results: result of each trained DiT on this rank.
        metrics: row of `metrics.jsonl`, with keys such as "loss" and "grad_norm".
        is_last: whether the step is the last step of the run.
        save_requested: whether a checkpoint was requested.
        check_requested: whether a comparison of the ranks was requested.
        stop_requested: whether the run should end after this step, to be resumed later.
        is_writing: whether a rank still writes files of an earlier checkpoint.
        is_best: whether the held-out loss of this step is the lowest so far. Set by the evaluation.
        ends_early: whether `eval.patience` ends the run. Set by the evaluation.
    """

    plan: StepPlan
    results: Sequence[StepResult]
    metrics: dict[str, Any]
    is_last: bool
    save_requested: bool
    check_requested: bool
    stop_requested: bool
    is_writing: bool
    is_best: bool = False
    ends_early: bool = False

    @property
    def number(self) -> int:
        """Number of optimizer steps that the run has made, including this step."""
        return self.plan.step + 1

    @property
    def ends(self) -> bool:
        """Whether no step follows in this process."""
        return self.is_last or self.stops

    @property
    def stops(self) -> bool:
        """Whether the run ends here before its last step, or was asked to end at it."""
        return self.stop_requested or self.ends_early


class Job:
    """Work before the first step and after some steps. Override what the job needs.

    Every rank has the job. A method that communicates must be called on every rank, so `is_due` must not differ between them.
    """

    belongs_to_step = False
    """Whether the time of `run` counts as time of the next step, and not as a pause."""

    def start(self, training: Training) -> None:
        """Act before the first step of this process."""

    def is_due(self, step: FinishedStep) -> bool:
        """Return whether to call `run` after a step."""
        return True

    def run(self, step: FinishedStep) -> None:
        """Act after a step."""

    def close(self) -> None:
        """Act at the end of this process, also after an error."""
