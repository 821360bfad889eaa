"""Values of the recipe keys that are `auto`. They follow from the number of clips."""

from __future__ import annotations

USUAL_STEPS = 1500
USUAL_BINS = 12_000
MIN_PASSES = 4
MAX_PASSES = 300
MIN_CLIPS = 12
"""Smallest number of clips of which some are held out."""


def usual_steps(steps_per_epoch: int, bins_per_step: int) -> int:
    """Number of steps of a run: `USUAL_STEPS`, or fewer if they have more than `USUAL_BINS` bins.

    They are at least `MIN_PASSES` and at most `MAX_PASSES` passes over the data.
    """
    usual = min(USUAL_STEPS, max(USUAL_BINS // bins_per_step, 1))
    return max(MIN_PASSES * steps_per_epoch, min(usual, MAX_PASSES * steps_per_epoch))


def usual_interval(steps: int) -> int:
    """Number of steps between two checkpoints: a sixth of the run, and at most 500."""
    return max(min(500, steps // 6), 1)


def usual_held_out(clips: int) -> int:
    """Number of clips to hold out: a tenth, at least 2, or 4 from 40 clips on; above 20, a fiftieth of the clips is enough."""
    if clips < MIN_CLIPS:
        return 0
    return max(2 if clips < 40 else 4, min(clips // 10, max(20, clips // 50)))
