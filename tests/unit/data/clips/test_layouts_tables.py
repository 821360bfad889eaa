"""Tables of clips: columns, paths, windows, captions, and every row that cannot be used."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.support.clip_folders import keys, lay
from wands.data.clips.file_kinds import VIDEO_EXTENSIONS
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord
from wands.errors import DataError


def reasons(source: Path, **options: Any) -> dict[str, str]:
    return {rejection.key: rejection.reason for rejection in load_source(str(source), **options)[1]}


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
