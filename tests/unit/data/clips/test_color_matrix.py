"""Videos that do not say their color matrix: BT.709 from 720 lines on, BT.601 below, as players do."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from av.video.reformatter import Colorspace

from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, probe
from wands.preprocess.preprocess_report import PreprocessReport

COLORS = np.array([(200, 30, 30), (30, 180, 40), (40, 40, 210), (128, 128, 128)], np.uint8)


def write_bars(
    path: Path, width: int, height: int, matrix: Colorspace, *, tag: bool = False, codec: str = "libx264"
) -> np.ndarray:
    """Write a video of four colored bars that was converted to YUV with `matrix`, and return its RGB frame."""
    frame = np.repeat(np.repeat(COLORS[None], height, axis=0), width // 4, axis=1)
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=8, options={"crf": "10", "b": "5M"})
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        if tag:
            stream.codec_context.colorspace = matrix
        for index in range(5):
            image = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=matrix
            )
            if not tag:
                image.colorspace = 2  # AVCOL_SPC_UNSPECIFIED
            image.pts = index
            out.mux(stream.encode(image))
        out.mux(stream.encode())
    return frame


@pytest.mark.parametrize(
    ("size", "matrix", "tag", "known"),
    [
        ((1280, 720), Colorspace.ITU709, False, "BT.709, assumed"),
        ((720, 1280), Colorspace.ITU709, False, "BT.709, assumed"),
        ((1280, 720), Colorspace.ITU601, True, "as the file says"),
        ((1280, 720), Colorspace.ITU709, True, "as the file says"),
        ((640, 480), Colorspace.ITU601, False, ""),
        ((640, 480), Colorspace.ITU709, True, ""),
    ],
)
def test_the_colors_are_those_that_were_encoded(
    tmp_path: Path, size: tuple[int, int], matrix: Colorspace, tag: bool, known: str
) -> None:
    frame = write_bars(tmp_path / "a.mp4", *size, matrix, tag=tag)
    assert probe(tmp_path / "a.mp4").matrix == known
    (clip,) = decode_clip(tmp_path / "a.mp4", ClipSpec(8.0, max_pixels=size[0] * size[1]))
    bars = frame[0, size[0] // 8 :: size[0] // 4].astype(int)
    width = clip.frames.shape[2]
    found = clip.frames[0, clip.frames.shape[1] // 2, width // 8 :: width // 4].astype(int)
    assert np.abs(found - bars).max() <= 6  # the wrong matrix is up to 20 off


def test_vp8_is_always_bt601(tmp_path: Path) -> None:
    write_bars(tmp_path / "a.webm", 1280, 720, Colorspace.ITU601, codec="libvpx")
    assert probe(tmp_path / "a.webm").matrix == "as the file says"


def test_the_report_says_what_was_assumed(tmp_path: Path) -> None:
    tokens = np.array([4, 4, 4])
    report = PreprocessReport(tmp_path, "v", 3, 0, 0, 0, (), tokens, 1, 1, 1.0, num_assumed=2)
    assert "2 samples decoded as BT.709, as players do: of videos with 720 lines or more" in str(report)
