"""Step folders: the folders `step_*` in `checkpoints`, with one checkpoint each, and the files that name the newest folder.

This module does not import PyTorch, so that a launcher starts quickly.
"""

from __future__ import annotations

from pathlib import Path

from wands.disk_errors import read_patiently
from wands.files import write_text

STATE_FILE = "wands_state.json"


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step, such as "step_00000100". Sorting the names sorts the steps."""
    return f"step_{step:08d}"


def list_steps(where: Path) -> list[Path]:
    """Return the step folders in a run folder or a checkpoints folder, oldest first; only `where` if it is itself one."""
    if (where / STATE_FILE).is_file():
        return [where]
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    return sorted(
        path for path in folder.glob("step_????????") if path.is_dir() and path.name[5:].isdecimal()
    )


def named_step(folder: Path) -> Path | None:
    """Return the newest step folder that `next` or `latest` in the folder `checkpoints` names, or None.

    `next` exists if a run was killed just before it renamed the file to `latest`.
    """
    named = []
    for name in ("next", "latest"):  # `next` first, because a training may rename it to `latest` meanwhile
        path = folder / name
        if path.is_file():
            named.append(read_patiently(path, path.read_bytes).decode(errors="replace").strip())
    return max((step for step in list_steps(folder) if step.name in named), default=None)


def finish_publish(folder: Path) -> None:
    """Update the file `latest` in the folder `checkpoints`, if a run was killed just before it replaced `latest`."""
    if (pointer := folder / "next").is_file():
        if newest := named_step(folder):
            write_text(folder / "latest", newest.name)
        pointer.unlink()
