"""Nasty values, random damage, huge members and control characters in listings."""

from __future__ import annotations

import json
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.support.listing_folders import clip, image, load, mp4, tar, write
from wands.data.clips.layouts import load_source
from wands.data.clips.records import Rejection
from wands.errors import DataError

__all__ = ["mp4"]  # fixtures


NASTY = [
    {"video": "x" * 5000, "caption": "long"},
    {"video": "clip.mp4", "caption": "x", "start": 10**400},
    {"video": "clip.mp4", "caption": "x", "start_frame": float("inf"), "end_frame": 1},
    {"video": "clip.mp4", "caption": {"a": 1}},
    {"video": ["clip.mp4"], "caption": "x"},
    {"video": "clip.mp4", "caption": ["x", None]},
    {"video": "clip.mp4/x", "caption": "x"},
    {"video": "~/clip.mp4", "caption": "x"},
]


def test_nasty_values_are_rejected(tmp_path: Path) -> None:
    clip(tmp_path / "clip.mp4", 40)
    write(tmp_path / "metadata.jsonl", "\n".join(map(json.dumps, NASTY)) + "\n" + "[" * 100_000)
    rows, rejected = load(tmp_path)
    assert rows == {}
    assert len(rejected) == len(NASTY) + 1
    (tmp_path / "metadata.jsonl").unlink()
    write(tmp_path / "clip.json", "[" * 100_000)
    assert "cannot be read" in load(tmp_path)[1]["clip"]
    write(tmp_path / "meta.json", "[" * 100_000)
    with pytest.raises(DataError, match="cannot be read"):
        load_source(str(tmp_path))


LISTINGS = {
    "metadata.csv": "video,prompt,start,end\nclip.mp4,a cat,0,1\nimage.png,a tree,,\n",
    "metadata.jsonl": '{"video_path": "clip.mp4", "caption": "a"}\n{"image_path": "image.png", "caption": "b"}\n',
    "metadata.json": '[{"file_path": "clip.mp4", "text": "a cat", "type": "video", "start": 0.5}]',
    "meta.json": '[{"file_name": "clip.mp4", "start_frame": 0, "end_frame": 5, "vila_caption": "a"}]',
    "videos2caption.json": '[{"path": "clip.mp4", "cap": ["a", "b"], "fps": 8.0}]',
    "captions.json": '{"clip.mp4": ["a", "b"], "image.png": ["c"]}',
    "videos.txt": "clip.mp4\nimage.png\n",
    "merge.txt": ".,table.json\n",
}


@pytest.mark.parametrize("name", LISTINGS)
def test_random_damage_to_a_listing_never_crashes(tmp_path: Path, name: str) -> None:
    clip(tmp_path / "clip.mp4", 40)
    image(tmp_path / "image.png", 80)
    write(tmp_path / "prompts.txt", "a cat\na tree\n")
    write(tmp_path / "table.json", [{"path": "clip.mp4", "cap": ["a"]}])
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(150):
        data = bytearray(LISTINGS[name].encode())
        for place in rng.integers(len(data), size=int(rng.integers(1, 6))):
            data[place] = rng.choice([rng.integers(256), *b'\0"{}[],:\n\\/.'])
        (tmp_path / name).write_bytes(data)
        try:
            rows, rejections = load_source(str(tmp_path / name))
            outcomes.add("read")
            assert len(rows) + len(rejections) > 0
        except DataError as error:
            outcomes.add("refused" if "; " in str(error) else str(error))
    assert "read" in outcomes
    assert outcomes <= {"read", "refused"}


# ---------------------------------------------------------------- sizes and names of an attacker


def peak_of(source: Path, cache: Path) -> tuple[int, list[Rejection]]:
    """Largest number of bytes that a scan allocates at once, and its rejections."""
    tracemalloc.start()
    try:
        _, rejections = load_source(str(source), cache_dir=cache)
        return tracemalloc.get_traced_memory()[1], rejections
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_member_of_2_gib_is_not_read_into_memory(tmp_path: Path, kind: bytes) -> None:
    header = tarfile.TarInfo("a.txt")
    header.size = 2 << 30
    header.type = kind
    with (tmp_path / "a.tar").open("wb") as file:  # the content is a hole in the file
        file.write(tarfile.TarInfo("a.mp4").tobuf() + header.tobuf())
        file.truncate(file.tell() + header.size + 1024)
    peak, rejections = peak_of(tmp_path / "a.tar", tmp_path / "cache")
    assert peak < 8 << 20
    assert any("2,147,483,648 bytes" in rejection.reason for rejection in rejections)


def test_a_caption_file_of_another_kind_is_not_read_into_memory(tmp_path: Path) -> None:
    clip(tmp_path / "data" / "a.mp4", 40)
    with (tmp_path / "data" / "a.txt").open("wb") as file:
        file.truncate(1 << 30)
    peak, rejections = peak_of(tmp_path / "data", tmp_path / "cache")
    assert peak < 8 << 20
    assert "a.txt has more than 1,048,576 bytes" in rejections[0].reason


@pytest.mark.parametrize("packed", [False, True])
def test_a_name_with_control_characters_is_refused(tmp_path: Path, mp4: list[bytes], packed: bool) -> None:
    name = "a\x1b[2J\x1b]0;owned\x07"
    if packed:
        tar(tmp_path / "data" / "a.tar", [(f"{name}.mp4", mp4[0]), (f"{name}.txt", b"A cat.")])
    else:
        clip(tmp_path / "data" / f"{name}.mp4", 40)
        write(tmp_path / "data" / f"{name}.txt", "A cat.")
    rows, rejections = load_source(str(tmp_path / "data"), cache_dir=tmp_path / "cache")
    assert rows == []
    assert all("control characters" in rejection.reason for rejection in rejections)
    assert rejections
    assert not any("\x1b" in rejection.key + rejection.path + rejection.reason for rejection in rejections)
