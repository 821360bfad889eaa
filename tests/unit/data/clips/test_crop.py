"""The column `crop`: the same frames as of a clip without borders, at any orientation, and its own place in the cache."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.clip_files import quadrants, write_clip
from tests.unit.data.clips.test_video_orientation import ORIENTATIONS, with_matrix
from wands.commands.check.check import check
from wands.config.options import CheckOptions
from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.video import decode_clip
from wands.errors import DataError
from wands.preprocess.decoding import _decoded_windows
from wands.preprocess.scan import SourceScan, _read_pieces

SPEC = ClipSpec(25)
LOSSLESS = {"codec": "ffv1", "options": {}, "pix_fmt": "bgr0"}


def frames_of(path: Path, **place) -> np.ndarray:
    return next(decode_clip(path, SPEC, **place)).frames


@pytest.mark.parametrize("max_pixels", [None, 48 * 80])
def test_a_letterboxed_clip_gives_the_frames_of_the_clip_without_borders(
    tmp_path: Path, max_pixels: int | None
):
    noise = np.random.default_rng(0).integers(0, 256, (5, 64, 96, 3), dtype=np.uint8)
    plain = write_clip(tmp_path / "plain.mkv", list(noise), **LOSSLESS)
    boxed = np.pad(noise, ((0, 0), (21, 11), (7, 3), (0, 0)))
    path = write_clip(tmp_path / "boxed.mkv", list(boxed), **LOSSLESS)
    spec = ClipSpec(25, max_pixels=max_pixels)
    clip = next(decode_clip(path, spec, crop=(7, 21, 96, 64)))
    np.testing.assert_array_equal(clip.frames, next(decode_clip(plain, spec)).frames)
    assert clip.source.display_size == (96, 64)
    assert next(decode_clip(path, spec)).source.display_size == (106, 96)


@pytest.mark.parametrize("exif", ORIENTATIONS)
def test_crop_counts_in_pixels_of_the_upright_frame(tmp_path: Path, exif: int):
    axes, *_ = ORIENTATIONS[exif]
    path = with_matrix(write_clip(tmp_path / "a.mp4", [quadrants()] * 3), tmp_path / "b.mp4", axes)
    whole = frames_of(path)
    np.testing.assert_array_equal(frames_of(path, crop=(16, 32, 48, 32)), whole[:, 32:64, 16:64])


def test_crop_counts_in_pixels_of_the_displayed_frame(tmp_path: Path):
    path = write_clip(tmp_path / "wide.mp4", [quadrants()] * 3, sar=Fraction(4, 3))  # shown as 128 x 64
    clip = next(decode_clip(path, SPEC, crop=(0, 0, 64, 32)))
    assert clip.source.display_size == (64, 32)
    assert clip.frames[0, 4:-4, 4:-4, 0].min() > 200  # the upper left quadrant is red
    assert clip.frames[0, 4:-4, 4:-4, 1:].max() < 40


def write_table(folder: Path, *crops: str) -> str:
    write_clip(folder / "a.mp4", [quadrants()] * 5)
    rows = [f'a.mp4,a caption,{n / 25},{(n + 1) / 25},"{crop}"\n' for n, crop in enumerate(crops)]
    (folder / "metadata.csv").write_text("video,caption,start,end,crop\n" + "".join(rows))
    return str(folder)


@pytest.mark.parametrize(
    "crop", ["1,2,3", "1,2,3,4,5", "a,b,c,d", "0,0,0,32", "-1,0,16,16", "0.5,0,16,16", "0 0 16 16"]
)
def test_what_is_not_a_rectangle_is_rejected(tmp_path: Path, crop: str):
    _, (rejection,) = load_source(write_table(tmp_path, crop, ""))
    assert rejection.key == "metadata.csv:2"
    assert rejection.reason.startswith(
        f"crop={crop} must be x,y,width,height in whole pixels, size > 0; correct the row"
    )


def test_crop_outside_the_frame_is_rejected(tmp_path: Path):
    path = write_clip(tmp_path / "a.mp4", [quadrants()] * 2)
    with pytest.raises(
        DataError,
        match="frames of 96x64 pixels, but crop=80,0,32,32 must be in the frame and at least 2x2 pixels; correct",
    ):
        frames_of(path, crop=(80, 0, 32, 32))


def test_check_applies_the_crop(tmp_path: Path):
    report = check(CheckOptions(source=write_table(tmp_path, "", "0,16,96,32"), num_workers=1))
    sizes = {sample.key: (sample.width, sample.height) for sample in report.samples}
    assert sizes == {"a@0.000-0.040": (96, 64), "a@0.040-0.080": (96, 32)}


class InlineWorker:
    """Worker that decodes in this process."""

    killed = False

    def run(self, function, *arguments, limit_seconds):
        yield from function(*arguments)


def test_preprocess_applies_the_crop_and_stores_it_in_the_digest_only_if_it_is_set(tmp_path: Path):
    records, _ = load_source(write_table(tmp_path, "", "0,16,96,32"))
    plain, cropped = SourceScan(rows=records, rejected=[], spec=SPEC, quarantine={}).clips.values()
    data = _read_pieces(records[0].path)
    parts = [records[0].path.stat().st_size, 0.0, 0.04]
    # as before there was a column crop, so that old caches stay valid
    assert plain.video == hashlib.blake2b(data + json.dumps(parts).encode(), digest_size=16).hexdigest()
    parts = [parts[0], 0.04, 0.08]
    assert cropped.video != hashlib.blake2b(data + json.dumps(parts).encode(), digest_size=16).hexdigest()
    settings = SimpleNamespace(spec=SPEC, conditions=())
    for clip, height in ((plain, 64), (cropped, 32)):
        (window,) = _decoded_windows(clip, InlineWorker(), settings, False)
        assert window.frames.shape == (1, height, 96, 3)
        assert window.meta["display_size"] == ["96", str(height)]
