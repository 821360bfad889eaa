"""Who does which piece of work: several processes, on one node or many, take the next piece that nobody has.

A piece is a byte of a file. Whoever works on it holds a lock of the system on that byte, and the system lifts the lock when the
process ends, however it ends: the piece of a process that was killed is free again at once, and no clock is asked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from wands.errors import CacheError

POLL_SECONDS = 0.05
_TODO, _DONE = b"\0", b"\1"


class Claims:
    """The pieces 0 to num_pieces - 1 of a piece of work shared through a file.

    Safe to use from several threads. Open the file once in a process: closing it anywhere lifts all its locks there.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Args:
            path: made by `create`.
        """
        self._file = path.open("r+b", buffering=0)
        self.num_pieces = os.fstat(self._file.fileno()).st_size
        self._path = path
        self._held: set[int] = set()
        self._next = 0
        self._mutex = threading.Lock()

    @staticmethod
    def create(path: Path, num_pieces: int) -> None:
        """Make the file anew: nothing is done."""
        path.write_bytes(_TODO * num_pieces)

    def take(self, stopped: Callable[[], bool] = lambda: False) -> int | None:
        """Claim a piece that nobody has; waits for those that others are at, which may be killed.

        Args:
            stopped: asked now and then whether to give up.

        Returns:
            The number of the piece; None when all are done.

        Raises:
            CacheError: the file system has no locks.
        """
        while not stopped():
            with self._mutex:
                state = os.pread(self._file.fileno(), self.num_pieces, 0)
                if _TODO not in state:
                    return None
                for begin, end in ((self._next, len(state)), (0, self._next)):
                    piece = state.find(_TODO, begin, end)
                    while piece >= 0:
                        if piece not in self._held and self._lock(piece):
                            self._held.add(piece)
                            self._next = piece + 1
                            return piece
                        piece = state.find(_TODO, piece + 1, end)
            time.sleep(POLL_SECONDS)
        return None

    def done(self, piece: int) -> None:
        """Say that a claimed piece need not be done again; its result must be on the disk by now."""
        with self._mutex:
            os.pwrite(self._file.fileno(), _DONE, piece)
            self._unlock(piece)
            self._held.discard(piece)

    def num_done(self) -> int:
        """Pieces that somebody has done."""
        return os.pread(self._file.fileno(), self.num_pieces, 0).count(_DONE)

    def close(self) -> None:
        """Give back what is claimed and not done."""
        self._file.close()

    def _lock(self, piece: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, piece)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise CacheError(
                f"cache={self._path.parent.parent} lies on a file system without locks ({error.strerror}); "
                "choose an --out on another."
            ) from None
        if os.pread(self._file.fileno(), 1, piece) == _DONE:  # since the state was read
            self._unlock(piece)
            return False
        return True

    def _unlock(self, piece: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, piece)
