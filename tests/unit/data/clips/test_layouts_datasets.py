"""Datasets of Hugging Face: parquet, save_to_disk, names of the Hub, streams."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.clip_folders import lay
from wands.data.clips.hf_dataset import write_clip
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord, clip_key
from wands.errors import CacheError, DataError

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
