"""Choose the rows of each epoch when some samples are repeated more often than others.

A row is one possible use of a sample in an epoch. A sample that is used up to three times has three rows. The rows of
a source are numbered copy by copy: first one row for each sample, then a second row for each sample, and so on. There
is no state: the number of an epoch determines the rows of the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor

import numpy as np

from wands.errors import ConfigError
from wands.flow.rng import permutation


class RepeatSchedule:
    """Selection of the rows (uses of samples) of each epoch.

    A source of N samples with `repeat` r has ceil(r) copies. A copy is N rows, one row for each sample. If r is an
    integer, each epoch uses all copies. Otherwise each epoch uses the first floor(r) copies completely, and on
    average (r - floor(r)) * N rows of the last copy. The seed determines a random order of the last copy's rows. Each
    epoch takes the rows that follow the rows of the previous epoch in this order. After the last row, the order starts
    again.

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
        self.num_samples, self.repeats = tuple(num_samples), tuple(repeats)
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
                f"data.sources gives less than one sample per epoch (samples x repeat: {shares}); increase its repeat or weight."
            )

    @property
    def is_constant(self) -> bool:
        """Whether every epoch uses every row (use of a sample). This is the case if all repeats are integers."""
        return all(repeat.denominator == 1 for repeat in self.repeats)

    def phase(self, epoch: int) -> tuple[tuple[int, int], ...]:
        """Return numbers that identify the rows (uses of samples) of an epoch. Two epochs with equal numbers use the
        same rows.

        With a fractional `repeat`, an epoch uses some samples of the source once more than the other samples. These
        extra samples follow each other in a random order of the source's samples, which the seed determines.

        Returns:
            For each source (position of the first extra sample in the random order, number of extra samples). The number of
            extra samples is 0 if `repeat` is an integer.
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

    An epoch uses as many samples, with repeats, as all sources contain together. The share of a source in the epoch is
    proportional to the weight of the source. If the weights are proportional to the sources' numbers of samples, every
    repeat is 1.

    Args:
        num_samples: number of samples of each source.
        weights: weight of each source, above 0. The sum need not be 1. The weight of a source without samples is
            ignored.
    """
    shares = [exact(weight) if num else Fraction(0) for num, weight in zip(num_samples, weights, strict=True)]
    total, summed = sum(num_samples), sum(shares)
    return [
        share / summed * total / num if num else Fraction(1)
        for num, share in zip(num_samples, shares, strict=True)
    ]
