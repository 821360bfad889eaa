"""Choose the rows of each epoch, and map a global step to its samples.

A row is one possible use of a sample in an epoch. The rows of a source are numbered copy by copy: one row for each sample, then a
second row for each sample, and so on.

As long as the data does not change, the step number is the only state of the data order. If clips were added or removed, a
resumed run also needs the plan of the epoch, which the checkpoint contains (`wands.checkpoint.epoch_files`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from math import ceil, floor
from typing import Literal

import numpy as np

from wands.config.auto import usual_steps
from wands.data.bins import Bin
from wands.data.packing import Cost, EpochPlan, Step, bin_costs, count_steps, plan_epoch, storage_windows
from wands.errors import ConfigError, DataError
from wands.flow.rng import permutation


class RepeatSchedule:
    """Selection of the rows of each epoch.

    A source with N samples and `repeat` r has ceil(r) copies of N rows. Each epoch uses all rows of the first floor(r) copies
    and, on average, (r - floor(r)) * N rows of the last copy: the next ones in a random order that depends only on the seed and
    starts again after the last row. Any e consecutive epochs use each sample floor(e * r) or ceil(e * r) times.

    Attributes:
        sample_of: int64 [rows], number of the sample of each row, counted over all sources.
        min_samples: smallest number of rows of an epoch.

    Raises:
        ConfigError: if an epoch could be empty.
    """

    def __init__(self, num_samples: Sequence[int], repeats: Sequence[Fraction], seed: int) -> None:
        self.num_samples = tuple(num_samples)
        self.repeats = tuple(repeats)
        copies = [ceil(repeat) for repeat in repeats]
        firsts = np.cumsum([0, *num_samples]).tolist()
        sources = zip(firsts, num_samples, copies, strict=False)
        rows = [np.tile(np.arange(first, first + num), times) for first, num, times in sources]
        self.sample_of = np.concatenate(rows)
        self._first_rows = np.cumsum([0, *map(len, rows)]).tolist()
        self._orders = [permutation(num, seed, "visits", number) for number, num in enumerate(num_samples)]
        self.min_samples = sum(floor(r * num) for r, num in zip(self.repeats, self.num_samples, strict=True))
        if not self.min_samples:
            pairs = zip(num_samples, repeats, strict=True)
            shares = " + ".join(f"{num} x {float(repeat):.3g}" for num, repeat in pairs)
            raise ConfigError(
                f"data.sources gives less than one sample per epoch (samples x repeat: {shares}); increase the repeat or "
                "weight of a source."
            )

    @property
    def is_constant(self) -> bool:
        """Whether the `repeat` of every source is an integer. If so, all epochs have the same rows."""
        return all(repeat.denominator == 1 for repeat in self.repeats)

    def phase(self, epoch: int) -> tuple[tuple[int, int], ...]:
        """Return (first extra sample in the random order, number of extra samples) of each source.

        Two epochs with an equal result use the same rows. The number is 0 if `repeat` is an integer.
        """
        shares: list[tuple[int, int]] = []
        for repeat, num in zip(self.repeats, self.num_samples, strict=True):
            share = (repeat - floor(repeat)) * num
            begin = floor(epoch * share)
            shares.append((begin % num if num else 0, floor((epoch + 1) * share) - begin))
        return tuple(shares)

    def rows(self, epoch: int) -> np.ndarray:
        """Return the row numbers of an epoch, int64, in ascending order."""
        rows: list[np.ndarray] = []
        sources = zip(self._first_rows, self.repeats, self._orders, self.phase(epoch), strict=False)
        for first, repeat, order, (begin, count) in sources:
            whole = floor(repeat) * len(order)
            chosen = order[np.arange(begin, begin + count) % max(1, len(order))]
            rows += [np.arange(first, first + whole), first + whole + np.sort(chosen)]
        return np.concatenate(rows)


def exact(number: float) -> Fraction:
    """Convert a decimal number to an exact fraction (0.1 to 1/10), so that counts have no rounding errors."""
    return Fraction(str(number))


def repeats_of_weights(num_samples: Sequence[int], weights: Sequence[float]) -> list[Fraction]:
    """Convert the weights of sources to repeats, so that an epoch has as many rows as there are samples.

    The share of a source is proportional to its weight. The weights are above 0 and need not sum to 1; the weight of a source
    without samples is ignored.
    """
    shares = [exact(weight) if num else Fraction(0) for num, weight in zip(num_samples, weights, strict=True)]
    total = sum(num_samples)
    summed = sum(shares)
    return [
        share / summed * total / num if num else Fraction(1)
        for num, share in zip(num_samples, shares, strict=True)
    ]


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, planned before any data is read.

    Attributes:
        bins: row numbers of every bin, without samples that `data.exclude` names. A bin may be empty: `()`.
        repeat_index_of: int64 [rows], number of earlier rows of the whole data with the same sample id.
    """

    step: int
    epoch: int
    step_in_epoch: int
    bins: Step
    num_samples: int
    num_tokens: int
    repeat_index_of: np.ndarray = field(repr=False, compare=False)
    epoch_plan: EpochPlan = field(repr=False, compare=False)

    def repeat_indices(self, bin: Bin) -> list[int]:
        """Return the repeat of each row in a bin."""
        return [int(self.repeat_index_of[i]) for i in bin]

    @property
    def mean_samples(self) -> float:
        """Mean number of samples in a step of the epoch, including samples that `data.exclude` names.

        The loss of every step is divided by a number proportional to this mean. If it were divided by the step's own number, the
        few long clips of a step would weigh more.
        """
        return self.epoch_plan.totals[0] / self.epoch_plan.num_steps


@dataclass(eq=False)
class PlanSampler:
    """All optimizer steps of a training run. Every epoch has new bins in a new order.

    The attributes determine the plans of all epochs, so a checkpoint needs to store only the step number, unless the data changes
    during the run. With a schedule, epochs may have different numbers of steps.

    Attributes:
        seq_lens: int64 [N], number of tokens of each row.
        keys: sample id of every row. All rows of a sample have the same id.
        cost: cost of each row, or a rule for it, see `Cost`. The plan balances it between the ranks.
        epochs: number of epochs. It is used only if `max_steps` is None.
        max_steps: number of steps, or "auto" for `usual_steps`.
        level_bins: number of bins that get similar costs because the ranks process them at the same time, see `plan_epoch`.
        schedule: rows of each epoch. None means all rows.
        buffer_size: number of rows that are packed together (`packing.buffer_size`). None means all rows of an epoch.
        places: int64 [N, 2], (shard, position in the shard) of every row. Required with `buffer_size`.
        excluded: ids of samples that training skips (`data.exclude`). An epoch is planned as if no sample were excluded, so the
            other samples stay in their steps, and the divisor of the loss does not change.
        start: (epoch, global step) from which the epochs are planned with the current data. It is later than (0, 0) if the data
            or the packing changed during the run.
        given: plans by epoch that replace the computed plans, in row numbers of the current data: from `packing.plan`, or from
            the checkpoint if the data or the packing changed, so that the resumed run finishes its epoch as planned.
        steps_per_epoch: number of steps of the epoch in `start`. Without a schedule, all later epochs have the same number.

    Raises:
        DataError: if there is no sample, or a sample has more than `max_tokens` tokens.
    """

    seq_lens: np.ndarray
    keys: Sequence[str]
    _: KW_ONLY
    max_tokens: int
    bins_per_step: int
    seed: int
    cost: Cost
    epochs: int = 1
    max_steps: Literal["auto"] | int | None = None
    level_bins: int | None = None
    schedule: RepeatSchedule | None = None
    buffer_size: int | None = None
    places: np.ndarray | None = None
    excluded: Collection[str] = ()
    start: tuple[int, int] = (0, 0)
    given: Mapping[int, EpochPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.seq_lens) == len(self.keys)
        self.seq_lens = np.asarray(self.seq_lens, dtype=np.int64)
        self.bin_cost = bin_costs(self.seq_lens, self.cost)
        if self.schedule is not None and self.schedule.is_constant:
            self.schedule = None
        self._windows: list[np.ndarray] | None = None
        if self.buffer_size is not None:
            assert self.places is not None
            self._windows = storage_windows(self.places, self.buffer_size, self.seed)
        # The repeat index of a row is the number of earlier rows with the same key.
        counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self.repeat_index_of = np.array([next(counters[key]) for key in self.keys], np.int64)
        self._counted: dict[tuple[tuple[int, int], ...], int] = {}
        # First known epoch, and first steps of this epoch and the next ones, up to the latest requested epoch.
        self._first_epoch = self.start[0]
        self._first_steps = [self.start[1]]
        if (earlier := self.given.get(self.start[0] - 1)) is not None:
            self._first_epoch -= 1
            self._first_steps.insert(0, self.start[1] - earlier.num_steps)
        self._plan = (self.start[0], self._plan_epoch(self.start[0]))
        self.steps_per_epoch = self._plan[1].num_steps
        self.total_steps = self._count_all()

    def _count_all(self) -> int:
        if self.max_steps == "auto":
            return usual_steps(self.steps_per_epoch, self.bins_per_step)
        return self.first_step(self.epochs) if self.max_steps is None else self.max_steps

    def num_steps(self, epoch: int) -> int:
        """Return the number of optimizer steps of an epoch."""
        if epoch in self.given:
            return self.given[epoch].num_steps
        if self.schedule is None:
            return self.steps_per_epoch
        phase = self.schedule.phase(epoch)
        if phase not in self._counted:
            bins = {"max_tokens": self.max_tokens, "bins_per_step": self.bins_per_step}
            self._counted[phase] = count_steps(self.seq_lens, **bins, windows=self._windows_of(epoch))
        return self._counted[phase]

    def first_step(self, epoch: int) -> int:
        """Return the first global step of an epoch."""
        while (last := self._first_epoch + len(self._first_steps) - 1) < epoch:
            self._first_steps.append(self._first_steps[-1] + self.num_steps(last))
        return self._first_steps[epoch - self._first_epoch]

    def epoch_of(self, step: int) -> int:
        """Return the epoch that contains a global step."""
        while self._first_steps[-1] <= step:
            self.first_step(self._first_epoch + len(self._first_steps))
        return self._first_epoch + bisect_right(self._first_steps, step) - 1

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch: its optimizer steps, each with its bins."""
        if self._plan[0] != epoch:
            self._plan = (epoch, self._plan_epoch(epoch))
            assert self._plan[1].num_steps == self.num_steps(epoch)
        return self._plan[1]

    def step_plan(self, step: int) -> StepPlan:
        """Return the plan of a global step: its bins, and the numbers of samples and tokens."""
        epoch = self.epoch_of(step)
        plan = self.epoch_plan(epoch)
        step_in_epoch = step - self.first_step(epoch)
        planned = plan.steps[step_in_epoch]
        bins = tuple(tuple(i for i in bin if self.keys[i] not in self.excluded) for bin in planned)
        samples = [i for bin in bins for i in bin]
        num_tokens = int(self.seq_lens[samples].sum())
        return StepPlan(
            step=step,
            epoch=epoch,
            step_in_epoch=step_in_epoch,
            bins=bins,
            num_samples=len(samples),
            num_tokens=num_tokens,
            repeat_index_of=self.repeat_index_of,
            epoch_plan=plan,
        )

    def rows(self, epoch: int) -> np.ndarray | None:
        """Return the row numbers that an epoch uses, int64, or None if the epoch uses all rows."""
        if epoch in self.given:
            return np.array([i for step in self.given[epoch].steps for bin in step for i in bin], np.int64)
        return None if self.schedule is None else self.schedule.rows(epoch)

    def iterate(self, start_step: int = 0) -> Iterator[StepPlan]:
        """Return an iterator over the plans of all steps from `start_step` to the end of the run."""
        return (self.step_plan(step) for step in range(start_step, self.total_steps))

    def _windows_of(self, epoch: int) -> list[np.ndarray] | None:
        """Return the windows of an epoch in reading order; None if the epoch is one window of all rows."""
        rows = self.rows(epoch)
        if self._windows is None:
            return None if rows is None else [rows]
        windows = [self._windows[i] for i in permutation(len(self._windows), self.seed, epoch, "windows")]
        if rows is None:
            return windows
        used = np.zeros(len(self.keys), dtype=bool)
        used[rows] = True
        return [window for window in (window[used[window]] for window in windows) if len(window)]

    def _plan_epoch(self, epoch: int) -> EpochPlan:
        if epoch in self.given:
            return self.given[epoch]
        return plan_epoch(
            self.seq_lens,
            max_tokens=self.max_tokens,
            bins_per_step=self.bins_per_step,
            seed=self.seed,
            epoch=epoch,
            cost=self.cost,
            keys=self.keys,
            level_bins=self.level_bins,
            windows=self._windows_of(epoch),
        )


def check_enough_samples(num_samples: int, dp_size: int) -> None:
    """Raise DataError if there are fewer samples than data-parallel ranks, because some rank would never get a sample."""
    if num_samples < dp_size:
        fix = f"use at most {num_samples} data-parallel ranks, or add clips" if num_samples else "add clips"
        raise DataError(
            f"data has {num_samples} samples, fewer than the {dp_size} data-parallel ranks; {fix}."
        )
