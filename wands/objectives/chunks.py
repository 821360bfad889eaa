"""Chunks of frames, and which of them a chunk sees in causal training.

Sources: Chen et al. 2024, "Diffusion Forcing"; Yin et al. 2025, "CausVid"; Huang et al. 2025, "Self Forcing".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from wands.attention.units import Unit
from wands.config.recipe import ObjectiveConfig


def chunk_bounds(num_frames: int, chunk_frames: int, first_alone: bool) -> list[tuple[int, int]]:
    """Return (first, end) of each chunk in latent frames. The last chunk may be shorter. `first_alone`: frame 0 is one chunk."""
    starts = [0, *range(1 if first_alone else chunk_frames, num_frames, chunk_frames)]
    return list(pairwise([*starts, num_frames]))


def seen_chunks(
    bounds: Sequence[tuple[int, int]], chunk: int, window_frames: int | None, sink_frames: int
) -> list[tuple[int, int]]:
    """Return the ranges (first, end) of earlier chunks that a chunk sees.

    These are the chunks that lie whole in the `window_frames` frames before the chunk, or in the first `sink_frames` frames. None
    means all earlier chunks.
    """
    begin = bounds[chunk][0] - window_frames if window_frames is not None else 0
    seen = [j for j in range(chunk) if bounds[j][0] >= begin or bounds[j][1] <= sink_frames]
    return list(_ranges(seen))


def teacher_forcing_units(grid: tuple[int, int, int], config: ObjectiveConfig) -> tuple[Unit, ...]:
    """Return the units of a sample: the clean copies of its chunks, then their noisy copies.

    Clean and noisy chunks see themselves and earlier clean chunks. The clean copy of the last chunk would be seen by no noisy
    chunk, and is left out.

    Args:
        grid: number of tokens along (frame, row, column).
        config: chunks, window and sink.
    """
    bounds = chunk_bounds(grid[0], config.chunk_frames, config.independent_first_frame)
    per_frame = grid[1] * grid[2]
    num_clean = len(bounds) - 1
    clean = []
    noisy = []
    for chunk, (first, end) in enumerate(bounds):
        seen = seen_chunks(bounds, chunk, config.window_frames, config.sink_frames)
        own = num_clean + chunk
        unit = Unit(first * per_frame, end * per_frame, (*seen, (own, own + 1)), chunk)
        noisy.append(unit)
        if chunk < num_clean:
            clean.append(unit._replace(sees=_joined(seen, chunk), is_context=True))
    return (*clean, *noisy)


def diffusion_forcing_units(grid: tuple[int, int, int], config: ObjectiveConfig) -> tuple[Unit, ...]:
    """Return the units of a sample: its chunks, each of which sees itself and earlier chunks. Arguments as above."""
    bounds = chunk_bounds(grid[0], config.chunk_frames, config.independent_first_frame)
    per_frame = grid[1] * grid[2]
    units = []
    for chunk, (first, end) in enumerate(bounds):
        seen = seen_chunks(bounds, chunk, config.window_frames, config.sink_frames)
        units.append(Unit(first * per_frame, end * per_frame, _joined(seen, chunk), chunk))
    return tuple(units)


def _joined(seen: Sequence[tuple[int, int]], chunk: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges `seen` and the chunk itself."""
    numbers = [j for first, end in seen for j in range(first, end)]
    return tuple(_ranges([*numbers, chunk]))


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, end) of ascending numbers."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number + 1 for number in numbers if number + 1 not in numbers]
    return zip(starts, ends, strict=True)
