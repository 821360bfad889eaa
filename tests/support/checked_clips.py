"""Options of a tiny model for the tests of `wands check`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

SMALL: dict[str, Any] = {"max_pixels": 64 * 96, "max_frames": 9}


def folder_of(path: Path, names: dict[str, str], clips_dir: Path) -> Path:
    """Real clips under other names: stem -> file name in clips_dir, with a caption each."""
    path.mkdir()
    for stem, name in names.items():
        shutil.copy(clips_dir / name, path / f"{stem}{Path(name).suffix}")
        (path / f"{stem}.txt").write_text(f"a caption of {stem}")
    return path


@pytest.fixture(scope="module")
def clips(clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three good clips, one of them twice, and a text that is none."""
    names = {"a": "bikes.mp4", "b": "bikes.mp4", "city": "cityCC0.mpg", "man": "carphone_pristine.mp4"}
    folder = folder_of(tmp_path_factory.mktemp("check") / "clips", names, clips_dir)
    (folder / "text.mp4").write_text("no <video>")
    (folder / "text.txt").write_text("<script>alert('a caption')</script>")
    return folder
