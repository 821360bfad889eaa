"""Decoding: every frame of the generated clips carries its number, so that a wrong choice of frame shows."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorRange, Colorspace
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clip_files import CONTAINERS, H264, decode_one, numbers, quadrants, write_clip
from wands.data.clips.clip import ClipSpec, plan_size, plan_windows
from wands.data.clips.video import decode_clip, frame_times, probe, save_video, to_frames, to_pixels
from wands.errors import ConfigError, DataError, WandsError

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
    # The clips say no color matrix: BT.709 from 720 lines on.
    matrix = Colorspace.ITU709 if chosen[0].height >= 720 else None
    return [
        frame.reformat(format="rgb24", src_colorspace=matrix, interpolation="AREA").to_ndarray()
        for frame in chosen
    ]


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


def test_a_last_window_that_turns_out_to_be_an_image_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where the header promises a little more than there is: the second window has one frame instead of five."""
    path = tmp_path / "a.mp4"
    save_video(path, np.zeros((6, 32, 32, 3), np.uint8), 16)
    monkeypatch.setattr(
        "wands.data.clips.video.plan_windows", lambda spec, begin, finish: iter(((0.0, 5), (5 / 16, 5)))
    )
    clips = list(decode_clip(path, ClipSpec(fps=16, clip_mode="slide", max_frames=5)))
    assert [(clip.suffix, len(clip.frames)) for clip in clips] == [("#0000", 5)]
