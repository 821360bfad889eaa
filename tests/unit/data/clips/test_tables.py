"""Tables that commands write: they are read back as the same clips with the same columns, in any folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wands.data.clips.layouts import load_source
from wands.data.clips.tables import check_out, read_table, table_row, write_table
from wands.errors import ConfigError

HOSTILE = 'a "quoted", {braced} cell;\r\nwith two lines,\x00 \ud800 and =1+1'


def make_source(folder: Path) -> Path:
    (folder / "clips").mkdir(parents=True)
    for name in ("a.mp4", "b, c.mp4"):
        (folder / "clips" / name).write_bytes(b"")
    rows = [
        {
            "File_Name": "clips/a.mp4",
            "text": "one",
            "start": "1.5",
            "license": "CC0",
            "tags": ["x", {"y": 1}],
        },
        {"File_Name": "clips/a.mp4", "text": "two", "start": "1.5", "Score": 0.25},
        {"File_Name": "clips/b, c.mp4", "note": HOSTILE, "embedding": None},
    ]
    table = folder / "source.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


@pytest.mark.parametrize("place", ["clips/new", "elsewhere", "."])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_written_table_names_the_same_clips(tmp_path: Path, place: str, kind: str):
    records, rejections = load_source(str(make_source(tmp_path / "set")), needs_caption=False)
    assert not rejections
    out = tmp_path / "set" / place / f"out.{kind}"
    write_table(out, [table_row(record, out, motion=0.5) for record in records])

    again, rejections = load_source(str(out), needs_caption=False)
    assert not rejections
    found = {(r.path, r.caption, r.start, r.end, r.license) for r in again}
    assert found == {(r.path, r.caption, r.start, r.end, r.license) for r in records}
    rows = {record.caption: record.row for record in again}
    assert float(str(rows["two"]["score"])) == 0.25
    assert {str(row["motion"]) for row in rows.values()} == {"0.5"}
    if kind == "jsonl":
        assert (rows["one"]["tags"], rows[""]["note"]) == (["x", {"y": 1}], HOSTILE)
    else:
        assert json.loads(str(rows["one"]["tags"])) == ["x", {"y": 1}]
        assert rows[""]["note"] == HOSTILE.replace("\ud800", "?").replace("\r\n", "\n")


def test_a_table_in_the_folder_of_its_clips_can_be_moved_with_them(tmp_path: Path):
    records, _ = load_source(str(make_source(tmp_path)), needs_caption=False)
    assert {table_row(record, tmp_path / "out.csv")["video"] for record in records} == {
        "clips/a.mp4",
        "clips/b, c.mp4",
    }


def test_a_table_that_cannot_be_written_stays_as_it_was(tmp_path: Path):
    table = tmp_path / "out.csv"
    times = [("b.mp4", 0.0), ("a.mp4", 10.5), ("a.mp4", 9.0), ("a.mp4", 0.0)]
    write_table(table, [{"video": video, "start": start} for video, start in times])
    assert [(row["video"], float(str(row["start"]))) for _, row in read_table(table)] == sorted(times)
    write_table(table, [{"video": "a.mp4"}])
    with pytest.raises(TypeError):
        write_table(table, [{"video": "b.mp4"}, {3: 4, "x": {(1, 2): 3}}])
    assert read_table(table) == [(2, {"video": "a.mp4"})]
    assert list(tmp_path.iterdir()) == [table]
    with pytest.raises(ConfigError, match=r"--out=.*out.json must end in .csv or .jsonl"):
        check_out(tmp_path / "out.json", "clips")
    with pytest.raises(ConfigError, match=r"--out=.*out.csv is the file SOURCE"):
        check_out(table, str(table))


def test_cells_may_be_separated_by_semicolons(tmp_path: Path):
    """As Excel writes them in many countries. Commas belong to the captions then."""
    table = tmp_path / "clips.csv"
    table.write_text('\nvideo;caption;start\na.mp4;a cat, a dog;0,5\nb.mp4;"one; two" ;1\nc.mp4;"open;2\n')
    rows = list(read_table(table))
    assert rows[0][1] == {"video": "a.mp4", "caption": "a cat, a dog", "start": "0,5"}
    assert rows[1][1] == {"video": "b.mp4", "caption": "one; two", "start": "1"}
    assert "close the double quotes" in str(rows[2][1])
