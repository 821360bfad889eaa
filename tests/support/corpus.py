"""Files that break data pipelines, each made on the spot from a real clip, and what must become of each.

Two kinds of entries: those that give a sample, and those that give a reason. Nothing may give neither.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from tests.support.clip_files import write_clip
from tests.unit.data.clips.test_video_damage import damage, half, write_sound
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip

SAMPLE = ""
LONG = "a name of 251 letters " + "x" * 229
PLAIN = {"preset": "ultrafast"}
LIE = b"YUV4MPEG2 W65535 H65535 F25:1 Ip A1:1 C420jpeg\nFRAME\n"


def real_frames(clips_dir: Path) -> list[np.ndarray]:
    """25 frames of cyclists, uint8 [64, 96, 3]."""
    clip = next(decode_clip(clips_dir / "bikes.mp4", ClipSpec(fps=25, height=64, width=96, max_frames=25)))
    return list(clip.frames)


def write_layers(path: Path, frames: list[np.ndarray], codec: str, pix_fmt: str) -> Path:
    """With an alpha channel that fades."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=25)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        for index, frame in enumerate(frames):
            alpha = np.full((*frame.shape[:2], 1), index * 10, np.uint8)
            picture = av.VideoFrame.from_ndarray(np.concatenate([frame, alpha], axis=2), format="rgba")
            picture.pts = index
            picture.time_base = Fraction(1, 25)
            output.mux(stream.encode(picture.reformat(format=pix_fmt)))
        output.mux(stream.encode(None))
    return path


def lose_packet(path: Path, number: int) -> Path:
    """Overwrite one packet by zeros."""
    with av.open(str(path)) as container:
        lost = [bytes(packet) for packet in container.demux(video=0) if packet.size][number]
    path.write_bytes(path.read_bytes().replace(lost, bytes(len(lost)), 1))
    return path


def _pictures(frames: list[np.ndarray]) -> dict[str, tuple[Callable[[Path], object], str]]:
    """Pictures, as in `_videos`."""

    def picture(path: Path, mode: str = "RGB", orientation: int = 1) -> Path:
        image = Image.fromarray(frames[0]).convert(mode)
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(path, exif=exif)
        return path

    return {
        "image.png": (picture, SAMPLE),
        "image with alpha.png": (lambda path: picture(path, mode="RGBA"), SAMPLE),
        "image of a turned phone.jpg": (lambda path: picture(path, orientation=6), SAMPLE),
        "image cut.jpg": (lambda path: half(picture(path)), "no frame"),
        "image cut.png": (lambda path: half(picture(path)), "no frame"),
        "image that moves.webp": (
            lambda path: Image.fromarray(frames[0]).save(
                path, save_all=True, append_images=[Image.fromarray(frames[9])]
            ),
            "no frame",
        ),
    }


def _videos(frames: list[np.ndarray]) -> dict[str, tuple[Callable[[Path], object], str]]:
    """File name -> (its writer, what its reason says; "" for a sample)."""
    large = np.repeat(np.repeat(frames[0], 68, axis=0), 80, axis=1)  # 7680 x 4352
    odd = [frame[:63, :95] for frame in frames]
    uneven = [40 * i + (i * i) % 23 for i in range(25)]

    def clip(pictures: list[np.ndarray] | None = None, **how: object) -> Callable[[Path], Path]:
        return lambda path: write_clip(path, pictures or frames, **{"options": PLAIN, **how})  # type: ignore[arg-type]

    def made(writer: Callable[[Path], Path], then: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda path: then(writer(path))

    faststart = clip(container={"movflags": "+faststart"})
    return {
        "whole.mp4": (clip(), SAMPLE),
        "truncated.mp4": (made(faststart, half), "truncated|corrupt"),
        "truncated before its index.mp4": (made(clip(), half), "cannot be read as a video"),
        "truncated.mkv": (made(clip(), half), "truncated|corrupt"),
        "truncated.ts": (made(clip(fmt="mpegts"), lambda path: half(path, 0.02)), "video"),
        "zero bytes.mp4": (lambda path: path.touch(), "is empty"),
        "only zeros.mp4": (lambda path: path.write_bytes(bytes(9999)), "cannot be read as a video"),
        "noise.mp4": (
            lambda path: path.write_bytes(random.Random(0).randbytes(9999)),
            "cannot be read as a video",
        ),
        "sound.mp4": (write_sound, "has no video stream"),
        "sound with a cover.mp4": (lambda path: write_sound(path, cover=True), "has no video stream"),
        "text.mp4": (lambda path: path.write_text("not a video\n" * 99), "is a text file, despite its name"),
        "playlist.mp4": (
            lambda path: path.write_text("ffconcat version 1.0\nfile whole.mp4\n"),
            "is a text file, despite its name",
        ),
        "corrupt packets.mp4": (made(faststart, lambda path: damage(path, 0.4, 0.9)), "is corrupt at"),
        "lost packet.mkv": (made(clip(), lambda path: lose_packet(path, 7)), "is corrupt at"),
        "turned.mp4": (clip(rotation=90), SAMPLE),
        "askew.mp4": (clip(rotation=45), "is rotated by"),
        "variable fps.mkv": (clip(stamps_ms=uneven), SAMPLE),
        "leap in time.mkv": (clip(stamps_ms=[40 * i + 60_000 * (i > 3) for i in range(25)]), SAMPLE),
        "slow.mp4": (clip(fps=5), SAMPLE),
        "fast.mp4": (clip(fps=875), SAMPLE),
        "wide pixels.mp4": (clip(sar=Fraction(4, 3)), SAMPLE),
        "odd size.mp4": (clip(odd, pix_fmt="yuv444p"), SAMPLE),
        "tiny.mp4": (clip([frame[:8, :8] for frame in frames]), "below 16 px"),
        "one frame.mp4": (clip(frames[:1]), SAMPLE),
        "one picture.gif": (clip(frames[:1], codec="gif", options={}), SAMPLE),
        "ten bit.mp4": (clip(pix_fmt="yuv420p10le"), SAMPLE),
        "sixteen bit gray.mkv": (clip(codec="ffv1", options={}, pix_fmt="gray16le"), SAMPLE),
        "alpha.mov": (lambda path: write_layers(path, frames, "prores_ks", "yuva444p10le"), SAMPLE),
        "alpha.webm": (lambda path: write_layers(path, frames, "libvpx-vp9", "yuva420p"), SAMPLE),
        "png alpha.mov": (lambda path: write_layers(path, frames, "png", "rgba"), SAMPLE),
        "huge.mp4": (clip([large] * 5, codec="mjpeg", options={}), SAMPLE),
        "a lie of 65535 x 65535.avi": (
            lambda path: path.write_bytes(LIE + bytes(9999)),
            "cannot be read|no frame",
        ),
        "漢字 и 🚲 e\u0301.mp4": (clip(), SAMPLE),
        "hash # percent %23 'quote\" new line.mp4": (clip(), SAMPLE),
        f"{LONG}.mp4": (clip(), SAMPLE),
        "UPPER.MP4": (clip(fmt="mp4"), SAMPLE),
    }


CAPTIONS: dict[str, tuple[bytes | None, str]] = {
    "no caption": (None, "missing caption"),
    "empty caption": (b"", "empty caption"),
    "blank caption": (b" \n\t ", "empty caption"),
    "caption of an entity": (b"&amp;nbsp;", "caption is empty after cleaning"),
    "caption in latin-1": ("ein Fu\xdfg\xe4nger".encode("latin-1"), "cannot be read"),
    "endless caption": (b"a man rides a bicycle " * 400, SAMPLE),
}


def build_corpus(folder: Path, clips_dir: Path) -> dict[str, str]:
    """Write the files, with captions next to them.

    Args:
        folder: new.
        clips_dir: real clips.

    Returns:
        Key of each clip -> regular expression of its reason, or `SAMPLE`.
    """
    folder.mkdir()
    frames = real_frames(clips_dir)
    expected = {}
    videos = _videos(frames) | _pictures(frames)
    stems = [Path(name).stem for name in videos]
    for name, (write, reason) in videos.items():
        path = folder / name
        write(path)
        path.with_suffix(".txt").write_text(f"cyclists, as {path.stem[:40]}")
        whole = stems.count(path.stem) > 1  # two clips that differ in their extension alone keep it
        expected[(name if whole else path.stem).replace("#", "%23")] = reason
    for stem, (caption, reason) in CAPTIONS.items():
        shutil.copy(folder / "whole.mp4", folder / f"{stem}.mp4")
        if caption is not None:
            (folder / f"{stem}.txt").write_bytes(caption)
        expected[stem] = reason
    expected |= _links(folder)
    return expected


def _links(folder: Path) -> dict[str, str]:
    (folder / "again").symlink_to(folder, target_is_directory=True)  # each file is met once all the same
    (folder / "itself.mp4").symlink_to("itself.mp4")
    (folder / "nowhere.mp4").symlink_to("nowhere else.mp4")
    # Opens, and fails to be read, whoever asks: permissions do not stop root.
    (folder / "unreadable.mp4").symlink_to("/proc/self/mem")
    os.mkfifo(folder / "pipe.mp4")
    stems = ("itself", "nowhere", "unreadable", "pipe", "forbidden")
    for stem in stems:
        (folder / f"{stem}.txt").write_text("a caption all the same")
    shutil.copy(folder / "whole.mp4", folder / "forbidden.mp4")
    (folder / "forbidden.mp4").chmod(0)
    broken = {
        "itself": "is a link to itself",
        "nowhere": "to a missing file",
        "unreadable": "cannot be read",
        "pipe": "is a named pipe",
    }
    return broken | {"forbidden": SAMPLE if os.geteuid() == 0 else "cannot be read"}


def mutate(data: bytes, seed: int) -> bytes:
    """One of five kinds of damage, all of it drawn from `seed`: flipped bits, a cut tail, bytes put in, zeroed, lost."""
    dice = random.Random(seed)
    broken = bytearray(data)
    place = dice.randrange(len(data))
    if seed % 5 == 0:
        for _ in range(dice.choice((1, 8, 64, len(data) // 100))):
            broken[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif seed % 5 == 1:
        del broken[place:]
    elif seed % 5 == 2:
        broken[place:place] = dice.randbytes(dice.choice((1, 7, 100, 4000)))
    elif seed % 5 == 3:
        length = min(len(data) - place, dice.choice((16, 500, 5000)))
        broken[place : place + length] = bytes(length)
    else:
        del broken[place : place + dice.choice((1, 13, 1000))]
    return bytes(broken)
