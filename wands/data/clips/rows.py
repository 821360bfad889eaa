"""Read the time range, crop and license of a clip from its table row or JSON object. Column names are in lower case."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from wands.data.clips.clip import Crop
from wands.errors import DataError
from wands.texts import printable

LICENSE_COLUMNS = ("license", "licence")
RANGE_COLUMNS = ("start", "end", "start_frame", "end_frame")
MAX_TIME = 1e9
"""Limit of times in seconds and in frames. The arithmetic of larger times can overflow."""
Range = tuple[float | None, float | None]
"""(start, end) of a time range in seconds. None stands for the start or the end of the clip."""


def read_number(cell: Any) -> float | None:
    """Return the number in a cell, or None if the cell does not contain a finite number."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(cell, bytes) and math.isfinite(number := float(cell)):
            return number
    return None


def is_empty(cell: object) -> bool:
    """Return whether a cell is None, NaN, or a text of only white space. pandas represents an empty cell by NaN."""
    return cell is None or cell != cell or not str(cell).strip()


def first_filled(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first value in the columns `names` that is neither None nor "", else the first of them, else None.

    A table can have a video column and an image column, and fill one of the two cells in each row.
    """
    values = [row[name] for name in names if name in row]
    return next((value for value in values if value not in (None, "")), next(iter(values), None))


def pick_license(row: Mapping[str, Any]) -> str:
    """Return the license that a row (or the metadata of a sample) states, as one line of at most 100 characters, or ""."""
    value = first_filled(row, LICENSE_COLUMNS)
    return "" if is_empty(value) else printable(" ".join(str(value).split()))[:100]


def pick_crop(row: Mapping[str, Any]) -> Crop | None:
    """Return the rectangle (x, y, width, height) in the column `crop`, such as "0,140,1920,800" or a list, or None.

    Raises:
        DataError: if the crop is not a rectangle.
    """
    value: Any = row.get("crop")
    if is_empty(value):
        return None
    with suppress(TypeError, ValueError):
        x, y, width, height = map(int, map(str, value.split(",") if isinstance(value, str) else value))
        if min(x, y) >= 0 and min(width, height) > 0:
            return x, y, width, height
    raise DataError(f"crop={value!s:.60} must be x,y,width,height in whole pixels, size > 0; correct the row")


def read_range(row: Mapping[str, Any], path: Path) -> Range:
    """Return the time range (start, end) of a row in seconds, None for the start or the end of the clip.

    A range in frames is converted with the frame rate or, if it varies, with the times of the frames of the clip `path`.

    Raises:
        DataError: if the range is invalid or the clip cannot be opened.
    """
    frames = _read_frame_range(row)
    if frames is None:
        return _read_seconds(row)
    from wands.data.clips.video import frame_times, probe

    info = probe(path)
    (first, last) = frames
    if first == 0 and last + 1 >= info.num_frames > 0:
        return None, None
    times = frame_times(path)
    if times is None:
        return first / info.fps, (last + 1) / info.fps
    begin, end = (
        # Frames after the end of the clip get times at the mean rate. The decoder then refuses the range as too long.
        times[min(number, len(times) - 1)] + max(0, number + 1 - len(times)) / info.fps
        for number in (first, last + 1)
    )
    return begin, end


def _read_seconds(row: Mapping[str, Any]) -> Range:
    start, end = (_seconds(name, row.get(name)) for name in ("start", "end"))
    if (start or 0.0) < 0 or (end is not None and end <= (start or 0.0)):
        raise DataError(f"start={start} and end={end} must satisfy 0 <= start < end; correct the row")
    return start, end


def _seconds(name: str, value: Any) -> float | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if (number := read_number(value)) is None or abs(number) >= MAX_TIME:
        raise DataError(f"{name}={value} is not a number of seconds; correct the row")
    return number


def _read_frame_range(row: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (start_frame, end_frame), both inclusive, or None if both are empty. DataError if only one is filled."""
    first = row.get("start_frame")
    last = row.get("end_frame")
    if first in (None, "") and last in (None, ""):
        return None
    with suppress(ValueError):
        # pandas writes 9.0 in a column that has an empty cell.
        limits = [float(str(value)) for value in (first, last)]
        if all(map(float.is_integer, limits)) and 0 <= limits[0] <= limits[1] < MAX_TIME:
            return int(limits[0]), int(limits[1])
    raise DataError(
        f"start_frame={first} and end_frame={last} must be whole numbers with 0 <= start_frame <= end_frame; correct the row"
    )
