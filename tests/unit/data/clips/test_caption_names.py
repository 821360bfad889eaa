"""Other programs' names of caption files, and folders of frames."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from wands.data.clips.records import ClipRecord, Rejection
from wands.data.clips.sidecars import folder_with_sidecars, numbered_frames
from wands.data.clips.source import Source


def scan(folder: Path, **options: bool) -> list[ClipRecord | Rejection]:
    return list(folder_with_sidecars(Source(str(folder), **options)) or ())


@pytest.mark.parametrize("name", ["a.caption", "a.mp4.txt", "a.mp4.caption", "a.mp4.json"])
def test_a_caption_file_of_another_program_is_read(clips_dir: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(clips_dir / "carphone_pristine.mp4", tmp_path / "a.mp4")
    (tmp_path / name).write_text('{"caption": "a man"}' if name.endswith("json") else "a man\n")
    (record,) = scan(tmp_path)
    assert isinstance(record, ClipRecord)
    assert record.caption == "a man"


def test_the_nearest_name_wins(clips_dir: Path, tmp_path: Path) -> None:
    shutil.copy(clips_dir / "carphone_pristine.mp4", tmp_path / "a.mp4")
    for name in ("a.txt", "a.caption", "a.mp4.txt"):
        (tmp_path / name).write_text(name)
    (record,) = scan(tmp_path)
    assert isinstance(record, ClipRecord)
    assert record.caption == "a.txt"


def write_frames(folder: Path, names: list[str]) -> None:
    folder.mkdir()
    for name in names:
        Image.new("RGB", (64, 64)).save(folder / name)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ([f"{i:06d}.png" for i in range(1, 25)], "-start_number 1 -i walk/%06d.png walk.mp4"),
        ([f"frame_{i}.jpg" for i in range(30)], "-start_number 0 -i walk/frame_%d.jpg walk.mp4"),
    ],
)
def test_a_folder_of_frames_is_one_line(
    tmp_path: Path, names: list[str], pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_frames(tmp_path / "walk", names)
    (tmp_path / "walk.txt").write_text("a man walks")
    (item,) = (item for item in scan(tmp_path) if isinstance(item, Rejection) and item.key != "walk.txt")
    assert f"{len(names)} numbered images without captions look like the frames of a video" in item.reason
    assert pattern in item.reason
    with caplog.at_level("WARNING"):  # single images, for example for `wands caption`
        assert len(scan(tmp_path, needs_caption=False)) >= len(names)
    assert "look like the frames of a video, but each counts as a clip" in caplog.text


@pytest.mark.parametrize("needs_caption", [True, False])
def test_frames_of_a_video_that_was_made_are_not_used(
    clips_dir: Path, tmp_path: Path, needs_caption: bool
) -> None:
    write_frames(tmp_path / "walk", [f"{i:06d}.png" for i in range(1, 25)])
    shutil.copy(clips_dir / "carphone_pristine.mp4", tmp_path / "walk.MP4")
    (tmp_path / "walk.txt").write_text("a man walks")
    record, item = scan(tmp_path, needs_caption=needs_caption)
    assert isinstance(record, ClipRecord)
    assert isinstance(item, Rejection)
    assert (
        item.reason == "24 images look like the frames of walk.MP4, which is used; move the folder elsewhere"
    )


def test_numbered_images_with_captions_are_images(tmp_path: Path) -> None:
    names = [f"{i:03d}.png" for i in range(12)]
    write_frames(tmp_path / "images", names)
    for name in names:
        (tmp_path / "images" / name).with_suffix(".txt").write_text("an image")
    assert len([item for item in scan(tmp_path) if isinstance(item, ClipRecord)]) == 12
    assert numbered_frames([*names[:5], *names[6:]]) == []  # a gap
    assert numbered_frames(names[:7]) == []
