"""Append rows to the log files of a run, such as `metrics.jsonl`. A log that cannot be written never stops the training."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from wands.disk_errors import read_patiently
from wands.errors import WandsError, one_line
from wands.files import split_rows, write_error, write_text
from wands.log_rows import is_sound
from wands.own_files import open_own_file
from wands.version import __version__

_log = logging.getLogger(__name__)

_FAILURE = "%s cannot be written (%s); free disk space. The training continues; the next step tries again."
MAX_WAITING = 10_000
"""Largest number of records that a log keeps in memory while its file cannot be written. Older records are lost."""


class AppendLog:
    """Log file to which records (lines) are appended.

    Records that cannot be written stay in memory until the next one. The first failure and the first success after it are logged.
    The file is opened for each write, so that a deleted file or folder is created again.

    Raises:
        WandsError: if `path` is a link, a named pipe or another thing that is no file.
    """

    def __init__(self, path: Path) -> None:
        with suppress(OSError):
            os.close(open_own_file(path, os.O_RDONLY))
        self.path = path
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._num_lost = 0
        self._failed = False

    def append(self, *records: bytes) -> None:
        """Append records to the file. A failed write raises no error; the next call writes these records first."""
        self._num_lost += max(0, len(self._waiting) + len(records) - MAX_WAITING)
        self._waiting.extend(records)
        try:
            self._write(b"".join(self._waiting))
            if self._failed:
                _log.error("the log %s can be written again; missing records: %d", self.path, self._num_lost)
            self._waiting.clear()
            self._num_lost = 0
            self._failed = False
        except (OSError, WandsError) as error:  # WandsError: a link or a named pipe
            if not self._failed:
                _log.error(_FAILURE, self.path, one_line(error))
            self._failed = True

    def close(self) -> None:
        """Try again to write the records that could not be written. If this fails, log how many are missing."""
        if self._waiting:
            self.append()
        if self._waiting:
            num_missing = self._num_lost + len(self._waiting)
            _log.error("the log %s is incomplete; missing records: %d", self.path, num_missing)

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab", opener=open_own_file) as file:
                file.write(data)
        except OSError:
            with suppress(OSError), open(self.path, "r+b", opener=open_own_file) as file:
                file.truncate(size)  # a full disk may have left a part of a record
            raise


def to_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of a `.jsonl` file, with null in place of numbers that are not finite."""
    return (json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None)) + "\n").encode()


def continue_rows(path: Path, start_step: int, *keys: str) -> tuple[list[dict[str, Any]], AppendLog]:
    """Return the rows of a `.jsonl` file without those of the steps after `start_step`, and the log to append to.

    A resumed run repeats these steps. Their rows are removed from the file, except events that the steps do not write again, such
    as a restart. Lines that are damaged or lack one of `keys` are moved to a file with the suffix `.damaged`.

    Raises:
        WandsError: if the file contains rows to remove, but cannot be written.
        DiskError: if the file cannot be read.
    """
    cut = (None, "bad update", "spike")
    rows, damaged = _read_log(path, keys)
    if damaged:
        _set_aside(path, damaged)
    rows = [row for row in rows if row.get("event") not in cut or row["step"] <= start_step]
    lines = b"".join(map(to_line, rows))
    if path.is_file() and read_patiently(path, path.read_bytes) != lines:
        write_text(path, lines.decode())
    return rows, AppendLog(path)


def _set_aside(path: Path, damaged: Sequence[bytes]) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        file = open_own_file(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(file, "wb") as stream:
            stream.write(b"".join(line + b"\n" for line in damaged))
    except OSError as error:
        raise write_error(aside, error) from error
    _log.warning(
        "%s: set aside %d damaged lines in %s; all other rows are kept", path, len(damaged), aside.name
    )


def _read_log(path: Path, keys: Sequence[str] = ()) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return (rows, damaged lines) of a log. A row with a value of the wrong type, or without one of the keys, is damaged."""
    found, damaged = split_rows(path)
    rows = []
    for row in found:
        if is_sound(path.name, row) and all(key in row for key in keys):
            rows.append(row)
        else:
            damaged.append(to_line(row).rstrip())
    return rows, damaged


class EventLog:
    """Log of the events of a run, written by rank 0. `step` is the current step, which is stored with each event.

    The first event, with `facts` such as the number of ranks, is `restart` if the previous launch neither reached the last step
    nor stopped on request, otherwise `start`. An exception that leaves the `with` block is written as `error`. Create this log
    before the `StepLog`: a `restart` event names the last step in `metrics.jsonl`, whose last rows the `StepLog` removes.
    """

    def __init__(self, output_dir: Path, rank: int, step: int, facts: Mapping[str, Any]) -> None:
        self._log: AppendLog | None = None
        self._lock = Lock()  # a thread writes the results of pushes
        self.step = step
        if rank != 0:
            return
        rows, self._log = continue_rows(output_dir / "events.jsonl", step, "event")
        past = [row for row in rows if row.get("event") in ("start", "restart", "error", "end", "stop")]
        is_restart = bool(past) and past[-1]["event"] not in ("end", "stop")
        values: dict[str, Any] = {"wands_version": __version__, **facts}
        if is_restart:
            steps = [row["step"] for row in _read_log(output_dir / "metrics.jsonl")[0]]
            number = 1 + sum(row["event"] == "restart" for row in past)
            reason = past[-1].get("reason") if past[-1]["event"] == "error" else None
            values |= {"number": number, "last_step": max(steps, default=0), "reason": reason}
        self.write("restart" if is_restart else "start", **values)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.write("error", reason=one_line(error))

    def write(self, event: str, **values: Any) -> None:
        if self._log is not None:
            row = {"step": self.step, "event": event, "time": round(time.time(), 3)}
            with self._lock:
                self._log.append(to_line(row | values))

    def close(self) -> None:
        """Try again to write the rows that could not be written. If this fails, log how many rows are missing."""
        if self._log is not None:
            self._log.close()


def marked_steps(output_dir: Path, last_step: int) -> dict[str, list[int]]:
    """Return the steps up to `last_step` of a run's events "restart" and "skipped update", for model cards and plots.

    "slow-rank report" is added if there are any. The dict is empty if the run folder has no events.
    """
    rows = [row for row in _read_log(output_dir / "events.jsonl")[0] if row["step"] <= last_step]
    restarts = [row["step"] for row in rows if row.get("event") == "restart"]
    skipped = [row["step"] for row in rows if row.get("skipped")]
    slow = sorted({row["step"] for row in rows if row.get("event") == "slow rank"})
    marks = {"restart": restarts, "skipped update": skipped} | ({"slow-rank report": slow} if slow else {})
    return marks if rows else {}
