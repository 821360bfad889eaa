"""Hostile tar archives."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.corpus import mutate
from tests.support.hostile_box import Sandbox
from tests.support.hostile_media import png
from tests.support.hostile_values import hostile_rows

Member = tuple[str, bytes, dict[str, Any]]
"""Name, content and attributes of a member of an archive."""


def _tar(members: Sequence[Member], mode: str = "w", has_end: bool = True) -> bytes:
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


def _content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def _members_outside(box: Sandbox) -> list[Member]:
    """Members whose names lead out of the folder."""
    clip = box.clip.read_bytes()
    outside = f"{box.outside}/stolen.mp4"
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
    return [(name, clip, {}) for name in names] + [("stolen.txt", b"a", {})]


def _linked_members(box: Sandbox) -> list[Member]:
    """Members that are links, pipes and devices."""
    clip = box.clip.read_bytes()
    link = {"type": tarfile.SYMTYPE, "linkname": str(box.clip)}
    device = {"type": tarfile.CHRTYPE}
    linked: list[Member] = [
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
    return linked


def _members_with_texts(box: Sandbox) -> list[Member]:
    """Members with a hostile text or row next to each."""
    clip = box.clip.read_bytes()
    said: list[Member] = []
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
    return said


def _write_bomb(path: Path, pair: Sequence[Member]) -> None:
    """A member of 8 GiB of zeros in a compressed archive. The file ends after 512 MiB of them."""
    header = tarfile.TarInfo("bomb.mp4")
    header.size = 8 << 30
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packer.compress(_tar([*pair, ("bomb.txt", b"zeros", {})], has_end=False) + header.tobuf()))
        for _ in range(32):
            file.write(packer.compress(bytes(1 << 24)))
        file.write(packer.flush())


def _write_sparse(path: Path, pair: Sequence[Member]) -> None:
    """A member of 4 GiB that is one hole, in the sparse format of GNU tar."""
    header = bytearray(tarfile.TarInfo("hole.mp4").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"00000000000\0" * 2
    header[483:495] = b"0" + oct(1 << 32)[2:].encode().zfill(10) + b"\0"
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    path.write_bytes(_tar([*pair, ("hole.txt", b"zeros", {})], has_end=False) + header + bytes(1024))


def archives(box: Sandbox) -> dict[str, Callable[[Path], object]]:
    """Return the writers of the hostile archives by file name."""
    clip = box.clip.read_bytes()
    pair: list[Member] = [("good.mp4", clip, {}), ("good.txt", b"a good clip", {})]
    link = {"type": tarfile.SYMTYPE, "linkname": str(box.clip)}
    flipped = {f"flipped {seed}.tar": _content(mutate(_tar(pair * 3), seed)) for seed in range(5)}
    flipped |= {f"flipped {seed}.tgz": _content(mutate(_tar(pair, "w:gz"), seed)) for seed in range(5)}
    return {
        "names.tar": _content(_tar(pair + _members_outside(box))),
        "links.tar": _content(_tar(pair + _linked_members(box))),
        "rows.tar": _content(_tar(_members_with_texts(box))),
        "masks.tar": _content(
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
        "twins.tar": _content(_tar(pair * 99)),
        "bomb.tgz": lambda path: _write_bomb(path, pair),
        "sparse.tar": lambda path: _write_sparse(path, pair),
        "pickled.tar": _content(box.pickled),
        "zip.tar": _content(b"PK\3\4" + bytes(999)),
        "empty.tar": _content(b""),
        "zeros.tar": _content(bytes(10240)),
        "text.tgz": _content(b"404"),
        "latents.tar": _content(_tar([("a.pth", box.pickled, {}), ("a.json", b"{}", {})])),
        **flipped,
    }
