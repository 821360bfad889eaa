"""Judge every update of the weights by its loss and gradient norm. A bad update ends the run, or is skipped.

An update is bad if its loss or gradient norm is not finite. A spike is a value far above those of past updates (see
`train.spike_zscore`). With `train.on_bad_step=skip`, it is bad too; with `stop`, it is only written to `events.jsonl`, with the
clips of the step.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from wands.config.recipe import TrainConfig
from wands.data.sampler import StepPlan
from wands.distributed.bootstrap import gather_objects
from wands.errors import DataError
from wands.run.append_log import EventLog
from wands.run.step_result import StepResult
from wands.variants import Expert

_log = logging.getLogger(__name__)
WINDOW = 128
"""Number of past updates with which an update is compared."""
MIN_UPDATES = 20
"""Smallest number of past updates that is needed to recognize a spike."""


class BadSteps:
    """Losses and gradient norms of the last updates of each DiT, with which new updates are compared.

    Args:
        config: `train` section of the recipe.
        excluded: `data.exclude` of the recipe, for error messages.
        saved: `TrainState.bad_steps` of the checkpoint that the run resumes from.
        events: log to which bad updates are written.

    Attributes:
        state: value for `wands_state.json`: the steps of "skipped" updates, and the [loss, gradient norm] pairs of the last
            `WINDOW` good updates of each DiT's subfolder.
    """

    def __init__(
        self,
        config: TrainConfig,
        excluded: Sequence[str],
        experts: Sequence[Expert],
        saved: Mapping[str, Any] | None,
        events: EventLog,
    ) -> None:
        self._config = config
        self._excluded = excluded
        self._experts = experts
        self._events = events
        self.state: dict[str, list[Any]] = {"skipped": [], **{expert.subfolder: [] for expert in experts}}
        self.state |= saved or {}

    def judges(self, plan: StepPlan, count: float) -> list[Callable[[torch.Tensor, float], bool] | None]:
        """Return a function for each trained DiT that decides whether to skip its update, or None if none is skipped.

        The function gets the loss summed over this rank's tokens, and the gradient norm. Its result is equal on all ranks. It
        skips a bad update, and every update of a step whose samples are all in `data.exclude`. With `train.on_bad_step=stop`, it
        is None for other steps, because `check` ends the run. `count` is `Schedule.count`.
        """
        if not plan.num_samples or self._config.on_bad_step == "stop":
            skip = None if plan.num_samples else lambda loss, norm: True  # all samples are excluded
            return [skip] * len(self._experts)
        return [partial(self._is_bad, self.state[expert.subfolder], count) for expert in self._experts]

    def _is_bad(self, past: Sequence[Any], count: float, loss: torch.Tensor, norm: float) -> bool:
        mean = (loss / count).to(torch.float64)
        dist.all_reduce(mean)
        bad = not (mean.isfinite() and math.isfinite(norm))
        if not bad and len(past) >= MIN_UPDATES:
            bad = max(robust_z_scores((mean.item(), norm), past)) > self._config.spike_zscore
        verdict = torch.full_like(mean, float(bad))
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)  # ranks with different hardware must not disagree
        return bool(verdict)

    def check(self, plan: StepPlan, count: float, expert: Expert, loss: float, result: StepResult) -> None:
        """Write a bad update or a spike to `events.jsonl`, and store the values of a good update. Every rank must call this.

        `count` is `Schedule.count`, and `loss` the mean loss of the step over all ranks. A skipped update is bad; a spike that
        was not skipped is good.

        Raises:
            DataError: on all ranks, if a bad update ends the run: with `train.on_bad_step=stop`, every one; with `skip`, if more
                than `train.max_bad_steps` updates of the run were skipped.
        """
        step = plan.step + 1
        norm = result.grad_norm
        budget = self._config.max_bad_steps
        if not plan.num_samples:
            return
        past = self.state[expert.subfolder]
        event = "bad update"
        if not result.skipped and math.isfinite(loss) and math.isfinite(norm):
            event = "spike"
            is_judged = self._config.on_bad_step == "stop" and len(past) >= MIN_UPDATES
            is_spike = is_judged and self._is_bad(past, count, result.loss, norm)
            past[:] = [*past, (loss, norm)][-WINDOW:]
            if not is_spike:
                return
        # The ranks of a context-parallel group have the same clips.
        gathered = chain(*gather_objects(result.samples))
        clips = {(clip["sample_id"], clip["repeat_index"]): clip for clip in gathered}.values()
        row = {"expert": expert.name, "skipped": result.skipped, "loss": loss, "grad_norm": norm}
        self._events.write(event, **row, clips=list(clips))
        if event == "spike":
            return
        self.state["skipped"] += [step] * result.skipped
        if result.skipped and len(self.state["skipped"]) <= budget:
            _log.warning("step %d: bad loss or gradient norm; the update is skipped (see events.jsonl)", step)
            return
        bad = [clip for clip in clips if not math.isfinite(clip["loss"])]
        names = ", ".join(f"{clip['sample_id']} (sigma {clip['sigma']:.4f})" for clip in bad) or "none"
        keys = dict.fromkeys([*self._excluded, *(clip["sample_id"] for clip in bad)])
        option = shlex.quote(f"data.exclude={json.dumps([*keys], ensure_ascii=False)}")
        fix = f"train without these clips (add --set {option}), " if bad else ""
        fix += f"raise train.max_bad_steps={budget}" if result.skipped else "set train.on_bad_step=skip"
        of_expert = f" of the {expert.name}-noise expert" if expert.name else ""
        raise DataError(
            f"step {step}: the update{of_expert} is bad (see train.on_bad_step): the loss is {loss} and the gradient norm is "
            f"{norm} (clips without a finite loss: {names}); {fix}, or lower optim.lr. Then start the run again with --resume.",
            agreed=True,
        )


def robust_z_scores(values: Sequence[float], past: Sequence[Sequence[float]]) -> list[float]:
    """Return how far the logarithm of each value is above the median of past logarithms, in robust standard deviations.

    The robust standard deviation is 1.4826 times the median absolute deviation, and at least 0.05. Each past update has its
    numbers in the order of `values`.
    """
    *logs, current = np.log(np.maximum([*past, values], 1e-30))
    median = np.median(logs, axis=0)
    spread = 1.4826 * np.median(np.abs(logs - median), axis=0)
    return ((current - median) / np.maximum(spread, 0.05)).tolist()
