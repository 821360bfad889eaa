"""Turned and mirrored videos and pictures, pixels that are not square, and the central crop."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from tests.support.clip_files import decode_one, quadrants, write_clip
from wands.data.clips.clip import ClipSpec


def assert_same_colors(ours: np.ndarray, wanted: np.ndarray, tolerance: int = 8) -> None:
    assert ours.shape == wanted.shape
    inner = np.abs(ours.astype(int) - wanted)
    for y in (1, 3):
        for x in (1, 3):
            assert inner[y * len(ours) // 4, x * ours.shape[1] // 4].max() <= tolerance


# The directions are those in which the ffmpeg program was seen to turn the same files.
@pytest.mark.parametrize(("rotation", "quarter_turns"), [(90, 1), (180, 2), (270, 3), (-90, 3)])
def test_rotation_is_applied_counterclockwise(tmp_path: Path, rotation: int, quarter_turns: int) -> None:
    path = write_clip(tmp_path / "turned.mp4", [quadrants()] * 5, rotation=rotation)
    clip = decode_one(path, ClipSpec(fps=25))
    assert clip.source.rotation == rotation % 360
    assert_same_colors(clip.frames[0], np.rot90(quadrants(), quarter_turns))
    resized = decode_one(path, ClipSpec(fps=25, height=32, width=48)).frames
    assert resized.shape == (5, 32, 48, 3)
    assert_same_colors(
        resized[0], np.rot90(quadrants(48, 32) if quarter_turns % 2 else quadrants(32, 48), quarter_turns)
    )


# Where the x and the y axis go in a display matrix, and the same as turns counterclockwise and a mirror after them.
ORIENTATIONS = {
    1: ((1, 0, 0, 1), 0, False),
    2: ((-1, 0, 0, 1), 0, True),
    3: ((-1, 0, 0, -1), 180, False),
    4: ((1, 0, 0, -1), 180, True),
    5: ((0, 1, 1, 0), 270, True),
    6: ((0, 1, -1, 0), 270, False),
    7: ((0, -1, -1, 0), 90, True),
    8: ((0, -1, 1, 0), 90, False),
}


def oriented(picture: np.ndarray, exif: int) -> np.ndarray:
    """As Pillow shows a picture of that EXIF orientation."""
    image = Image.fromarray(picture)
    image.getexif()[ExifTags.Base.Orientation] = exif
    return np.asarray(ImageOps.exif_transpose(image))


def with_matrix(plain: Path, path: Path, axes: tuple[int, ...]) -> Path:
    """The mp4 with another matrix in its track header."""
    data = bytearray(plain.read_bytes())
    place = data.index(b"tkhd") + 44  # version 0
    a, b, c, d = (axis << 16 for axis in axes)
    struct.pack_into(">9i", data, place, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("exif", ORIENTATIONS)
def test_each_of_the_eight_orientations_is_shown_as_it_says(tmp_path: Path, exif: int) -> None:
    axes, rotation, mirrored = ORIENTATIONS[exif]
    plain = write_clip(tmp_path / "plain.mp4", [quadrants()] * 5)
    path = with_matrix(plain, tmp_path / "turned.mp4", axes)
    clip = decode_one(path, ClipSpec(fps=25))
    assert (clip.source.rotation, clip.source.mirrored) == (rotation, mirrored)
    assert_same_colors(clip.frames[0], oriented(quadrants(), exif))
    # The same pixels as of the plain file: nothing but their order differs.
    stored = decode_one(plain, ClipSpec(fps=25)).frames
    np.testing.assert_array_equal(clip.frames[3], oriented(stored[3], exif))


@pytest.mark.parametrize("exif", ORIENTATIONS)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_pictures_are_turned_as_their_exif_says(tmp_path: Path, suffix: str, exif: int) -> None:
    path = tmp_path / f"a.{suffix}"
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = exif
    Image.fromarray(quadrants()).save(path, exif=tags.tobytes(), quality=95)
    clip = decode_one(path, ClipSpec(fps=16))
    assert (clip.source.rotation, clip.source.mirrored) == ORIENTATIONS[exif][1:]
    with Image.open(path) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert_same_colors(clip.frames[0], wanted)


def test_damaged_exif_is_no_reason_to_refuse_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 2
    Image.fromarray(quadrants()).save(path, exif=tags.tobytes(), quality=95)
    data = path.read_bytes()
    place = data.index(b"Exif") + 14
    for position in range(place, place + 12):
        path.write_bytes(data[:position] + b"\xff" + data[position + 1 :])
        assert decode_one(path, ClipSpec(fps=16)).frames.shape == (1, 64, 96, 3)


def test_pixel_aspect_widens_the_picture(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "wide.mp4", [quadrants()] * 5, sar=Fraction(4, 3))
    clip = decode_one(path, ClipSpec(fps=25))
    assert clip.source.sar == Fraction(4, 3)
    assert_same_colors(clip.frames[0], quadrants(64, 128))
    turned = write_clip(tmp_path / "tall.mp4", [quadrants()] * 5, sar=Fraction(4, 3), rotation=90)
    assert_same_colors(decode_one(turned, ClipSpec(fps=25)).frames[0], np.rot90(quadrants(64, 128)))


def test_crop_is_central_and_shrinking_averages(tmp_path: Path) -> None:
    picture = np.zeros((64, 128, 3), np.uint8)
    picture[:, 32:96] = np.indices((64, 64)).sum(0)[..., None] % 2 * 255  # a fine chequer between black sides
    path = write_clip(tmp_path / "chequer.mp4", [picture] * 5, options={"crf": "0"})
    cut = decode_one(path, ClipSpec(fps=25, height=32, width=32, center_crop=True)).frames
    assert cut.shape == (5, 32, 32, 3)
    assert (
        np.abs(cut.astype(int) - 127).max() < 10
    )  # point sampling would show 0 or 255, a shifted cut the sides
    squeezed = decode_one(path, ClipSpec(fps=25, height=32, width=32)).frames
    assert squeezed[0, 16, :6].max() < 10
    assert squeezed[0, 16, -6:].max() < 10
