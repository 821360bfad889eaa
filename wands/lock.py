"""Lock that lets only one process at a time write to a run folder, a cache or an export.

On one machine the lock is a `flock`, which the kernel releases when the process ends for any reason. On some network file
systems, `flock` does not reach other machines. The process that holds the lock therefore also writes a heartbeat to the lock
file every 10 s. The heartbeat contains the time, and the host and id of the process. A process on another machine takes over
the lock only if the heartbeat has stopped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from wands.errors import WandsError, one_line

log = logging.getLogger(__name__)

LOCK_NAME = ".wands.lock"
"""Name of the lock file in a run folder and in a cache."""
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
SETTLE_SECONDS = 2.0
"""Seconds to wait after taking over a lock. If two processes take over the same lock, both then see which of the two wrote
the lock file last, and only that process keeps the lock.
"""
_RECORD_BYTES = 384  # records of one size are replaced by one write, so that no reader sees half a record


class WriterLock(AbstractContextManager["WriterLock"]):
    """Lock that lets one process at a time write to a folder. The lock is held from the constructor to `release`.

    The end of a `with` statement also calls `release`.

    Attributes:
        path: the lock file. It exists while a process holds the lock, and remains if this process is killed.
        has_leftovers: whether an earlier process left the lock file in place, because the process was killed or `is_kept`
            was True. The temporary files of the earlier process may then be deleted.
        is_kept: whether `release` leaves the lock file in place, so that the next lock has `has_leftovers` = True.
    """

    def __init__(self, path: Path, label: str, patience: float = 0.0) -> None:
        """Take the lock.

        The process that holds a lock rewrites the lock file every 10 s. If a process on another machine wrote the lock
        file, the constructor watches the file for 60 s. If the file does not change, the other process has died, and the
        constructor takes the lock.

        Args:
            path: the lock file. Its folder is created if it does not exist.
            label: key and value that name the folder to write, such as "output_dir=runs/default", for messages.
            patience: seconds to wait while a living process holds the lock. After this time, an error is raised.

        Raises:
            WandsError: if another process holds the lock, or the lock file cannot be created.
        """
        self.path, self._label, self.is_kept = path, label, False
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        holder = f"host {socket.gethostname()}, pid {os.getpid()}, since {since}"
        self._record: dict[str, Any] = {"holder": holder, "boot_id": _boot_id()}
        self._made_folder = False
        try:
            self._acquire(patience)
        except OSError as error:
            raise WandsError(
                f"{label}: lock file {path} cannot be created ({one_line(error)}); choose another folder."
            ) from None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="wands lock", daemon=True)
        self._thread.start()

    def _acquire(self, patience: float) -> None:
        began, first = time.monotonic(), None
        while True:
            state = self._open()
            record = self._read()
            waited = time.monotonic() - began
            # On one machine, `flock` alone decides.
            was_here = record.get("boot_id") == self._record["boot_id"]
            is_free = state == "created" or (state == "locked" and was_here)
            is_stale = not record or (record == first and waited >= STALE_SECONDS)
            if is_free or (is_stale and state != "held"):
                break
            os.close(self._file)
            if waited >= patience and (state == "held" or record != (first or record)):
                raise self._refusal(record)
            if first is None and state != "held":
                log.warning(
                    f"{self._label} was being written by another process ({_holder(record)}); waiting {STALE_SECONDS:.0f} s "
                    "for a sign of life from that process"
                )
            first = first or record
            time.sleep(0.2)
        try:
            self._write()
        except OSError:  # the disk is full
            os.close(self._file)
            self.path.unlink()
            raise
        if not is_free:  # a process on another machine may take over at the same time
            time.sleep(SETTLE_SECONDS)
            if (record_now := self._read()) != self._record:
                os.close(self._file)
                raise self._refusal(record_now)
        self.has_leftovers = bool(record)
        if record:
            log.warning(f"{self._label}: took over the lock of an ended process ({_holder(record)})")

    def _open(self) -> str:
        """Open the lock file, and try to lock it with `flock`. Create the file if it does not exist.

        Returns:
            "created": this process created the file, and locked it if the file system supports `flock`. "locked": the file
            existed, and this process has locked it. "held": another process has locked the file. "no flock": the file existed,
            and the file system does not support `flock`.
        """
        while True:
            state = "created"
            try:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            except FileNotFoundError:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._made_folder = True
                continue
            except FileExistsError:
                state = "locked"
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "held"
            except OSError:  # a file system without locks: only the heartbeat counts
                state = "no flock" if state == "locked" else state
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                    return state
            os.close(self._file)  # the holder has deleted this file: it has ended

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads(self.path.read_bytes()))
        return {}

    def _write(self) -> None:
        self._record["time"] = time.time()
        os.pwrite(self._file, json.dumps(self._record).encode().ljust(_RECORD_BYTES), 0)

    def _refusal(self, record: dict[str, Any]) -> WandsError:
        return WandsError(
            f"{self._label} is being written by another process ({_holder(record)}). Wait until that process ends, stop that "
            "process, or choose another folder."
        )

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            record = self._read()
            if record and record != self._record:
                sys.stderr.write(
                    f"wands: {self._label} was taken over by another process ({_holder(record)}), because this process did not "
                    "update its lock for 60 s. This process ends, because two processes must not write to one folder.\n"
                )
                os._exit(2)
            with suppress(OSError):  # the next heartbeat tries again
                self._write()

    def release(self) -> None:
        """Release the lock. Delete the lock file, unless the attribute `is_kept` is True.

        If the constructor created the folder of the lock file, and the folder is now empty, also delete the folder.
        """
        self._released.set()
        self._thread.join()
        with suppress(OSError):
            if not self.is_kept and self._read() == self._record:
                self.path.unlink()
            if self._made_folder:
                self.path.parent.rmdir()
        os.close(self._file)

    def __exit__(self, *_: object) -> None:
        self.release()


def _boot_id() -> str:
    """Return an id of the running kernel, which shows whether two processes run on the same machine.

    All containers of a machine share this id.
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _holder(record: dict[str, Any]) -> str:
    return str(record.get("holder", "it has just started"))
