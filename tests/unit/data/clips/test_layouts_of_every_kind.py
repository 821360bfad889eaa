"""Licences and clips without captions in every layout."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.clip_folders import lay
from wands.data.clips.layouts import load_source
from wands.data.clips.rows import pick_license
from wands.errors import DataError

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
