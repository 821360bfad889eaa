"""Log files of a run. A log that cannot be written never stops the training."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from wands.errors import one_line
from wands.files import read_rows, write_text

_log = logging.getLogger(__name__)

_FAILURE = "%s cannot be written (%s); free disk space. The training continues; the next step tries again."
MAX_WAITING = 10_000
"""Largest number of records that a log keeps in memory while its file cannot be written. Older records are lost."""


class AppendLog:
    """Log file to which records are appended. If a write fails, the records are kept and written with the next record.

    The first failed write is logged, and the first write that succeeds again. The file is opened for each record, so that a
    deleted file or folder is created again.

    Args:
        path: the file. It is created with the first record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._num_lost, self._failed = 0, False

    def append(self, *records: bytes) -> None:
        """Write the records of earlier failed writes, then these records. Do not raise an error if a write fails."""
        self._num_lost += max(0, len(self._waiting) + len(records) - MAX_WAITING)
        self._waiting.extend(records)
        try:
            self._write(b"".join(self._waiting))
            if self._failed:
                _log.error("%s can be written again; missing records: %d", self.path, self._num_lost)
            self._waiting.clear()
            self._num_lost, self._failed = 0, False
        except OSError as error:
            if not self._failed:
                _log.error(_FAILURE, self.path, one_line(error))
            self._failed = True

    def close(self) -> None:
        """Try again to write the records that are waiting. If they cannot be written, report how many are missing."""
        if self._waiting:
            self.append()
        if self._waiting:
            num_missing = self._num_lost + len(self._waiting)
            _log.error("%s is incomplete; missing records: %d", self.path, num_missing)

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)  # a full disk may have left a part of a record
                raise


def to_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of a `.jsonl` file, with null in place of numbers that are not finite."""
    return (json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None)) + "\n").encode()


def continue_rows(path: Path, start_step: int) -> tuple[list[dict[str, Any]], AppendLog]:
    """Open a `.jsonl` file to append rows, after removing the rows that a resumed run writes again.

    The resumed run repeats the steps after `start_step`. The rows of these steps are removed, except rows of events that
    the repeated steps do not write again, such as a restart.

    Returns:
        (remaining rows, log to which rows can be appended).

    Raises:
        WandsError: if the file contains rows to remove, but cannot be written.
    """
    rows, cut = read_rows(path), (None, "bad update", "spike")
    rows = [row for row in rows if row.get("event") not in cut or row.get("step", math.inf) <= start_step]
    lines = b"".join(map(to_line, rows))
    if path.is_file() and path.read_bytes() != lines:
        write_text(path, lines.decode())
    return rows, AppendLog(path)
