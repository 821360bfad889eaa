"""Clips, pictures, listings and tar archives for the tests of layouts of other trainers."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.video import decode_clip, save_video

FPS = 8


def clip(path: Path, shade: int, num_frames: int = 9) -> Path:
    """A real mp4 whose brightness tells which one it is."""
    frames = np.full((num_frames, 32, 48, 3), shade, np.uint8)
    frames[:, ::4] = np.arange(num_frames, dtype=np.uint8)[:, None, None, None] * 20
    save_video(path, frames, FPS)
    return path


def image(path: Path, shade: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((32, 48, 3), shade, np.uint8)).save(path)
    return path


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def load(source: Path, **options: Any) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Rows as key: (file name, caption) and rejections as key: reason; every row decodes."""
    rows, rejections = load_source(str(source), **options)
    for row in rows:
        assert row.path.is_absolute()
        assert len(next(decode_clip(row.path, ClipSpec(fps=FPS, max_frames=5))).frames) in (1, 5)
    assert all("; " in rejection.reason for rejection in rejections), rejections
    return {row.key: (row.path.name, row.caption) for row in rows}, {r.key: r.reason for r in rejections}


# ---------------------------------------------------------------- archives


def tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def mp4(tmp_path: Path) -> list[bytes]:
    return [clip(tmp_path / "made" / f"{i}.mp4", 30 * i).read_bytes() for i in range(4)]
