"""Tables of clips: read .csv, .jsonl and .json files and pairs of .txt files (paths and captions); write .csv and .jsonl."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wands.data.clips.file_kinds import decode_text, explain_error
from wands.data.clips.records import ClipRecord
from wands.data.clips.rows import RANGE_COLUMNS
from wands.data.clips.source import CAPTION_COLUMNS, VIDEO_COLUMNS
from wands.errors import ConfigError, DataError
from wands.files import atomic_path

_FIX_QUOTES = 'close the double quotes, write "" for a double quote inside a cell, use commas between cells'
NumberedRow = tuple[int, dict[str, Any] | str]
"""(number of the line or item from 1, row with lower-case column names, or the reason why it is unreadable)."""


def read_lines(file: Path) -> list[str]:
    """Return the stripped lines of a text file. DataError if it cannot be read."""
    try:
        lines = decode_text(file.read_bytes(), f"SOURCE={file}").rstrip("\n").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"SOURCE={file} cannot be read: {explain_error(error)}") from error
    return [line.strip() for line in lines]


def read_pairs(videos: Path, captions: Path) -> list[NumberedRow]:
    """Return (line number, row with "video" and "caption") from a file of paths and a file of captions, line by line.

    Raises:
        DataError: if a file cannot be read, or the two files have different numbers of lines.
    """
    paths = read_lines(videos)
    texts = read_lines(captions)
    if len(paths) != len(texts):
        raise DataError(
            f"SOURCE={videos.parent}: {videos.name} has {len(paths):,} lines and {captions.name} has "
            f"{len(texts):,}, but line n of both files must describe one clip; correct the files"
        )
    pairs = enumerate(zip(paths, texts, strict=True), start=1)
    return [(number, {"video": video, "caption": text}) for number, (video, text) in pairs if video or text]


def read_table(table: Path) -> list[NumberedRow]:
    """Return (number, row) for each row of a .csv, .jsonl or .json file in UTF-8, UTF-16 or UTF-32.

    A .json file is a list of rows, numbered from 1, or an object that maps file names to captions or rows. In other files, the
    number is that of the line. A row maps lower-case column names to cells; for an unreadable row, it is a text with the reason.

    Raises:
        DataError: if the file has another extension, or is not a valid file of its kind.
    """
    kind = table.suffix.lower()
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".json": _json_rows}
    if kind not in readers:
        raise DataError(f"SOURCE={table} is not a table; pass a .csv, .jsonl or .json file, or a folder")
    try:
        rows = list(readers[kind](table))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON
        raise DataError(f"SOURCE={table} cannot be read: {explain_error(error)}") from error
    return [(number, row if isinstance(row, str) else lower_names(row)) for number, row in rows]


def lower_names(row: dict[Any, Any]) -> dict[str, Any]:
    """Return a row with column names in lower case, without leading and trailing white space."""
    return {str(name).strip().lower()[:1000]: value for name, value in row.items()}


def _csv_rows(table: Path) -> Iterator[NumberedRow]:
    """Yield (number of its first line, row or reason) for each row of a .csv file except the header.

    The separator is a comma, or a semicolon if only that is in the header.
    """
    lines = list(io.StringIO(decode_text(table.read_bytes(), f"SOURCE={table}"), newline=""))
    header = next(filter(str.strip, lines), "")
    # Excel writes semicolons in the countries that write 0,5 for a half.
    separator = ";" if ";" in header and "," not in header else ","
    names: list[str] | None = None
    begin = 0
    while begin < len(lines):
        cells, end = _csv_row(lines, begin, separator)
        if isinstance(cells, str):
            if names is None:
                raise DataError(f"SOURCE={table}: line {begin + 1} must name the columns, but is an {cells}")
            yield begin + 1, cells
        elif names is None:
            names = cells or None  # an empty line has no cells
        elif len(cells) > len(names):
            yield begin + 1, "row has more cells than the header; put a caption with commas in double quotes"
        elif cells:
            yield begin + 1, dict(itertools.zip_longest(names, cells))
        begin = end


def _csv_row(lines: list[str], begin: int, separator: str) -> tuple[list[str] | str, int]:
    """Return (cells, or the reason if unreadable; index of the next row's line) for the row at `lines[begin]`.

    An unclosed double quote makes a row unreadable, because all later rows would become one caption.
    """
    rows = (lines[index] for index in range(begin, len(lines)))
    reader = csv.reader(rows, delimiter=separator, strict=True)
    try:
        return next(reader), begin + reader.line_num
    except csv.Error as error:
        problem = error
    end = begin + reader.line_num
    # Remove spaces and tabs after a closing quote.
    row = [re.sub(rf'"[ \t]+(?=[{separator}\r\n]|$)', '"', line) for line in lines[begin:end]]
    try:
        (cells,) = csv.reader(row, delimiter=separator, strict=True)
    except (csv.Error, ValueError):
        fix = _FIX_QUOTES if '"' in row[0] else "correct the row"
        return f"unreadable row ({problem}); {fix}", begin + 1
    return cells, end


def _jsonl_rows(table: Path) -> Iterator[NumberedRow]:
    data = table.read_bytes()
    if not json.detect_encoding(data).startswith("utf-8"):
        data = decode_text(data, f"SOURCE={table}").encode()
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            problem = "" if isinstance(row, dict) else "line is not a JSON object"
        except (ValueError, RecursionError) as error:
            problem = f"unreadable line ({explain_error(error).partition(';')[0]})"
        yield number, f"{problem}; write a JSON object on the line" if problem else row


def _json_rows(table: Path) -> Iterator[NumberedRow]:
    rows = json.loads(decode_text(table.read_bytes(), f"SOURCE={table}"))
    if isinstance(rows, dict):
        rows = [
            {**value, "file_name": name} if isinstance(value, dict) else {"file_name": name, "caption": value}
            for name, value in rows.items()
        ]
    if not isinstance(rows, list):
        raise ValueError(f"the file must be a JSON list or object, but has the type {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            row = "item is not a JSON object; write an object with video and caption"
        yield number, row


def table_row(record: ClipRecord, table: Path, **columns: object) -> dict[str, object]:
    """Return the row for a clip in a new table: video, caption, time range, the other columns of `record.row`, then `columns`.

    Paths of files in the folder of the new table are relative to it.
    """
    folder = table.absolute().parent

    def written(path: Path) -> str:
        return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()

    files = {kind.column: written(path) for kind, path in record.files}
    times = {name: time for name in ("start", "end") if (time := getattr(record, name)) is not None}
    replaced = {*VIDEO_COLUMNS, *CAPTION_COLUMNS, *RANGE_COLUMNS}
    copied = {name: value for name, value in record.row.items() if name not in replaced}
    return {"video": written(record.path), "caption": record.caption, **times, **copied, **files, **columns}


def check_out(table: Path, source: str) -> None:
    """Raise ConfigError if the value of --out has an extension that `write_table` cannot write, or is the source."""
    if table.suffix.lower() not in (".csv", ".jsonl"):
        raise ConfigError(f"--out={table} must end in .csv or .jsonl; change the extension")
    if os.path.realpath(table) == os.path.realpath(os.path.expanduser(source)):  # also for a link to itself
        raise ConfigError(
            f"--out={table} is the file SOURCE; choose another file, because rows of SOURCE that cannot be read would be lost"
        )


def write_table(table: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, sorted by video and start time, for `read_table`. An interrupted write keeps an existing file.

    Values that JSON cannot represent become null. In a .csv file, lists and objects become JSON texts.

    Raises:
        WandsError: if the file cannot be written.
    """

    def to_json(value: object) -> str:
        return json.dumps(value, default=lambda unknown: None)

    rows = sorted(rows, key=lambda row: (str(row.get("video")), row.get("start", 0.0)))
    with (
        atomic_path(table) as partial,
        partial.open("w", encoding="utf-8", errors="replace", newline="") as file,
    ):
        if table.suffix.lower() == ".jsonl":
            file.writelines(to_json(row) + "\n" for row in rows)
            return
        names = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            plain = {
                name: to_json(value) for name, value in row.items() if isinstance(value, list | dict | bytes)
            }
            writer.writerow({**row, **plain})
