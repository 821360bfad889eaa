"""Lock that lets only one process at a time write to a run folder, a cache or an export.

The lock is a `flock`, which the kernel releases when the process ends for any reason. On some network file systems, `flock` fails
or does not reach other machines. So the lock file also contains a record of its owner, who rewrites it every 10 s. A process on
another machine takes the lock over when the record has not changed for 3 minutes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from wands.errors import WandsError, one_line
from wands.own_files import open_own_file

log = logging.getLogger(__name__)

LOCK_NAME = ".wands.lock"
"""Name of the lock file in a run folder and in a cache."""
BEAT_SECONDS = 10.0
STALE_SECONDS = 180.0
SETTLE_SECONDS = 2.0
"""Seconds between two looks at the lock file. Of two processes that take a lock over at once, the later one keeps it."""
_RECORD_BYTES = 1024  # records of one size are replaced by one write, so that no reader sees half a record
_PROC = Path("/proc")


class WriterLock(AbstractContextManager["WriterLock"]):
    """Lock that lets one process at a time write to a folder, from the constructor to the end of a `with` statement.

    Args:
        path: the lock file. A missing folder is created.
        label: key and value that name the folder to write, such as "output_dir=runs/default", for messages.
        patience: seconds to wait while a living process holds the lock. After this time, an error is raised.
        force: whether to take over the lock of a process on another machine at once.

    Attributes:
        has_leftovers: whether an earlier process was killed or had `is_kept` = True. Its temporary files may be deleted.
        is_kept: whether the lock file stays at the end, so that the next lock has `has_leftovers` = True.
        on_lost: function that a thread calls with a message if another process has taken the lock over.

    Raises:
        WandsError: if another process holds the lock, or has taken it over by the end of the `with` statement.
    """

    def __init__(self, path: Path, label: str, patience: float = 0.0, *, force: bool = False) -> None:
        self.path = path
        self.is_kept = False
        self.on_lost: Callable[[str], None] = lambda message: None
        self._label = label
        self._owner = {
            "owner": f"host {socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%F %T %z')}",
            "pid": os.getpid(),
            "pid_namespace": os.readlink(_PROC / "self/ns/pid"),
            "boot_id": _boot_id(),
        }
        self._made_folder = False
        self._is_failing = False
        self._lost: WandsError | None = None
        self._file = -1
        try:
            self._acquire(patience, force)
        except OSError as error:
            self._close()
            raise WandsError(
                f"{label}: lock file {path} cannot be created ({one_line(error)}); choose another folder."
            ) from None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="wands lock", daemon=True)
        self._thread.start()

    def _acquire(self, patience: float, force: bool) -> None:
        began = time.monotonic()
        first: dict[str, Any] = {}
        taken: dict[str, Any] = {}
        while True:
            is_locked = self._open()
            record = _read(self.path)
            lives = _is_alive(record, is_locked)
            waited = time.monotonic() - began
            if lives is False:
                break
            self._close()
            if lives is None and (force or (record == first and waited >= STALE_SECONDS)):
                # A new file, because a lost machine may never release the `flock` of this one.
                self.path.unlink(missing_ok=True)
                taken = record
                continue
            if waited >= patience and (lives or record != (first or record)):
                raise WandsError(
                    f"{self._label} is being written by another process ({_name(record)}). Wait until that process ends, stop "
                    "that process, or choose another folder."
                )
            if not first and lives is None:
                log.warning(
                    f"{self._label} was being written by another process ({_name(record)}); waiting {STALE_SECONDS:.0f} s "
                    "for a sign of life from that process"
                )
            first = first or record
            time.sleep(0.2)
        self._write()
        if self._is_failing and not is_locked:
            raise OSError("neither a lock nor a record is possible")
        if taken or not is_locked:
            time.sleep(SETTLE_SECONDS)  # another process may do the same at this moment
            self.check()
        self.has_leftovers = bool(record or taken)
        if self.has_leftovers:
            log.warning(f"{self._label}: took over the lock of an ended process ({_name(record or taken)})")

    def _open(self) -> bool | None:
        """Open or create the lock file. Return whether this process has locked it, or None if the file system has no locks."""
        for _ in range(100):
            if not self.path.parent.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._made_folder = True
            with suppress(FileNotFoundError):  # the holder has just ended, and has deleted its file or folder
                self._file = open_own_file(self.path, os.O_RDWR | os.O_CREAT)
                is_locked: bool | None = True
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError:
                    is_locked = None
                if os.path.samestat(os.lstat(self.path), os.fstat(self._file)):
                    return is_locked
            self._close()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _beat(self) -> None:
        try:
            while not self._released.wait(BEAT_SECONDS):
                self.check()
                self._write()
        except WandsError as error:
            self.on_lost(str(error))

    def _write(self) -> None:
        content = json.dumps({**self._owner, "time": time.time()}).encode()
        try:
            os.pwrite(self._file, content.ljust(_RECORD_BYTES), 0)
            os.fsync(self._file)  # for other machines
            self._is_failing = False
        except OSError as error:  # a failing disk does not end the run
            if not self._is_failing:
                log.warning(f"{self._label}: {self.path} cannot be written ({one_line(error)}); going on")
            self._is_failing = True

    def check(self) -> None:
        """Raise a WandsError if the lock file has the record of another process, now and 2 s later."""
        with suppress(OSError):  # a file that cannot be read proves nothing
            for pause in (SETTLE_SECONDS, 0.0):
                record = _read(self.path)
                if self._lost or record.get("owner") in (None, self._owner["owner"]):
                    break
                time.sleep(pause)
            else:
                self._lost = WandsError(
                    f"{self._label} was taken over by another process ({_name(record)}). Two processes must not write to one "
                    "folder, so this process ends."
                )
        if self._lost:
            raise self._lost

    def __exit__(self, *_: object) -> None:
        """Release the lock, and delete the lock file unless `is_kept`. Delete its folder if the lock made it and it is empty."""
        self._released.set()
        self._thread.join()
        try:
            self.check()
        finally:
            with suppress(OSError):
                if not self.is_kept and _read(self.path).get("owner") == self._owner["owner"]:
                    self.path.unlink()
                if self._made_folder:
                    self.path.parent.rmdir()
            self._close()


def _read(path: Path) -> dict[str, Any]:
    """Return the record in a lock file, or {} if there is none."""
    try:
        with open(path, "rb", opener=open_own_file) as file:
            content = file.read(_RECORD_BYTES).decode(errors="replace").strip(" \0")
    except (FileNotFoundError, WandsError):
        return {}
    with suppress(ValueError, RecursionError):
        if isinstance(record := json.loads(content), dict):
            return record
    return {"damaged": content} if content else {}


def _is_alive(record: dict[str, Any], is_locked: bool | None) -> bool | None:
    """Return whether the owner of a lock still runs, or None if this process cannot know."""
    if not record:
        return is_locked is False
    if record.get("boot_id") != _boot_id():
        return None
    if is_locked is not None:
        return not is_locked
    is_near = record.get("pid_namespace") == os.readlink(_PROC / "self/ns/pid")
    return False if is_near and not (_PROC / str(record.get("pid"))).exists() else None


def _boot_id() -> str:
    """Return an id of the running kernel, which all containers of a machine share."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _name(record: dict[str, Any]) -> str:
    return str(record.get("owner", "it has just started, or its record is damaged"))
