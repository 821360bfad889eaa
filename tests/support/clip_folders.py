"""Folders of clips for the tests of layouts."""

from __future__ import annotations

from pathlib import Path

from wands.data.clips.records import ClipRecord


def lay(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def keys(rows: list[ClipRecord]) -> list[str]:
    return [row.key for row in rows]
