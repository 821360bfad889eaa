"""Read JSON files and write files atomically: under a temporary name next to the target, synced, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wands.errors import ConfigError, WandsError, one_line


def read_json(
    path: Path, *, label: str = "", fix: str = "fix the file.", error: type[WandsError] = ConfigError
) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        label: how the user knows the file, for example "--deepspeed zero3.json"; the path by default.
        fix: end of the message.
        error: class to raise.

    Raises:
        WandsError: of class `error`, if the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        reason = "no such file"
    except (OSError, ValueError, RecursionError) as problem:
        reason = one_line(problem)
    raise error(f"{label or path} cannot be read ({reason}); {fix}")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; leaving the block renames it to `path`, an exception removes it.

    The suffix is kept, because writers choose their format by it. A missing folder is created.

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
        raise WandsError(
            f"{path} cannot be written ({one_line(error)}); free space or choose another folder."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Create or replace a text file.

    Raises:
        WandsError: the file cannot be written.
    """
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file or folder to `path` so that it survives a power cut."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
