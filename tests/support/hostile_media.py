"""Media files that are damaged, or hostile by their name, content, link, mask or caption."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from pathlib import Path

from PIL import Image

from tests.support.clip_files import numbered, write_clip
from tests.support.corpus import mutate
from tests.support.hostile_box import Sandbox
from tests.support.hostile_values import hostile_rows


def png(width: int, height: int, bits: int = 1) -> bytes:
    """A black gray image of any size in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(1 + -(-width * bits // 8))
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def originals(folder: Path) -> list[Path]:
    """Write one undamaged file of each of 14 formats."""
    frames = [numbered(number)[:48, :64] for number in range(24)]
    codecs = {
        **{"mp4": "libx264", "mkv": "libx264", "ts": "libx264", "flv": "libx264", "webm": "libvpx-vp9"},
        **{"avi": "mpeg4", "mpg": "mpeg2video", "mov": "mjpeg", "wmv": "wmv2", "gif": "gif"},
    }
    fast = {"libx264": {"preset": "ultrafast"}, "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"}}
    made = [
        write_clip(
            folder / f"clip.{kind}",
            frames,
            fps=25 if kind == "mpg" else 16,
            codec=codec,
            options=fast.get(codec, {}),
        )
        for kind, codec in codecs.items()
    ]
    for kind in ("png", "jpg", "webp", "bmp"):
        Image.fromarray(frames[0]).save(folder / f"clip.{kind}")
    return [*made, *(folder / f"clip.{kind}" for kind in ("png", "jpg", "webp", "bmp"))]


def write_mutations(folder: Path, count: int) -> list[Path]:
    """Write damaged copies of the originals, and a caption next to each."""
    (folder.parent / "originals").mkdir()
    contents = [(path.suffix, path.read_bytes()) for path in originals(folder.parent / "originals")]
    shutil.rmtree(folder.parent / "originals")
    paths = []
    for seed in range(count):
        suffix, data = contents[seed % len(contents)]
        paths.append(folder / f"{seed:03}{suffix}")
        paths[-1].write_bytes(mutate(data, seed))
        paths[-1].with_suffix(".txt").write_text(f"clip {seed}")
    return paths


class _Media:
    """A folder of files with captions next to them, and the paths of all files in it."""

    def __init__(self, folder: Path, clip: bytes) -> None:
        self.folder = folder
        self.clip = clip
        self.paths = list[Path]()

    def add(
        self,
        name: str | bytes,
        data: bytes | None = None,
        caption: bytes | None = b"a caption",
        kind: str = ".txt",
    ) -> Path:
        """Write a file, by default an undamaged clip, and its caption."""
        encoded = name if isinstance(name, bytes) else name.encode()
        path = Path(os.fsdecode(os.fsencode(self.folder) + b"/" + encoded))
        path.write_bytes(self.clip if data is None else data)
        if caption is not None:
            path.with_suffix(kind).write_bytes(caption)
        self.paths.append(path)
        return path


def _names(shell: str) -> list[str]:
    """Names of files that a shell, a terminal, a template, HTML, SQL or FFmpeg could take for something else."""
    target = shell.replace("/", "%2f")  # a name cannot contain "/"
    names = [
        "$(touch canary)",
        "`touch canary`",
        "; touch canary;",
        "| touch canary",
        "&& touch canary",
        "-rf",
        "--help",
    ]
    names += [
        "a\nb",
        "a\rb",
        "a\x1b[2Jb",
        "a\x07b",
        "a\u202egpj",
        "%n%s%d",
        "{{7*7}}",
        "{0.__class__}",
        "<img src=x>",
    ]
    names += [
        "' or 1=1 --",
        '"quoted"',
        "back\\slash",
        " ",
        "con",
        "a#0001",
        "a@1.000-2.000",
        "a~deadbeef",
    ]
    names += [
        "x" * 240,
        "\u0301\u0327" * 50,
        "🚲" * 50,
        f"$({target})"[:200],
        "file:a",
        "concat:a|b",
        "http:a",
        "pipe:0",
        "@a",
    ]
    return names


def _add_captions(media: _Media, box: Sandbox) -> None:
    for caption in (
        box.shell,
        f"$({box.shell})",
        "{{ ''.__class__.__mro__ }}",
        f"=cmd|'/C {box.shell}'!A1",
        "%s%s%n",
        "<script>alert(1)</script>",
    ):
        media.add(f"caption {len(media.paths)}.mp4", caption=caption.encode())
    media.add("utf16.mp4", caption="eine Straße".encode("utf-16"))
    media.add("nul.mp4", caption=b"a\0b")
    media.add("control.mp4", caption=b"a \x1b[2J b")
    media.add("bomb.mp4", caption=b"&lt;" * 200_000)
    media.add("accents.mp4", caption="\u0300\u0323".encode() * 250_000)
    media.add("mojibake.mp4", caption="Ã©".encode() * 250_000)
    media.add("deep.mp4", caption=b"[" * 300_000, kind=".json")
    media.add("yaml.mp4", caption=f"!!python/object/apply:os.system ['{box.shell}']".encode(), kind=".json")
    media.add("pickled.mp4", caption=box.pickled)
    media.add("pickled 2.mp4", caption=box.pickled, kind=".json")
    for number, row in enumerate(hostile_rows(box)):
        media.add(f"row {number}.mp4", caption=json.dumps({"caption": "a row", **row}).encode(), kind=".json")


def _add_links(media: _Media, box: Sandbox) -> None:
    """Add captions and clips that are no files, or never end."""
    os.mkfifo(media.add("pipe.mp4", caption=None).with_suffix(".txt"))
    os.mkfifo(media.add("pipe 2.mp4", caption=None).with_suffix(".json"))
    for number, link in enumerate(("/dev/zero", "/dev/stdin", "/proc/self/mem", "nowhere", str(box.outside))):
        media.add(f"link {number}.mp4", caption=None).with_suffix(".txt").symlink_to(link)
    for number, link in enumerate(
        ("/dev/zero", "/proc/self/environ", str(box.root / "pipe.mp4"), "nowhere", "loop 5.mp4", "loop 4.mp4")
    ):
        path = media.folder / f"loop {number}.mp4"
        path.symlink_to(link)
        path.with_suffix(".txt").write_text("a link")
        media.paths.append(path)
    (media.folder / "everything").symlink_to(media.folder)
    (media.folder / "folder.mp4").mkdir()


def _add_formats(media: _Media, box: Sandbox) -> None:
    """Add other formats under the name of a video."""
    playlist = (
        f"#EXTM3U\n#\1\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{box.url}/a.ts\n{box.clip}\n#EXT-X-ENDLIST\n"
    )
    media.add("playlist.mp4", playlist.encode())
    media.add("playlist.ts", playlist.encode())
    media.add("concat.mp4", f"ffconcat version 1.0\n#\1\nfile '{box.clip}'\n".encode())
    media.add("dash.mp4", f"<?xml version='1.0'?><!--\1--><MPD><BaseURL>{box.url}/</BaseURL></MPD>".encode())
    media.add(
        "sdp.mp4", f"v=0\n#\1\nc=IN IP4 127.0.0.1\nm=video {box.url.rpartition(':')[2]} RTP/AVP 96\n".encode()
    )
    media.add(
        "svg.png", f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{box.url}/a.png'/>\1</svg>".encode()
    )
    media.add("pickle.mp4", box.pickled)
    media.add("html.mp4", b"<!DOCTYPE html><html>404</html>")
    media.add("pointer.mp4", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    media.add("zip.mp4", b"PK\3\4" + bytes(99))


def _add_images(media: _Media) -> None:
    """Add images, also with a name that FFmpeg could take for the pattern of a sequence."""
    media.add("frame0.png", png(64, 48))
    media.add("frame%d.png", b"\x89PNG nothing")
    for side in (1, 15, 16, 16_000, 16_384, 60_000):
        media.add(f"square {side}.png", png(side, side))
    media.add("thin.png", png(65_000, 16))
    media.add(
        "lie.png", png(64, 48).replace(struct.pack(">II", 64, 48), struct.pack(">II", 2**31 - 1, 2**31 - 1))
    )


def _add_masks(media: _Media, box: Sandbox) -> None:
    masks = {
        "size": png(480, 48),
        "damaged": png(64, 48)[:50],
        "empty": b"",
        "black": png(64, 48),
        "huge": png(16_000, 12_000),
    }
    for name, data in masks.items():
        media.add(f"mask {name}.mp4").with_suffix(".mask.png").write_bytes(data)
    for number, data in enumerate(
        (mutate(media.clip, 1), mutate(media.clip, 3), media.clip[:500], bytes(999), box.pickled)
    ):
        media.add(f"mask {number}.mp4").with_suffix(".mask.mp4").write_bytes(data)
    for number, link in enumerate(("/dev/zero", str(box.root / "pipe.mp4"), "/proc/self/mem")):
        media.add(f"linked mask {number}.mp4").with_suffix(".mask.png").symlink_to(link)


def write_hostile_media(box: Sandbox, folder: Path) -> list[Path]:
    """Write files with hostile names, contents, links, masks and captions."""
    media = _Media(folder, box.clip.read_bytes())
    for name in _names(box.shell):
        media.add(f"{name}.mp4")
    media.add(b"not utf-8 \xff\xfe.mp4")
    _add_captions(media, box)
    _add_links(media, box)
    _add_formats(media, box)
    _add_images(media)
    _add_masks(media, box)
    return media.paths
