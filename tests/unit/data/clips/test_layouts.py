"""Scanning a source. Nothing is decoded there, so clips are files of a few bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.clip_folders import keys, lay
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord
from wands.preprocess.clip_rules import count_problems
from wands.preprocess.scan import select_part

# ---------------------------------------------------------------- folders


def test_folder_with_captions_beside_the_clips(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "b.mp4": "x",
            "b.txt": "\ufeff A dog.\n",
            "a/deep/c.MOV": "x",
            "a/deep/c.json": '{"cap": ["A cat."]}',
            "日本/été.webm": "x",
            "日本/été.txt": "桜",
            "both.mkv": "x",
            "both.txt": "from txt",
            "both.json": '{"caption": "from json"}',
            "readme.txt": "no clip belongs to me",
            ".hidden.mp4": "x",
            ".trash/d.mp4": "x",
        },
    )
    rows, rejections = load_source(str(tmp_path))
    assert rejections == []
    assert rows == [
        ClipRecord("a/deep/c", tmp_path / "a/deep/c.MOV", "A cat."),
        ClipRecord("b", tmp_path / "b.mp4", "A dog."),
        ClipRecord("both", tmp_path / "both.mkv", "from txt"),
        ClipRecord("日本/été", tmp_path / "日本/été.webm", "桜"),
    ]


def test_kinds_that_are_not_read_are_told(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "a.mp4": "x",
            "a.txt": "one",
            "a.avif": "its cover",
            "d/dvd.VOB": "x",
            "d/dvd.txt": "two",
            "d/bare.heic": "x",
            "d/new.codec": "x",
            "d/new.json": '{"caption": "three"}',
            "d/weights.bin": "x",
            "d/weights.json": '{"layers": 3}',
            "d/noending": "x",
            "d/noending.txt": "four",
            "d/LICENSE": "x",
            "d/LICENSE.txt": "x",
            "d/LICENSE-MIT.txt": "x",
            "d/alone.txt": "no caption has a clip here",
        },
    )
    rows, rejections = load_source(str(tmp_path))
    assert keys(rows) == ["a"]
    assert {r.key: r.reason for r in rejections} == {
        "a.avif": ".avif files are not read, so convert the file to .png",
        "d/bare": ".heic files are not read, so convert the file to .png",
        "d/dvd": ".vob files are not read, so convert the file to .mp4; dvd.txt is its caption",
        "d/new": ".codec files are not read, so convert the file to .mp4 or .png; new.json is its caption",
        "d/noending": "a file without an extension is not read, so convert the file to .mp4 or .png; "
        "noending.txt is its caption",
    }
    (tmp_path / "a.mp4").unlink()
    assert load_source(str(tmp_path))[0] == []  # and no word that the folder were empty


def test_captions_without_a_clip_are_told(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "a.mp4": "x",
            "a.txt": "one",
            "a.tags.txt": "more of a",
            "a.mp4.txt": "more of a",
            "b.txt": "lost its clip",
            "c.json": '{"caption": "lost its clip"}',
            "test_1.txt": "lost its clip",
            "README.txt": "x",
            "Readme_en.txt": "x",
            "test.txt": "x",
            "prompts.txt": "x",
            "license.txt": "x",
            "config.json": '{"prompt": "x"}',
            "other.json": '{"fps": 8}',
            "index.jsonl": '{"caption": "x"}',
            "texts/b.txt": "no clips here",
        },
    )
    rows, rejections = load_source(str(tmp_path))
    assert keys(rows) == ["a"]
    assert {r.key: r.reason for r in rejections} == {
        name: f"no clip of the same name is next to the caption; add {Path(name).stem}.mp4, or remove the caption file"
        for name in ("b.txt", "c.json", "test_1.txt")
    }


def test_captions_in_capital_letters(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "UP.MP4": "x",
            "UP.TXT": "one",
            "UP.JPG": "its poster",
            "b.mp4": "x",
            "b.Json": '{"caption": "two"}',
            "c.mp4": "x",
            "c.TXT": "not this",
            "c.json": '{"caption": "three"}',
        },
    )
    rows, rejections = load_source(str(tmp_path))
    assert [(row.path.name, row.caption) for row in rows] == [
        ("UP.MP4", "one"),
        ("b.mp4", "two"),
        ("c.mp4", "three"),
    ]
    assert [r.reason for r in rejections] == [
        "image UP.JPG may be a preview of the video UP.MP4 of the same name, so the image is not used; "
        "rename the image if it is a separate clip"
    ]


@pytest.mark.parametrize("column", ["caption", "prompt", "text", "cap"])
def test_json_caption_names(tmp_path: Path, column: str) -> None:
    lay(tmp_path, {"a.mp4": "x", "a.json": json.dumps({column: "yes", "fps": 3})})
    assert load_source(str(tmp_path))[0][0].caption == "yes"


def test_every_unusable_clip_says_why(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "none.mp4": "x",
            "empty.mp4": "x",
            "empty.txt": " \n\t",
            "latin.mp4": "x",
            "latin.txt": "caf\xe9".encode("latin-1"),
            "bad.mp4": "x",
            "bad.json": "{",
            "list.mp4": "x",
            "list.json": "[]",
            "nokey.mp4": "x",
            "nokey.json": '{"title": "x"}',
            "number.mp4": "x",
            "number.json": '{"caption": 7}',
            "half.mp4": "x",
            "half.json": '{"caption": "\\ud800"}',
            "good.mp4": "x",
            "good.txt": "good",
        },
    )
    (tmp_path / "broken.mp4").symlink_to(tmp_path / "gone.mp4")
    rows, rejections = load_source(str(tmp_path))
    assert keys(rows) == ["good"]
    found = {rejection.key: rejection.reason for rejection in rejections}
    assert len(found) == len(rejections) == 9
    for key, part in {
        "none": "missing caption; write a caption in none.txt or none.json",
        "empty": "empty caption; write a caption in empty.txt",
        "latin": "cannot be read (latin.txt)",
        "bad": "cannot be read (bad.json)",
        "list": "list.json contains a list, not a JSON object; write an object",
        "nokey": "missing caption; write a caption in nokey.json",
        "number": "caption has the type int, but it must be text",
        "half": "caption is not valid Unicode",
        "broken": "is a link to itself or to a missing file",
    }.items():
        assert part in found[key]
        assert "; " in found[key]
    assert [rejection.key for rejection in rejections] == sorted(found)


def test_names_that_are_not_utf8_are_rejected_printably(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9"
    for ending in (b".mp4", b".txt"):
        with open(raw + ending, "w") as file:
            file.write("x")
    rows, rejections = load_source(str(tmp_path))
    assert rows == []
    assert "not valid UTF-8 or contains control characters; rename the file" in rejections[0].reason
    assert (rejections[0].key + rejections[0].path).encode("utf-8")


def test_links_are_followed_but_never_round(tmp_path: Path) -> None:
    lay(tmp_path / "src", {"a/clip.mp4": "x", "a/clip.txt": "one"})
    lay(tmp_path / "elsewhere", {"far.mp4": "x", "far.txt": "two"})
    (tmp_path / "src/a/loop").symlink_to(tmp_path / "src")
    (tmp_path / "src/z").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "src/a")
    rows, rejections = load_source(str(tmp_path / "src"))
    assert keys(rows) == ["a/clip", "z/far"]
    assert rejections == []


def test_keys_are_unique_and_leave_hash_to_the_decoder(tmp_path: Path) -> None:
    names = ["a.mp4", "a.mov", "a.mp4.avi", "d/a.mp4", "take#1.mp4", "take%231.mov"]
    lay(tmp_path, {name: "x" for name in names} | {f"{name.rsplit('.', 1)[0]}.txt": "t" for name in names})
    rows, rejections = load_source(str(tmp_path))
    assert keys(rows) == ["a.mov", "a.mp4", "a.mp4.avi", "d/a", "take%231.mov", "take%231.mp4"]
    assert rejections == []
    assert load_source(str(tmp_path)) == (rows, rejections)
    lay(tmp_path, {"take#1.mov": "x"})  # would get the key of take%231.mov
    rows, rejections = load_source(str(tmp_path))
    assert len(set(keys(rows))) == len(rows) == 5
    assert [rejection.reason for rejection in rejections] == [
        "another clip has the same name after # is replaced by %23; rename one of the two clips"
    ] * 2


# ---------------------------------------------------------------- the name of a source


def spellings_of(source: Path, link: Path) -> list[str]:
    """Absolute, relative, with "..", and through a link to the folder above."""
    relative = os.path.relpath(source)
    return [str(source), relative, os.path.join(relative, "..", source.name), str(link / source.name)]


@pytest.mark.parametrize("layout", ["fastvideo", "merge", "table", "sidecars"])
def test_keys_do_not_depend_on_how_the_source_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    folder = tmp_path / "real" / "set"
    lay(folder, {"videos/a.mp4": "a", "videos/b.mp4": "b", "videos/a.txt": "x", "videos/b.txt": "y"})
    (tmp_path / "link").symlink_to("real")
    rows = [{"path": "a.mp4", "cap": ["x"]}, {"path": "b.mp4", "cap": ["y"]}]
    tables = {"fastvideo": ["videos2caption.json"], "merge": ["merge.txt"], "table": ["metadata.csv"]}.get(
        layout, []
    )
    if layout in ("fastvideo", "merge"):
        lay(folder, {"videos2caption.json": json.dumps(rows)})
        tables = ["videos2caption.json", *tables]
    if layout == "merge":
        lay(folder, {"merge.txt": "videos,videos2caption.json\n"})
    if layout == "table":  # one path is relative, one is absolute and goes through the link
        lay(folder, {"metadata.csv": f"video,caption\nvideos/a.mp4,x\n{tmp_path}/link/set/videos/b.mp4,y\n"})
    (tmp_path / "elsewhere").mkdir()
    for place in (tmp_path, folder, tmp_path / "elsewhere"):
        monkeypatch.chdir(place)
        for name in spellings_of(folder, tmp_path / "link"):
            for source in (name, *(f"{name}/{table}" for table in tables)):
                records, rejections = load_source(source)
                assert keys(records) == ["videos/a", "videos/b"], source
                assert rejections == []
        for table in tables:
            assert keys(load_source(str(tmp_path / "link" / "set" / table))[0]) == ["videos/a", "videos/b"]


def test_parts_do_not_depend_on_how_the_source_is_named(tmp_path: Path) -> None:
    lay(tmp_path / "real", {f"{n}.mp4": "x" for n in range(9)} | {f"{n}.txt": "x" for n in range(9)})
    (tmp_path / "link").symlink_to("real")
    parts = []
    for source in (tmp_path / "real", tmp_path / "link", tmp_path / "link" / ".." / "real"):
        parts.append(keys(select_part(load_source(str(source))[0], str(source), (1, 3))))
    assert parts[0] == parts[1] == parts[2]
    assert 0 < len(parts[0]) < 9


def test_hidden_clips_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lay(
        tmp_path,
        {"a.mp4": "x", "a.txt": "x", "._a.mp4": "x", "b/._b.tar": "x", "._a.txt": "x", ".DS_Store": "x"},
    )
    assert keys(load_source(str(tmp_path))[0]) == ["a"]
    assert f"{tmp_path}: skipped 2 clips or archives whose names begin with a dot" in caplog.text


def test_a_rejection_is_short(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"video,caption\n{'x' * 100_000},y\n")
    _, (rejection,) = load_source(str(tmp_path / "t.csv"))
    assert max(map(len, (rejection.key, rejection.path, rejection.reason))) <= 4096


def test_reasons_are_counted_without_the_names_of_the_clips(tmp_path: Path) -> None:
    """A name before the first parenthesis would make a kind of each clip. A URL can contain a password or a signature."""
    bad = ("https://me:pw@host/{}.mp4?sign=abc", "{}\u0000.mp4", "gone/{}.mp4", "{}" * 300 + ".mp4")
    table = [
        json.dumps({"video": name.replace("{}", letter), "caption": "x"}) for name in bad for letter in "ab"
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(table))
    _, rejections = load_source(str(tmp_path))
    kinds = dict(count_problems((r.path, r.reason) for r in rejections))
    assert kinds == {"no such file": 4, "path is a URL, not a file": 2, "path cannot be read": 2}
    assert not [r.reason for r in rejections if "sign=" in r.reason or "pw@" in r.reason]

    listed = tmp_path / "listed"
    lay(listed, {f"{name}.mp4": b"" for name in "abc"} | {"captions.json": b'{"c.mp4": ["x"]}'})
    _, rejections = load_source(str(listed))
    assert count_problems((r.path, r.reason) for r in rejections) == [
        ("captions.json has no entry for this clip", 2)
    ]

    masked = lay(tmp_path / "masked", {"a.mp4": "", "b.mp4": ""})
    masks = {"a": "https://me:pw@host/a.png?sign=abc", "b": "gone/b.png"}
    table = [json.dumps({"video": f"{key}.mp4", "caption": "x", "mask": mask}) for key, mask in masks.items()]
    (masked / "metadata.jsonl").write_text("\n".join(table))
    _, rejections = load_source(str(masked))
    kinds = dict(count_problems((r.path, r.reason) for r in rejections))
    assert kinds == {"for the mask, path is a URL, not a file": 1, "for the mask, no such file": 1}
    assert not [r.reason for r in rejections if "sign=" in r.reason or "pw@" in r.reason]
