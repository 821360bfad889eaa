"""Rows whose cells are lists, as in Panda-70M: the time ranges of a video in one cell, and their captions in another."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from wands.data.clips.captions import MAX_CHARACTERS
from wands.data.clips.rows import read_number
from wands.errors import DataError

TIMESTAMP_COLUMNS = ("timestamp", "timestamps")
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:\.\d*)?)")
MAX_LIST = 50 * MAX_CHARACTERS
"""Longest text that is read as a list, in characters."""


def split_lists(row: dict[str, Any], caption_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each pair of time range and caption, or the row itself if its cells are no lists.

    A list of captions without time ranges is several captions of one clip, unless it is written as text: then it may be anything.

    Raises:
        DataError: if one cell is a list and the other is not, or the lists have different lengths.
    """
    name = next((name for name in caption_names if row.get(name) not in (None, "")), "caption")
    captions = _texts_of(row.get(name))
    column = next((column for column in TIMESTAMP_COLUMNS if column in row), TIMESTAMP_COLUMNS[0])
    ranges = _ranges_of(row.get(column))
    if ranges is None and (captions is None or not isinstance(row[name], str)):
        return [row]
    if captions is None or ranges is None or len(captions) != len(ranges):
        cell, kind = (name, captions) if ranges is None else (column, ranges)
        raise DataError(
            f"{cell}={str(row[cell])[:60]} is a list of {len(kind or [])}, but a list needs as many time ranges in {column} as "
            f"captions in {name}; write a row for each caption"
        )
    return [
        {**row, name: caption, "start": start, "end": end}
        for (start, end), caption in zip(ranges, captions, strict=True)
    ]


def _texts_of(cell: Any) -> list[str] | None:
    values = _list_of(cell)
    return values if values and all(isinstance(value, str) for value in values) else None


def _ranges_of(cell: Any) -> list[tuple[float, float]] | None:
    ranges = []
    for pair in _list_of(cell) or ():
        times = [_seconds_of(time) for time in pair] if isinstance(pair, list | tuple) else []
        if len(times) != 2 or None in times:
            return None
        ranges.append((times[0] or 0.0, times[1] or 0.0))
    return ranges or None


def _list_of(cell: Any) -> list[Any] | None:
    """Return a cell that is a list, or the text of a list as JSON or Python writes it."""
    if (
        isinstance(cell, str)
        and cell.strip()[:1] == "["
        and cell.strip()[-1] == "]"
        and len(cell) <= MAX_LIST
    ):
        for read in (json.loads, ast.literal_eval):
            try:
                cell = read(cell.strip())
                break
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return list(cell) if isinstance(cell, list | tuple) else None


def _seconds_of(value: Any) -> float | None:
    """Return a time in seconds, from a number or from a text such as "0:01:02.500"."""
    if isinstance(value, str) and (match := _CLOCK.fullmatch(value.strip())):
        hours, minutes, seconds = match.groups()
        return 3600.0 * int(hours or 0) + 60.0 * int(minutes) + float(seconds)
    return read_number(value)
