"""Read JSON files; write files and folders atomically: under a temporary name next to the target, synced, then renamed."""

from __future__ import annotations

import json
import os
import shutil
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


def read_json_object(
    path: Path, *, label: str = "", fix: str = "fix the file.", error: type[WandsError] = ConfigError
) -> dict[str, Any]:
    """Read a JSON file that contains an object. The arguments are explained at `read_json`.

    Raises:
        WandsError: of class `error`, if the file is missing, is unreadable or contains no JSON object.
    """
    value = read_json(path, label=label, fix=fix, error=error)
    if not isinstance(value, dict):
        raise error(f"{label or path} must contain a JSON object, not a {type(value).__name__}; {fix}")
    return value


def differences(ours: Any, theirs: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Return every place where two nested JSON values differ, as (dotted name, value in ours, value in theirs)."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            difference
            for key in sorted(ours.keys() | theirs.keys())
            for difference in differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if ours == theirs else [(name, ours, theirs)]


def first_difference(ours: Any, theirs: Any) -> tuple[str, Any, Any] | None:
    """Return the first of the `differences` of two JSON values, or None."""
    return next(iter(differences(ours, theirs)), None)


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


@contextmanager
def atomic_folder(out: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder next to `out`; leaving the block renames it to `out`, an exception deletes it.

    A folder that is replaced keeps its name until the new one is complete. If the process is killed, a complete folder
    is left under `out` or `out` with the suffix ".old".

    Args:
        out: folder that the user gave as --out; missing, or an empty folder.
        replaceable: name of a file; a folder that contains it may be replaced.

    Raises:
        ConfigError: if `out` cannot be replaced, or a temporary name is in use.
        WandsError: if `out` cannot be written.
    """
    partial, old = (out.with_name(f"{out.name}.{suffix}") for suffix in ("tmp", "old"))
    _check_replaceable(out, old, replaceable)
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"--out {out} needs the name {partial} for a temporary folder, which exists; delete that folder if no other wands "
            "writes to it and it has no files of yours."
        ) from None
    except OSError as error:
        raise WandsError(f"--out {out} cannot be made ({one_line(error)}); choose another folder.") from error
    try:
        yield partial
        if not out.exists() or not any(out.iterdir()):
            publish(partial, out)
        else:
            os.replace(out, old)
            try:
                publish(partial, out)
            except OSError:
                if not out.exists():
                    os.replace(old, out)
                raise
            shutil.rmtree(old)
    except OSError as error:
        failures = (
            error.args[0] if isinstance(error, shutil.Error) else None
        )  # copytree lists every failed file
        reason = failures[0][-1] if isinstance(failures, list) else one_line(error)
        raise WandsError(
            f"--out {out} cannot be written ({reason}); free space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(out: Path, old: Path, replaceable: str | None) -> None:
    if os.path.ismount(out):
        raise ConfigError(
            f"--out {out} is a mount point, which a finished folder cannot replace; give a folder in it, such as "
            f"{out / 'output'}."
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; choose a new or an empty folder.")
    if out.exists() and any(out.iterdir()) and not (replaceable and (out / replaceable).is_file()):
        allowed = f" and no {replaceable} of an earlier export" if replaceable else ""
        raise ConfigError(f"--out {out} contains files{allowed}; choose a new or an empty folder.")
    if old.exists():
        raise ConfigError(
            f"--out {out} needs the name {old}, which a killed process may have left; delete that folder, or rename it to "
            f"{out.name} if {out.name} is missing."
        )


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
