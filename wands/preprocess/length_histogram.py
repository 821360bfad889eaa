"""Draw a histogram of the lengths of samples, in video tokens, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BAR_WIDTH = 40
NUM_BARS = 10


def count_lengths(lengths: np.ndarray) -> list[tuple[str, int]]:
    """Return (length or range as text, number of samples), shortest first, of at least one sample.

    More than ten different lengths are counted in ten ranges or fewer.
    """
    distinct = np.unique(lengths).tolist()
    if len(distinct) <= NUM_BARS:
        return [(f"{length:,}", int((lengths == length).sum())) for length in distinct]
    step = -(-(distinct[-1] - distinct[0] + 1) // NUM_BARS)
    lows = range(distinct[0], distinct[-1] + 1, step)
    counts = np.bincount((lengths - distinct[0]) // step)
    return [(f"{low:,} - {low + step - 1:,}", int(count)) for low, count in zip(lows, counts, strict=True)]


def token_histogram(tokens: Sequence[int] | np.ndarray) -> str:
    """Return a histogram of at least one sample as ASCII lines: a heading, one line per bar, and the totals."""
    lengths = np.asarray(tokens, np.int64)
    bars = count_lengths(lengths)
    width = max(len("tokens"), *(len(label) for label, _ in bars))
    most = max(count for _, count in bars)
    lines = [f"  {'tokens':>{width}}  samples"]
    for label, count in bars:
        bar = "#" * -(-BAR_WIDTH * count // most)  # rounded up: a single sample is visible
        lines.append(f"  {label:>{width}}  {count:7,}  {bar}".rstrip())
    lines.append(
        f"  {lengths.sum():,} tokens in all; a sample has {lengths.min():,} to {lengths.max():,}, "
        f"{lengths.mean():,.0f} on average"
    )
    return "\n".join(lines)
