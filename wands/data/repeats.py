"""Which rows of the data an epoch visits, where some are to be visited more often than others.

A row is one possible visit to one sample in an epoch: a sample that is visited up to three times has three
rows, which follow each other in copies of the whole source. Nothing here remembers anything: what an epoch
visits follows from its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor

import numpy as np

from wands.errors import ConfigError
from wands.flow.rng import permutation


class RepeatSchedule:
    """The rows of each epoch.

    A source of N samples with `repeat` r has ceil(r) copies. All but the last are visited whole in each epoch.
    Of the last, an epoch takes the share r - floor(r) that follows, in a seeded order of the samples, on the
    share of the epoch before; after its end the order begins anew. So with r = 1.5 a sample is visited once in
    one epoch and twice in the next, and any run of e epochs visits each sample floor(e r) or ceil(e r) times.

    Args:
        num_samples: of each source.
        repeats: of each source, above 0; exact fractions.
        seed: `train.seed`.

    Attributes:
        num_rows: of all copies of all sources.
        sample_of: int64 [num_rows], sample of each row, counted through all sources.

    Raises:
        ConfigError: an epoch might visit nothing.
    """

    def __init__(self, num_samples: Sequence[int], repeats: Sequence[Fraction], seed: int) -> None:
        self.num_samples, self.repeats = tuple(num_samples), tuple(repeats)
        copies = [ceil(repeat) for repeat in repeats]
        firsts = np.cumsum([0, *num_samples]).tolist()
        self.sample_of = np.concatenate(
            [
                np.arange(first, first + num)
                for first, num, times in zip(firsts, num_samples, copies, strict=False)
                for _ in range(times)
            ]
        )
        self.num_rows = len(self.sample_of)
        ends = np.cumsum([num * times for num, times in zip(num_samples, copies, strict=True)]).tolist()
        self._first_rows = [0, *ends]
        self._orders = [permutation(num, seed, "visits", number) for number, num in enumerate(num_samples)]
        self.min_samples = sum(floor(r * num) for r, num in zip(self.repeats, self.num_samples, strict=True))
        if not self.min_samples:
            shares = " + ".join(
                f"{num} x {float(r):.3g}" for num, r in zip(num_samples, repeats, strict=True)
            )
            raise ConfigError(
                f"data.sources visit less than one sample an epoch ({shares}); raise repeat or weight."
            )

    @property
    def is_constant(self) -> bool:
        """Every epoch visits every row."""
        return all(repeat.denominator == 1 for repeat in self.repeats)

    def phase(self, epoch: int) -> tuple[int, ...]:
        """Where each source's walk through its last copy begins and how far it goes: epochs with the same visit the same."""
        walk: list[int] = []
        for repeat, num in zip(self.repeats, self.num_samples, strict=True):
            share = (repeat - floor(repeat)) * num
            begin = floor(epoch * share)
            walk += (begin % num if num else 0, floor((epoch + 1) * share) - begin)
        return tuple(walk)

    def rows(self, epoch: int) -> np.ndarray:
        """What an epoch visits, int64, ascending."""
        phase, found = self.phase(epoch), []
        for number, (repeat, num) in enumerate(zip(self.repeats, self.num_samples, strict=True)):
            first, whole = self._first_rows[number], floor(repeat) * num
            begin, count = phase[2 * number : 2 * number + 2]
            walked = self._orders[number][np.arange(begin, begin + count) % max(1, num)]
            found += [np.arange(first, first + whole), first + whole + np.sort(walked)]
        return np.concatenate(found)


def exact(number: float) -> Fraction:
    """The fraction that a person wrote: 0.1 is a tenth."""
    return Fraction(str(number))


def repeats_of_weights(num_samples: Sequence[int], weights: Sequence[float]) -> list[Fraction]:
    """The visits to a sample per epoch that give each source its share of the epoch.

    An epoch is as many visits as there are samples in all sources, so that weights in the ratio of the sizes
    mean one visit each.

    Args:
        num_samples: of each source.
        weights: of each source, above 0, of any sum. That of a source without samples does not count.
    """
    shares = [exact(weight) if num else Fraction(0) for num, weight in zip(num_samples, weights, strict=True)]
    total, summed = sum(num_samples), sum(shares)
    return [
        share / summed * total / num if num else Fraction(1)
        for num, share in zip(num_samples, shares, strict=True)
    ]
