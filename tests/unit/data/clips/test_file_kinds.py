"""Files that are not what their names promise: each gets the reason that its user can act on."""

import os
import shutil
from pathlib import Path

import pytest

from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.video import decode_clip
from wands.errors import DataError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
SPECIAL = {
    "pipe.mp4": (os.mkfifo, "is a named pipe, not a file"),
    "zero.mp4": (lambda path: path.symlink_to("/dev/zero"), "is a device or a socket, not a file"),
    "self.mp4": (lambda path: path.symlink_to(path.name), "is a link to itself or to a missing file"),
    "gone.mp4": (lambda path: path.symlink_to("nowhere.mp4"), "is a link to itself or to a missing file"),
    "dir.mp4": (Path.mkdir, "is a folder, not a file"),
}


@pytest.mark.parametrize("listed", [False, True])
def test_a_path_that_is_no_file_says_what_it_is(tmp_path: Path, listed: bool) -> None:
    (tmp_path / "good.mp4").write_text("x")
    (tmp_path / "good.txt").write_text("good")
    for name, (make, _) in SPECIAL.items():
        make(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text("a caption")
    table = tmp_path / "table.csv"
    table.write_text("video,caption\ngood.mp4,good\n" + "".join(f"{name},x\n" for name in SPECIAL))
    records, rejections = load_source(str(table if listed else tmp_path))
    assert [record.key for record in records] == ["good"]
    assert len(rejections) == len(SPECIAL)
    for name, (_, reason) in SPECIAL.items():
        assert any(f"{name} {reason}; " in item.reason for item in rejections), (name, rejections)


@pytest.mark.parametrize("name", ["pipe.mp4", "self.mp4"])
def test_a_source_that_is_no_file_says_what_it_is(tmp_path: Path, name: str) -> None:
    make, reason = SPECIAL[name]
    make(tmp_path / name)
    with pytest.raises(DataError, match=f"SOURCE=.*{name} {reason}"):
        load_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"is empty \(0 bytes\); copy or download"),
        (b"\n <!DOCTYPE html>\n<title>404</title>", "is an HTML page, such as the error page"),
        ("<HTML lang='de'>".encode("utf-8-sig"), "is an HTML page"),
        (POINTER.encode(), "is a Git LFS pointer, not the file itself; run git lfs pull"),
        (("ä" * 5000).encode(), "is a text file, despite its name"),
        (b"x" + ("ä" * 5000).encode(), "is a text file"),  # the first 1,024 bytes end inside a character
        (b"\xff\xfe\xfd" * 99, "(cannot be read as a video|has no frame)"),
        (b"text with \x01", "(cannot be read as a video|has no frame)"),
    ],
)
@pytest.mark.parametrize("name", ["a.mp4", "a.png", "a.ts"])
def test_a_content_that_is_no_video_says_what_it_is(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"video=.*{name} {reason}"):
        list(decode_clip(tmp_path / name, ClipSpec(fps=16)))


def test_an_unreadable_file_is_one_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "a.mp4"
    path.write_text("x")
    monkeypatch.setattr("av.open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot be read as a video \(Permission denied\)"):
        list(decode_clip(path, ClipSpec(fps=16)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "ein Mädchen läuft\r\n"),
        ("a.json", '{"caption": "ein Mädchen läuft"}'),
        ("t.csv", "video,caption\r\na.mp4,ein Mädchen läuft\r\n"),
        ("t.json", '[{"video": "a.mp4", "caption": "ein Mädchen läuft"}]'),
        ("t.jsonl", '{"video": "a.mp4", "caption": "ein Mädchen läuft"}\r\n'),
    ],
)
def test_captions_of_every_unicode_encoding(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    (tmp_path / "a.mp4").write_text("x")
    (tmp_path / name).write_bytes(text.encode(encoding))
    records, rejections = load_source(str(tmp_path / name if name[0] == "t" else tmp_path))
    assert [(record.key, record.caption) for record in records] == [("a", "ein Mädchen läuft")]
    assert rejections == []


@pytest.mark.parametrize("name", ["a.txt", "a.json", "t.csv", "t.json"])
def test_a_pointer_is_never_a_caption(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.mp4").write_text("x")
    (tmp_path / name).write_text(POINTER)
    if name[0] == "t":
        with pytest.raises(DataError, match=f"{name} is a Git LFS pointer"):
            load_source(str(tmp_path / name))
    else:
        records, (rejection,) = load_source(str(tmp_path))
        assert records == []
        assert rejection.reason.startswith(f"{name} is a Git LFS pointer")


def test_nested_json_is_one_reason(tmp_path: Path) -> None:
    deep = '{"caption":' + "[" * 100_000
    (tmp_path / "a.mp4").write_text("x")
    (tmp_path / "a.json").write_text(deep)
    shutil.copy(tmp_path / "a.json", tmp_path / "t.jsonl")
    (_, (rejection,)) = load_source(str(tmp_path))
    (_, (line,)) = load_source(str(tmp_path / "t.jsonl"))
    assert (
        rejection.reason
        == "the caption file cannot be read (a.json): brackets are nested too deeply; remove the nested values"
    )
    assert line.reason == "unreadable line (brackets are nested too deeply); write a JSON object on the line"
