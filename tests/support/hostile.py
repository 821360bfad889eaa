"""Hostile sources of clips in folders, and hostile conditions.

Every payload tries to create a file called canary, or to reach `Sandbox.port`. The content is drawn from seeds.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.hostile_archives import archives
from tests.support.hostile_box import Sandbox
from tests.support.hostile_datasets import datasets_of
from tests.support.hostile_tables import tables


def write_sources(box: Sandbox) -> dict[str, Path]:
    """Write every hostile table, archive, configuration and dataset into a separate folder. Return SOURCE by name."""
    found: dict[str, Path] = {}

    def new_folder(name: str) -> Path:
        folder = box.data / name.replace(".", " ")
        folder.mkdir()
        shutil.copy(box.clip, folder / "good.mp4")
        (folder / "good.txt").write_text("a good clip")
        return folder

    for name, data in tables(box).items():
        folder = new_folder(name)
        (folder / "prompts.txt").write_text("a\n" * (data.count(b"\n") + 1)) if name == "videos.txt" else None
        found[name] = folder / name
        found[name].write_bytes(data)
    for name, write in archives(box).items():
        found[name] = new_folder(name) / name
        write(found[name])
    for name, write in datasets_of(box).items():
        found[f"dataset {name}"] = box.data / f"dataset {name}"
        found[f"dataset {name}"].mkdir()
        write(found[f"dataset {name}"])
    return found


CONDITIONS = (
    "__import__('os').system('touch canary')",
    "motion > __import__('os').system('touch canary')",
    "open('canary', 'w') is None",
    "9 ** 9 ** 9 > motion",
    "'a' * 10 ** 10 == caption",
    "(motion := 1) > 0",
    "[motion for motion in caption] == 1",
    "(lambda: motion)() > 1",
    "caption.__class__ == 'x'",
    "caption['x'] == 'x'",
    "f'{caption}' == 'x'",
    "(" * 400 + "motion > 1" + ")" * 400,
    "not " * 200 + "motion > 1",
    "motion > " + "9" * 900,
    "motion > 1e999",
    "motion > nan",
    "a\0b > 1",
    "\ud800 > 1",
    "caption == '\x1b[2J'",
    "caption == 'a' or " * 40 + "caption == 'b'",
    "x" * 2000,
    "",
    "#",
    "motion > 1; import os",
    "await motion",
    "*motion",
    "...",
    "caption in caption",
    "motion > -(-(-1))",
)
