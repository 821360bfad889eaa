"""Choose the rows (uses of samples) of each epoch, and map a global step to the samples of this step.

A row is one possible use of a sample in an epoch. If a source is repeated 2.5 times, each of its samples has three rows, and
an epoch uses two or three of these rows. The index of the epoch (0, 1, 2, ...) determines which rows the epoch uses. The rows
of a source are numbered copy by copy: first one row for each sample, then a second row for each sample, and so on.

As long as the data does not change, the step number is the only state of the data order. If clips were added or removed,
a resumed run also needs the plan of the epoch, which the checkpoint contains (`wands.checkpoint.epoch_files`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from math import ceil, floor

import numpy as np

from wands.data.bins import Bin
from wands.data.packing import Cost, EpochPlan, Step, bin_costs, count_steps, plan_epoch, storage_windows
from wands.errors import ConfigError, DataError
from wands.flow.rng import permutation


class RepeatSchedule:
    """Selection of the rows (uses of samples) of each epoch.

    A source with N samples and `repeat` r has ceil(r) copies of N rows. Each copy has one row for each sample. If r is an
    integer, each epoch uses all rows. Otherwise each epoch uses all rows of the first floor(r) copies, and on average
    (r - floor(r)) * N rows of the last copy. The rows of the last copy have a random order that depends only on the seed. Each
    epoch takes the next rows in this order. After the last row, the order starts again.

    Example: with r = 1.5, a sample is used once in one epoch and twice in the next. Any e consecutive epochs use each
    sample floor(e * r) or ceil(e * r) times.

    Args:
        num_samples: number of samples of each source.
        repeats: for each source, how often an epoch uses each sample. The numbers are exact fractions above 0.
        seed: `train.seed`.

    Attributes:
        sample_of: int64 [rows], number of the sample of each row. Samples are numbered consecutively over all sources.
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
        """Whether the `repeat` of every source is an integer. If so, all epochs have the same rows (uses of samples)."""
        return all(repeat.denominator == 1 for repeat in self.repeats)

    def phase(self, epoch: int) -> tuple[tuple[int, int], ...]:
        """Return numbers that identify the rows (uses of samples) of an epoch. Two epochs with equal numbers use the
        same rows.

        If the `repeat` of a source is fractional, an epoch uses some samples of the source once more than the other samples of
        the source. These extra samples are consecutive items in a fixed random order of the source's samples. So the position
        of the first extra sample, and the number of extra samples, identify the rows of the source.

        Returns:
            One pair for each source: (position of the first extra sample in the random order, number of extra samples). The
            number of extra samples is 0 if `repeat` is an integer.
        """
        shares: list[tuple[int, int]] = []
        for repeat, num in zip(self.repeats, self.num_samples, strict=True):
            share = (repeat - floor(repeat)) * num
            begin = floor(epoch * share)
            shares.append((begin % num if num else 0, floor((epoch + 1) * share) - begin))
        return tuple(shares)

    def rows(self, epoch: int) -> np.ndarray:
        """Return the row numbers of an epoch, int64, in ascending order. A row is one use of a sample."""
        rows: list[np.ndarray] = []
        sources = zip(self._first_rows, self.repeats, self._orders, self.phase(epoch), strict=False)
        for first, repeat, order, (begin, count) in sources:
            whole = floor(repeat) * len(order)
            chosen = order[np.arange(begin, begin + count) % max(1, len(order))]
            rows += [np.arange(first, first + whole), first + whole + np.sort(chosen)]
        return np.concatenate(rows)


def exact(number: float) -> Fraction:
    """Convert a decimal number to an exact fraction, so that counts of samples have no rounding errors. For example, 0.1
    becomes 1/10.
    """
    return Fraction(str(number))


def repeats_of_weights(num_samples: Sequence[int], weights: Sequence[float]) -> list[Fraction]:
    """Convert the weights of sources to repeats: how often an epoch uses each sample of a source.

    The share of a source in the epoch is proportional to the weight of the source. An epoch uses as many samples as all
    sources contain together, where a sample that is used twice counts twice. If the weights are proportional to the
    sources' numbers of samples, every repeat is 1.

    Args:
        num_samples: number of samples of each source.
        weights: weight of each source, above 0. The sum need not be 1. The weight of a source without samples is
            ignored.
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
        step: global step, from 0.
        epoch: pass over the data, from 0.
        step_in_epoch: step inside the epoch, from 0.
        bins: for every bin (one forward pass of one rank), the row numbers of its samples, without the samples that
            `data.exclude` names. A row is one use of a sample. A bin is `()` if all its samples are excluded, or if the
            epoch's last step has too few samples for all its bins.
        num_samples: number of samples in `bins`.
        num_tokens: number of tokens in `bins`.
        repeat_index_of: int64 [rows]. For each row of the whole data, the number of earlier rows with the same sample id.
        epoch_plan: plan of the epoch.
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
        """Return, for each row (use of a sample) in a bin (packed sequence), how many earlier rows of the whole data have the
        same sample id.
        """
        return [int(self.repeat_index_of[i]) for i in bin]

    @property
    def mean_samples(self) -> float:
        """Mean number of samples in a step of the epoch, including samples that `data.exclude` names.

        The loss of every step is divided by a number that is proportional to this mean, so that every sample of the epoch has
        the same weight. If it were divided by the step's own number, the few long clips of a step would weigh more.
        """
        return self.epoch_plan.totals[0] / self.epoch_plan.num_steps


@dataclass(eq=False)
class PlanSampler:
    """All optimizer steps of a training run. Every epoch has new bins (packed sequences) in a new order.

    A row is one use of a sample in an epoch: a sample that an epoch may use three times has three rows. An epoch uses
    every row of the data once, or the rows that `schedule` selects. With a schedule, epochs may have different numbers of
    steps. The attributes determine the plans of all epochs, so a checkpoint needs to store only the step number, unless
    the data changes during the run.

    Attributes:
        seq_lens: int64 [N], number of tokens of each of the N rows.
        keys: sample id of every row. All rows of a sample have the same id.
        max_tokens: capacity of a bin in tokens.
        bins_per_step: number of bins of one optimizer step.
        seed: `train.seed`.
        cost: cost (such as FLOPs) of each row, or a rule for it, see `Cost`. The plan balances it between the ranks.
        epochs: number of epochs. It is used only if `max_steps` is None.
        max_steps: number of optimizer steps, over as many epochs as needed.
        level_bins: number of bins that the ranks process at the same time, see `plan_epoch`. These bins get similar costs.
        schedule: rows of each epoch. None means all rows.
        buffer_size: number of rows that are packed together (`packing.buffer_size`). None means all rows of an epoch.
        places: int64 [N, 2], (shard, position in the shard) of every row. Required with `buffer_size`.
        excluded: ids of samples that training skips (`data.exclude`). An epoch is planned as if no sample were excluded. So
            the other samples stay in their steps, and the divisor of the loss does not change.
        start: (epoch, global step) from which the epochs are planned with the current data. It is later than (0, 0) if the
            data or the packing changed during the run.
        given: maps an epoch to a plan that replaces the computed plan. A plan comes from one of two files. The file that the
            recipe key `packing.plan` names contains the plan of one epoch. A checkpoint contains the plan of the epoch in
            which it was saved. If the data or the packing changed, the resumed run finishes this epoch as planned. All
            plans contain row numbers of the current data.
        steps_per_epoch: number of steps of the epoch in `start`. Without a schedule, all later epochs have the same number.
        total_steps: number of optimizer steps of the whole run.
        bin_cost: function that returns the `cost` of a bin, given the row numbers of the bin.

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
    max_steps: int | None = None
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
        self.total_steps = self.max_steps if self.max_steps is not None else self.first_step(self.epochs)

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
        """Return the plan of an epoch: its optimizer steps, each with its bins (packed sequences)."""
        if self._plan[0] != epoch:
            self._plan = (epoch, self._plan_epoch(epoch))
            assert self._plan[1].num_steps == self.num_steps(epoch)
        return self._plan[1]

    def step_plan(self, step: int) -> StepPlan:
        """Return the plan of a global step: its bins (packed sequences), and the numbers of samples and tokens."""
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
        """Return the row numbers that an epoch uses, int64, or None if the epoch uses all rows. A row is one use of a sample."""
        if epoch in self.given:
            return np.array([i for step in self.given[epoch].steps for bin in step for i in bin], np.int64)
        return None if self.schedule is None else self.schedule.rows(epoch)

    def iterate(self, start_step: int = 0) -> Iterator[StepPlan]:
        """Return an iterator over the plans of all steps from `start_step` to the end of the run."""
        return (self.step_plan(step) for step in range(start_step, self.total_steps))

    def _windows_of(self, epoch: int) -> list[np.ndarray] | None:
        """Return the windows of an epoch, in the order in which they are read, as int64 arrays of row numbers.

        A row is one use of a sample. A window is a group of rows that is packed into bins separately. The few bins of a window
        that do not fill an optimizer step are combined with bins of the next windows, and may exchange rows with these bins.
        Return None if the epoch uses all rows of the data as one window.
        """
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
