"""Ranges of whole parameters, in which the ranks store their parts of a checkpoint.

A range is a number of consecutive values of a flattened parameter, or, where a rank has only some columns of a matrix, of these
columns, flattened. Any range can be filled from any others, so a run can continue with another division of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Columns = tuple[int, int]
"""First column, and the column after the last, of the columns of a matrix that a rank has."""


class Range(NamedTuple):
    """Place of consecutive values in a whole parameter.

    Attributes:
        start: index of the first value in the flattened parameter, or in its flattened columns.
        shape: shape of the whole parameter.
        columns: the columns to which the values belong; None for all columns.
    """

    start: int
    shape: Sequence[int]
    columns: Columns | None = None

    @classmethod
    def of_place(cls, place: Sequence[Any]) -> Range:
        """Return the range that a checkpoint describes: [start, shape], and optionally a number and then the columns."""
        start, shape, *more = place
        return cls(start, shape, (more[1][0], more[1][1]) if len(more) > 1 else None)


class _Rectangle(NamedTuple):
    """Values of a range, from `offset` on, that fill a rectangle of the whole matrix. Bounds are exclusive at the end."""

    rows: tuple[int, int]
    columns: Columns
    offset: int

    def view(self, values: Tensor, rows: tuple[int, int], columns: Columns) -> Tensor:
        """Return a view [rows, columns] of a part of this rectangle, of the values of this rectangle."""
        matrix = values.view(self.rows[1] - self.rows[0], self.columns[1] - self.columns[0])
        return matrix[
            rows[0] - self.rows[0] : rows[1] - self.rows[0],
            columns[0] - self.columns[0] : columns[1] - self.columns[0],
        ]

    @property
    def numel(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


def copy_common(wanted: Range, target: Tensor, stored: Range, source: Any) -> int:
    """Copy the values that two ranges of one parameter have in common. Return their number.

    `target` [N] is filled from `source` [M], a tensor or a slice of a Safetensors file, of which only the needed parts are read.
    """
    numel = source.get_shape()[0] if hasattr(source, "get_shape") else len(source)
    if wanted.columns == stored.columns:
        low = max(wanted.start, stored.start)
        high = min(wanted.start + len(target), stored.start + numel)
        if low < high:
            target[low - wanted.start : high - wanted.start] = source[
                low - stored.start : high - stored.start
            ]
        return max(high - low, 0)
    copied = 0
    wanted_rectangles = list(_rectangles(wanted, len(target)))
    for theirs in _rectangles(stored, numel):
        values = None
        for mine in wanted_rectangles:
            rows = _common(mine.rows, theirs.rows)
            columns = _common(mine.columns, theirs.columns)
            if rows is None or columns is None:
                continue
            if values is None:
                values = source[theirs.offset : theirs.offset + theirs.numel]
            own = target[mine.offset : mine.offset + mine.numel]
            part = mine.view(own, rows, columns)
            part.copy_(theirs.view(values, rows, columns))
            copied += part.numel()
    return copied


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    low = max(one[0], other[0])
    high = min(one[1], other[1])
    return (low, high) if low < high else None


def _rectangles(place: Range, numel: int) -> Iterator[_Rectangle]:
    """Yield the at most three rectangles of a range of a matrix: the rest of its first row, whole rows, and its last row."""
    first, end = place.columns or (0, place.shape[-1])
    width = end - first
    position = place.start
    while position < place.start + numel:
        row, column = divmod(position, width)
        left = place.start + numel - position
        num_rows = 1 if column or left < width else left // width
        num_columns = min(width - column, left)
        yield _Rectangle(
            rows=(row, row + num_rows),
            columns=(first + column, first + column + num_columns),
            offset=position - place.start,
        )
        position += num_rows * num_columns
