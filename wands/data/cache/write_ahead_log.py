"""Write-ahead log of samples and text embeddings. A killed process loses at most the record that it was writing.

An HDF5 file is unreadable if its writer is killed, so samples go to a log first, and from there to the shards.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wands.data.cache.format import disk_error
from wands.errors import CacheError
from wands.lock import WriterLock
from wands.own_files import open_own_file

_HEAD = struct.Struct("<4sIQII")  # magic, bytes of header and arrays, CRC-32 of header and arrays
_MAGIC = b"wjr1"


@dataclass(frozen=True)
class LogRecord:
    """Position and metadata of one record. The arrays stay on the disk until `read`.

    Attributes:
        name: digest of the caption, or digest of the video with the window's suffix, such as "#0003#640x352".
        offset: position in bytes at which the arrays start in the file.
        dtypes: dtypes of the arrays, "uint16" or "uint8".
        crc32: CRC-32 of the arrays' bytes.
    """

    name: str
    meta: dict[str, Any]
    path: Path
    offset: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    crc32: int

    @property
    def end(self) -> int:
        """Position in bytes in the log file at which the arrays of this record end."""
        return self.offset + sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in pairs]

    def read(self) -> list[np.ndarray]:
        """Return the arrays, writable. CacheError if the checksum is wrong, for example after a power failure."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            content = bytearray(file.read(self.end - self.offset))
        if zlib.crc32(content) != self.crc32:
            raise CacheError(
                f"cache={self.path.parent.parent} has a damaged {self.path.name} (wrong checksum of {self.name}); "
                f"delete {self.path} and run the same wands preprocess command again."
            )
        arrays = []
        begin = 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self._sizes, strict=True):
            part = np.frombuffer(content, np.uint8, size, begin)
            begin += size
            # A copy, because a part may begin at an odd byte.
            arrays.append(part.copy().view(dtype).reshape(shape))
        return arrays


def read_records(path: Path) -> Iterator[LogRecord]:
    """Yield the records up to the first that is incomplete or damaged. Another process may append at the same time."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        position = 0
        while position + _HEAD.size <= size:
            file.seek(position)
            magic, header_bytes, num_bytes, header_crc32, crc32 = _HEAD.unpack(file.read(_HEAD.size))
            offset = position + _HEAD.size + header_bytes
            if magic != _MAGIC or offset + num_bytes > size:
                return
            content = file.read(header_bytes)
            if zlib.crc32(content) != header_crc32:
                return
            header = json.loads(content)
            shapes = tuple(tuple(shape) for shape in header["shapes"])
            record = LogRecord(
                name=header["name"],
                meta=header["meta"],
                path=path,
                offset=offset,
                shapes=shapes,
                dtypes=tuple(header["dtypes"]),
                crc32=crc32,
            )
            position = offset + num_bytes
            if record.end != position:
                return
            yield record


class WriteAheadLog:
    """Log file, new or left by a killed process, to which one process at a time appends records."""

    def __init__(self, path: Path, durable: bool = True, patience: float = 60.0) -> None:
        """Open or create the file, lock it until `close` or the end of the process, and remove an incomplete last record.

        Unless `durable`, records survive a kill of the process, but not a power failure. `patience` is the seconds to wait for
        the lock.

        Raises:
            DiskError: if the disk is full.
            WandsError: if another process, such as a worker of another run, keeps the lock.
        """
        self.path = path
        self._durable = durable
        label = f"cache={path.parent.parent} ({path.name})"
        with ExitStack() as stack:
            lock = stack.enter_context(WriterLock(path.with_name(f"{path.name}.lock"), label, patience))
            self._check_lock = lock.check
            try:
                self._file = stack.enter_context(open(path, "ab", buffering=0, opener=open_own_file))
            except OSError as error:
                raise disk_error(path, 0, error, cache=path.parent.parent) from None
            records = list(read_records(path))
            self.num_records = len(records)
            self.num_bytes = records[-1].end if records else 0
            self._file.truncate(self.num_bytes)
            self._open = stack.pop_all()

    def add(self, name: str, arrays: Sequence[np.ndarray], meta: Mapping[str, Any]) -> None:
        """Append one record of contiguous uint16 or uint8 arrays, which then survives a kill of the process.

        Raises:
            DiskError: if the disk is full. The log is unchanged.
            WandsError: if another process has taken the log over.
        """
        self._check_lock()
        dtypes = [str(array.dtype) for array in arrays]
        assert {*dtypes} <= {"uint16", "uint8"}, dtypes
        content = b"".join(array.tobytes() for array in arrays)
        shapes = [array.shape for array in arrays]
        fields = {"name": name, "shapes": shapes, "dtypes": dtypes, "meta": meta}
        header = json.dumps(fields).encode()
        head = _HEAD.pack(_MAGIC, len(header), len(content), zlib.crc32(header), zlib.crc32(content))
        left = memoryview(head + header + content)
        size = len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
            if self._durable:
                os.fdatasync(self._file.fileno())
        except OSError as error:
            self._file.truncate(self.num_bytes)
            raise disk_error(self.path, size, error, cache=self.path.parent.parent) from None
        self.num_bytes += size
        self.num_records += 1

    def clear(self) -> None:
        """Remove all records from the file. Call this method after the records have been copied to a shard of the cache."""
        self._file.truncate(0)
        self.num_bytes = self.num_records = 0

    def close(self) -> None:
        """Close the file and release the lock."""
        self._open.close()
