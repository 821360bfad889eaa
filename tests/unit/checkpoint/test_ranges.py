"""Ranges of whole parameters: any division is filled from any other, as by index."""

from __future__ import annotations

import itertools

import pytest
import torch

from wands.checkpoint.ranges import Range, copy_common

ROWS = 5
COLUMNS = 12


def divide(whole: torch.Tensor, num_columns: int, num_cuts: int) -> list[tuple[Range, torch.Tensor]]:
    """A matrix in parts of columns, each of which is cut into pieces, as tensor parallelism and ZeRO divide it."""
    parts = []
    width = COLUMNS // num_columns
    for part in range(num_columns):
        columns = (part * width, (part + 1) * width)
        flat = whole[:, columns[0] : columns[1]].reshape(-1)
        size = -(-len(flat) // num_cuts)
        parts += [
            (
                Range(start, whole.shape, columns if num_columns > 1 else None),
                flat[start : start + size].clone(),
            )
            for start in range(0, len(flat), size)
        ]
    return parts


DIVISIONS = [(1, 1), (1, 4), (1, 7), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3)]


@pytest.mark.parametrize(("stored", "wanted"), itertools.product(DIVISIONS, repeat=2), ids=str)
def test_any_division_is_filled_from_any_other(stored: tuple[int, int], wanted: tuple[int, int]):
    whole = torch.randn(ROWS, COLUMNS)
    sources = divide(whole, *stored)
    for place, expected in divide(whole, *wanted):
        target = torch.full_like(expected, torch.nan)
        counts = [copy_common(place, target, source_place, source) for source_place, source in sources]
        assert torch.equal(target, expected)
        assert sum(counts) == len(target)


def test_what_is_missing_is_not_counted():
    whole = torch.randn(ROWS, COLUMNS)
    sources = divide(whole, 2, 3)[1:]
    target = torch.zeros(whole.numel())
    counts = [copy_common(Range(0, whole.shape), target, *source) for source in sources]
    assert sum(counts) == whole.numel() - 10


def test_a_place_in_a_file_is_a_range():
    assert Range.of_place([3, [4, 5]]) == Range(3, [4, 5])
    assert Range.of_place([3, [4, 5], 2]) == Range(3, [4, 5])
    assert Range.of_place([3, [4, 5], 2, [1, 3]]) == Range(3, [4, 5], (1, 3))
