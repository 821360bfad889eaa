"""Tables of clips: csv, jsonl, json and line-aligned txt files -> rows with lower-case names, and their meaning."""

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wands.errors import DataError

# fmt: off
VIDEO_COLUMNS = (
    "video", "video_path", "file_name", "file_path", "path", "video_file_name",
    "image", "image_path", "image_file_name", "mp4",
)
CAPTION_COLUMNS = ("caption", "prompt", "text", "cap", "captions", "vila_caption", "gemini_v2_caption", "txt")
# fmt: on
RANGE_COLUMNS = ("start", "end", "start_frame", "end_frame")

# Line (or item) number from 1, and the row; in place of an unreadable row the reason.
NumberedRow = tuple[int, dict[str, Any] | str]


@dataclass(frozen=True)
class Columns:
    """Which columns hold the video and the caption; None takes the usual names. Case does not count."""

    source: str
    video: str | None = None
    caption: str | None = None

    @property
    def video_names(self) -> tuple[str, ...]:
        return (self.video.lower(),) if self.video else VIDEO_COLUMNS

    @property
    def caption_names(self) -> tuple[str, ...]:
        return (self.caption.lower(),) if self.caption else CAPTION_COLUMNS

    def check(self, present: Iterable[str]) -> None:
        """Make sure that some row can have a video and a caption.

        Raises:
            DataError: no column has one of the names looked for.
        """
        names = {name.lower() for name in present}
        for kind, wanted in (("video", self.video_names), ("caption", self.caption_names)):
            if not names.intersection(wanted):
                raise DataError(
                    f"source={self.source} has no {kind} column: looked for {', '.join(wanted)} among "
                    f"{', '.join(sorted(names)) or 'none'}; name it with {kind}_column"
                )

    def pick(self, row: dict[str, Any]) -> tuple[Any, Any]:
        """Return (video, caption) of a row with lower-case names; None where the row has none."""
        return _first(row, self.video_names), self.pick_caption(row)

    def pick_caption(self, row: dict[str, Any]) -> Any:
        """Return the caption of a row with lower-case names; None where the row has none."""
        return _first(row, self.caption_names)


def _first(row: dict[str, Any], names: Iterable[str]) -> Any:
    """The first column that is filled: a table of videos and images leaves one of the two empty."""
    present = [row[name] for name in names if name in row]
    return next((value for value in present if value not in (None, "")), next(iter(present), None))


def read_window(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Read a row's optional start and end, seconds.

    Raises:
        DataError: not numbers, or nothing lies between them.
    """
    limits: list[float | None] = []
    for name in ("start", "end"):
        value = row.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            limits.append(None)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{name}={value} is no number of seconds; correct it")
        limits.append(number)
    start, end = limits
    if (start or 0.0) < 0 or (end is not None and end <= (start or 0.0)):
        raise DataError(f"start={start} end={end} must be 0 <= start < end; correct them")
    return start, end


def read_frames(row: dict[str, Any]) -> tuple[int, int] | None:
    """Read a row's optional start_frame and end_frame, both inclusive, as NVIDIA's meta.json has them.

    Raises:
        DataError: one of them is missing, no whole number, or nothing lies between them.
    """
    first, last = row.get("start_frame"), row.get("end_frame")
    if first in (None, "") and last in (None, ""):
        return None
    try:
        limits = [float(str(value)) for value in (first, last)]
        # A column in which some row is empty comes as 9.0 from pandas.
        frames = (int(limits[0]), int(limits[1])) if all(map(float.is_integer, limits)) else (0, -1)
    except ValueError:
        frames = (0, -1)
    if not 0 <= frames[0] <= frames[1]:
        raise DataError(
            f"start_frame={first} end_frame={last} must be whole numbers, 0 <= start_frame <= end_frame; "
            "correct them"
        )
    return frames


def read_pairs(videos: Path, captions: Path) -> list[NumberedRow]:
    """Read two text files whose n-th lines belong together: a clip's path, its caption.

    Raises:
        DataError: one of them cannot be read, or they differ in length: no line can then be trusted.
    """
    columns = []
    for file in (videos, captions):
        try:
            lines = file.read_text(encoding="utf-8-sig").replace("\r\n", "\n").rstrip("\n").split("\n")
        except (OSError, ValueError) as error:
            raise DataError(f"source={file} cannot be read ({error}); save it as UTF-8 text") from error
        columns.append([line.strip() for line in lines])
    if len(columns[0]) != len(columns[1]):
        raise DataError(
            f"source={videos.parent}: {videos.name} has {len(columns[0]):,} lines and {captions.name} "
            f"{len(columns[1]):,}; line n of one must belong to line n of the other"
        )
    return [
        (number, {"video": video, "caption": caption})
        for number, (video, caption) in enumerate(zip(*columns, strict=True), start=1)
        if video or caption
    ]


def read_table(table: Path) -> list[NumberedRow]:
    """Read a .csv, .jsonl or .json file in UTF-8, with or without a byte order mark.

    A .json is a list of objects, or one object of file name: caption(s), or file name: object.

    Raises:
        DataError: it is none of these, or cannot be read as a whole.
    """
    kind = table.suffix.lower()
    try:
        if kind == ".jsonl":
            rows = list(_jsonl_rows(table.read_bytes()))
        elif kind == ".csv":
            rows = list(_csv_rows(table))
        elif kind == ".json":
            rows = list(_json_rows(table.read_text(encoding="utf-8-sig")))
        else:
            raise DataError(f"source={table} is no table; give a .csv, .jsonl or .json file, or a folder")
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON
        raise DataError(f"source={table} cannot be read ({error}); save it as UTF-8 {kind[1:]}") from error
    return [(number, row if isinstance(row, str) else _lower(row)) for number, row in rows]


def _lower(row: dict[str, Any]) -> dict[str, Any]:
    return {str(name).strip().lower(): value for name, value in row.items()}


def _csv_rows(table: Path) -> Iterator[NumberedRow]:
    """Rows under the number of the line where they begin; after an unreadable one the next line begins another."""
    lines = list(io.StringIO(table.read_text(encoding="utf-8-sig"), newline=""))
    names: list[str] | None = None
    begin = 0
    while begin < len(lines):
        cells, end = _csv_row(lines, begin)
        if isinstance(cells, str):
            if names is None:
                raise DataError(f"source={table}:{begin + 1} is an {cells}")
            yield begin + 1, cells
        elif not cells:
            pass  # an empty line
        elif names is None:
            names = cells
        elif len(cells) > len(names):
            yield begin + 1, "more cells than the header; put a caption with commas in double quotes"
        else:
            yield begin + 1, dict(itertools.zip_longest(names, cells))
        begin = end


def _csv_row(lines: list[str], begin: int) -> tuple[list[str] | str, int]:
    """The cells of the row that begins at a line, or why it is unreadable; and the line behind.

    A double quote that is never closed would take all rows behind it into one caption, so quotes are read strictly.
    """
    reader = csv.reader((lines[index] for index in range(begin, len(lines))), strict=True)
    try:
        return next(reader), begin + reader.line_num
    except csv.Error as error:
        problem = error
    # Blanks behind a closing quote are harmless.
    row = [re.sub(r'"[ \t]+(?=[,\r\n]|$)', '"', line) for line in lines[begin : begin + reader.line_num]]
    try:
        (cells,) = csv.reader(row, strict=True)
    except (csv.Error, ValueError):
        cure = (
            'close its double quotes, double those inside a cell (""), use commas between cells'
            if '"' in row[0]
            else "mend it"
        )
        return f"unreadable row ({problem}); {cure}", begin + 1
    return cells, begin + len(row)


def _jsonl_rows(data: bytes) -> Iterator[NumberedRow]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            yield number, f"unreadable line ({error}); write one JSON object on it"
            continue
        yield number, row if isinstance(row, dict) else "not an object; write one JSON object on the line"


def _json_rows(text: str) -> Iterator[NumberedRow]:
    rows = json.loads(text)
    if isinstance(rows, dict):
        rows = [
            {**value, "file_name": name} if isinstance(value, dict) else {"file_name": name, "caption": value}
            for name, value in rows.items()
        ]
    if not isinstance(rows, list):
        raise ValueError(f"a list of objects is wanted, found {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else "not an object; write one with video and caption"
