"""Work of a run between its steps: logs, held-out loss, comparisons, checkpoints, samples, pushes, and outside jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wands.data.sampler import StepPlan
from wands.run.step_result import StepResult
from wands.train.reduction import StepSums

if TYPE_CHECKING:
    from wands.train.training import Training


@dataclass(kw_only=True)
class FinishedStep:
    """A step that has updated the weights, and the decisions about the run after it. Equal on all ranks, except `results`.

    Attributes:
        results: result of each trained DiT on this rank.
        sums: numbers of the step over all ranks.
        seconds: duration of the step, with the wait for data.
        own_seconds: result of `ComputeTimes.end_step`.
        is_first: whether the step is the first step of this process.
        metrics: row of `metrics.jsonl`, with keys such as "loss" and "grad_norm". Set by the log, which is the first job.
        is_best: whether the held-out loss of this step is the lowest so far. Set by the evaluation.
        ends_early: whether `eval.patience` ends the run. Set by the evaluation.
        lacks_evaluation: whether the evaluation of this step was left out, because the run must stop. Set by the evaluation.
    """

    plan: StepPlan
    results: Sequence[StepResult]
    sums: StepSums
    lr: float
    seconds: float
    own_seconds: list[float] | None
    is_first: bool
    is_last: bool
    metrics: dict[str, Any] = field(default_factory=dict)
    is_best: bool = False
    ends_early: bool = False
    lacks_evaluation: bool = False

    @property
    def save_requested(self) -> bool:
        return bool(self.sums.largest["save"])

    @property
    def check_requested(self) -> bool:
        """Whether a comparison of the ranks was requested."""
        return bool(self.sums.largest["check"])

    @property
    def stop_requested(self) -> bool:
        """Whether the run should end after this step, to be resumed later. The resumed run makes up for a missing evaluation."""
        return bool(self.sums.largest["quit"]) or self.lacks_evaluation

    @property
    def is_writing(self) -> bool:
        """Whether a rank still writes files of an earlier checkpoint."""
        return bool(self.sums.largest["is_writing"])

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
