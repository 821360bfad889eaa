"""Read JSON files; write files and folders atomically: under a temporary name next to the target, synced, and then renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wands.disk_errors import disk_number, read_patiently
from wands.errors import ConfigError, DiskError, WandsError, one_line
from wands.lock import WriterLock

_TEMPORARY_NAME = re.compile(r"\..+\.\d+\.tmp(?:\..+)?")
_DECODER = json.JSONDecoder()
_GAPS = " \t\r\0"
"""Bytes that may be between the objects of a damaged line."""


def read_json_object(
    path: Path, *, label: str = "", fix: str = "fix the file.", error: type[WandsError] = ConfigError
) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    In error messages, `label` is the name of the file (default: its path), and `fix` is the end of the text.

    Raises:
        WandsError: of class `error`, if the file is missing, is unreadable or does not contain a JSON object.
        DiskError: if the file system does not read the file.
    """
    try:
        value = json.loads(read_patiently(path, path.read_bytes).decode("utf-8-sig"))
    except FileNotFoundError:
        raise error(f"{label or path} cannot be read (no such file); {fix}") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"{label or path} cannot be read ({one_line(problem)}); {fix}") from None
    if not isinstance(value, dict):
        raise error(f"{label or path} must contain a JSON object, not a {type(value).__name__}; {fix}")
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the intact rows of a `.jsonl` file, one JSON object per line; [] if there is no file."""
    return split_rows(path)[0]


def split_rows(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Read a `.jsonl` file, and return (intact rows, damaged lines).

    A power failure can leave NUL bytes in a line, or join lines. The objects at its start, or after its NUL bytes, are intact
    rows.

    Raises:
        DiskError: if the file system does not read the file.
    """
    rows: list[dict[str, Any]] = []
    damaged: list[bytes] = []
    # splitlines would also split at characters such as U+2028, which JSON need not escape.
    lines = read_patiently(path, path.read_bytes).split(b"\n") if path.is_file() else []
    for line in filter(None, lines):
        found, is_whole = _objects_of(line)
        rows += found
        if not is_whole:
            damaged.append(line)
    return rows, damaged


def _objects_of(line: bytes) -> tuple[list[dict[str, Any]], bool]:
    """Return the JSON objects of a line, and whether the line is one object and nothing else."""
    found: list[dict[str, Any]] = []
    try:
        rest = line.decode().strip(_GAPS)
        while rest:
            value, end = _DECODER.raw_decode(rest)
            if not isinstance(value, dict):
                return found, False
            found.append(value)
            rest = rest[end:].strip(_GAPS)
    except (ValueError, RecursionError):
        return found, False
    return found, len(found) == 1 and b"\0" not in line


def differences(ours: Any, theirs: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value in `ours`, value in `theirs`) for each difference between two nested JSON values.

    A missing key counts as None. All dotted keys start with `name`.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        prefix = f"{name}." if name else ""
        keys = sorted(ours.keys() | theirs.keys())
        return [item for key in keys for item in differences(ours.get(key), theirs.get(key), prefix + key)]
    return [] if ours == theirs else [(name, ours, theirs)]


def first_difference(ours: Any, theirs: Any) -> tuple[str, Any, Any] | None:
    """Return the first of the `differences` between two nested JSON values, or None."""
    return next(iter(differences(ours, theirs)), None)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. When the `with` block ends, rename the temporary file to `path`.

    It has the suffix of `path`, because writers choose the format by the suffix, and is deleted if the block raises. The folder
    of `path` is created if it is missing.

    Raises:
        WandsError: if the file cannot be written, for example because the disk is full or the folder of `path` is a file.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # a link in a folder of somebody else would be followed
            yield temporary
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def delete_leftovers(folder: Path) -> None:
    """Delete the temporary files of `atomic_path` that killed processes left in a folder, which must not be a link."""
    for path in folder.glob(".*.tmp*") if not folder.is_symlink() else ():
        if _TEMPORARY_NAME.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
            path.unlink()


@contextmanager
def atomic_folder(out: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder next to `out`, the user's --out. When the `with` block ends, rename it to `out`.

    `out` must be missing or empty, or contain the file `replaceable`. An old folder is kept until the new one is complete. If the
    block raises, the temporary folder is deleted. If the process is killed, the next process that writes `out` restores the old
    folder and deletes the temporary one.

    Raises:
        ConfigError: if `out` may not be replaced, or the user has a folder with its name and the suffix ".tmp" or ".old".
        WandsError: if `out` cannot be written, or another process is writing `out`.
    """
    _check_replaceable(out, replaceable)
    with WriterLock(out.with_name(f".{out.name}.lock"), f"--out {out}") as lock:
        partial, old = (out.with_name(f"{out.name}.{suffix}") for suffix in ("tmp", "old"))
        if lock.has_leftovers:
            shutil.rmtree(partial, ignore_errors=True)
            if old.exists() and not out.exists():
                os.replace(old, out)
            shutil.rmtree(old, ignore_errors=True)
        _check_replaceable(out, replaceable)  # again: `out` may have changed before this process got the lock
        for folder in (partial, old):
            if folder.exists():
                raise ConfigError(
                    f"--out {out}: wands needs a temporary folder {folder}, but a folder with this name already exists, and "
                    f"was not left by a killed wands process. Rename or delete {folder}."
                )
        yield from _fill_and_rename(out, partial, old, lock)


def _fill_and_rename(out: Path, partial: Path, old: Path, lock: WriterLock) -> Iterator[Path]:
    try:
        partial.mkdir()
        yield partial
        lock.check()
        if not out.exists() or not any(out.iterdir()):
            publish(partial, out)
        else:
            try:
                os.replace(out, old)
                publish(partial, out)
                shutil.rmtree(old)
            except OSError:
                if not out.exists():
                    os.replace(old, out)
                raise
            finally:
                lock.is_kept = old.exists()  # after Ctrl-C: the next process deletes the old folder
    except OSError as error:
        raise write_error(f"--out {out}", error) from error
    finally:
        lock.check()  # raises if the folder now belongs to another process
        shutil.rmtree(partial, ignore_errors=True)
        lock.is_kept |= partial.exists()  # if it could not be deleted, the next process does


def write_error(target: object, error: OSError) -> WandsError:
    """Return the error for a file or folder that could not be written; a DiskError if the file system failed."""
    reason = one_line(error)
    fix = "free space or choose another folder"
    number = disk_number(error)
    failed = error.args[0] if isinstance(error, shutil.Error) else None
    if isinstance(failed, list):  # of copytree: every file that failed
        *_, reason = failed[0]
        fix = "check this file and both disks, then run the command again"
        found = re.match(r"\[Errno (\d+)\]", reason)
        number = disk_number(OSError(int(found[1]), reason)) if found else 0
    text = f"{target} cannot be written ({reason}); {fix}."
    return DiskError(text, number=number) if number else WandsError(text)


def _check_replaceable(out: Path, replaceable: str | None) -> None:
    if os.path.ismount(out):
        raise ConfigError(
            f"--out {out} is a mount point and cannot be replaced; choose a folder inside the mount point, such as "
            f"{out / 'output'}."
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; choose a new or an empty folder.")
    if out.exists() and any(out.iterdir()) and not (replaceable and (out / replaceable).is_file()):
        allowed = f", but no {replaceable} of an earlier export" if replaceable else ""
        raise ConfigError(f"--out {out} contains files{allowed}; choose a new or an empty folder.")


def write_text(path: Path, text: str) -> None:
    """Create or replace a text file atomically, or raise WandsError."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish(temporary: Path, path: Path) -> None:
    """Sync a finished file or folder to the disk, and rename it to `path`. A power failure cannot leave an incomplete `path`."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file to the disk, or a folder's list of file names, so that a power failure cannot lose it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
