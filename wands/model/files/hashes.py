"""Hashes of the files of a model, to find files that changed since they were written or downloaded: damage, not forgery."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import xxhash

from wands.disk_errors import read_patiently
from wands.errors import CheckpointError, one_line
from wands.model.files.tensor_files import hash_file

HASH_FILE = ".wands_hashes.json"
"""Name of the file with the hashes of a model's files. `wands export` and `wands convert` write it into the model's folder."""


def write_hashes(folder: Path) -> None:
    """Write the hashes of all files in a new model folder to its `HASH_FILE`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {path.relative_to(folder).as_posix(): hash_file(path) for path in files}
    (folder / HASH_FILE).write_text(json.dumps(hashes, indent=1), encoding="utf-8")


def find_changed_files(
    folder: Path, *, parts: Collection[str] | None = None, share: tuple[int, int] = (0, 1), hub: bool = True
) -> tuple[int, list[str]]:
    """Compare the files of a model with their stored hashes; return (number of files with a hash, problems).

    The hashes are in `folder / HASH_FILE`. Without it, safetensors files from the Hub have the SHA-256 that the Hub client
    stored.

    Args:
        folder: folder of a pipeline or another model.
        parts: names of subfolders or files in `folder` to check; None checks all.
        share: (rank, number of ranks). Each rank reads its part of the files.
        hub: use the SHA-256 of the Hub client, about 1 s for each GB.
    """
    try:
        path = folder / HASH_FILE
        stored = json.loads(read_patiently(path, path.read_bytes)) if path.is_file() else {}
        expected = {str(name): str(value) for name, value in stored.items()}
    except (ValueError, OSError, AttributeError) as error:
        return 1, [f"{folder / HASH_FILE} is damaged ({one_line(error)})"]
    if hub and not expected:
        expected = {
            path.relative_to(folder).as_posix(): value
            for path in folder.rglob("*.safetensors")
            if (value := hub_sha256(folder, path))
        }
    hashes = {name: value for name, value in expected.items() if parts is None or name.split("/")[0] in parts}
    damaged = find_damaged_files(folder, hashes, share, "its hash is not the stored hash")
    return len(hashes), [f"{folder / name} is damaged ({reason})" for name, reason in damaged]


def find_damaged_files(
    folder: Path, hashes: Mapping[str, str], share: tuple[int, int], difference: str
) -> Iterator[tuple[str, str]]:
    """Yield (file name, reason) for each file that differs from its hash or cannot be read.

    Args:
        folder: folder of the files.
        hashes: hash by file name, either from `hash_file` (32 digits) or SHA-256 (64 digits).
        share: (rank, number of ranks). Each rank reads its part of the files.
        difference: reason for a file with a different hash.

    Raises:
        DiskError: if the file system does not read a file, which may be intact.
    """
    for name in sorted(hashes)[share[0] :: share[1]]:
        try:
            path = folder / name
            kind = "sha256" if len(hashes[name]) == 64 else xxhash.xxh3_128
            found = read_patiently(path, partial(hash_file, path, kind))
        except OSError as error:
            yield name, one_line(error)
            continue
        if found != hashes[name]:
            yield name, difference


def check_files(folder: Path, label: str, *, parts: Collection[str] | None = None) -> None:
    """Raise CheckpointError if files of a model (only `parts`, if given) do not match its `HASH_FILE`, if there is one."""
    _, problems = find_changed_files(folder, parts=parts, hub=False)
    if problems:
        raise CheckpointError(
            [f"{label}: {problem}. Write or download the file again." for problem in problems]
        )


def hub_sha256(folder: Path, path: Path) -> str | None:
    """Return the SHA-256 that the Hub client stored for a file of a model; None for small files and files from elsewhere."""
    blob = path.resolve()
    record = folder / f".cache/huggingface/download/{path.relative_to(folder)}.metadata"
    text = record.read_text(encoding="utf-8") if record.is_file() else ""
    match = re.search(r"(?m)^[0-9a-f]{64}$", blob.name if blob.parent.name == "blobs" else text)
    return match[0] if match else None
