"""Write `tests/fixtures/cache`: two clips for an image-to-video model, one of them with a mask.

python -m tests.support.store_cache
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.commands import preprocess

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "fixtures" / "cache"
VARIANT = "wan2.1-i2v-14b"
CAPTIONS = {
    "bikes.mp4": "Street scenes of cyclists and parked bicycles.",
    "man.mp4": "A man in a dark suit sits in a moving car.",
}


def store(scratch: Path, clips: Path) -> None:
    from make_tiny_pipeline import build_tiny_pipeline

    model = scratch / VARIANT
    source = scratch / "clips"
    build_tiny_pipeline(model, size="test", vae_dir="random", variant=VARIANT)
    source.mkdir()
    shutil.copy(clips / "bikes.mp4", source / "bikes.mp4")
    shutil.copy(clips / "carphone_pristine.mp4", source / "man.mp4")
    mask = np.zeros((144, 176), np.uint8)
    mask[:, :88] = 255
    Image.fromarray(mask).save(source / "man.mask.png")
    (source / "captions.json").write_text(json.dumps(CAPTIONS))
    preprocess(source, STORED, model, max_pixels=48 * 64, max_frames=9, device="cpu", text_dtype="fp32")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "scripts"))
    clips = Path(os.environ.get("WANDS_CLIPS", ROOT / ".setup" / "clips")).resolve()
    # A sample names its file, so the files lie in a place that names nobody.
    scratch = Path(tempfile.gettempdir()) / "store_cache"
    scratch.mkdir()
    shutil.rmtree(STORED, ignore_errors=True)
    try:
        store(scratch, clips)
    finally:
        shutil.rmtree(scratch)
