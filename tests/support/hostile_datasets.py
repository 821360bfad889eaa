"""Hostile folders of Hugging Face datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.corpus import mutate
from tests.support.hostile_box import Sandbox


def _videos(box: Sandbox) -> list[dict[str, Any]]:
    """Values of a video column of a dataset."""
    clip = box.clip.read_bytes()
    videos: list[dict[str, Any]] = [
        {"bytes": clip, "path": path}
        for path in (
            "../../stolen.mp4",
            f"{box.outside}/stolen.mp4",
            "a\0.mp4",
            "x" * 9999,
            None,
            f"{box.url}/a.mp4",
        )
    ]
    videos += [
        {"bytes": None, "path": path}
        for path in ("/dev/zero", str(box.root / "pipe.mp4"), "/proc/self/mem", f"{box.url}/a.mp4", None)
    ]
    videos += [{"bytes": data, "path": "a.mp4"} for data in (b"", b"x", box.pickled)]
    return videos


def _write_extension(folder: Path, table: Any, pickled: bytes) -> None:
    """A table with a column of a type of Python, whose metadata is a pickle."""
    import pyarrow

    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled}
    schema = pyarrow.schema([*table.schema, pyarrow.field("x", pyarrow.binary(), metadata=metadata)])
    with pyarrow.ipc.new_stream(folder / "data.arrow", schema) as file:
        file.write_table(pyarrow.table([*table.columns, pyarrow.array([b"x"] * len(table))], schema=schema))
    (folder / "state.json").write_text(
        json.dumps(
            {
                "_data_files": [{"filename": "data.arrow"}],
                "_fingerprint": "x",
                "_format_type": None,
                "_format_columns": None,
                "_format_kwargs": {},
                "_output_all_columns": False,
                "_split": None,
            }
        )
    )
    (folder / "dataset_info.json").write_text("{}")


def datasets_of(box: Sandbox) -> dict[str, Callable[[Path], object]]:
    """Return the writers of hostile folders of Hugging Face datasets, by folder name."""
    import pyarrow
    import pyarrow.parquet

    videos = _videos(box)
    table = pyarrow.table({"video": videos, "caption": [f"clip {number}" for number in range(len(videos))]})

    def parquet(folder: Path, data: Any = table) -> None:
        pyarrow.parquet.write_table(data, folder / "train.parquet")

    def damaged(folder: Path, seed: int) -> None:
        parquet(folder)
        (folder / "train.parquet").write_bytes(mutate((folder / "train.parquet").read_bytes(), seed))

    def with_file(name: str, text: str) -> Callable[[Path], object]:
        return lambda folder: (parquet(folder), (folder / name).write_text(text))

    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
    )
    return {
        "parquet": parquet,
        "damaged 1": lambda folder: damaged(folder, 1),
        "damaged 3": lambda folder: damaged(folder, 3),
        "pickled": lambda folder: (folder / "train.parquet").write_bytes(box.pickled),
        "script": with_file("script.py", f"import os\nos.system({box.shell!r})\n"),
        "readme": with_file(
            "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {box.url}/x.parquet\n---\n"
        ),
        "tags": with_file(
            "README.md", f"---\nconfigs: !!python/object/apply:os.system ['{box.shell}']\n---\n"
        ),
        "laughs": with_file("README.md", f"---\n{laughs}dataset_info: *a19\n---\n"),
        "elsewhere": with_file(
            "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {box.outside}/*\n---\n"
        ),
        "extension": lambda folder: _write_extension(folder, table, box.pickled),
        "state": lambda folder: (
            (folder / "state.json").write_text('{"_data_files": [{"filename": "../../outside/private.mp4"}]}')
            and (folder / "a.arrow").write_bytes(b"")
        ),
    }
