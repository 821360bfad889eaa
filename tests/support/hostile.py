"""Damaged and hostile media files, tables, archives and configurations, and a sandbox that notices what a command does to it.

Every payload tries to create a file called canary, or to reach `Sandbox.port`. The content is drawn from seeds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import socket
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from PIL import Image

from tests.support.clip_files import numbered, write_clip
from tests.support.corpus import mutate
from wands.cli import main
from wands.texts import printable


@dataclass
class Sandbox:
    """Folders in which commands run: `data` with hostile files, `out` for what commands write, `outside` with private files.

    Attributes:
        root: the current folder of the commands. Nothing in it changes, except `out`.
        limit: longest time of a command in seconds.
    """

    root: Path
    limit: float = 60.0
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def __post_init__(self) -> None:
        for folder in (self.data, self.out, self.outside):
            folder.mkdir(parents=True)
        self.listener.setblocking(False)
        self.clip = write_clip(
            self.outside / "private.mp4", [numbered(k)[:48, :64] for k in range(24)], fps=16
        )
        (self.outside / "private.txt").write_text("a private caption")
        os.mkfifo(self.root / "pipe.mp4")

    data = property(lambda self: self.root / "data")
    out = property(lambda self: self.root / "out")
    outside = property(lambda self: self.root / "outside")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    @property
    def shell(self) -> str:
        return f"touch {self.root}/canary"

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(_Payload(self.shell))

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Return type, size, time of the last change and digest of everything in the sandbox, except in `out`."""
        found = {}
        for folder, folders, files in os.walk(self.root):
            if Path(folder) == self.root:
                folders.remove("out")
            for name in [*folders, *files]:
                path = Path(folder, name)
                status = path.lstat()
                is_small = path.is_file() and not path.is_symlink() and status.st_size < 1 << 20
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_small else ""
                found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, digest)
        return found

    def calls(self) -> int:
        """Return the number of connections to `url` since the last call."""
        count = 0
        while True:
            try:
                self.listener.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1

    def run(self, *words: object) -> tuple[Result, list[str]]:
        """Run a command. Return its result, and what it did wrong."""
        try:
            with time_limit(self.limit):
                done = CliRunner().invoke(main, [str(word) for word in words])
        except TimeoutError:
            return Result(CliRunner(), b"", b"", b"", None, 9, None), ["hangs"]
        wrong = []
        if not isinstance(done.exception, SystemExit | None):
            wrong.append(f"crashes: {done.exception!r:.500}")
        if done.exit_code == 2 and not done.stderr.rpartition("wands: ")[2].strip():
            wrong.append("gives no reason")
        if "Traceback" in done.output:
            wrong.append("prints a traceback")
        if any(line != printable(line) for line in done.output.split("\n")):
            wrong.append("prints control characters")
        if len(done.output) > 200_000:
            wrong.append(f"prints {len(done.output)} characters")
        return done, wrong


class _Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the `with` block after a time, also in a read that waits forever."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- media files


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


def write_hostile_media(box: Sandbox, folder: Path) -> list[Path]:
    """Write files with hostile names, contents, links, masks and captions."""
    shell = box.shell
    private = box.clip.read_bytes()
    paths = list[Path]()

    def add(
        name: str | bytes, data: bytes = private, caption: bytes | None = b"a caption", kind: str = ".txt"
    ) -> Path:
        path = Path(
            os.fsdecode(os.fsencode(folder) + b"/" + (name if isinstance(name, bytes) else name.encode()))
        )
        path.write_bytes(data)
        if caption is not None:
            path.with_suffix(kind).write_bytes(caption)
        paths.append(path)
        return path

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
    for name in names:
        add(f"{name}.mp4")
    add(b"not utf-8 \xff\xfe.mp4")
    for caption in (
        shell,
        f"$({shell})",
        "{{ ''.__class__.__mro__ }}",
        f"=cmd|'/C {shell}'!A1",
        "%s%s%n",
        "<script>alert(1)</script>",
    ):
        add(f"caption {len(paths)}.mp4", caption=caption.encode())
    add("utf16.mp4", caption="eine Straße".encode("utf-16"))
    add("nul.mp4", caption=b"a\0b")
    add("control.mp4", caption=b"a \x1b[2J b")
    add("bomb.mp4", caption=b"&lt;" * 200_000)
    add("accents.mp4", caption="\u0300\u0323".encode() * 250_000)
    add("mojibake.mp4", caption="Ã©".encode() * 250_000)
    add("deep.mp4", caption=b"[" * 300_000, kind=".json")
    add("yaml.mp4", caption=f"!!python/object/apply:os.system ['{shell}']".encode(), kind=".json")
    add("pickled.mp4", caption=box.pickled)
    add("pickled 2.mp4", caption=box.pickled, kind=".json")
    for number, row in enumerate(hostile_rows(box)):
        add(f"row {number}.mp4", caption=json.dumps({"caption": "a row", **row}).encode(), kind=".json")
    # Captions that are no files, or never end.
    os.mkfifo(add("pipe.mp4", caption=None).with_suffix(".txt"))
    os.mkfifo(add("pipe 2.mp4", caption=None).with_suffix(".json"))
    for number, link in enumerate(("/dev/zero", "/dev/stdin", "/proc/self/mem", "nowhere", str(box.outside))):
        add(f"link {number}.mp4", caption=None).with_suffix(".txt").symlink_to(link)
    # Clips that are no files.
    for number, link in enumerate(
        ("/dev/zero", "/proc/self/environ", str(box.root / "pipe.mp4"), "nowhere", "loop 5.mp4", "loop 4.mp4")
    ):
        path = folder / f"loop {number}.mp4"
        path.symlink_to(link)
        path.with_suffix(".txt").write_text("a link")
        paths.append(path)
    (folder / "everything").symlink_to(folder)
    (folder / "folder.mp4").mkdir()
    # Other formats under the name of a video.
    playlist = (
        f"#EXTM3U\n#\1\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{box.url}/a.ts\n{box.clip}\n#EXT-X-ENDLIST\n"
    )
    add("playlist.mp4", playlist.encode())
    add("playlist.ts", playlist.encode())
    add("concat.mp4", f"ffconcat version 1.0\n#\1\nfile '{box.clip}'\n".encode())
    add("dash.mp4", f"<?xml version='1.0'?><!--\1--><MPD><BaseURL>{box.url}/</BaseURL></MPD>".encode())
    add(
        "sdp.mp4", f"v=0\n#\1\nc=IN IP4 127.0.0.1\nm=video {box.url.rpartition(':')[2]} RTP/AVP 96\n".encode()
    )
    add(
        "svg.png", f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{box.url}/a.png'/>\1</svg>".encode()
    )
    add("pickle.mp4", box.pickled)
    add("html.mp4", b"<!DOCTYPE html><html>404</html>")
    add("pointer.mp4", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    add("zip.mp4", b"PK\3\4" + bytes(99))
    # An image whose name FFmpeg could take for the pattern of a sequence.
    add("frame0.png", png(64, 48))
    add("frame%d.png", b"\x89PNG nothing")
    for side in (1, 15, 16, 16_000, 16_384, 60_000):
        add(f"square {side}.png", png(side, side))
    add("thin.png", png(65_000, 16))
    add("lie.png", png(64, 48).replace(struct.pack(">II", 64, 48), struct.pack(">II", 2**31 - 1, 2**31 - 1)))
    # Masks.
    masks = {
        "size": png(480, 48),
        "damaged": png(64, 48)[:50],
        "empty": b"",
        "black": png(64, 48),
        "huge": png(16_000, 12_000),
    }
    for name, data in masks.items():
        add(f"mask {name}.mp4").with_suffix(".mask.png").write_bytes(data)
    for number, data in enumerate(
        (mutate(private, 1), mutate(private, 3), private[:500], bytes(999), box.pickled)
    ):
        add(f"mask {number}.mp4").with_suffix(".mask.mp4").write_bytes(data)
    for number, link in enumerate(("/dev/zero", str(box.root / "pipe.mp4"), "/proc/self/mem")):
        add(f"linked mask {number}.mp4").with_suffix(".mask.png").symlink_to(link)
    return paths


# ---------------------------------------------------------------- tables, archives and configurations


def hostile_rows(box: Sandbox) -> list[dict[str, Any]]:
    """Columns of a row that has a clip and a caption."""
    crops: list[Any] = [
        "0,0,16,16px",
        "0,0,1e9,1e9",
        "-1,-1,16,16",
        "0,0,0,0",
        "0,0,1,1",
        "16,16,64,64",
        "50%,0,9,9",
        "a",
        [1],
        {},
    ]
    crops += [
        "0,0,16",
        "0,0,16,16,16",
        f"0,0,{10**40},{10**40}",
        [0, 0, 1e308, 1e308],
        [True] * 4,
        [[0]] * 4,
        "nan,0,16,16",
        "1,1,17,17",
    ]
    crops += [
        "0" * 5000,
        "0,0,64,48;movie=private.mp4",
        f"$({box.shell}),0,16,16",
        "0,0,16,inf",
        float("nan"),
        -1,
        "١,٢,16,16",
    ]
    masks: list[Any] = [
        "/dev/zero",
        "/proc/self/mem",
        str(box.root / "pipe.mp4"),
        "nowhere.png",
        str(box.outside),
        "../" * 40 + "etc/passwd",
    ]
    masks += [
        f"{box.url}/mask.png",
        "x" * 5000,
        "a\0b",
        5,
        ["good.mp4"],
        "~nouser/x.png",
        "\ud800.png",
        f"$({box.shell})",
        str(box.outside / "private.txt"),
    ]
    times: list[Any] = [
        float("nan"),
        float("inf"),
        -1,
        "1e999",
        1e308,
        "0x10",
        "1_0",
        [1],
        {},
        True,
        10**400,
        "00:00:01",
        "-0",
        "1e-320",
    ]
    rows: list[dict[str, Any]] = [{"crop": crop} for crop in crops] + [{"mask": mask} for mask in masks]
    rows += [{name: time} for name in ("start", "end") for time in times]
    rows += [
        {"start": 1.4, "end": 1.4000001},
        {"start_frame": 0, "end_frame": 10**30},
        {"start_frame": "a", "end_frame": None},
    ]
    rows += [
        {"license": "x" * 100_000},
        {"license": ["a", {}]},
        {"a\nb": 1, "\x1b[2J": 2},
        {"": "", "video": None, "crop": None},
    ]
    rows += [
        {"motion": value} for value in ("nan", "inf", 10**400, "1e999", [[]], "=1+1", None, b"x".decode())
    ]
    return rows


def _paths(box: Sandbox) -> list[Any]:
    """Values of a video column that lead to no clip, or to a clip somewhere else."""
    return [
        *(
            "/etc/passwd",
            "/dev/zero",
            "/dev/stdin",
            "/proc/self/environ",
            "/proc/self/mem",
            "/proc/self/fd/0",
            "/",
            ".",
            "..",
            "",
        ),
        *(
            str(box.clip),
            "../../outside/private.mp4",
            "../" * 60 + "etc/passwd",
            str(box.root / "pipe.mp4"),
            str(box.outside),
        ),
        *(
            "~/x.mp4",
            "~nouser/x.mp4",
            f"file://{box.clip}",
            f"{box.url}/a.mp4",
            "s3://a/b.mp4",
            "hf://datasets/a/b/c.mp4",
            "-",
            "--help",
        ),
        *(
            "concat:good.mp4|good.mp4",
            f"subfile,,start,0,end,9,,:{box.clip}",
            "pipe:0",
            "data:video/mp4;base64,AAAA",
            "x" * 300,
            "x" * 5000,
        ),
        *(
            "a\0b.mp4",
            "\ud800.mp4",
            "a\nb.mp4",
            "\x1b[2J.mp4",
            f"$({box.shell}).mp4",
            f"`{box.shell}`",
            f"|{box.shell}",
            f"; {box.shell};",
        ),
        *(
            "good.mp4/",
            "good.mp4/x",
            "./good.mp4",
            "GOOD.MP4",
            "%67ood.mp4",
            "good.mp4\u200b",
            "e\u0301" * 2000,
            "\u0300\u0323" * 300_000,
        ),
        *(5, 1e308, True, None, [], ["good.mp4"], {"path": "good.mp4"}, {"bytes": "x"}, [[]], {"a": {}}),
    ]


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    import csv

    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


def _jsonl(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


GOOD = {"video": "good.mp4", "caption": "a good clip"}


def tables(box: Sandbox) -> dict[str, bytes]:
    """Return the hostile tables and configurations: name -> content."""
    shell = box.shell
    nested = "[" * 200_000
    rows = [GOOD, *(GOOD | row for row in hostile_rows(box))]
    paths = [GOOD, *({"video": path, "caption": "a"} for path in _paths(box))]
    captions: list[Any] = [
        shell,
        f"$({shell})",
        "{{7*7}}",
        "{video.__class__}",
        f"=cmd|'/C {shell}'!A1",
        "@SUM(1)",
        "\x1b]0;x\7",
        "\0",
        "\ud800",
    ]
    captions += [
        5,
        [],
        [[]],
        {},
        {"a": 1},
        [None],
        True,
        float("nan"),
        "&lt;" * 100_000,
        "\u0300\u0323" * 300_000,
        ["a"] * 50,
        " ",
        "a\nb\r\nc",
        "<b>",
    ]
    said = [{**GOOD, "start": 0.01 * number, "caption": caption} for number, caption in enumerate(captions)]
    texts = [path for path in _paths(box) if isinstance(path, str) and len(path) < 9999]
    good = _csv([("video", "caption"), ("good.mp4", "a good clip")])
    toml = f"[[directory]]\npath = '.'\ncaption = '{shell}'\n"
    return {
        # tables
        "paths.jsonl": _jsonl(paths),
        "paths.json": json.dumps(paths).encode(),
        "paths.csv": _csv(
            [
                ("video", "caption"),
                ("good.mp4", "a"),
                *((text, "a") for text in texts if "\ud800" not in text),
            ]
        ),
        "rows.jsonl": _jsonl(rows),
        "rows.json": json.dumps({f"good.mp4{' ' * number}": row for number, row in enumerate(rows)}).encode(),
        "rows.csv": _csv(
            [
                ("video", "caption", "crop", "mask", "start"),
                *(
                    ("good.mp4", "a", row.get("crop"), row.get("mask", ""), row.get("start", ""))
                    for row in hostile_rows(box)
                    if "\ud800" not in str(row)
                ),
            ]
        ),
        "captions.jsonl": _jsonl(said),
        "captions.json": json.dumps({"good.mp4": captions}).encode(),
        "formulas.csv": _csv(
            [
                ("video", "caption", "=cmd|'/C calc'!A1"),
                ("good.mp4", f"=cmd|'/C {shell}'!A1", "+1"),
                ("@good.mp4", "-1+1", "=1"),
            ]
        ),
        "utf16.csv": good.decode().encode("utf-16"),
        "utf16be.csv": b"\xfe\xff" + good.decode().encode("utf-16-be"),
        "utf16 cut.csv": good.decode().encode("utf-16")[:-1],
        "utf32.jsonl": _jsonl([GOOD]).decode().encode("utf-32"),
        "latin1.csv": good + b"good.mp4,Stra\xdfe\n",
        "nul.csv": good + b"good.mp4,a\0b\n\0\0,\0\n" + bytes(999),
        "empty.csv": b"",
        "header.csv": b"video,caption\n",
        "quote.csv": good + b'good.mp4,"never closed\n' * 99,
        "wide.csv": ("video,caption," + ",".join(map(str, range(50_000))) + "\ngood.mp4,a\n").encode(),
        "twins.csv": b"video,video,caption,CAPTION, caption \n" + b"good.mp4,x,a,b,c\n",
        "long.csv": good + b"good.mp4," + b"x" * 2_000_000 + b"\n",
        "names.csv": b"\x1b[2Jvideo,caption\n" + b"x" * 100_000 + b",\n",
        "lines.jsonl": b"\n".join(
            [
                b"{}",
                b"[]",
                b"null",
                b"1",
                b'"x"',
                b"{",
                nested.encode(),
                b'{"a":' * 99_999,
                b"9" * 9999,
                b"\xff",
                *[_jsonl([GOOD]).strip()] * 3,
            ]
        ),
        "deep.json": nested.encode(),
        "deep objects.json": b'{"a":' * 100_000,
        "digits.json": b"[" + b"9" * 1_000_000 + b"]",
        "infinite.json": b'[{"video": "good.mp4", "caption": "a", "start": Infinity, "end": -Infinity, "crop": NaN}]',
        "null.json": b"null",
        "text.json": b'"good.mp4"',
        "html.json": b"<!DOCTYPE html><html>",
        "pointer.jsonl": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "table.tsv": b"video\tcaption\ngood.mp4\ta\n",
        "table.xlsx": b"PK\3\4" + bytes(99),
        "table.yaml": f"!!python/object/apply:os.system ['{shell}']".encode(),
        "table.pkl": box.pickled,
        "pickled.csv": box.pickled,
        "pickled.json": box.pickled,
        "merge.txt": "\n".join(
            [
                ".,paths.json",
                "/,/dev/zero",
                f"{box.outside},{box.url}/x.json",
                "a,b,c",
                "\0,\0",
                "x" * 5000 + ",x",
                "~nouser,~nouser",
            ]
        ).encode(),
        "videos.txt": ("good.mp4\n" + "\n".join(text.replace("\n", " ") for text in texts)).encode(
            "utf-8", "replace"
        ),
        # configurations of other trainers
        "keys.toml": ("a." * 30_000 + "b = 1").encode(),
        "deep.toml": b"a = " + b"[" * 30_000,
        "digits.toml": b"[[directory]]\npath = '.'\nnum_repeats = " + b"9" * 5000,
        "shell.toml": toml.encode() + f"caption_prefix = '''$({shell})'''\n".encode(),
        "folders.toml": "".join(
            f"[[directory]]\npath = {json.dumps(text)}\n"
            for text in texts
            if text.isprintable() and text not in ("/", "..")
        ).encode(),
        "sizes.toml": toml.encode()
        + b"resolutions = [[inf, nan], [1e308, -1], [[[]]]]\nframe_buckets = [-1, 1e99]\nsize_buckets = 'x'\n",
        "self.toml": b"[[datasets]]\nvideo_jsonl_file = 'self.toml'\n"
        b"[[datasets]]\nimage_directory = '.'\ncaption_extension = '../../x'\n",
        "bytes.toml": b"\xff\xfe\0\0",
        "training.json": json.dumps(
            {"datasets": [{"data_root": text} for text in texts if text not in ("/", "..", ".", "")]}
        ).encode(),
        "self.json": json.dumps({"datasets": [{"dataset_file": "self.json"}] * 99}).encode(),
        "id.json": json.dumps(
            {"datasets": [{"data_root": ".", "id_token": "\x1b[2J", "caption_options": {"a": [1e308]}}]}
        ).encode(),
    }


def _tar(
    members: Sequence[tuple[str, bytes, dict[str, Any]]], mode: str = "w", has_end: bool = True
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.GNU_FORMAT) as archive:  # type: ignore[call-overload]
        for name, data, attributes in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in attributes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data))
        end = archive.offset
    return buffer.getvalue() if has_end else buffer.getvalue()[:end]


def archives(box: Sandbox) -> dict[str, Callable[[Path], object]]:
    """Return the writers of the hostile archives by file name."""
    clip = box.clip.read_bytes()
    outside = f"{box.outside}/stolen.mp4"
    pair: list[tuple[str, bytes, dict[str, Any]]] = [("good.mp4", clip, {}), ("good.txt", b"a good clip", {})]
    link = {"type": tarfile.SYMTYPE, "linkname": str(box.clip)}
    device = {"type": tarfile.CHRTYPE}
    names = [
        outside,
        "../" * 9 + "stolen.mp4",
        "a/../../stolen.mp4",
        "./../stolen.mp4",
        f"$({box.shell}).mp4".replace("/", "_"),
        "\x1b[2J.mp4",
        "x" * 300 + ".mp4",
        "..",
        "/",
    ]
    led = [(name, clip, {}) for name in names] + [("stolen.txt", b"a", {})]
    linked = [
        ("a", b"", {**link, "linkname": str(box.outside)}),
        ("a/stolen.mp4", clip, {}),
        ("a/stolen.txt", b"x", {}),
        ("b.mp4", b"", link),
        ("b.txt", b"x", {}),
    ]
    linked += [
        ("c.mp4", b"", {**link, "type": tarfile.LNKTYPE}),
        ("c.txt", b"x", {}),
        ("d.mp4", b"", {"type": tarfile.FIFOTYPE}),
        ("e.mp4", b"", device),
        ("e.txt", b"x", {}),
    ]
    said: list[tuple[str, bytes, dict[str, Any]]] = []
    for number, row in enumerate(hostile_rows(box)):
        said += [
            (f"{number}.mp4", clip, {}),
            (f"{number}.json", json.dumps({"caption": "a", **row}).encode(), {}),
        ]
    for number, text in enumerate((b"\0", b"", box.pickled, b"[" * 200_000, b"\xff", b"x" * 1_200_000)):
        said += [
            (f"text {number}.mp4", clip, {}),
            (f"text {number}.txt", text, {}),
            (f"object {number}.mp4", clip, {}),
            (f"object {number}.json", text, {}),
        ]

    def content(data: bytes) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(data)

    def bomb(path: Path) -> None:
        """A member of 8 GiB of zeros in a compressed archive. The file ends after 512 MiB of them."""
        header = tarfile.TarInfo("bomb.mp4")
        header.size = 8 << 30
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        with path.open("wb") as file:
            file.write(
                packer.compress(_tar([*pair, ("bomb.txt", b"zeros", {})], has_end=False) + header.tobuf())
            )
            for _ in range(32):
                file.write(packer.compress(bytes(1 << 24)))
            file.write(packer.flush())

    def sparse(path: Path) -> None:
        """A member of 4 GiB that is one hole, in the sparse format of GNU tar."""
        header = bytearray(tarfile.TarInfo("hole.mp4").tobuf(tarfile.GNU_FORMAT))
        header[156:157] = tarfile.GNUTYPE_SPARSE
        header[386:410] = b"00000000000\0" * 2
        header[483:495] = b"0" + oct(1 << 32)[2:].encode().zfill(10) + b"\0"
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
        path.write_bytes(_tar([*pair, ("hole.txt", b"zeros", {})], has_end=False) + header + bytes(1024))

    flipped = {f"flipped {seed}.tar": content(mutate(_tar(pair * 3), seed)) for seed in range(5)}
    flipped |= {f"flipped {seed}.tgz": content(mutate(_tar(pair, "w:gz"), seed)) for seed in range(5)}
    return {
        "names.tar": content(_tar(pair + led)),
        "links.tar": content(_tar(pair + linked)),
        "rows.tar": content(_tar(said)),
        "masks.tar": content(
            _tar(
                [
                    *pair,
                    ("good.mask.png", b"", link),
                    ("a.mp4", clip, {}),
                    ("a.txt", b"x", {}),
                    ("a.mask.png", png(9, 99), {}),
                ]
            )
        ),
        "twins.tar": content(_tar(pair * 99)),
        "bomb.tgz": bomb,
        "sparse.tar": sparse,
        "pickled.tar": content(box.pickled),
        "zip.tar": content(b"PK\3\4" + bytes(999)),
        "empty.tar": content(b""),
        "zeros.tar": content(bytes(10240)),
        "text.tgz": content(b"404"),
        "latents.tar": content(_tar([("a.pth", box.pickled, {}), ("a.json", b"{}", {})])),
        **flipped,
    }


def datasets_of(box: Sandbox) -> dict[str, Callable[[Path], object]]:
    """Return the writers of hostile folders of Hugging Face datasets, by folder name."""
    import pyarrow
    import pyarrow.parquet

    clip = box.clip.read_bytes()
    videos = [
        {"bytes": clip, "path": path}
        for path in (
            "../../stolen.mp4",
            f"{box.outside}/stolen.mp4",
            "a\0.mp4",
            "x" * 9999,
            None,
            f"{box.url}/a.mp4",
        )
    ]
    videos += [
        {"bytes": None, "path": path}
        for path in ("/dev/zero", str(box.root / "pipe.mp4"), "/proc/self/mem", f"{box.url}/a.mp4", None)
    ]
    videos += [{"bytes": data, "path": "a.mp4"} for data in (b"", b"x", box.pickled)]
    table = pyarrow.table({"video": videos, "caption": [f"clip {number}" for number in range(len(videos))]})
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": box.pickled}

    def parquet(folder: Path, data: Any = table) -> None:
        pyarrow.parquet.write_table(data, folder / "train.parquet")

    def damaged(folder: Path, seed: int) -> None:
        parquet(folder)
        (folder / "train.parquet").write_bytes(mutate((folder / "train.parquet").read_bytes(), seed))

    def with_file(name: str, text: str) -> Callable[[Path], object]:
        return lambda folder: (parquet(folder), (folder / name).write_text(text))

    def extension(folder: Path) -> None:
        schema = pyarrow.schema([*table.schema, pyarrow.field("x", pyarrow.binary(), metadata=metadata)])
        with pyarrow.ipc.new_stream(folder / "data.arrow", schema) as file:
            file.write_table(
                pyarrow.table([*table.columns, pyarrow.array([b"x"] * len(videos))], schema=schema)
            )
        (folder / "state.json").write_text(
            json.dumps(
                {
                    "_data_files": [{"filename": "data.arrow"}],
                    "_fingerprint": "x",
                    "_format_type": None,
                    "_format_columns": None,
                    "_format_kwargs": {},
                    "_output_all_columns": False,
                    "_split": None,
                }
            )
        )
        (folder / "dataset_info.json").write_text("{}")

    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
    )
    return {
        "parquet": parquet,
        "damaged 1": lambda folder: damaged(folder, 1),
        "damaged 3": lambda folder: damaged(folder, 3),
        "pickled": lambda folder: (folder / "train.parquet").write_bytes(box.pickled),
        "script": with_file("script.py", f"import os\nos.system({box.shell!r})\n"),
        "readme": with_file(
            "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {box.url}/x.parquet\n---\n"
        ),
        "tags": with_file(
            "README.md", f"---\nconfigs: !!python/object/apply:os.system ['{box.shell}']\n---\n"
        ),
        "laughs": with_file("README.md", f"---\n{laughs}dataset_info: *a19\n---\n"),
        "elsewhere": with_file(
            "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {box.outside}/*\n---\n"
        ),
        "extension": extension,
        "state": lambda folder: (
            (folder / "state.json").write_text('{"_data_files": [{"filename": "../../outside/private.mp4"}]}')
            and (folder / "a.arrow").write_bytes(b"")
        ),
    }


def write_sources(box: Sandbox) -> dict[str, Path]:
    """Write every hostile table, archive, configuration and dataset into a folder of its own. Return SOURCE by name."""
    found: dict[str, Path] = {}

    def new_folder(name: str) -> Path:
        folder = box.data / name.replace(".", " ")
        folder.mkdir()
        shutil.copy(box.clip, folder / "good.mp4")
        (folder / "good.txt").write_text("a good clip")
        return folder

    for name, data in tables(box).items():
        folder = new_folder(name)
        (folder / "prompts.txt").write_text("a\n" * (data.count(b"\n") + 1)) if name == "videos.txt" else None
        found[name] = folder / name
        found[name].write_bytes(data)
    for name, write in archives(box).items():
        found[name] = new_folder(name) / name
        write(found[name])
    for name, write in datasets_of(box).items():
        found[f"dataset {name}"] = box.data / f"dataset {name}"
        found[f"dataset {name}"].mkdir()
        write(found[f"dataset {name}"])
    return found


CONDITIONS = (
    "__import__('os').system('touch canary')",
    "motion > __import__('os').system('touch canary')",
    "open('canary', 'w') is None",
    "9 ** 9 ** 9 > motion",
    "'a' * 10 ** 10 == caption",
    "(motion := 1) > 0",
    "[motion for motion in caption] == 1",
    "(lambda: motion)() > 1",
    "caption.__class__ == 'x'",
    "caption['x'] == 'x'",
    "f'{caption}' == 'x'",
    "(" * 400 + "motion > 1" + ")" * 400,
    "not " * 200 + "motion > 1",
    "motion > " + "9" * 900,
    "motion > 1e999",
    "motion > nan",
    "a\0b > 1",
    "\ud800 > 1",
    "caption == '\x1b[2J'",
    "caption == 'a' or " * 40 + "caption == 'b'",
    "x" * 2000,
    "",
    "#",
    "motion > 1; import os",
    "await motion",
    "*motion",
    "...",
    "caption in caption",
    "motion > -(-(-1))",
)
