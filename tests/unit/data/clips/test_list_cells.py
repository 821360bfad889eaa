"""Cells that are lists, as in Panda-70M."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import check
from wands.data.clips.list_cells import split_lists
from wands.errors import DataError

RANGES = "[['0:00:00.500', '0:00:02.000'], ['0:00:02.000', '1:00:04']]"
CAPTIONS = "['first part', 'it\\'s the \"second\"']"
NAMES = ("caption", "text")


@pytest.mark.parametrize("ranges", [RANGES, [[0.5, 2], ["2.0", 3604]], json.dumps([[0.5, 2.0], [2, 3604]])])
def test_a_row_for_each_pair_of_range_and_caption(ranges: object) -> None:
    rows = split_lists({"video": "a.mp4", "timestamp": ranges, "caption": CAPTIONS, "score": 1}, NAMES)
    assert [(row["start"], row["end"], row["caption"]) for row in rows] == [
        (0.5, 2.0, "first part"),
        (2.0, 3604.0, 'it\'s the "second"'),
    ]
    assert all(row["score"] == 1 for row in rows)


@pytest.mark.parametrize(
    "row",
    [
        {"caption": "[anime] a cat"},
        {"caption": "a cat", "timestamp": "2024-01-01 10:00"},
        {"caption": "a cat", "timestamp": 17.5},
        {"caption": ["one", "two"]},
        {"caption": "[]"},
        {"caption": "[" * 100_000},
        {"caption": None},
    ],
)
def test_other_rows_are_as_before(row: dict[str, object]) -> None:
    assert split_lists(row, NAMES) == [row]


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        ({"caption": CAPTIONS}, r"caption=\['first part'.* is a list of 2"),
        ({"caption": CAPTIONS, "timestamp": "[[0, 1]]"}, r"timestamp=\[\[0, 1\]\] is a list of 1"),
        ({"caption": "one text", "timestamp": RANGES}, r"timestamp=\[\['0:00:00.500'.* is a list of 2"),
    ],
)
def test_a_list_without_its_partner_names_the_cell(row: dict[str, object], cell: str) -> None:
    with pytest.raises(DataError, match=cell):
        split_lists(row, NAMES)


def test_a_table_of_lists_is_read(clips_dir: Path, tmp_path: Path) -> None:
    shutil.copy(clips_dir / "carphone_pristine.mp4", tmp_path / "a.mp4")
    (tmp_path / "t.csv").write_text(
        "video,timestamp,caption\n"
        "a.mp4,\"[['0:00:00.000', '0:00:01.000'], ['0:00:01.000', '0:00:02.000']]\",\"['one', 'two']\"\n"
        "a.mp4,,\"['one', 'two']\"\n"
    )
    report = check(tmp_path / "t.csv", thumbnails=False)
    assert report.totals()["rejected"] == 1
    assert len(report.clips) == 3
