"""Hashes of the files of a model, to find files that changed after they were written or downloaded.

The hashes find damage, not forgery.
"""

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
    """Compute the hashes of all files in a new model folder, and write the hashes to `HASH_FILE` in this folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {path.relative_to(folder).as_posix(): hash_file(path) for path in files}
    (folder / HASH_FILE).write_text(json.dumps(hashes, indent=1), encoding="utf-8")


def find_changed_files(
    folder: Path, *, parts: Collection[str] | None = None, share: tuple[int, int] = (0, 1), hub: bool = True
) -> tuple[int, list[str]]:
    """Read the files of a model, and compare them with their stored hashes.

    The stored hashes are in the file `HASH_FILE` in `folder`. If this file is missing, only safetensors files from the Hub
    have a stored hash: their SHA-256, which the Hub client stored during the download.

    Args:
        folder: folder of a pipeline or another model.
        parts: names of subfolders or files in `folder` to check; None checks the whole folder.
        share: (rank, number of ranks). The ranks divide the files among them, and each rank reads only its part.
        hub: whether to use the SHA-256 of the Hub client if `HASH_FILE` is missing. This takes about 1 s for each GB.

    Returns:
        (number of files with a stored hash, problems). problems contains one text for each changed or unreadable file.
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
    """Compare files with their hashes, and yield (file name, reason) for each file that is damaged or cannot be read.

    Args:
        folder: folder of the files.
        hashes: maps the name of each file to its hash, either from `hash_file` (32 digits) or SHA-256 (64 digits).
        share: (rank, number of ranks). The ranks divide the files among them, and each rank reads only its part.
        difference: reason to yield for a file that has a different hash.

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
    """Check that the files of a model did not change after wands stored their hashes.

    The hashes are in the file `HASH_FILE` in `folder`. Without this file, nothing is checked. `parts` are names of
    subfolders or files in `folder` to check; None checks the whole folder.

    Raises:
        CheckpointError: if a file changed or cannot be read. The messages start with `label`.
    """
    _, problems = find_changed_files(folder, parts=parts, hub=False)
    if problems:
        raise CheckpointError(
            [f"{label}: {problem}. Write or download the file again." for problem in problems]
        )


def hub_sha256(folder: Path, path: Path) -> str | None:
    """Return the SHA-256 that the Hub client stored for the file `path` in a model's `folder`.

    Return None for a small file or a file that was not downloaded from the Hub. The client stored no SHA-256 for these files.
    """
    blob = path.resolve()
    record = folder / f".cache/huggingface/download/{path.relative_to(folder)}.metadata"
    text = record.read_text(encoding="utf-8") if record.is_file() else ""
    match = re.search(r"(?m)^[0-9a-f]{64}$", blob.name if blob.parent.name == "blobs" else text)
    return match[0] if match else None
