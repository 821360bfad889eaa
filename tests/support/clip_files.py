"""Small videos whose frames show their number, turned pictures, and damaged files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip

SIZE = (128, 64)  # width, height
H264 = {"g": "20", "bf": "3", "preset": "ultrafast", "crf": "10"}
B_FRAMES = {"g": "20", "bf": "2", "b": "2000000"}


def numbered(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """A picture of 8 columns, white where ``number`` has a bit, over a faint pattern that moves."""
    width, height = size
    bits = np.repeat([(number >> bit) & 1 for bit in range(8)], width // 8) * 200 + 20
    picture = np.broadcast_to(bits[None, :, None], (height, width, 3)).astype(np.uint8).copy()
    picture[::4] += np.uint8(number % 16)
    return picture


def numbers(frames: np.ndarray) -> list[int]:
    """Read the numbers back."""
    columns = frames.shape[2] // 8
    means = frames.reshape(*frames.shape[:2], 8, columns, 3).mean(axis=(1, 3, 4))
    return [int(sum(1 << bit for bit in range(8) if row[bit] > 128)) for row in means]


def write_clip(
    path: Path,
    pictures: list[np.ndarray] | None = None,
    *,
    num_frames: int = 75,
    fps: int = 25,
    codec: str = "libx264",
    options: dict[str, str] = H264,
    container: dict[str, str] | None = None,
    fmt: str | None = None,
    rotation: int = 0,
    sar: Fraction | None = None,
    stamps_ms: list[int] | None = None,
    first_stamp: int = 0,
    title: str = "",
    pix_fmt: str | None = None,
) -> Path:
    """Encode pictures (default: numbered ones)."""
    pictures = pictures if pictures is not None else [numbered(i) for i in range(num_frames)]
    with av.open(str(path), "w", format=fmt, container_options=container or {}) as output:
        output.metadata["title"] = title
        stream = output.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pix_fmt or {"mjpeg": "yuvj420p", "gif": "rgb8"}.get(codec, "yuv420p")
        if sar:
            stream.codec_context.sample_aspect_ratio = sar
        if rotation:
            stream.set_display_rotation(rotation)
        if stamps_ms:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = stamps_ms[index] if stamps_ms else index + first_stamp
            frame.time_base = Fraction(1, 1000) if stamps_ms else Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def decode_one(path: Path, spec: ClipSpec, start: float | None = None, end: float | None = None):
    clips = list(decode_clip(path, spec, start, end))
    assert len(clips) == 1
    return clips[0]


CONTAINERS = {
    "h264.mp4": {},
    "open_gop.mp4": {"options": {**H264, "x264-params": "open-gop=1"}},
    "fragments.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}},
    "mpeg4.mov": {"codec": "mpeg4", "options": B_FRAMES},  # its seek lands too late for some frames
    "h264.mkv": {},
    "vp9.webm": {
        "codec": "libvpx-vp9",
        "options": {"g": "20", "cpu-used": "8", "deadline": "realtime", "b": "2000000"},
    },
    "no_duration.webm": {
        "codec": "libvpx-vp9",
        "options": {"g": "20", "cpu-used": "8", "deadline": "realtime", "b": "2000000"},
        "container": {"live": "1"},
    },
    "h264.avi": {},  # its timestamps are out of order
    "mpeg4.avi": {"codec": "mpeg4", "options": B_FRAMES},
    "mjpeg.avi": {"codec": "mjpeg", "options": {}},
    "h264.ts": {"fmt": "mpegts"},
    "mpeg2.mpg": {"codec": "mpeg2video", "options": B_FRAMES},  # its seek and its duration are wrong
    "h264.flv": {},
    "raw.h264": {"fmt": "h264"},  # no timestamps at all
    "wmv2.wmv": {"codec": "wmv2", "options": {"b": "2000000"}},
    "gif.gif": {"codec": "gif", "options": {}},
}


def quadrants(height: int = 64, width: int = 96) -> np.ndarray:
    """Red, green / blue, white."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[: height // 2, : width // 2, 0] = picture[: height // 2, width // 2 :, 1] = 230
    picture[height // 2 :, : width // 2, 2] = picture[height // 2 :, width // 2 :] = 230
    return picture
