"""Jobs around the checkpoints of a run: the comparison before a save, the save, and the push after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from wands.checkpoint.checkpoint_files import TrainState
from wands.checkpoint.save import BackgroundPush, CheckpointSaver
from wands.distributed.bootstrap import group_timeout
from wands.report.run_data import thin
from wands.train.jobs import FinishedStep, Job
from wands.train.training import Training
from wands.watch.rank_checks import check_step
from wands.watch.watchdog import Watchdog


class Checkpoints(Job):
    """Job that saves the checkpoints of a run.

    Args:
        state: state of the run before its first step.
        bad_steps: value of `BadSteps.state`, which changes with each step.
        history: (step, loss) pairs of the run so far, on rank 0.
        keep_best: value of `checkpoint.keep_best`.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        state: TrainState,
        *,
        bad_steps: dict[str, Any],
        history: Sequence[tuple[int, float]],
        keep_best: bool,
        watchdog: Watchdog,
    ) -> None:
        self._saver = saver
        self._state = state
        self._bad_steps = bad_steps
        self._history = history
        self._keep_best = keep_best
        self._watchdog = watchdog

    def saves(self, step: FinishedStep) -> bool:
        is_best = step.is_best and self._keep_best
        return step.ends or is_best or step.save_requested or self._saver.is_due(step.number)

    def is_due(self, step: FinishedStep) -> bool:
        can_finish = self._saver.is_pending and not step.is_writing
        return can_finish or self.saves(step)

    def run(self, step: FinishedStep) -> None:
        if self._saver.is_pending:
            self._saver.finish()
        if not self.saves(step):
            return
        state = replace(
            self._state,
            step=step.number,
            epoch=step.plan.epoch,
            loss=thin(list(self._history)),
            bad_steps=self._bad_steps,
        )
        self._watchdog.begin_work(f"saving the checkpoint of step {step.number}")
        is_best = step.is_best and self._keep_best
        self._saver.save(state, step.plan, required=step.ends, is_best=is_best)

    def close(self) -> None:
        self._saver.close()


class RankComparison(Job):
    """Job that compares the plan and the weights between the ranks, also before each save, so that differing weights are not
    saved.
    """

    def __init__(self, training: Training, checkpoints: Checkpoints) -> None:
        self._training = training
        self._checkpoints = checkpoints
        self._every = training.recipe.train.check_every

    def is_due(self, step: FinishedStep) -> bool:
        is_regular = self._checkpoints.saves(step) or step.number % max(self._every, 1) == 0
        return step.is_first or step.check_requested or bool(self._every and is_regular)

    def run(self, step: FinishedStep) -> None:
        reads_all = step.is_first or step.check_requested
        engines = self._training.engines.values()
        num_equal = sum(check_step(engine, step.plan, self._training.device, reads_all) for engine in engines)
        if reads_all:
            self._training.log(
                f"step {step.number}: {num_equal} parameters and the packing plan are equal on all ranks"
            )


class Pushes(Job):
    """Job that writes the event of a new checkpoint (`saved` returns the newest), and pushes it to the Hub in the background."""

    belongs_to_step = True

    def __init__(
        self, training: Training, push: BackgroundPush, saved: Callable[[], Any], watchdog: Watchdog
    ) -> None:
        self._training = training
        self._push = push
        self._saved = saved
        self._watchdog = watchdog
        self._is_complete = False

    def is_due(self, step: FinishedStep) -> bool:
        return step.is_last or self._watchdog.saved != self._saved()

    def run(self, step: FinishedStep) -> None:
        self._is_complete = step.is_last
        saved = self._saved()
        if self._watchdog.saved == saved:
            return
        self._watchdog.saved = saved
        self._training.events.write("save", checkpoint=saved.name)
        self._push.add(saved)

    def close(self) -> None:
        # A resumed run pushes the checkpoint of a run that stopped early.
        self._push.close(group_timeout().total_seconds() / 2 if self._is_complete else 0.0)
