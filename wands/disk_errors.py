"""Tell errors of the file system from damaged files, and repeat failed reads.

A network disk fails single reads now and then. Such a read succeeds a moment later, and the file is intact.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from wands.errors import DiskError

T = TypeVar("T")
_log = logging.getLogger(__name__)

WAITS = (1.0, 4.0, 15.0)
"""Seconds to wait before each repetition of a failed read."""
# Other numbers, such as EINVAL, come from a damaged file that names impossible positions or paths.
_RETRIED = [
    "EIO",
    "ESTALE",
    "ETIMEDOUT",
    "EAGAIN",
    "EINTR",
    "EBUSY",
    "ENOLCK",
    "ENODEV",
    "ENXIO",
    "EREMOTEIO",
    "ENOMEM",
    "ENOTCONN",
    "ECONNRESET",
    "ECONNREFUSED",
    "ECONNABORTED",
    "EHOSTDOWN",
    "EHOSTUNREACH",
    "ENETDOWN",
    "ENETUNREACH",
    "EMFILE",
    "ENFILE",
]
_LASTING = ("EACCES", "EPERM", "ENOENT", "ENOSPC", "EDQUOT", "EROFS", "EFBIG")
RETRIED = frozenset(getattr(errno, name) for name in _RETRIED if hasattr(errno, name))
"""Error numbers after which a read is repeated."""
DISK_NUMBERS = RETRIED | {getattr(errno, name) for name in _LASTING}
"""Error numbers of the file system. They say nothing about the content of a file."""
# HDF5, the safetensors package and PyTorch's mapped files name the error number only in their texts.
_NUMBER_IN_TEXT = re.compile(r"(?:errno = |\(os error |-only mode: [^()]*\()(\d+)")


def system_number(error: BaseException) -> int:
    """Return the operating system's number of an error, such as `errno.EIO`; 0 if there is none."""
    number: int | None = error.number if isinstance(error, DiskError) else getattr(error, "errno", None)
    if number is None and (found := _NUMBER_IN_TEXT.search(str(error))):
        number = int(found[1])
    return number or 0


def disk_number(error: BaseException) -> int:
    """Return the number of an error that says nothing about the content of a file, such as `errno.EIO`; 0 for others."""
    number = system_number(error)
    return number if number in DISK_NUMBERS else 0


def unreadable(path: Path | str, error: BaseException) -> DiskError:
    """Return the error for a file that the file system did not read."""
    number = disk_number(error)
    return DiskError(
        f"{path} cannot be read ({os.strerror(number)}). This is an error of the file system: the file may be intact. Check the "
        "disk, its mount and the permissions, then run the same command again (wands train with --resume).",
        number=number,
    )


def failed_access(error: OSError) -> DiskError:
    """Return the error for a failed read or write that no other code has described."""
    return DiskError(
        f"{error.filename or 'a file'} cannot be read or written ({error.strerror}). This is an error of the file system: the "
        "file may be intact. Check the disk, its mount and the permissions, then run the same command again (wands train with "
        "--resume).",
        number=disk_number(error),
    )


def read_patiently(path: Path | str, read: Callable[[], T]) -> T:
    """Return the result of `read`. If the file system fails, call it again after 1, 4 and 15 s, with a line for the user.

    An error that lasts, such as a missing permission, is raised at once. `path` is only for messages.

    Raises:
        DiskError: if the file system failed each time. Other errors of `read`, such as FileNotFoundError, are raised as they are.
    """
    for wait in (*WAITS, None):
        try:
            return read()
        except Exception as error:
            number = disk_number(error)
            if number in (0, errno.ENOENT):
                raise
            if wait is None or number not in RETRIED:
                raise unreadable(path, error) from error
            # An error, because ranks other than 0 log no warnings.
            _log.error("%s cannot be read (%s); trying again in %.0f s", path, os.strerror(number), wait)
        time.sleep(wait)
    raise AssertionError("the last call of `read` returns or raises")


def load_patiently(label: str, load: Callable[[], T]) -> T:
    """Return the result of a library's function that loads several files, with the repetitions of `read_patiently`.

    Errors of the file system also count if the library has replaced them by another error.

    Raises:
        DiskError: if the file system failed each time. Other errors of `load` are raised as they are.
    """

    def unwrapped() -> T:
        try:
            return load()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                # Libraries look for files that may be missing, so ENOENT is no cause.
                if disk_number(cause) not in (0, errno.ENOENT):
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            raise

    return read_patiently(label, unwrapped)
