"""Broken, lying and endless files: each ends in a clip or in one sentence."""

from __future__ import annotations

import os
import random
import socket
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition

from tests.support.clip_files import CONTAINERS, H264, SIZE, decode_one, numbered, numbers, write_clip
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, probe
from wands.errors import DataError

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


@pytest.mark.parametrize("brand", ["heic", "mif1", "avif"])
def test_an_image_of_tiles_is_no_video(brand: str, tmp_path: Path) -> None:
    """HEIC by another name, or in a table: FFmpeg would decode one tile of a photo."""
    path = write_clip(tmp_path / "renamed.jpg.mp4")
    data = path.read_bytes()
    assert data[4:8] == b"ftyp"
    path.write_bytes(data[:8] + brand.encode() + data[12:])
    with pytest.raises(
        DataError, match=r"is a HEIC, HEIF or AVIF image, which is not read; convert the file to \.png"
    ):
        probe(path)
