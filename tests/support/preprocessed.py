"""Clips, and caches that `wands preprocess` makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from wands.data.cache.reader import LatentCache

SMALL: dict[str, Any] = {"max_pixels": 64 * 96, "max_frames": 9, "device": "cpu", "text_dtype": "fp32"}
CAPTIONS = {
    "bikes": "Street scenes of cyclists &amp;amp; parked bicycles.",
    "nested/carphone": "A man in a dark suit sits in a moving car.",
    "city": "Street scenes of cyclists & parked   bicycles.",  # equal to the first once cleaned
}


def three_clips(folder: Path, clips_dir: Path) -> Path:
    """Three real clips: mp4, nested mp4, MPEG program stream."""
    (folder / "nested").mkdir(parents=True)
    shutil.copy(clips_dir / "bikes.mp4", folder / "bikes.mp4")
    shutil.copy(clips_dir / "carphone_pristine.mp4", folder / "nested" / "carphone.mp4")
    shutil.copy(clips_dir / "cityCC0.mpg", folder / "city.mpg")
    for stem, caption in CAPTIONS.items():
        (folder / f"{stem}.txt").write_text(caption)
    return folder


def single_clip(folder: Path, clips_dir: Path) -> Path:
    folder.mkdir()
    shutil.copy(clips_dir / "carphone_pristine.mp4", folder / "man.mp4")
    (folder / "man.txt").write_text(CAPTIONS["nested/carphone"])
    return folder


@pytest.fixture
def clips(clips_dir: Path, tmp_path: Path) -> Path:
    return three_clips(tmp_path / "clips", clips_dir)


@pytest.fixture
def one_clip(clips_dir: Path, tmp_path: Path) -> Path:
    return single_clip(tmp_path / "one", clips_dir)


def contents(path: Path) -> dict[str, tuple[bytes, bytes, str]]:
    cache = LatentCache(path, verify=True)
    samples = [cache.read(i) for i in range(len(cache))]
    raw = [
        [t.view(torch.uint16).numpy().tobytes() for t in (sample.latents, sample.text_embeds)]
        for sample in samples
    ]
    return {
        s.sample_id: (*r, cache.meta(i)["caption"]) for i, (s, r) in enumerate(zip(samples, raw, strict=True))
    }
