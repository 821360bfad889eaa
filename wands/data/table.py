"""Tables of clips: csv, jsonl and json files -> rows with lower-case column names, and their meaning."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wands.errors import DataError

VIDEO_COLUMNS = ("video", "video_path", "file_name", "file_path", "path")
CAPTION_COLUMNS = ("caption", "prompt", "text", "cap")

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
        videos = (row[name] for name in self.video_names if name in row)
        captions = (row[name] for name in self.caption_names if name in row)
        return next(videos, None), next(captions, None)


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
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{name}={value} is no number of seconds; correct it")
        limits.append(number)
    start, end = limits
    if (start or 0.0) < 0 or (end is not None and end <= (start or 0.0)):
        raise DataError(f"start={start} end={end} must be 0 <= start < end; correct them")
    return start, end


def read_table(table: Path) -> list[NumberedRow]:
    """Read a .csv, .jsonl or .json (list of objects) file in UTF-8, with or without a byte order mark.

    Raises:
        DataError: it is none of these, or cannot be read as a whole.
    """
    kind = table.suffix.lower()
    try:
        if kind == ".jsonl":
            rows = list(_jsonl_rows(table.read_bytes()))
        elif kind == ".csv":
            rows = list(_csv_rows(table.read_text(encoding="utf-8-sig")))
        elif kind == ".json":
            rows = list(_json_rows(table.read_text(encoding="utf-8-sig")))
        else:
            raise DataError(f"source={table} is no table; give a .csv, .jsonl or .json file, or a folder")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not JSON
        raise DataError(f"source={table} cannot be read ({error}); save it as UTF-8 {kind[1:]}") from error
    return [(number, row if isinstance(row, str) else _lower(row)) for number, row in rows]


def _lower(row: dict[str, Any]) -> dict[str, Any]:
    return {str(name).strip().lower(): value for name, value in row.items()}


def _csv_rows(text: str) -> Iterator[NumberedRow]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield reader.line_num, f"unreadable line ({error}); mend it"
            continue
        if None in row:  # DictReader's place for cells beyond the header
            yield reader.line_num, "more cells than the header; put a caption with commas in double quotes"
        else:
            yield reader.line_num, dict(row)


def _jsonl_rows(data: bytes) -> Iterator[NumberedRow]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            yield number, f"unreadable line ({error}); write one JSON object on it"
            continue
        yield number, row if isinstance(row, dict) else "not an object; write one JSON object on the line"


def _json_rows(text: str) -> Iterator[NumberedRow]:
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError(f"a list of objects is wanted, found {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else "not an object; write one with video and caption"
