"""The schedule of a run: the bins of every step, and the numbers by which losses are divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from wands.data.datasets import Dataset
from wands.data.packing import Step, imbalance
from wands.data.sampler import PlanSampler, StepPlan
from wands.flow.rng import SampleKey
from wands.objectives.objective import ClipCosts, ClipFacts, Objective

NumCondTokens = Callable[[SampleKey, tuple[int, int, int]], int]
"""Function from the key and token grid of a use of a clip to the number of tokens that are given to the model."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All steps of a run, with the weights of their clips in the loss. A row of the data is one use of a clip in an epoch.

    Attributes:
        clips: result of `plan_clips`.
        costs: tokens and attention pairs of every row in one forward pass.
        num_cond_tokens: number of tokens of the first frame, where it is given.
    """

    sampler: PlanSampler
    objective: Objective
    data: Dataset
    clips: ClipFacts
    costs: ClipCosts
    num_cond_tokens: NumCondTokens

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return self.sampler.total_steps

    @property
    def num_tokens(self) -> np.ndarray:
        """Number of tokens of every row that the model sees, int64 [N]."""
        return self.costs.tokens

    def denominator(self, plan: StepPlan) -> float:
        """Return the number by which the summed loss of a step is divided before the backward pass.

        It is the mean weight of a step of the epoch, so that every clip counts alike, however its step is filled.
        `data.sources[].loss_weight` does not change it.
        """
        weights = self._planned_weights
        rows = self.sampler.rows(plan.epoch)
        mean = float((weights if rows is None else weights[rows]).mean())
        return mean * plan.mean_samples

    def count(self, plan: StepPlan) -> float:
        """Return the weight of a step's clips, by which its summed loss is divided for the log; 1 without trained tokens."""
        rows = list(chain.from_iterable(plan.bins))
        trained = [float(self._unmasked_tokens[i]) - self._num_given(plan, i) for i in rows]
        clips = ClipFacts(grids=self.clips.grids[rows], trained_tokens=np.array(trained))
        return float(self.objective.weights(clips).sum()) or 1.0

    def imbalance(self, bins: Step, dp_size: int) -> float:
        """Return the cost of the slowest ranks in a step / the mean cost of all ranks. 1 is optimal."""
        return imbalance([bins], dp_size, self.sampler.bin_cost)

    @cached_property
    def _planned_weights(self) -> np.ndarray:
        return self.objective.weights(self.clips)

    def _num_given(self, plan: StepPlan, row: int) -> float:
        key = SampleKey(self.data.keys[row], int(plan.repeat_index_of[row]), plan.epoch)
        frames, rows, columns = self.clips.grids[row].tolist()
        return float(self._first_frames[row]) if self.num_cond_tokens(key, (frames, rows, columns)) else 0.0

    @cached_property
    def _unmasked_tokens(self) -> np.ndarray:
        return unmasked_tokens(self.data, self.clips.grids)

    @cached_property
    def _first_frames(self) -> np.ndarray:
        return first_frame_tokens(self.data, self.clips.grids)


def plan_clips(data: Dataset, patch_size: tuple[int, int, int], first_frame_ratio: float) -> ClipFacts:
    """Return the token grid and the expected number of trained tokens of every row of the data.

    `first_frame_ratio` is the share of the uses of a clip in which its first frame is given, and not trained.
    """
    grids = data.latent_shapes.astype(np.int64) // patch_size
    given = first_frame_ratio * first_frame_tokens(data, grids)
    return ClipFacts(grids=grids, trained_tokens=unmasked_tokens(data, grids) - given)


def unmasked_tokens(data: Dataset, grids: np.ndarray) -> np.ndarray:
    """Return the sum of the token weights of every row, float64 [N]. Without a mask, every token has weight 1."""
    sums = data.mask_sums[:, 0]
    return np.where(sums > 0, sums, grids.prod(axis=1))


def first_frame_tokens(data: Dataset, grids: np.ndarray) -> np.ndarray:
    """Return the token weight of every row's first latent frame, float64 [N]. 0 for an image, whose frame is always trained."""
    frames, rows, columns = grids.T
    counts = np.where(frames > 1, rows * columns, 0).astype(float)
    total, first = data.mask_sums.T
    return np.where((total > 0) & (counts > 0), first, counts)
