"""Files appear whole or not at all: written under a temporary name beside the target, synced, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wands.errors import WandsError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; leaving the block renames it to `path`, an exception removes it.

    The suffix is kept, because writers choose their format by it. The folder is made when it is missing.

    Args:
        path: the file to create or replace.

    Raises:
        WandsError: the file cannot be written (no space, no permission, a file where a folder should be).
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise WandsError(
            f"{path} cannot be written ({reason}); free space or choose another folder."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Create or replace a text file.

    Raises:
        WandsError: it cannot be written.
    """
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file or folder its name so that it survives a power cut."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, from the system's memory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
