"""Scanning a source. Nothing is decoded there, so clips are files of a few bytes."""

import errno
import json
import os
import tarfile
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from wands.data.clips.file_kinds import VIDEO_EXTENSIONS
from wands.data.clips.hf_dataset import write_clip
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord, clip_key
from wands.data.clips.rows import pick_license
from wands.errors import CacheError, DataError
from wands.preprocess.clip_rules import count_problems
from wands.preprocess.scan import select_part


def lay(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def keys(rows: list[ClipRecord]) -> list[str]:
    return [row.key for row in rows]


def reasons(source: Path, **options: Any) -> dict[str, str]:
    return {rejection.key: rejection.reason for rejection in load_source(str(source), **options)[1]}


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
        "a.avif": ".avif files are not read; convert the file to .png",
        "d/bare": ".heic files are not read; convert the file to .png",
        "d/dvd": ".vob files are not read, though dvd.txt has a caption; convert the file to .mp4",
        "d/new": ".codec files are not read, though new.json has a caption; convert the file to .mp4 or .png",
        "d/noending": "a file without an extension is not read, though noending.txt has a caption; "
        "convert the file to .mp4 or .png",
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
        "latin": "latin.txt cannot be read",
        "bad": "bad.json cannot be read",
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


# ---------------------------------------------------------------- tables

CLIPS = {"clips/a.mp4": "x", "clips/b.mp4": "x", "c.mp4": "x"}
ROWS = [
    ("clips/a.mp4", 'A "dog", running'),
    ("clips/b.mp4", "Ein Hund läuft"),
    ("c.mp4", "line one\nline two"),
]


def table_text(kind: str, video: str, caption: str, rows: list[tuple[str, str]] = ROWS) -> str:
    if kind == "csv":
        cells = [['"' + cell.replace('"', '""') + '"' for cell in row] for row in [(video, caption), *rows]]
        return "\r\n".join(",".join(row) for row in cells) + "\r\n"
    items = [{video: path, caption: text} for path, text in rows]
    return json.dumps(items) if kind == "json" else "\n".join(map(json.dumps, items)) + "\n\n"


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("video", ["video", "video_path", "file_name", "file_path", "path", "Video"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_tables_of_every_kind_and_column(tmp_path: Path, kind: str, video: str, bom: bytes) -> None:
    caption = {"csv": "caption", "jsonl": "prompt", "json": "text"}[kind]
    lay(tmp_path, CLIPS | {f"metadata.{kind}": bom + table_text(kind, video, caption).encode()})
    for source in (tmp_path, tmp_path / f"metadata.{kind}"):
        rows, rejections = load_source(str(source))
        assert rejections == []
        assert rows == [
            ClipRecord("c", tmp_path / "c.mp4", "line one\nline two"),
            ClipRecord("clips/a", tmp_path / "clips/a.mp4", 'A "dog", running'),
            ClipRecord("clips/b", tmp_path / "clips/b.mp4", "Ein Hund läuft"),
        ]


def test_relative_source_gives_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, CLIPS | {"list.jsonl": table_text("jsonl", "path", "cap")})
    monkeypatch.chdir(tmp_path)
    assert {row.path for row in load_source("list.jsonl")[0]} == {tmp_path / name for name in CLIPS}


def test_paths_may_be_absolute_or_climb(tmp_path: Path) -> None:
    lay(tmp_path, {"far/x.mp4": "x", "y.mp4": "x"})
    text = table_text("csv", "video", "caption", [(str(tmp_path / "far/x.mp4"), "x"), ("../y.mp4", "y")])
    lay(tmp_path / "in", {"metadata.csv": text})
    rows, rejections = load_source(str(tmp_path / "in"))
    assert rejections == []
    assert [row.path for row in rows] == [tmp_path / "far/x.mp4", tmp_path / "y.mp4"]
    assert keys(rows) == [str(tmp_path / "far/x")[1:], str(tmp_path / "y")[1:]]


def test_named_columns_win(tmp_path: Path) -> None:
    row = {"video": "no.mp4", "clip": "c.mp4", "caption": "no", "long_text": "yes"}
    lay(tmp_path, CLIPS | {"metadata.json": json.dumps([row])})
    rows, rejections = load_source(
        str(tmp_path / "metadata.json"), video_column="CLIP", caption_column="Long_Text"
    )
    assert (keys(rows), rows[0].caption, rejections) == (["c"], "yes", [])
    with pytest.raises(
        DataError, match=r"no video column: expected one of film, found caption, clip, long_text, video;"
    ):
        load_source(str(tmp_path / "metadata.json"), video_column="film")
    with pytest.raises(
        DataError,
        match=r"no caption column: expected one of poem, found .*; set --caption-column to the name",
    ):
        load_source(str(tmp_path / "metadata.json"), caption_column="poem")


def test_windows_cut_one_clip_into_several(tmp_path: Path) -> None:
    text = "video,caption,start,end\nc.mp4,one,0,2.5\nc.mp4,two,2.5,\nc.mp4,three,,\nc.mp4,four,,1\n"
    lay(tmp_path, CLIPS | {"metadata.csv": text})
    rows, rejections = load_source(str(tmp_path / "metadata.csv"))
    assert rejections == []
    assert [(row.key, row.caption, row.start, row.end) for row in rows] == [
        ("c", "three", None, None),
        ("c@0.000-1.000", "four", None, 1.0),
        ("c@0.000-2.500", "one", 0.0, 2.5),
        ("c@2.500", "two", 2.5, None),
    ]


@pytest.mark.parametrize(("written", "on_disk"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_may_be_composed_otherwise_than_on_disk(tmp_path: Path, written: Any, on_disk: Any) -> None:
    name, there = (unicodedata.normalize(form, "été/café.mp4") for form in (written, on_disk))
    lay(tmp_path, {f"videos/{there}": "x", "list.csv": f"video,caption\n{name},one\n"})
    rows, rejections = load_source(str(tmp_path / "list.csv"))
    assert rows == [ClipRecord(f"videos/{name[:-4]}", tmp_path / "videos" / there, "one")]
    assert rejections == []
    lay(tmp_path, {f"videos/{name}": "y"})  # that of exactly this name comes first
    assert load_source(str(tmp_path / "list.csv"))[0][0].path == tmp_path / "videos" / name


def test_rows_of_one_clip_give_it_several_captions(tmp_path: Path) -> None:
    lines = ["c.mp4,one,", "c.mp4,two,", "c.mp4,one,", "c.mp4,two,", "c.mp4,one,1", "c.mp4,three,1"]
    lay(tmp_path, CLIPS | {"list.csv": "\n".join(["video,caption,start", *lines])})
    rows, rejections = load_source(str(tmp_path / "list.csv"))
    assert [(row.key, row.caption) for row in rows] == [
        ("c", "one"),
        ("c@1.000", "one"),
        ("c@1.000~8b5b9db0", "three"),
        ("c~3fc4ccfe", "two"),  # as if one row had both
    ]
    twice = "duplicate of an earlier row; remove one of the two rows"
    assert [(r.key, r.reason) for r in rejections] == [("c", twice)] * 2
    both = {"video": "c.mp4", "caption": ["one", "two"]}
    again = {"video": "c.mp4", "caption": ["three", "one"]}
    lay(tmp_path, {"list.jsonl": f"{json.dumps(both)}\n{json.dumps(again)}"})
    rows, rejections = load_source(str(tmp_path / "list.jsonl"))
    assert keys(rows) == ["c", "c~3fc4ccfe", "c~8b5b9db0"]
    assert [r.reason for r in rejections] == [twice]


def test_every_unusable_row_says_why(tmp_path: Path) -> None:
    lines = [
        '{"video": "c.mp4", "caption": "good"}',
        '{"video": "c.mp4", "caption": " good"}',
        '{"video": "clips/../c.mp4", "caption": "good"}',
        '{"video": "gone.mp4", "caption": "x"}',
        '{"video": "clips", "caption": "x"}',
        '{"video": "https://a.b/c.mp4", "caption": "x"}',
        '{"caption": "x"}',
        '{"video": 3, "caption": "x"}',
        '{"video": "clips/a.mp4"}',
        '{"video": "clips/a.mp4", "caption": "  "}',
        '{"video": "clips/a.mp4", "caption": null}',
        '{"video": "clips/a.mp4", "caption": "x", "start": "a"}',
        '{"video": "clips/a.mp4", "caption": "x", "start": 3, "end": 2}',
        '{"video": "clips/a.mp4", "caption": "x", "start": -1}',
        '{"video": "clips/a.mp4", "caption": "x", "end": NaN}',
        "{broken",
        '["clips/a.mp4", "x"]',
        '{"video": "clips/b.mp4", "caption": []}',
        '{"video": "a\\u0000.mp4", "caption": "x"}',
    ]
    lay(tmp_path, CLIPS | {"metadata.jsonl": "\n".join(lines).encode() + b"\n\xff\xfe\n"})
    rows, rejections = load_source(str(tmp_path))
    assert keys(rows) == ["c"]
    assert rows[0].caption == "good"
    assert len(rejections) == len(lines)  # one row is good, and one more line is not UTF-8
    assert [r.key for r in rejections] == sorted(r.key for r in rejections)
    assert [r.reason for r in rejections if r.key == "c"] == [
        "duplicate of an earlier row; remove one of the two rows"
    ] * 2
    found = {r.key: r.reason for r in rejections if r.key != "c"}
    for line, part in {
        4: f"no such file ({tmp_path / 'gone.mp4'})",
        5: "is a folder, not a file",
        6: "is a URL, not a file",
        7: "this row names no clip",
        8: "this row names no clip",
        9: "missing caption; write a caption in metadata.jsonl:9",
        10: "empty caption",
        11: "missing caption",
        12: "start=a is not a number of seconds",
        13: "start=3.0 and end=2.0 must satisfy 0 <= start < end",
        14: "start=-1.0 and end=None must satisfy",
        15: "end=nan is not a number",
        16: "unreadable line",
        17: "line is not a JSON object",
        18: "missing caption",
        19: "no such file",
        20: "unreadable line",
    }.items():
        assert part in found.pop(f"metadata.jsonl:{line}")
    assert found == {}


def test_clips_beside_a_table_that_it_does_not_list_are_told(tmp_path: Path) -> None:
    names = ["a.mp4", "b.mp4", "é.mp4", "d/c.mp4", "d/bad.mp4", "d/last.png", "pose.mp4", "forgotten.mov"]
    names += ["b.mov", "d/cover.png", "few/1.mp4", "few/2.mp4", *(f"many/{i:02}.mp4" for i in range(11))]
    rows = [
        {"video": "a.mp4", "caption": "a", "control": "pose.mp4", "stills": ["d/last.png", 3]},
        {"video": "b.mp4", "caption": "b"},
        {"video": unicodedata.normalize("NFD", "é.mp4"), "caption": "e"},
        {"video": "link/c.mp4", "caption": "c"},
        {"video": "d/bad.mp4"},
    ]
    lay(tmp_path, {name: "x" for name in names} | {"metadata.json": json.dumps(rows)})
    (tmp_path / "link").symlink_to(tmp_path / "d")
    found, rejections = load_source(str(tmp_path))
    assert len(found) == 4
    alone = "no readable row in metadata.json names this clip; add a row with its caption, or move the clip elsewhere"
    assert {r.key: r.reason for r in rejections} == {
        "b.mov": alone,  # b is the key of the other
        "forgotten": alone,
        "few/1": alone,
        "few/2": alone,
        "metadata.json:5": "missing caption; write a caption in metadata.json:5, or run wands caption",
        "metadata.json:many": "no readable row in metadata.json names 11 of the clips in this folder (00.mp4, "
        "01.mp4 ...); add rows with their captions, or move the clips elsewhere",
    }
    # Who names the table wants what is in it.
    assert [r.key for r in load_source(str(tmp_path / "metadata.json"))[1]] == ["metadata.json:5"]
    rows.append({"video": "d/last.png", "caption": "a still"})
    lay(tmp_path, {"metadata.json": json.dumps(rows)})
    assert reasons(tmp_path)["d/cover"] == alone


def test_csv_mistakes(tmp_path: Path) -> None:
    text = "video,caption\nc.mp4,a dog, running\nclips/a.mp4\nclips/b.mp4,fine\n"
    lay(tmp_path, CLIPS | {"metadata.csv": text})
    assert keys(load_source(str(tmp_path))[0]) == ["clips/b"]
    found = reasons(tmp_path)
    assert "more cells than the header; put a caption with commas in double quotes" in found["metadata.csv:2"]
    assert "missing caption" in found["metadata.csv:3"]
    lay(tmp_path, {"metadata.csv": "video|caption\nc.mp4|a dog\n"})
    with pytest.raises(DataError, match="no video column"):
        load_source(str(tmp_path))


def test_an_unclosed_quote_of_a_csv_costs_one_row(tmp_path: Path) -> None:
    rest = [f"{letter}.mp4,{letter}" for letter in "bcdefgh"]
    rest[2] = 'd.mp4,"d, and\nmore"'
    rest[4] = 'f.mp4,"f ""quoted"" " \t'
    lines = [
        "video,caption",
        'a.mp4,"a cat on a mat',
        *rest,
        '"A.mp4" ,"a 12" screen"',
        "i.mp4,i",
        'j.mp4,"j',
    ]
    lay(tmp_path, {f"{letter}.mp4": "x" for letter in "abcdefghijA"} | {"list.csv": "\n".join(lines)})
    rows, rejections = load_source(str(tmp_path / "list.csv"))
    assert [(row.key, row.caption) for row in rows] == [
        ("b", "b"),
        ("c", "c"),
        ("d", "d, and\nmore"),
        ("e", "e"),
        ("f", 'f "quoted"'),
        ("g", "g"),
        ("h", "h"),
        ("i", "i"),
    ]
    cure = '; close the double quotes, write "" for a double quote inside a cell, use commas between cells'
    assert [(r.key, r.reason.removesuffix(cure)) for r in rejections] == [
        ("list.csv:11", "unreadable row (',' expected after '\"')"),
        ("list.csv:13", "unreadable row (unexpected end of data)"),
        ("list.csv:2", "unreadable row (',' expected after '\"')"),
    ]
    lay(tmp_path, {"list.csv": 'video,"caption\na.mp4,one\n'})
    with pytest.raises(
        DataError,
        match=r"list\.csv: line 1 must name the columns, but is an unreadable row \(unexpected end of data\); close",
    ):
        load_source(str(tmp_path / "list.csv"))


def test_rows_of_a_csv_are_numbered_by_the_line_where_they_begin(tmp_path: Path) -> None:
    text = 'video,caption\r\n\r\ngone.mp4,"one\r\n\r\ntwo"\r\nlost.mp4,"three"\r\n'
    lay(tmp_path, {"list.csv": text})
    assert list(reasons(tmp_path / "list.csv")) == ["list.csv:3", "list.csv:6"]


# ---------------------------------------------------------------- sources that cannot be used at all


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "gone", r"SOURCE=.*gone does not exist .*; correct the path"),
        ({}, "gone.csv", "does not exist"),
        ({"notes.txt": "x"}, "", r"contains no clip; wands looked for .*\.mp4"),
        (
            {"a.mp4": "x"},
            "a.mp4",
            r"a\.mp4 is not a table; pass a \.csv, \.jsonl or \.json file, or a folder",
        ),
        ({"metadata.csv": "video,caption\n"}, "", "lists no clip"),
        ({"metadata.csv": ""}, "", "lists no clip"),
        ({"metadata.json": "[]"}, "", "lists no clip"),
        ({"metadata.json": "{"}, "", r"metadata\.json cannot be read: .*; correct the JSON"),
        ({"metadata.json": '"a.mp4"'}, "", "the file must be a JSON list or object, but has the type str"),
        ({"metadata.csv": "video,caption\na,\xe9".encode("latin-1")}, "", "; save the file as UTF-8 text"),
        (
            {"metadata.csv": "a", "metadata.json": "[]"},
            "",
            "contains several files that list clips .metadata.csv and metadata.json.; pass the path of one of these files",
        ),
    ],
)
def test_unusable_sources_end_in_one_sentence(
    tmp_path: Path, files: dict[str, str | bytes], source: str, message: str
) -> None:
    lay(tmp_path, files)
    with pytest.raises(DataError, match=message) as caught:
        load_source(str(tmp_path / source))
    assert "\n" not in str(caught.value)


def test_mistyped_paths_are_not_sought_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    lay(tmp_path, {"data/clips/a.mp4": "x"})
    for source in ("clips", "data/clip", "./owner/name", "a/b/c", "~/nothing/here"):
        with pytest.raises(DataError, match="does not exist"):
            load_source(source)
    with pytest.raises(DataError, match="SOURCE= is empty"):
        load_source(" ")


def test_every_extension_is_found(tmp_path: Path) -> None:
    names = [f"c{index}{extension}" for index, extension in enumerate(VIDEO_EXTENSIONS)]
    lay(tmp_path, {name: "x" for name in names} | {f"{Path(name).stem}.txt": "t" for name in names})
    assert len(load_source(str(tmp_path))[0]) == len(VIDEO_EXTENSIONS) > 10


# ---------------------------------------------------------------- Hugging Face datasets


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two usable rows (one as bytes, one as a path) and three that are not."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    lay(tmp_path, {"real.mp4": "real"})
    videos = [
        {"bytes": b"bytes", "path": "deep/in.mp4"},
        {"bytes": None, "path": str(tmp_path / "real.mp4")},
        {"bytes": b"other", "path": None},
        {"bytes": None, "path": "gone.mp4"},
        {"bytes": None, "path": None},
    ]
    captions = ["one", "two", "  ", "x", "x"]
    return datasets.Dataset.from_dict({"video": videos, "text": captions, "unused": [0] * 5})


def check_dataset(source: Path, tmp_path: Path, split: str) -> None:
    rows, rejections = load_source(str(source), split=split, cache_dir=tmp_path / "clips")
    by_caption = {row.caption: row for row in rows}
    assert set(by_caption) == {"one", "two"}
    assert by_caption["one"].key == "in-277089d91c0b"  # sha256 of the bytes: the same in any order of rows
    assert by_caption["one"].path.parent == tmp_path / "clips"
    assert by_caption["one"].path.suffix == ".mp4"
    assert by_caption["one"].path.read_bytes() == b"bytes"
    assert not any("bytes" in str(row.row) for row in rows)  # all clips would be in memory together
    assert by_caption["two"].path.read_bytes() == b"real"
    assert [(r.key, r.reason.split(";")[0].split(" (")[0]) for r in rejections] == [
        (f"{split}:2", "empty caption"),
        (f"{split}:3", "no such file"),
        (f"{split}:4", "this row names no clip"),
    ]


def test_folder_of_parquet_files(dataset: Any, tmp_path: Path) -> None:
    (tmp_path / "pq").mkdir()
    dataset.to_parquet(tmp_path / "pq/train-0.parquet")
    check_dataset(tmp_path / "pq", tmp_path, "train")
    stamp = next((tmp_path / "clips").iterdir()).stat().st_mtime_ns
    check_dataset(tmp_path / "pq", tmp_path, "train")
    assert next((tmp_path / "clips").iterdir()).stat().st_mtime_ns == stamp  # written once
    with pytest.raises(DataError, match=r"could not be loaded as a Hugging Face dataset \(Bad split: dev"):
        load_source(str(tmp_path / "pq"), split="dev")
    with pytest.raises(DataError, match="no caption column"):
        load_source(str(tmp_path / "pq"), caption_column="poem")


def test_folder_of_save_to_disk(dataset: Any, tmp_path: Path) -> None:
    import datasets

    dataset.save_to_disk(tmp_path / "one")
    check_dataset(tmp_path / "one", tmp_path, "train")
    datasets.DatasetDict(dev=dataset).save_to_disk(tmp_path / "many")
    check_dataset(tmp_path / "many", tmp_path, "dev")
    with pytest.raises(DataError, match="has no split train; set --split to one of dev"):
        load_source(str(tmp_path / "many"))


def test_video_feature_is_never_decoded(dataset: Any, tmp_path: Path) -> None:
    import datasets

    usable = dataset.select([0, 1]).cast_column("video", datasets.Video())  # decoding would need torchcodec
    usable.save_to_disk(tmp_path / "video")
    rows, rejections = load_source(str(tmp_path / "video"), cache_dir=tmp_path / "clips")
    assert sorted(row.path.read_bytes() for row in rows) == [b"bytes", b"real"]
    assert rejections == []


@pytest.mark.parametrize(
    ("written", "key", "suffix"),
    [
        ("https://cdn.example.com/a.mp4?X-Amz-Signature=" + "a" * 300, "a-277089d91c0b", ".mp4"),
        ("https://cdn.example.com/deep/a.MP4?from=b.c/d#e", "a-277089d91c0b", ".MP4"),
        ("a?b.mp4", "a?b-277089d91c0b", ".mp4"),
        ("hf://datasets/a/b/c#d?e.mp4", "c%23d?e-277089d91c0b", ".mp4"),
        ("clip." + "x" * 240, "clip-277089d91c0b", ""),
        ("noise.sh", "noise-277089d91c0b", ""),
    ],
)
def test_bytes_are_named_by_what_a_clip_can_be(tmp_path: Path, written: str, key: str, suffix: str) -> None:
    name, path = write_clip(b"bytes", written, tmp_path)
    assert clip_key(name) == key
    assert path.suffix == suffix
    assert path.read_bytes() == b"bytes"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_refuses_bytes_ends_in_one_sentence(
    dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pq").mkdir()
    dataset.to_parquet(tmp_path / "pq/train-0.parquet")
    (tmp_path / "text").write_text("no folder")
    with pytest.raises(
        CacheError, match=r"text/clips cannot store in\.mp4 \(Not a directory: 5 bytes needed\); free"
    ):
        load_source(str(tmp_path / "pq"), cache_dir=tmp_path / "text/clips")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CacheError, match=r"No space left.*HF_DATASETS_CACHE"):
        write_clip(b"bytes", "a.mp4", tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


def test_hub_dataset_by_name(dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    snapshot = lay(tmp_path / "hub/snapshots" / ("0" * 40), {"videos/a.mp4": "x"})
    rows = {"Video": [str(snapshot / "videos/a.mp4")], "CAPTION": ["one"], "start": [0.5]}
    asked = []

    def load_dataset(name: str, split: str, streaming: bool, trust_remote_code: bool) -> Any:
        asked.append((name, split, streaming))
        return datasets.Dataset.from_dict(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found, rejections = load_source("owner/name", split="test")
    assert asked == [("owner/name", "test", True)]
    assert found == [
        ClipRecord(key="videos/a@0.500", path=snapshot / "videos/a.mp4", caption="one", start=0.5)
    ]
    assert rejections == []

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"\(first line\)"):
        load_source("owner/name")


def test_streamed_rows_that_name_files_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub

    hub = lay(tmp_path / "hub", {"videos/a.mp4": "x", "videos/b.mp4": "y"})
    asked = []

    def hf_hub_download(repo: str, name: str, repo_type: str, revision: str | None) -> str:
        asked.append((repo, name, repo_type, revision))
        if not (hub / name).is_file():
            raise FileNotFoundError(f"404: {name}\nmore")
        return str(hub / name)

    videos = ["videos/a.mp4", "hf://datasets/o/n@refs%2Fpr%2F1/videos/b.mp4", "videos/c.mp4", "../../x.mp4"]
    videos.append("https://me:password@host/e.mp4")
    rows = {"clip": videos, "text": ["one", "two", "three", "four", "five"], "other": [0] * 5}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    found, rejections = load_source("o/n", video_column="clip", caption_column="text")
    assert found == [
        ClipRecord("videos/a", hub / "videos/a.mp4", "one"),
        ClipRecord("videos/b", hub / "videos/b.mp4", "two"),
    ]
    assert asked == [
        ("o/n", "videos/a.mp4", "dataset", None),
        ("o/n", "videos/b.mp4", "dataset", "refs/pr/1"),
        ("o/n", "videos/c.mp4", "dataset", None),
    ]
    assert [(r.key, r.reason) for r in rejections] == [
        (
            "train:2",
            "file cannot be fetched from the Hub (videos/c.mp4, 404: videos/c.mp4); check the path and your access",
        ),
        ("train:3", "path leads out of repository o/n (../../x.mp4); use a relative path without .."),
        ("train:4", "path is a URL, not a file of the dataset; write the path in the repository"),
    ]


def test_streamed_webdataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` names the columns of WebDataset tars by their members' endings."""
    import datasets

    rows = {"__key__": ["a", "b"], "mp4": [{"bytes": b"x", "path": "a.mp4"}] * 2, "txt": ["one", ""]}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    found, rejections = load_source("o/n", cache_dir=tmp_path)
    assert [(row.caption, row.path.read_bytes()) for row in found] == [("one", b"x")]
    assert [rejection.key for rejection in rejections] == ["train:1"]


def test_a_stream_that_breaks_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows() -> Any:
        yield {"video": "/gone.mp4", "text": "one"}
        raise ConnectionError("reset by peer\nmore")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    with pytest.raises(DataError, match=r"SOURCE=o/n could not be loaded .* \(reset by peer\); check"):
        load_source("o/n")


def test_no_network_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        load_source("nobody/nothing-of-this-name")
    message = str(caught.value)
    assert message.startswith(
        "SOURCE=nobody/nothing-of-this-name could not be loaded as a Hugging Face dataset ("
    )
    assert message.endswith("the network, or pass a folder of clips")
    assert "\n" not in message


# ---------------------------------------------------------------- licences


def _lay_sidecars(folder: Path, rows: list[dict[str, Any]]) -> None:
    lay(folder, {row["video"].replace(".mp4", ".json"): json.dumps(row) for row in rows})


def _lay_tar(folder: Path, rows: list[dict[str, Any]]) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for row in rows:
            archive.add(folder / row["video"], row["video"])
            (folder / "member").write_text(json.dumps(row))
            archive.add(folder / "member", row["video"].replace(".mp4", ".json"))
            (folder / row["video"]).unlink()
    (folder / "member").unlink()


def _lay_parquet(folder: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(folder / "train-0.parquet")


@pytest.mark.parametrize(
    "lay_rows",
    [
        lambda folder, rows: lay(
            folder,
            {"metadata.csv": "video,caption, Licence \na.mp4,one,CC-BY-4.0\nb.mp4,two,\nc.mp4,three\n"},
        ),
        lambda folder, rows: lay(folder, {"metadata.jsonl": "\n".join(map(json.dumps, rows))}),
        lambda folder, rows: lay(folder, {"metadata.json": json.dumps(rows)}),
        _lay_sidecars,
        _lay_tar,
        _lay_parquet,
    ],
    ids=["csv", "jsonl", "json", "sidecars", "tar", "parquet"],
)
def test_the_licence_of_every_layout(lay_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    folder = lay(tmp_path / "set", {"a.mp4": "1", "b.mp4": "2", "c.mp4": "3"})
    captions = {"a": "one", "b": "two", "c": "three"}
    licenses = {"a": "CC-BY-4.0", "b": None, "c": ""}
    rows = [
        {"video": f"{key}.mp4", "caption": caption, "license": licenses[key]}
        for key, caption in captions.items()
    ]
    lay_rows(folder, rows)
    found, rejections = load_source(str(folder))
    assert rejections == []
    assert {row.caption: row.license for row in found} == {"one": "CC-BY-4.0", "two": "", "three": ""}


@pytest.mark.parametrize(
    ("value", "license"),
    [
        (" CC BY\n4.0 ", "CC BY 4.0"),
        ("a\x1b[31mb\x00", r"a\x1b[31mb\x00"),
        ("x" * 10_000, "x" * 100),
        (float("nan"), ""),
        ("  ", ""),
        (4, "4"),
        (["mit", {"url": "x"}], "['mit', {'url': 'x'}]"),
    ],
)
def test_a_licence_is_one_short_line(value: object, license: str) -> None:
    assert pick_license({"license": value}) == license
    assert pick_license({"license": license}) == license  # the index of a cache reads it again
    assert pick_license({"license": None, "licence": value}) == license


# ---------------------------------------------------------------- clips without captions


@pytest.mark.parametrize(
    "lay_rows",
    [
        lambda folder, rows: lay(folder, {"metadata.csv": "video,film\na.mp4,x\nb.mp4,y\n"}),
        lambda folder, rows: lay(folder, {"metadata.csv": "video,caption,film\na.mp4,,x\nb.mp4,one,y\n"}),
        lambda folder, rows: lay(folder, {"metadata.json": json.dumps(rows)}),
        lambda folder, rows: lay(folder, {"captions.json": json.dumps({"b.mp4": ["one"], "a.mp4": []})}),
        lambda folder, rows: lay(folder, {"captions.json": json.dumps({"b.mp4": ["one"]})}),
        lambda folder, rows: lay(folder, {"b.txt": "one", "a.txt": " "}),
        lambda folder, rows: lay(folder, {"b.txt": "one"}),
        _lay_sidecars,
        _lay_tar,
        _lay_parquet,
    ],
    ids=[
        "no column",
        "csv",
        "json",
        "captions.json",
        "no entry",
        "txt",
        "no txt",
        "sidecars",
        "tar",
        "parquet",
    ],
)
def test_clips_without_captions_if_no_caption_is_needed(
    lay_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    folder = lay(tmp_path / "set", {"a.mp4": "1", "b.mp4": "2"})
    lay_rows(
        folder,
        [{"video": "a.mp4", "caption": None, "film": "x"}, {"video": "b.mp4", "caption": "one", "film": "y"}],
    )
    found, rejections = load_source(str(folder), needs_caption=False)
    assert rejections == []
    assert [row.path.suffix for row in found] == [".mp4"] * 2
    captions = [row.caption for row in found]
    assert captions in ([["", "one"], ["", ""]] if (folder / "metadata.csv").exists() else [["", "one"]])
    if "film" in found[0].row:
        assert [row.row["film"] for row in found] == ["x", "y"]
    if (folder / "metadata.csv").exists() and captions == ["", ""]:
        with pytest.raises(DataError, match="has no caption column"):
            load_source(str(folder))
        return
    needed, rejections = load_source(str(folder))
    assert [row.caption for row in needed] == ["one"]
    assert len(rejections) == 1


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
