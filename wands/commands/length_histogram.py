"""Lengths of samples, drawn with letters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BAR_WIDTH = 40
NUM_BARS = 10


def token_histogram(tokens: Sequence[int] | np.ndarray) -> str:
    """Count samples by their tokens: one line for each length while there are few, for ten ranges otherwise.

    Args:
        tokens: video tokens of every sample, at least one sample.

    Returns:
        A heading, the bars, and a line of totals; ASCII only.
    """
    lengths = np.asarray(tokens, np.int64)
    assert lengths.size, "a histogram of nothing"
    distinct = np.unique(lengths)
    if len(distinct) <= NUM_BARS:
        edges = [(int(length), int(length)) for length in distinct]
    else:
        step = -(-(int(distinct[-1]) - int(distinct[0]) + 1) // NUM_BARS)
        firsts = range(int(distinct[0]), int(distinct[-1]) + 1, step)
        edges = [(first, first + step - 1) for first in firsts]
    counts = [int(((lengths >= low) & (lengths <= high)).sum()) for low, high in edges]
    labels = [f"{low:,}" if low == high else f"{low:,} - {high:,}" for low, high in edges]
    width = max(len("tokens"), *map(len, labels))
    bars = ["#" * -(-BAR_WIDTH * count // max(counts)) for count in counts]  # rounded up: one sample shows
    lines = [
        f"  {label:>{width}}  {count:7,}  {bar}".rstrip()
        for label, count, bar in zip(labels, counts, bars, strict=True)
    ]
    total = f"  {lengths.sum():,} tokens in all; a sample has {lengths.min():,} to {lengths.max():,}"
    return "\n".join(
        [f"  {'tokens':>{width}}  samples", *lines, f"{total}, {lengths.mean():,.0f} on average"]
    )
