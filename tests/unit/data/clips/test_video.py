"""Decoding: every frame of the generated clips carries its number, so that a wrong choice of frame shows."""

import os
import random
import socket
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from av.video.reformatter import ColorRange, Colorspace
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from wands.data.clips.clip import ClipSpec, plan_size, plan_windows
from wands.data.clips.video import decode_clip, frame_times, probe, save_video, to_frames, to_pixels
from wands.errors import ConfigError, DataError, WandsError

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


# The default tier: one container with exact times, one with wrong ones, one without, and pictures of unequal duration.
DEFAULT_CONTAINERS = ("h264.mp4", "h264.mkv", "h264.avi", "h264.ts", "raw.h264", "vp9.webm", "gif.gif")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT_CONTAINERS else pytest.mark.slow) for name in CONTAINERS],
)
def test_chooses_the_last_frame_at_or_before_each_time(name: str, tmp_path: Path) -> None:
    path = write_clip(tmp_path / name, **CONTAINERS[name])
    for start, spec in (
        (None, ClipSpec(fps=16)),
        (None, ClipSpec(fps=25)),
        (None, ClipSpec(fps=16, max_frames=13, clip_mode="middle")),
        (1.3, ClipSpec(fps=16, max_frames=9)),
        (2.2, ClipSpec(fps=24)),
        *((0.04 * first, ClipSpec(fps=25, max_frames=5)) for first in (1, 19, 20, 21, 38, 57, 66)),
    ):
        clip = decode_one(path, spec, start)
        if spec.clip_mode == "middle":
            assert clip.start_seconds == pytest.approx((3.0 - 13 / 16) / 2)
        else:
            available = 3.0 - (start or 0.0)
            assert len(clip.frames) == min(
                spec.legal_frames(int(available * spec.fps + 0.01)), spec.max_frames or 99
            )
        times = [clip.start_seconds + i / spec.fps for i in range(len(clip.frames))]
        assert numbers(clip.frames) == [int((time + 0.001) * 25) for time in times], (start, spec)


def sequential_choice(path: Path, times: list[float]) -> list[np.ndarray]:
    """The rule by brute force: decode everything, look the times up."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        stamps = np.array([float((frame.pts - stream.start_time) * frame.time_base) for frame in frames])
    chosen = [frames[int(np.searchsorted(stamps, time + 0.001, side="right")) - 1] for time in times]
    return [frame.reformat(format="rgb24", interpolation="AREA").to_ndarray() for frame in chosen]


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("bikes.mp4", None, 2.0),
        ("bikes.mp4", 3.3, None),
        pytest.param("bigbuckbunny.mp4", 4.1, None, marks=pytest.mark.slow),
        ("cityCC0.mpg", 5.7, None),
    ],
)
def test_real_clips_equal_a_sequential_decode(
    clips_dir: Path, name: str, start: float | None, end: float | None
) -> None:
    clip = decode_one(clips_dir / name, ClipSpec(fps=16, max_frames=33), start, end)
    chosen = sequential_choice(clips_dir / name, [(start or 0) + i / 16 for i in range(len(clip.frames))])
    top = (chosen[0].shape[0] - clip.frames.shape[1]) // 2  # 405 rows of the city become 400
    assert len(clip.frames) >= 17
    for ours, theirs in zip(clip.frames, chosen, strict=True):
        np.testing.assert_array_equal(ours, theirs[top : top + len(ours)])


def test_probe_tells_the_truth_about_real_clips(clips_dir: Path) -> None:
    city = probe(clips_dir / "cityCC0.mpg")
    phone = probe(clips_dir / "carphone_pristine.mp4")
    assert (city.num_frames, city.width, city.height, city.codec) == (0, 720, 405, "mpeg2video")
    assert city.duration == pytest.approx(190 / 25)
    assert (phone.sar, phone.num_frames, phone.rotation) == (Fraction(128, 117), 120, 0)
    assert phone.fps == pytest.approx(30000 / 1001)
    assert decode_one(clips_dir / "carphone_pristine.mp4", ClipSpec(fps=16)).frames.shape == (
        61 + 4,
        144,
        192,
        3,
    )


def test_slow_clip_repeats_frames(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "slow.mp4", num_frames=20, fps=10)
    clip = decode_one(path, ClipSpec(fps=16))
    assert len(clip.frames) == 29  # 32 cut to 1 + 4k
    assert numbers(clip.frames)[:9] == [0, 0, 1, 1, 2, 3, 3, 4, 5]


def test_uneven_timestamps_are_obeyed(tmp_path: Path) -> None:
    stamps = [0, 40, 500, 540, 580, 1000, 1040, 1080, 1120]
    path = write_clip(tmp_path / "uneven.mkv", num_frames=9, stamps_ms=stamps)
    clip = decode_one(path, ClipSpec(fps=10, max_frames=9))
    assert numbers(clip.frames) == [0, 1, 1, 1, 1, 2, 4, 4, 4]


def test_rounded_timestamps_do_not_repeat_a_frame(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "ms.mkv", num_frames=33, fps=16)  # Matroska stores 62.5 ms as 63
    assert numbers(decode_one(path, ClipSpec(fps=16)).frames) == list(range(33))


def test_slide_covers_the_clip_without_overlap(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "long.mp4", num_frames=57)
    clips = list(decode_clip(path, ClipSpec(fps=25, max_frames=24, clip_mode="slide")))
    assert [clip.suffix for clip in clips] == ["#0000", "#0001", "#0002"]
    assert [numbers(clip.frames) for clip in clips] == [
        list(range(21)),
        list(range(21, 42)),
        list(range(42, 55)),  # 15 left, 13 is 1 + 4k
    ]
    assert [clip.start_seconds for clip in clips] == pytest.approx([0.0, 0.84, 1.68])
    shorter = list(decode_clip(path, ClipSpec(fps=25, max_frames=24, clip_mode="slide"), end=45 / 25))
    assert [len(clip.frames) for clip in shorter] == [21, 21]  # 3 frames left would be a still
    only = list(decode_clip(path, ClipSpec(fps=25, max_frames=24, clip_mode="slide"), end=4 / 25))
    assert [len(clip.frames) for clip in only] == [1]
    assert decode_one(path, ClipSpec(fps=25, max_frames=9)).suffix == ""


def test_windows_start_and_end_where_they_are_told(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4")
    assert numbers(decode_one(path, ClipSpec(fps=25), 1.0, 1.52).frames) == list(range(25, 38))
    assert (
        len(decode_one(path, ClipSpec(fps=25), 2.8, 3.04).frames) == 5
    )  # an end rounded up by a frame is no fault
    with pytest.raises(DataError, match=r"lasts 3\.000 s, less than end=4"):
        list(decode_clip(path, ClipSpec(fps=25), 1.0, 4.0))
    with pytest.raises(DataError, match="too short"):
        list(decode_clip(path, ClipSpec(fps=25), 3.5))


@given(
    fps=st.sampled_from([16.0, 24.0, 29.97]),
    begin=st.floats(0, 50),
    length=st.floats(0.01, 40),
    max_frames=st.integers(1, 121),
    mode=st.sampled_from(["head", "middle", "slide"]),
)
def test_windows_are_legal(fps: float, begin: float, length: float, max_frames: int, mode: str) -> None:
    spec = ClipSpec(fps=fps, max_frames=max_frames, clip_mode=mode)
    windows = list(plan_windows(spec, begin, begin + length))
    assert windows
    clock = begin
    for start, frames in windows:
        assert frames % 4 == 1
        assert frames <= max_frames
        assert start >= clock - 1e-9
        assert start + (frames - 1) / fps < begin + length
        clock = start + frames / fps
    if mode == "slide":  # nothing but the last, short piece is left out
        full = spec.legal_frames(max_frames)
        assert all(frames == full for _, frames in windows[:-1])
        assert begin + length - clock <= max(5, full) / fps + 1e-3


@given(
    width=st.integers(16, 4000),
    height=st.integers(16, 4000),
    max_pixels=st.none() | st.integers(256, 2_000_000),
    multiple=st.sampled_from([16, 32]),
)
def test_own_aspect_is_kept_without_upscaling(
    width: int, height: int, max_pixels: int | None, multiple: int
) -> None:
    spec = ClipSpec(fps=16, max_pixels=max_pixels and max(max_pixels, multiple**2), size_multiple=multiple)
    try:
        geometry = plan_size(spec, Fraction(width), Fraction(height))
    except DataError:
        shrink = min(1.0, ((spec.max_pixels or width * height) / (width * height)) ** 0.5)
        assert min(width, height) * shrink < multiple
        return
    (scaled_w, scaled_h) = geometry.scaled
    (target_w, target_h) = geometry.target
    assert target_w % multiple == target_h % multiple == 0
    assert target_w * target_h <= (spec.max_pixels or width * height)
    assert target_w <= scaled_w <= width
    assert target_h <= scaled_h <= height
    assert abs(scaled_w - width * scaled_h / height) <= 1 + width / height  # rounding only
    assert target_w == scaled_w or target_h == scaled_h  # no more is cut than aspect demands


def test_sizes_of_known_cases() -> None:
    hd = (Fraction(1280), Fraction(720))
    assert plan_size(ClipSpec(fps=16, max_pixels=832 * 480), *hd).target == (832, 464)
    assert plan_size(ClipSpec(fps=16, max_pixels=832 * 480), Fraction(1664), Fraction(960)).target == (
        832,
        480,
    )
    square = plan_size(ClipSpec(fps=16, max_pixels=960 * 960), Fraction(1184), Fraction(1184))
    assert square.target == (960, 960)  # whose float root is just below 960
    assert plan_size(ClipSpec(fps=16), Fraction(720), Fraction(405)).target == (720, 400)
    stretched = plan_size(ClipSpec(fps=16, height=480, width=480), *hd)
    assert stretched.scaled == stretched.target == (480, 480)
    covered = plan_size(ClipSpec(fps=16, height=480, width=480, center_crop=True), *hd)
    assert (covered.scaled, covered.target) == ((853, 480), (480, 480))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 0}, "--fps=0"),
        ({"height": 480}, "must be set together"),
        ({"height": 480, "width": 850}, r"--width=850 must be a multiple of 16; use 848"),
        ({"center_crop": True}, "--center-crop needs"),
        ({"max_pixels": 9999, "height": 64, "width": 64}, "cannot be combined"),
        ({"max_pixels": 100}, "at least 256"),
        ({"max_frames": 0}, "--max-frames=0"),
        ({"clip_mode": "slide"}, "--clip-mode=slide needs a window length; set --max-frames"),
    ],
)
def test_impossible_specs_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClipSpec(**{"fps": 16, **options})


def quadrants(height: int = 64, width: int = 96) -> np.ndarray:
    """Red, green / blue, white."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[: height // 2, : width // 2, 0] = picture[: height // 2, width // 2 :, 1] = 230
    picture[height // 2 :, : width // 2, 2] = picture[height // 2 :, width // 2 :] = 230
    return picture


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


def test_same_bytes_every_time_and_for_every_window(clips_dir: Path) -> None:
    spec = ClipSpec(fps=16, max_pixels=128 * 128, max_frames=9)
    first, second = (decode_one(clips_dir / "bikes.mp4", spec, 2.0).frames for _ in range(2))
    np.testing.assert_array_equal(first, second)
    whole = decode_one(clips_dir / "bikes.mp4", ClipSpec(fps=16, max_pixels=128 * 128)).frames
    np.testing.assert_array_equal(first, whole[32:41])


# Frames of 1/60 s, then of 1/15 s.
UNEVEN_MS = [17 * i for i in range(50)] + [850 + 67 * i for i in range(24)]


@pytest.mark.parametrize("name", ["a.mp4", "fragments.mp4", "a.mkv", "vp9.webm", "a.flv"])
def test_times_of_frames_that_do_not_follow_the_rate(tmp_path: Path, name: str) -> None:
    path = write_clip(tmp_path / name, num_frames=74, stamps_ms=UNEVEN_MS, **CONTAINERS.get(name, {}))
    times = frame_times(path)
    assert times is not None
    assert times[:-1] == pytest.approx([stamp / 1000 for stamp in UNEVEN_MS], abs=1e-6)
    assert 2.33 < times[-1] <= probe(path).duration
    # Each of them is the time from which on the decoder shows that frame.
    for number in (0, 7, 21, 49, 50, 72):
        assert numbers(decode_one(path, ClipSpec(fps=60, max_frames=1), times[number]).frames) == [number]


@pytest.mark.parametrize("name", CONTAINERS)
def test_frames_at_a_constant_rate_have_no_times_of_their_own(tmp_path: Path, name: str) -> None:
    assert frame_times(write_clip(tmp_path / name, **CONTAINERS[name])) is None


def test_a_last_frame_that_is_held_does_not_move_those_before(tmp_path: Path) -> None:
    stamps = [40 * i for i in range(25)] + [3000]
    path = write_clip(tmp_path / "a.mkv", num_frames=26, stamps_ms=stamps, options=H264 | {"bf": "0"})
    times = frame_times(path)
    assert times is not None
    assert times[:-1] == pytest.approx([stamp / 1000 for stamp in stamps])


def test_pictures_of_vp8_that_are_never_shown_have_no_number(tmp_path: Path) -> None:
    plain = write_clip(tmp_path / "plain.webm", codec="libvpx", options={"b": "2000000"})
    path = tmp_path / "hidden.webm"
    with av.open(str(plain)) as source, av.open(str(path), "w") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size and packet.pts % 400 == 200:
                data = bytes(packet)
                hidden = av.Packet(bytes([data[0] & ~0x10]) + data[1:])
                hidden.pts = hidden.dts = packet.pts - 15
                hidden.time_base = packet.time_base
                hidden.stream = stream
                output.mux(hidden)
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    with av.open(str(path)) as source:
        assert sum(packet.size > 0 for packet in source.demux(video=0)) == 82
    times = frame_times(path)  # FFmpeg takes the rate of such a file for 200
    assert times is not None
    assert times[:-1] == pytest.approx([number / 25 for number in range(75)])
    assert numbers(decode_one(path, ClipSpec(fps=25, max_frames=9), 40 / 25).frames) == list(range(40, 49))


# ---------------------------------------------------------------- broken files


def half(path: Path, share: float = 0.5) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def moov_first(path: Path) -> Path:
    return write_clip(path, container={"movflags": "+faststart"})


def write_sound(path: Path, *, cover: bool = False) -> Path:
    with av.open(str(path), "w") as output:
        stream = output.add_stream("aac", rate=16000)
        art = output.add_stream("mjpeg", rate=1) if cover else None
        if art:
            art.width = 64
            art.height = 48
            art.pix_fmt = "yuvj420p"
            art.disposition = Disposition.attached_pic
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16000
        sound.pts = 0
        output.mux(stream.encode(sound))
        output.mux(stream.encode(None))
        if art:
            output.mux(
                art.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24"))
            )
            output.mux(art.encode(None))
    return path


def write_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def no_frames(path: Path) -> Path:
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25)
        stream.width = 64
        stream.height = 64
        stream.pix_fmt = "yuv420p"
        output.start_encoding()
    return path


BROKEN = {
    "missing": (lambda path: path / "a.mp4", "does not exist"),
    "folder": (lambda path: path, "is a folder, not a file"),
    "empty": (lambda path: write_text(path / "a.mp4", ""), r"is empty \(0 bytes\)"),
    "text": (
        lambda path: write_text(path / "a.mp4", "a man rides a bicycle\n" * 99),
        "is a text file, despite its name",
    ),
    "playlist": (
        lambda path: write_text(
            path / "a.mp4", f"ffconcat version 1.0\nfile {write_clip(path / 'b.mp4').name}\n"
        ),
        "is a text file, despite its name",
    ),
    "mp4 cut before moov": (lambda path: half(write_clip(path / "a.mp4")), "cannot be read as a video"),
    "mp4 cut after moov": (
        lambda path: half(moov_first(path / "a.mp4")),
        r"truncated: the header says 3\.00 s, but the video ends",
    ),
    "mkv cut": (lambda path: half(write_clip(path / "a.mkv"), 0.3), r"truncated: the header says 3\.00 s"),
    "flv cut": (lambda path: half(write_clip(path / "a.flv"), 0.3), "truncated|corrupt"),
    "avi cut": (
        lambda path: half(write_clip(path / "a.avi", codec="mjpeg", options={})),
        r"truncated: the header says 3\.00 s",
    ),
    "h264 avi cut": (lambda path: half(write_clip(path / "a.avi")), "truncated|corrupt"),
    "sound": (lambda path: write_sound(path / "a.mp4"), "has no video stream"),
    "sound with a cover": (lambda path: write_sound(path / "a.mp4", cover=True), "has no video stream"),
    "no frames": (lambda path: no_frames(path / "a.mp4"), "no frame that can be decoded|no video stream"),
    "tiny": (lambda path: write_clip(path / "a.mp4", [np.zeros((8, 64, 3), np.uint8)] * 9), "below 16 px"),
}


@pytest.mark.parametrize(
    ("name", "stamps", "variable"),
    [
        ("even.mkv", [round(i * 1000 / 24) for i in range(20)], False),  # 41 and 42 ms
        ("even.mp4", None, False),
        ("even.avi", None, False),
        ("even.flv", None, False),
        ("one_missing.mkv", [40 * i + 40 * (i > 9) for i in range(20)], True),
        ("phone.mkv", [33 * i + (i * i) % 17 for i in range(20)], True),
    ],
)
def test_variable_frame_rate_is_told_from_rounding(
    tmp_path: Path, name: str, stamps: list[int] | None, variable: bool
) -> None:
    path = write_clip(tmp_path / name, num_frames=20, stamps_ms=stamps)
    for start in (None, 0.1):
        assert decode_one(path, ClipSpec(fps=16), start).variable_fps is variable


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_say_what_is_wrong(kind: str, tmp_path: Path) -> None:
    build, message = BROKEN[kind]
    path = build(tmp_path)
    for spec in (ClipSpec(fps=16), ClipSpec(fps=16, max_frames=1, clip_mode="middle")):
        with pytest.raises(DataError, match=message) as caught:
            list(decode_clip(path, spec))
        assert str(caught.value).startswith(f"video={path} ")
        assert "; " in str(caught.value)  # a cure


def test_a_frame_that_the_decoder_flags_is_not_used(tmp_path: Path) -> None:
    path = half(write_clip(tmp_path / "a.avi", codec="mpeg4", options={"g": "20", "b": "2000000"}))
    with av.open(str(path)) as container:
        flagged = [frame.is_corrupt for frame in container.decode(video=0)]
    last = len(flagged) - 1
    assert flagged == [False] * last + [True]  # the one that the cut went through: decoded, with gray blocks
    spec = ClipSpec(fps=25, max_frames=5)
    assert numbers(decode_one(path, spec, (last - 5) / 25).frames) == list(range(last - 5, last))
    with pytest.raises(DataError, match="is corrupt at"):
        list(decode_clip(path, spec, (last - 4) / 25))


def test_odd_angles_are_refused(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", num_frames=5, rotation=45)
    with pytest.raises(DataError, match=r"is rotated by -?45 degrees"):
        list(decode_clip(path, ClipSpec(fps=16)))


def test_a_playlist_reaches_no_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        lines = [
            "#EXTM3U",
            "#EXT-X-TARGETDURATION:9",
            "#EXTINF:9,",
            f"http://127.0.0.1:{port}/a.ts",
            "#EXT-X-ENDLIST",
        ]
        with pytest.raises(DataError):
            list(decode_clip(write_text(tmp_path / "a.m3u8", "\n".join(lines)), ClipSpec(fps=16)))
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_header_that_says_a_little_too_much_is_forgiven(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv")
    data = path.read_bytes()
    assert data.count(b"00:00:03.000000000") == 1
    path.write_bytes(data.replace(b"00:00:03.000000000", b"00:00:03.060000000"))
    assert probe(path).duration == pytest.approx(3.06)
    spec = ClipSpec(fps=25, max_frames=21, clip_mode="slide")
    clips = list(decode_clip(path, spec))
    assert [len(clip.frames) for clip in clips] == [21, 21, 21, 9]
    assert numbers(clips[-1].frames) == list(range(63, 72))
    with pytest.raises(DataError, match=r"no frame at or after 3\.020 s"):
        list(decode_clip(path, spec, 3.02))
    path.write_bytes(data.replace(b"00:00:03.000000000", b"00:09:03.000000000"))
    assert probe(path).duration == pytest.approx(3.0)  # more than the whole file: not believed


def test_names_inside_the_file_need_not_be_utf8(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", title="caption")
    data = path.read_bytes()
    assert b"caption" in data
    path.write_bytes(data.replace(b"caption", b"\xff\xfe\xff\xfe\xff\xfe\xff"))
    assert len(decode_one(path, ClipSpec(fps=16)).frames) == 45


def test_a_colon_in_a_name_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clip(tmp_path / "plain.mp4").rename(tmp_path / "http:clip.mp4")
    monkeypatch.chdir(tmp_path)
    assert len(decode_one(Path("http:clip.mp4"), ClipSpec(fps=16)).frames) == 45


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.mp4")
    with pytest.raises(DataError, match="is a named pipe, not a file"):
        list(decode_clip(tmp_path / "a.mp4", ClipSpec(fps=16)))


@pytest.mark.parametrize("name", ["cut.mp4", "cut.avi"])
def test_a_cut_file_serves_windows_before_the_cut(tmp_path: Path, name: str) -> None:
    codec = {"codec": "mjpeg", "options": {}} if name.endswith("avi") else {}
    path = half(
        write_clip(tmp_path / name, container={"movflags": "+faststart"} if not codec else None, **codec)
    )
    assert numbers(decode_one(path, ClipSpec(fps=25, max_frames=21)).frames) == list(range(21))
    windows = decode_clip(path, ClipSpec(fps=25, max_frames=9, clip_mode="slide"))
    assert numbers(next(windows).frames) == list(range(9))
    with pytest.raises(DataError, match=r"truncated|corrupt"):
        list(windows)
    with pytest.raises(DataError, match="truncated"):
        list(decode_clip(path, ClipSpec(fps=25), 2.5))


def damage(path: Path, first: float, last: float, seed: int = 0) -> Path:
    """Overwrite 2 % of the bytes between two shares of the file."""
    data = bytearray(path.read_bytes())
    dice = random.Random(seed)
    places = range(int(len(data) * first), int(len(data) * last))
    for place in dice.sample(places, len(places) // 50):
        data[place] = dice.randrange(256)
    path.write_bytes(bytes(data))
    return path


def test_damage_counts_only_inside_the_window(clips_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "bikes.mp4"
    path.write_bytes((clips_dir / "bikes.mp4").read_bytes())
    clean = decode_one(path, ClipSpec(fps=16, max_frames=9)).frames
    damage(path, 0.5, 0.6)
    np.testing.assert_array_equal(decode_one(path, ClipSpec(fps=16, max_frames=9)).frames, clean)
    with pytest.raises(DataError, match="is corrupt at"):
        list(decode_clip(path, ClipSpec(fps=16)))


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("every_frame_whole.mkv", "mjpeg", {}),
        (
            "groups.mov",
            "mpeg4",
            {"g": "20", "b": "2000000"},
        ),  # shows picture 24 as 26 and 27 without a warning
        ("groups.mp4", "libx264", H264 | {"bf": "0"}),
        ("loses_count.avi", "mpeg4", {"g": "20", "b": "2000000"}),
    ],
)
def test_a_lost_packet_spoils_what_depends_on_it(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
) -> None:
    path = write_clip(tmp_path / name, codec=codec, options=options)
    with av.open(str(path)) as container:
        packets = [(bytes(packet), packet.is_keyframe) for packet in container.demux(video=0) if packet.size]
    healed = next(index for index in range(26, 75) if packets[index][1])
    lost = packets[25][0]
    data = path.read_bytes()
    path.write_bytes(data.replace(lost, bytes(len(lost)), 1))
    for first in range(20, 45):
        spec = ClipSpec(fps=25, max_frames=5)
        start = first / 25
        if first + 5 <= 25 or (first >= healed and not name.endswith("avi")):
            assert numbers(decode_one(path, spec, start).frames) == list(range(first, first + 5))
        else:
            with pytest.raises(DataError, match="is corrupt at"):
                list(decode_clip(path, spec, start))


def test_random_damage_ends_in_a_clip_or_a_data_error(tmp_path: Path) -> None:
    outcomes = []
    for name in ("h264.mp4", "h264.mkv", "h264.ts", "mpeg2.mpg", "h264.avi"):
        whole = write_clip(tmp_path / name, **CONTAINERS[name]).read_bytes()
        for seed in range(6):
            path = tmp_path / f"{seed}-{name}"
            path.write_bytes(whole)
            damage(path, 0.0 if seed % 2 else 0.1, 1.0, seed)
            try:
                frames = decode_one(path, ClipSpec(fps=16, max_pixels=64 * 64)).frames
                outcomes.append(len(frames) % 4 == 1)
            except DataError as error:
                outcomes.append("; " in str(error))
    assert outcomes == [True] * 30


def test_a_lying_length_does_not_eat_the_memory(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.avi", codec="mjpeg", options={}, num_frames=5)
    data = path.read_bytes()
    for tag, offset in ((b"avih", 8 + 16), (b"strh", 8 + 32)):  # the frame counts of the header
        at = data.index(tag) + offset
        data = data[:at] + (2**31 - 1).to_bytes(4, "little") + data[at + 4 :]
    path.write_bytes(data)
    assert probe(path).num_frames == 2**31 - 1
    with pytest.raises(DataError, match=r"too long for this machine's memory|truncated"):
        list(decode_clip(path, ClipSpec(fps=16)))
    with pytest.raises(DataError, match="truncated"):  # at once: not after planning years of windows
        list(decode_clip(path, ClipSpec(fps=16, max_frames=9, clip_mode="slide")))


def test_a_change_of_size_is_refused(tmp_path: Path) -> None:
    small = write_clip(tmp_path / "a.h264", num_frames=25, fmt="h264").read_bytes()
    large = write_clip(
        tmp_path / "b.h264", [numbered(i, (256, 128)) for i in range(25)], fmt="h264"
    ).read_bytes()
    (tmp_path / "ab.h264").write_bytes(small + large)
    with pytest.raises(DataError, match="changes size from 128x64 to 256x128"):
        list(decode_clip(tmp_path / "ab.h264", ClipSpec(fps=16)))
    assert len(decode_one(tmp_path / "ab.h264", ClipSpec(fps=16, max_frames=13)).frames) == 13


def test_time_that_runs_backwards_is_refused(tmp_path: Path) -> None:
    first = write_clip(tmp_path / "a.ts", num_frames=25, fmt="mpegts").read_bytes()
    second = write_clip(tmp_path / "b.ts", num_frames=25, fmt="mpegts", first_stamp=25).read_bytes()
    (tmp_path / "ab.ts").write_bytes(first + second)
    with pytest.raises(DataError, match="run backwards"):
        list(decode_clip(tmp_path / "ab.ts", ClipSpec(fps=16)))


def test_a_recording_that_begins_inside_a_group_starts_at_its_first_whole_frame(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.ts", fmt="mpegts")
    data = path.read_bytes()
    path.write_bytes(data[len(data) // 3 // 188 * 188 :])
    clip = decode_one(path, ClipSpec(fps=25))
    assert numbers(clip.frames) == list(
        range(40, 73)
    )  # a keyframe each 20; no frame is held to fill the lead
    assert clip.start_seconds > 0


def test_a_leap_in_time_is_refused_not_filled(tmp_path: Path) -> None:
    stamps = [40 * i if i < 10 else 40 * i + 3_600_000 for i in range(20)]
    path = write_clip(tmp_path / "leap.mkv", num_frames=20, stamps_ms=stamps)
    assert numbers(decode_one(path, ClipSpec(fps=25, max_frames=9)).frames) == list(range(9))
    with pytest.raises(DataError, match=r"shows one image from 0\.360 s to at least 10\.3[67]"):
        list(decode_clip(path, ClipSpec(fps=25)))


@pytest.mark.parametrize("name", ["a.mkv", "a.flv"])  # a header for each stream; one for the whole file
def test_sound_that_outlasts_the_picture_is_no_truncation(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25, options=H264)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        sound = output.add_stream("aac", rate=44100)
        for index in range(50):
            picture = av.VideoFrame.from_ndarray(numbered(index), format="rgb24")
            picture.pts = index
            picture.time_base = Fraction(1, 25)
            output.mux(stream.encode(picture))
        output.mux(stream.encode(None))
        noise = av.AudioFrame.from_ndarray(np.zeros((1, 44100 * 5), np.float32), format="fltp", layout="mono")
        noise.sample_rate = 44100
        noise.pts = 0
        output.mux(sound.encode(noise))
        output.mux(sound.encode(None))
    whole = probe(path).duration
    assert whole == pytest.approx(2.0, abs=0.05)
    assert numbers(decode_one(path, ClipSpec(fps=25)).frames) == list(range(49))


# ---------------------------------------------------------------- pixels and writing


def test_pixels_span_minus_one_to_one_and_come_back() -> None:
    frames = np.arange(256, dtype=np.uint8).repeat(3).reshape(4, 8, 8, 3)
    pixels = to_pixels(frames)
    assert pixels.shape == (3, 4, 8, 8)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()
    assert (pixels.min(), pixels.max()) == (-1.0, 1.0)
    assert float(pixels[1, 2, 3, 4]) == pytest.approx(frames[2, 3, 4, 1] / 127.5 - 1, abs=1e-6)
    scaled = frames.transpose(3, 0, 1, 2).astype(np.float32) / np.float32(127.5) - np.float32(1)
    np.testing.assert_array_equal(pixels, scaled)  # bit for bit, also on a GPU
    batch = to_pixels(torch.from_numpy(np.stack([frames, 255 - frames])))
    assert torch.equal(batch[0], pixels)
    assert batch.shape == (2, *pixels.shape)
    np.testing.assert_array_equal(to_frames(pixels), frames)
    np.testing.assert_array_equal(to_frames(pixels.double()), frames)
    assert to_frames(torch.tensor([-1.7, 0.0, 1.7]).view(3, 1, 1, 1)).tolist() == [[[[0, 128, 255]]]]


@pytest.mark.parametrize(("height", "width", "fps"), [(64, 96, 16.0), (33, 47, 30000 / 1001)])
def test_saved_video_shows_what_was_given(tmp_path: Path, height: int, width: int, fps: float) -> None:
    frames = np.stack([quadrants(height, width) + np.uint8(i) for i in range(9)])
    path = tmp_path / "new" / "out.mp4"
    save_video(path, frames, fps)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        decoded = [frame for frame in container.decode(stream)]
        assert float(stream.average_rate) == pytest.approx(fps)
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
    assert {frame.colorspace for frame in decoded} == {Colorspace.ITU709}
    assert {frame.color_range for frame in decoded} == {ColorRange.MPEG}
    shown = np.stack([frame.to_ndarray(format="rgb24") for frame in decoded])
    assert shown.shape == (9, height + height % 2, width + width % 2, 3)
    inner = shown[:, :height, :width].astype(int) - frames
    assert np.median(np.abs(inner)) <= 3
    assert np.abs(inner[:, 3 : height // 2 - 3, 3 : width // 2 - 3]).max() <= 12
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat")
    assert os.listdir(path.parent) == ["out.mp4"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.mp4"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(WandsError, match=r"out\.mp4 cannot be written \(.*No space"):
        save_video(path, np.zeros((5, 32, 32, 3), np.uint8), 16)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.mp4"]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import resource, numpy as np; from pathlib import Path; from wands.data.clips.video import save_video\n"
        "from wands.errors import WandsError\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "frames = np.random.default_rng(0).integers(0, 255, (9, 128, 128, 3), dtype=np.uint8)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"try: save_video(Path({str(tmp_path)!r}) / 'a.mp4', frames, 16)\n"
        "except WandsError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "a.mp4 cannot be written (" in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert os.listdir(tmp_path) == []
