"""Masks: found next to clips and in tables, decoded as the clip is, averaged over tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.listing_folders import tar
from wands.conditions.clip_files import MASK_FILE, FoundFile
from wands.data.clips.captions import add_trigger
from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.video import decode_clip, save_video
from wands.errors import DataError

SPEC = ClipSpec(fps=16, max_pixels=64 * 96)


def moving(num_frames: int = 16, height: int = 128, width: int = 192) -> np.ndarray:
    """A white bar on black that moves right by 12 pixels each frame."""
    frames = np.zeros((num_frames, height, width, 3), np.uint8)
    for number in range(num_frames):
        frames[number, :, 12 * number : 12 * number + 40] = 255
    return frames


def write_clip(folder: Path, num_frames: int = 16) -> Path:
    noise = np.random.default_rng(0).integers(0, 255, (num_frames, 128, 192, 3), np.uint8)
    save_video(folder / "a.mp4", noise, 16)
    return folder / "a.mp4"


def expected(frames: np.ndarray, side: int = 32) -> np.ndarray:
    """Token weights of 128 x 192 frames whose tokens have `side` pixels before scaling, by plain loops."""
    gray = frames.mean(axis=3) / 255
    spans = [(0, 1), *((first, first + 4) for first in range(1, len(frames), 4))]
    found = np.empty((len(spans), 128 // side, 192 // side))
    for f, r, c in np.ndindex(*found.shape):
        rows = slice(r * side, r * side + side)
        columns = slice(c * side, c * side + side)
        found[f, r, c] = gray[slice(*spans[f]), rows, columns].mean()
    return found


def test_a_video_is_averaged_over_latent_frames_and_tokens(tmp_path: Path):
    clip = write_clip(tmp_path)
    save_video(tmp_path / "a.mask.mp4", moving(), 16)
    [window] = decode_clip(clip, SPEC, files=[FoundFile(MASK_FILE, tmp_path / "a.mask.mp4")])
    assert window.frames.shape == (13, 64, 96, 3)
    truth = expected(moving()[:13])
    assert window.files["mask"].shape == truth.shape == (4, 4, 6)
    np.testing.assert_allclose(window.files["mask"], truth, atol=0.02)
    late = expected(moving()[1:14])  # a mask that is one frame late
    assert np.abs(window.files["mask"] - late).max() > 0.2


def test_windows_ranges_and_crops_are_those_of_the_clip(tmp_path: Path):
    clip = write_clip(tmp_path)
    small = moving()[:, ::2, ::2]  # half the size of the clip
    save_video(tmp_path / "m.mp4", small, 16)
    slide = replace(SPEC, max_frames=5, clip_mode="slide")
    windows = list(decode_clip(clip, slide, 1 / 16, None, None, [FoundFile(MASK_FILE, tmp_path / "m.mp4")]))
    assert len(windows) == 3
    for number, window in enumerate(windows):
        begin = 1 + 5 * number
        np.testing.assert_allclose(window.files["mask"], expected(moving()[begin : begin + 5]), atol=0.03)
    crop = (64, 0, 128, 128)
    [window] = decode_clip(
        clip, ClipSpec(fps=16, max_frames=5), 5 / 16, None, crop, [FoundFile(MASK_FILE, tmp_path / "m.mp4")]
    )
    truth = expected(moving()[5:10], side=16)[:, :, 4:]
    np.testing.assert_allclose(window.files["mask"], truth, atol=0.06)


@pytest.mark.parametrize("mode", ["L", "1", "RGB"])
def test_an_image_applies_to_all_frames(tmp_path: Path, mode: str):
    clip = write_clip(tmp_path)
    frame = moving(4)[3]
    Image.fromarray(frame).convert(mode).save(tmp_path / "m.png")
    [window] = decode_clip(clip, SPEC, files=[FoundFile(MASK_FILE, tmp_path / "m.png")])
    np.testing.assert_allclose(window.files["mask"], expected(np.stack([frame] * 13)), atol=0.01)
    Image.new(mode, (192, 128), "white").save(tmp_path / "ones.png")
    [window] = decode_clip(clip, SPEC, files=[FoundFile(MASK_FILE, tmp_path / "ones.png")])
    assert (window.files["mask"] == 1).all()


def test_a_white_video_is_a_mask_of_ones(tmp_path: Path):
    clip = write_clip(tmp_path)
    save_video(tmp_path / "m.mp4", np.full((16, 128, 192, 3), 255, np.uint8), 16)
    [window] = decode_clip(clip, SPEC, files=[FoundFile(MASK_FILE, tmp_path / "m.mp4")])
    assert (window.files["mask"] == 1).all()


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (moving(8), "is a mask of 0.50 s for a clip of 1.00 s"),
        (moving(24), "is a mask of 1.50 s for a clip of 1.00 s"),
        (moving(width=128), "is a mask of aspect ratio 1.000 for a clip of aspect ratio 1.500"),
        (moving() * 0, "which is black throughout a sample"),
    ],
)
def test_a_mask_that_does_not_fit_rejects_the_clip(tmp_path: Path, frames: np.ndarray, message: str):
    clip = write_clip(tmp_path)
    save_video(tmp_path / "m.mp4", frames, 16)
    with pytest.raises(DataError, match=message):
        list(decode_clip(clip, SPEC, files=[FoundFile(MASK_FILE, tmp_path / "m.mp4")]))


def test_black_windows_are_left_out(tmp_path: Path):
    clip = write_clip(tmp_path)
    frames = moving()
    frames[:6] = 0
    save_video(tmp_path / "m.mp4", frames, 16)
    slide = replace(SPEC, max_frames=5, clip_mode="slide")
    windows = decode_clip(clip, slide, files=[FoundFile(MASK_FILE, tmp_path / "m.mp4")])
    assert [next(windows).suffix, next(windows).suffix] == ["#0001", "#0002"]
    with pytest.raises(DataError, match="black throughout a sample"):
        next(windows)


def test_masks_are_found_and_are_no_clips(tmp_path: Path):
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in ("a.mp4", "b.mp4", "a.mask.png", "b.mask.mp4", "the.mask.mp4"):
        (folder / name).write_bytes(b"x")
    for name in ("a", "b", "the.mask"):
        (folder / f"{name}.txt").write_text("A caption.")
    rows, rejected = load_source(str(folder))
    assert not rejected
    assert {row.key: row.mask and row.mask.name for row in rows} == {
        "a": "a.mask.png",
        "b": "b.mask.mp4",
        "the.mask": None,
    }
    for name in ("a.txt", "b.txt", "the.mask.txt", "the.mask.mp4"):
        (folder / name).unlink()
    (folder / "masks").mkdir()
    for name in ("m.webp", "\x1b.png"):
        (folder / "masks" / name).write_bytes(b"x")
    lines = [
        {"video": "a.mp4", "caption": "A.", "mask": "masks/m.webp"},
        {"video": "b.mp4", "caption": "B.", "mask": "masks/none.png"},
        {"video": "b.mp4", "caption": "B.", "mask": "masks/\x1b.png"},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows, rejected = load_source(str(folder))
    assert [row.mask.name for row in rows] == ["m.webp"]
    missing, unprintable = rejected  # not b.mask.mp4, which no row names
    assert "none.png" in missing.reason
    assert "control characters" in unprintable.reason
    (folder / "metadata.jsonl").unlink()
    (folder / "captions.json").write_text(json.dumps({"a.mp4": "A.", "b.mp4": "B."}))
    rows, rejected = load_source(str(folder))
    assert [row.mask.name for row in rows] == ["a.mask.png", "b.mask.mp4"]
    assert not rejected


def test_a_trigger_word_is_added_once():
    assert add_trigger("A cat sits.", "ohwx") == "ohwx, A cat sits."
    assert add_trigger("An ohwx cat.", "ohwx") == "An ohwx cat."
    assert add_trigger("A planned trip.", "plan") == "plan, A planned trip."


def test_a_mask_in_an_archive(tmp_path: Path):
    clip = write_clip(tmp_path).read_bytes()
    Image.new("L", (192, 128), 255).save(tmp_path / "m.png")
    mask = (tmp_path / "m.png").read_bytes()
    row = json.dumps({"caption": "C.", "mask": str(tmp_path / "m.png")}).encode()
    members = {"a.mp4": clip, "a.txt": b"A.", "a.mask.png": mask, "b.mp4": clip, "b.txt": b"B."}
    tar(tmp_path / "x" / "s.tar", [*members.items(), ("c.mp4", clip), ("c.json", row), ("d.mask.png", mask)])
    rows, rejected = load_source(str(tmp_path / "x"), cache_dir=tmp_path / "cache")
    assert {record.key: record.mask and record.mask.read_bytes() for record in rows} == {
        "s/a": mask,
        "s/b": None,
        "s/c": None,  # a path in an archive could lead to any file
    }
    assert [item.key for item in rejected] == ["s/d"]
