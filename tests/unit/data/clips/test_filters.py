"""The condition of --where: equal to Python's own result where both can run it, refused in one sentence otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.listing_folders import clip
from wands.config.options import CheckOptions
from wands.data.clips.filters import MAX_LENGTH, Filter
from wands.errors import ConfigError
from wands.preprocess.clip_rules import read_source
from wands.texts import printable

ROW = {
    "motion": "0.05",
    "sharpness": 150,
    "license": "cc0",
    "caption": "a cat",
    "brightness": "",
    "score": "?",
}


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("motion > .01 and sharpness > 100", ""),
        ("motion > .2 and sharpness > 200", "motion = 0.05, but --where requires motion > .2"),
        ("sharpness > 100 and (motion > .2)", "motion = 0.05, but --where requires motion > .2"),
        ("motion > .2 or sharpness > 100", ""),
        (
            "motion > .2 or motion < -1",
            "motion = 0.05, but --where requires motion > .2 or motion < -1",
        ),
        ("0 < motion <= 0.05", ""),
        ("0 < motion < 0.05", "motion = 0.05, but --where requires 0 < motion < 0.05"),
        ("not motion > .2", ""),
        ("Motion > .01\n  and SHARPNESS == 150", ""),
        ('license == "cc0" and license != "by" and license >= "a"', ""),
        ('license in ["cc0", "by"] and license in ("cc0") and sharpness in (150, 2)', ""),
        ('license not in ["cc0", "by"]', 'license = cc0, but --where requires license not in ["cc0", "by"]'),
        ('"cat" in caption and "dog" not in caption', ""),
        ("brightness is None and motion is not None and column is None", ""),
        ("motion is None", "motion = 0.05, but --where requires motion is None"),
        ("motion < sharpness", ""),
        # A cell that is empty or not a number meets neither a comparison nor its opposite.
        ("brightness > .1", "brightness is empty, but --where requires brightness > .1"),
        ("not brightness > .1", "brightness is empty, but --where requires not brightness > .1"),
        ("brightness not in [1]", "brightness is empty, but --where requires brightness not in [1]"),
        ("brightness > .1 or motion > .01", ""),
        ("score > 1", "score = ? (not a number), but --where requires score > 1"),
        ("not score < 1", "score = ? (not a number), but --where requires not score < 1"),
    ],
)
def test_reasons(condition: str, reason: str) -> None:
    assert Filter(condition).reason(ROW) == reason


@pytest.mark.parametrize(
    ("condition", "character"),
    [
        *[("", 1), (" ", 1), ("motion", 1), ("motion >", 9), ("motion = 3", 8), ("1 < 2", 1), ("motion > True > f(1)", 17)],
        *[("motion.x > 1", 1), ("f(motion) > 1", 1), ("motion[0] > 1", 1), ("motion > 1; import os", 11)],
        *[("motion > 9**9**9", 10), ("motion > 2 + 3", 10), ("motion > 1e999", 10), ("motion > 1j", 10)],
        *[("motion > " + "9" * 900, 10), ("é > 1 and motion.x > 1", 11), ("motion > None", 10), ("motion is 1", 11)],
        *[("(x := motion) > 1", 2), ("lambda: motion > 1", 1), ("f'{motion}' > '1'", 1), ("motion @ 2", 1)],
        *[("motion in []", 11), ("motion.x in []", 1), ("motion in license", 11), ("motion in [[1]]", 12)],
        *[("motion > 1 if motion else 2", 1), ("[x for x in motion] > 1", 1), ("*motion > 1", 1), ("motion > '\0'", 11)],
        *[("motion > ...", 10), ("motion > ''", 10), ("motion > (yield)", 11), ("'a' is None and motion > 1", 1)],
        *[("motion > 1 \ud800", 12), ("(" * 300 + "motion > 1" + ")" * 300, 201), ("-motion > 1", 1)],
        *[("motion > b'1'", 10)],
    ],
)  # fmt: skip
def test_everything_else_is_refused_at_its_place(condition: str, character: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--where .* error at character {character} \(.*or, not\.$"):
        Filter(condition)


def test_thresholds_are_the_numbers_that_every_clip_must_meet() -> None:
    condition = "Motion > .2 and 100 < sharpness and note != 'a' and brightness < 0.9 and (a > 1 or b > 2) and c in [1]"
    assert Filter(condition).thresholds == [("motion", 0.2), ("brightness", 0.9)]
    assert Filter("motion > 1 or motion < 0").thresholds == []


def test_a_long_condition_is_refused() -> None:
    deepest = "not " * ((MAX_LENGTH - 10) // 4) + "motion > 1"
    assert Filter(deepest).reason({"motion": 2}) in ("", f"motion = 2, but --where requires {deepest}")
    with pytest.raises(ConfigError, match=r"--where has 1,210 characters. Use at most 1,000."):
        Filter("not " * 300 + "motion > 1")


_NUMBERS = st.floats(-9, 9).map(lambda number: f"{number:.2f}") | st.integers(-9, 9).map(str)
_COMPARISONS = st.one_of(
    st.builds(
        "{} {} {}".format,
        st.sampled_from("ab"),
        st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
        _NUMBERS,
    ),
    st.builds("{} < {} <= {}".format, _NUMBERS, st.sampled_from("ab"), _NUMBERS),
    st.builds("a {} b".format, st.sampled_from(["<", "<=", ">", ">=", "==", "!="])),
    st.builds(
        "{} {} ({}, {})".format, st.sampled_from("ab"), st.sampled_from(["in", "not in"]), _NUMBERS, _NUMBERS
    ),
    st.builds("c {} '{}'".format, st.sampled_from(["<", ">=", "==", "!="]), st.sampled_from("xyz")),
    st.builds("'{}' {} c".format, st.sampled_from("xyz"), st.sampled_from(["in", "not in"])),
)
_CONDITIONS = st.recursive(
    _COMPARISONS,
    lambda parts: st.one_of(
        st.builds("({} and {})".format, parts, parts),
        st.builds("{} or {}".format, parts, parts),
        st.builds("not ({})".format, parts),
    ),
    max_leaves=6,
)


@examples(300)
@given(_CONDITIONS, st.floats(-9, 9), st.integers(-9, 9), st.sampled_from("xyz"))
def test_a_condition_means_what_it_means_in_python(condition: str, a: float, b: int, c: str) -> None:
    expected = eval(condition, {"a": a, "b": b, "c": c})
    assert (Filter(condition).reason({"a": str(a), "b": b, "c": c}) == "") == expected


_WORDS = [
    "motion",
    ">",
    "(",
    ")",
    ".",
    "2",
    "'a'",
    "in",
    "not",
    "is",
    "None",
    "**",
    "[",
    "]",
    ",",
    "and",
    "-",
]


@examples(600)
@given(
    st.one_of(
        st.text(max_size=80),
        st.text("motin>.<=!()[]{}'\"\\ 019*-+:@andorisNe,x\t\n#", max_size=60),
        st.lists(st.sampled_from(_WORDS)).map(" ".join),
    ),
    st.none() | st.text(max_size=8) | st.floats() | st.integers() | st.booleans() | st.lists(st.integers()),
)
def test_nothing_but_a_refusal_is_raised(condition: str, cell: Any) -> None:
    try:
        parsed = Filter(condition)
    except ConfigError:
        return
    assert parsed.columns
    reason = parsed.reason(dict.fromkeys(parsed.columns, cell))
    assert reason == "" or ", but --where requires " in reason
    assert reason == printable(reason) or condition != printable(condition)


# ---- sources


def table(folder: Path, *rows: dict[str, object]) -> Path:
    for index, row in enumerate(rows):
        row.setdefault("video", clip(folder / f"{index}.mp4", 9 * index).name)
        row.setdefault("caption", f"caption {index}")
    (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "clips.jsonl"


def test_columns_that_every_clip_has(tmp_path: Path) -> None:
    source = table(tmp_path, {"start": 0.25, "end": 1, "licence": "by", "Clip-Score (%)": 7, "2d": 1})
    condition = (
        'key == "0@0.250-1.000" and path > "/" and "cap" in caption and license == "by" and start == 0.25 and end == 1'
        " and clip_score____ == 7 and _2d == 1"
    )
    ((record,), _) = read_source(CheckOptions(source=str(source), where=condition))
    assert record.unmet == ""
    ((record,), _) = read_source(CheckOptions(source=str(source), where="start >= 1"))
    assert record.unmet == "start = 0.25, but --where requires start >= 1"
    ((record,), _) = read_source(CheckOptions(source=str(source), where="seconds > .8"))
    assert record.unmet == "seconds = 0.75, but --where requires seconds > .8"
    assert read_source(CheckOptions(source=str(source)))[0][0].unmet == ""


def test_an_unknown_column_is_refused_with_the_columns(tmp_path: Path) -> None:
    source = str(table(tmp_path, {"motion": 1}, {"sharpness": 1}))
    message = (
        "--where names the column moton, but the clips have the columns caption, end, key, license, motion, path, sharpness, "
        "start, video; did you mean motion?"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_source(CheckOptions(source=source, where="moton > 1"))
    records, _ = read_source(CheckOptions(source=source, where="motion > 1 or sharpness > 0"))
    assert [record.unmet for record in records] == [
        "motion = 1, sharpness is empty, but --where requires motion > 1 or sharpness > 0",
        "",
    ]
    with pytest.raises(ConfigError, match="--where  cannot be used"):
        read_source(CheckOptions(source=source, where=""))


def test_a_caption_in_a_reason_cannot_control_the_terminal(tmp_path: Path) -> None:
    source = table(tmp_path, {"caption": "a\x1b[2J\nb" + "c" * 200})
    ((record,), _) = read_source(CheckOptions(source=str(source), where='caption == "d"'))
    assert record.unmet.startswith(r"caption = a\x1b[2J\nbccc")
    assert record.unmet.isprintable()
    assert len(record.unmet) < 120


def test_columns_of_a_dataset_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = [str(clip(tmp_path / f"{index}.mp4", 9 * index)) for index in range(2)]
    rows = {"video": paths, "text": ["one", "two"], "Clip Score": [1, 5], "other": ["x", "y"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "data")
    records, _ = read_source(CheckOptions(source=str(tmp_path / "data"), where="clip_score > 2"))
    assert {record.caption: record.unmet for record in records} == {
        "one": "clip_score = 1, but --where requires clip_score > 2",
        "two": "",
    }
    assert "other" not in records[0].row  # a column that no option names is not read
