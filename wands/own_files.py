"""Open files in a folder that wands did not make, such as a run or a cache that somebody shared.

It may contain a symbolic link, through which wands would write to another file of the user, or a named pipe, which blocks for
ever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from wands.errors import WandsError

_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of `os.open` for a symbolic link, for a folder, and for a named pipe or socket."""


def open_own_file(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file that belongs to wands, and return its descriptor. Fits the argument `opener` of `open`.

    Links in the path of the file's folder are followed.

    Raises:
        WandsError: if `path` is a symbolic link, a folder, a named pipe, a socket or a device.
        OSError: if the file cannot be opened.
    """
    return _open_regular(path, flags | os.O_NOFOLLOW, mode, "a regular file, and no link")


def open_regular_file(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file that the user may have linked, such as an image. Like `open_own_file`, but follows a link to a file."""
    return _open_regular(path, flags, mode, "a regular file")


def _open_regular(path: str | Path, flags: int, mode: int, rule: str) -> int:
    error = WandsError(f"{path} must be {rule}. Move what is there to another place.")
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)  # without O_NONBLOCK, a named pipe blocks
    except OSError as problem:
        if problem.errno in _NO_FILE:
            raise error from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error
    return descriptor
