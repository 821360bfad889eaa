"""Every layout of another trainer, built as that trainer documents it, with real tiny clips."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.support.clip_files import numbers, write_clip
from tests.support.listing_folders import FPS, clip, image, load, tar, write
from tests.unit.data.clips.test_video import UNEVEN_MS
from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord
from wands.data.clips.video import decode_clip
from wands.errors import DataError


def test_diffsynth_metadata_csv(tmp_path: Path) -> None:
    """DiffSynth-Studio: --dataset_base_path data --dataset_metadata_path data/metadata.csv."""
    clip(tmp_path / "video_1.mp4", 40)
    clip(tmp_path / "sub/video_2.mp4", 80)
    lines = [
        "video,prompt,input_image,end_image",
        'video_1.mp4,"from sunset to night, a small town",first.png,',
        "sub/video_2.mp4,a dog runs,,",
        "video_3.mp4,not there,,",
        "sub/video_2.mp4",
    ]
    write(tmp_path / "metadata.csv", "\n".join(lines))
    rows, rejected = load(tmp_path)
    assert rows == {
        "video_1": ("video_1.mp4", "from sunset to night, a small town"),
        "sub/video_2": ("video_2.mp4", "a dog runs"),
    }
    assert set(rejected) == {"metadata.csv:4", "metadata.csv:5"}
    assert "no such file" in rejected["metadata.csv:4"]
    assert "missing caption" in rejected["metadata.csv:5"]


def test_diffsynth_old_layout_keeps_clips_in_train(tmp_path: Path) -> None:
    """DiffSynth-Studio before 2.0: data/metadata.csv with file_name,text and data/train/."""
    clip(tmp_path / "train/video_00001.mp4", 40)
    write(tmp_path / "metadata.csv", 'file_name,text\nvideo_00001.mp4,"video description"\n')
    assert load(tmp_path) == ({"train/video_00001": ("video_00001.mp4", "video description")}, {})


def test_diffsynth_image_column(tmp_path: Path) -> None:
    image(tmp_path / "1.jpg", 40)
    clip(tmp_path / "1.mp4", 40)
    write(tmp_path / "metadata.csv", "image,video,prompt\n1.jpg,,a still\n,1.mp4,a clip\n")
    assert load(tmp_path) == ({"1.jpg": ("1.jpg", "a still"), "1.mp4": ("1.mp4", "a clip")}, {})


def test_musubi_jsonl(tmp_path: Path) -> None:
    """musubi-tuner: video_jsonl_file / image_jsonl_file of a dataset TOML, absolute paths."""
    a = clip(tmp_path / "videos/video1.mp4", 40)
    b = image(tmp_path / "images/image1.jpg", 80)
    lines = [
        {"video_path": str(a), "caption": "A caption for video1"},
        {"image_path": str(b), "caption": "A caption for image1"},
        {"video_path": str(a.with_name("gone.mp4")), "caption": "x", "control_path": "/c.mp4"},
        {"video_path": str(a)},
    ]
    table = write(tmp_path / "my_videos.jsonl", "\n".join(map(json.dumps, lines)) + "\n{half a line")
    rows, rejected = load(table)
    assert rows == {
        "videos/video1": ("video1.mp4", "A caption for video1"),
        "images/image1": ("image1.jpg", "A caption for image1"),
    }
    assert set(rejected) == {f"my_videos.jsonl:{line}" for line in (3, 4, 5)}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("place", ["", "train/"])
def test_hf_videofolder(tmp_path: Path, kind: str, place: str) -> None:
    """`datasets`' videofolder: metadata next to the clips, for the whole dataset or for one split."""
    clip(tmp_path / f"{place}0001.mp4", 40)
    clip(tmp_path / f"{place}more/0002.mp4", 80)
    items = [("0001.mp4", "one"), ("more/0002.mp4", "two"), ("0003.mp4", "three")]
    text = (
        "file_name,text\n" + "".join(f"{file},{text}\n" for file, text in items)
        if kind == "csv"
        else "".join(json.dumps({"file_name": file, "text": text}) + "\n" for file, text in items)
    )
    write(tmp_path / f"{place}metadata.{kind}", text)
    rows, rejected = load(tmp_path)
    assert rows == {"0001": ("0001.mp4", "one"), "more/0002": ("0002.mp4", "two")}
    assert list(rejected) == [f"metadata.{kind}:{4 if kind == 'csv' else 3}"]
    if place:  # the other split has no table, and nothing of train may be taken for it
        write(tmp_path / "test" / f"metadata.{kind}", text)
        assert load(tmp_path, split="test")[0] == {}


def test_videox_fun_json(tmp_path: Path) -> None:
    """VideoX-Fun: datasets/internal_datasets/{train/, json_of_internal_datasets.json}."""
    clip(tmp_path / "train/00000001.mp4", 40)
    image(tmp_path / "train/00000002.jpg", 80)
    listing = [
        {"file_path": "train/00000001.mp4", "text": "Young men in a car.", "type": "video"},
        {"file_path": "train/00000002.jpg", "text": "A small dog.", "type": "image", "width": 48},
        {"file_path": "train/00000003.mp4", "text": "Gone.", "type": "video"},
        "train/00000001.mp4",
    ]
    table = write(tmp_path / "json_of_internal_datasets.json", listing)
    for source in (tmp_path, table):
        rows, rejected = load(source)
        assert rows == {
            "train/00000001": ("00000001.mp4", "Young men in a car."),
            "train/00000002": ("00000002.jpg", "A small dog."),
        }
        assert set(rejected) == {f"{table.name}:3", f"{table.name}:4"}


@pytest.mark.parametrize("merge", ["", "relative", "absolute"])
def test_fastvideo_json(tmp_path: Path, merge: str) -> None:
    """FastVideo: videos/, videos2caption.json and, in older releases, merge.txt that joins the two."""
    clip(tmp_path / "videos/1.mp4", 40)
    image(tmp_path / "videos/0.jpg", 80)
    size = {"resolution": {"width": 48, "height": 32}, "fps": 8.0, "duration": 1.125}
    listing = [
        {"path": "1.mp4", **size, "cap": ["a caption", "another caption", "a caption"]},
        {"path": "0.jpg", "cap": ["a picture"]},
        {"path": "2.mp4", **size, "cap": ["gone"]},
        {"path": "1.mp4", **size, "cap": []},
    ]
    write(tmp_path / "videos2caption.json", listing)
    base = {"relative": "", "absolute": f"{tmp_path}/"}.get(merge)
    if base is not None:
        text = f"{base}videos,{base}videos2caption.json\n{base}gone,{base}gone.json\nno comma\n"
        write(tmp_path / "merge.txt", text)
    rows, rejected = load(tmp_path)
    second = "videos/1~f76cfed7"
    assert {key: caption for key, (_, caption) in rows.items()} == {
        "videos/0": "a picture",
        "videos/1": "a caption",
        second: "another caption",
    }
    assert rows[second][0] == "1.mp4"
    assert {f"videos2caption.json:{line}" for line in (1, 3, 4)} <= set(rejected)
    assert "twice" in rejected["videos2caption.json:1"]
    assert set(rejected) >= ({"merge.txt:2", "merge.txt:3"} if merge else set())


def captioned_folder(folder: Path) -> Path:
    """diffusion-pipe: a directory with captions.json, {file name: [captions]}."""
    clip(folder / "clip_1.mp4", 40)
    clip(folder / "clip_2.mp4", 80)
    clip(folder / "unlisted.mp4", 120)
    image(folder / "image_1.png", 160)
    write(
        folder / "captions.json",
        {
            "clip_1.mp4": ["A cat sleeps.", "An orange cat on a sofa."],
            "clip_2.mp4": ["A dog."],
            "image_1.png": ["A tree.", "A green tree."],
            "gone.mp4": ["Nothing."],
        },
    )
    return folder


def test_diffusion_pipe_captions_json(tmp_path: Path) -> None:
    rows, rejected = load(captioned_folder(tmp_path))
    assert sorted(rows.values()) == [
        ("clip_1.mp4", "A cat sleeps."),
        ("clip_1.mp4", "An orange cat on a sofa."),
        ("clip_2.mp4", "A dog."),
        ("image_1.png", "A green tree."),
        ("image_1.png", "A tree."),
    ]
    assert rows["clip_1"][1] == "A cat sleeps."
    second = next(key for key in rows if key.startswith("clip_1~"))
    assert set(rejected) == {"unlisted", "captions.json:gone.mp4"}
    assert "captions.json has no entry for this clip (unlisted.mp4)" in rejected["unlisted"]

    # a caption more, or first, leaves the keys of the others as they are
    write(tmp_path / "captions.json", {"clip_1.mp4": ["New.", "A cat.", "An orange cat on a sofa."]})
    assert load(tmp_path)[0][second][1] == "An orange cat on a sofa."


@pytest.mark.parametrize(("written", "on_disk"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_diffusion_pipe_accents_composed_otherwise(tmp_path: Path, written: Any, on_disk: Any) -> None:
    name, there = (unicodedata.normalize(form, "café.mp4") for form in (written, on_disk))
    data = clip(tmp_path / "set" / there, 40).read_bytes()
    tar(tmp_path / "set/a.tar", [(f"in {there}", data)])
    write(tmp_path / "set/captions.json", {name: ["one"], f"in {name}": ["two"]})
    rows, rejected = load(tmp_path / "set", cache_dir=tmp_path / "cache")
    assert rejected == {}
    assert rows[name[:-4]] == (there, "one")
    assert [caption for _, caption in rows.values()] == ["two", "one"]
    clip(tmp_path / "set" / name, 80)  # now the captions are this one's
    rows, rejected = load(tmp_path / "set", cache_dir=tmp_path / "cache")
    assert rows[name[:-4]] == (name, "one")
    assert list(rejected) == [there[:-4]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("3", "the file must be a JSON list or object, but has the type int"),
        ("{}", "lists no clip"),
        ('{"clip.mp4": ["a", 3]}', None),
        ('{"clip.mp4": []}', None),
    ],
)
def test_diffusion_pipe_malformed(tmp_path: Path, content: str, message: str | None) -> None:
    clip(tmp_path / "clip.mp4", 40)
    write(tmp_path / "captions.json", content)
    if message:
        with pytest.raises(DataError, match=message):
            load_source(str(tmp_path))
    else:
        problem = (
            "caption has the type int, but it must be text; write text"
            if "3" in content
            else "missing caption; write a caption"
        )
        ending = "" if "3" in content else ", or run wands caption"
        assert load(tmp_path) == ({}, {"clip": f"{problem} in captions.json{ending}"})


def test_captions_json_as_a_list_names_clips_twice(tmp_path: Path) -> None:
    clip(tmp_path / "clip.mp4", 40)
    listing = [{"file_name": "clip.mp4", "caption": text} for text in ("one", "two", "one")]
    write(tmp_path / "captions.json", listing)
    rows, rejected = load(tmp_path)
    assert rows == {"clip": ("clip.mp4", "one"), "clip~3fc4ccfe": ("clip.mp4", "two")}
    assert "duplicate of an earlier row" in rejected["clip"]


@pytest.mark.parametrize(
    ("videos", "captions"),
    [("videos.txt", "prompts.txt"), ("videos.txt", "captions.txt"), ("video.txt", "prompt.txt")],
)
def test_finetrainers_line_aligned(tmp_path: Path, videos: str, captions: str) -> None:
    """finetrainers, CogVideoX: line n of one file belongs to line n of the other."""
    clip(tmp_path / "videos/00000.mp4", 40)
    clip(tmp_path / "videos/00001.mp4", 80)
    write(tmp_path / videos, "videos/00000.mp4\nvideos/00001.mp4\nvideos/00002.mp4\nvideos/00001.mp4\n")
    write(tmp_path / captions, "A cat, black and white\nA dog\nGone\n\n")
    with pytest.raises(DataError, match=r"has 4 lines and .* has 3, but line n"):
        load_source(str(tmp_path))
    write(tmp_path / captions, "A cat, black and white\r\nA dog\r\nGone\r\nA dog\r\n")
    for source in (tmp_path, tmp_path / videos):
        rows, rejected = load(source)
        assert rows == {
            "videos/00000": ("00000.mp4", "A cat, black and white"),
            "videos/00001": ("00001.mp4", "A dog"),
        }
        assert set(rejected) == {f"{videos}:3", "videos/00001"}
    write(tmp_path / "caption.txt", "which of the two counts?\n" * 4)
    with pytest.raises(DataError, match=r"contains 2 caption files for .*; .* exactly one of"):
        load_source(str(tmp_path))


def test_sidecars_that_are_named_like_a_listing(tmp_path: Path) -> None:
    names = {"video": ".txt", "prompt": ".txt", "captions": ".json", "metadata": ".json"}
    for stem, ending in names.items():
        clip(tmp_path / f"{stem}.mp4", 40)
        caption = f"caption of {stem}"
        write(tmp_path / f"{stem}{ending}", caption if ending == ".txt" else {"caption": caption})
    rows, rejected = load(tmp_path)
    assert rows == {stem: (f"{stem}.mp4", f"caption of {stem}") for stem in names}
    assert rejected == {}


def test_dfm_sidecars(tmp_path: Path) -> None:
    """NVIDIA DFM, Megatron-Bridge: flat folder of .mp4 with .json, in older releases .jsonl, of the same name."""
    for index in range(5):
        clip(tmp_path / f"video_{index}.mp4", 40 * index)
    write(tmp_path / "video_0.json", {"caption": "A cat."})
    write(tmp_path / "video_1.jsonl", json.dumps({"vila_caption": "A dog."}) + "\n" + "{}\n")
    write(tmp_path / "video_2.json", {"title": "no caption"})
    write(tmp_path / "video_3.jsonl", "not json")
    rows, rejected = load(tmp_path)
    assert rows == {"video_0": ("video_0.mp4", "A cat."), "video_1": ("video_1.mp4", "A dog.")}
    assert set(rejected) == {"video_2", "video_3", "video_4"}


def test_dfm_meta_json_counts_frames(tmp_path: Path) -> None:
    """NVIDIA DFM: meta.json with start_frame and end_frame, both inclusive."""
    for name in ("a.mp4", "b.mp4"):
        clip(tmp_path / name, 40, num_frames=17)
    entry = {"file_name": "a.mp4", "start_frame": 4, "end_frame": 8, "vila_caption": "part"}
    whole = {"file_name": "b.mp4", "start_frame": 0, "end_frame": 16, "vila_caption": "whole"}
    bad = [
        entry | {"start_frame": 9},
        entry | {"start_frame": "x"},
        {"file_name": "a.mp4", "end_frame": 3, "vila_caption": "half"},
    ]
    (tmp_path / "text.mp4").write_text("no clip")
    broken = entry | {"file_name": "text.mp4"}
    write(tmp_path / "meta.json", [entry, whole, *bad, broken])
    rows, rejections = load_source(str(tmp_path))
    assert rows == [
        ClipRecord(key="a@0.500-1.125", path=tmp_path / "a.mp4", caption="part", start=0.5, end=1.125),
        ClipRecord("b", tmp_path / "b.mp4", "whole"),
    ]
    assert [r.key for r in rejections] == [f"meta.json:{line}" for line in (3, 4, 5, 6)]
    window = next(decode_clip(rows[0].path, ClipSpec(fps=FPS), rows[0].start, rows[0].end)).frames
    assert [round(float(frame[0].mean()) / 20) for frame in window] == [4, 5, 6, 7, 8]


def test_a_range_in_a_file_beside_a_clip(tmp_path: Path) -> None:
    for stem in "abcd":
        clip(tmp_path / f"{stem}.mp4", 40, num_frames=17)
    write(tmp_path / "a.json", {"caption": "seconds", "start": 0.5, "end": 1.5})
    write(tmp_path / "b.json", {"caption": "frames", "start_frame": 4, "end_frame": 8})
    write(tmp_path / "c.jsonl", json.dumps({"caption": "open", "start": 1}))
    write(tmp_path / "d.json", {"caption": "none", "start": 2, "end": 1})
    rows, rejections = load_source(str(tmp_path))
    assert rows == [
        ClipRecord(key="a@0.500-1.500", path=tmp_path / "a.mp4", caption="seconds", start=0.5, end=1.5),
        ClipRecord(key="b@0.500-1.125", path=tmp_path / "b.mp4", caption="frames", start=0.5, end=1.125),
        ClipRecord(key="c@1.000", path=tmp_path / "c.mp4", caption="open", start=1.0),
    ]
    assert [(r.key, "start=2.0 and end=1.0" in r.reason) for r in rejections] == [("d", True)]


@pytest.mark.parametrize("whole", [int, float])
def test_frames_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: type) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    clip(tmp_path / "a.mp4", 40, num_frames=17)
    rows = {
        "video": ["../a.mp4"] * 4,
        "caption": ["frames", "seconds", "all", "turned"],
        "Start_Frame": [whole(4), None, whole(0), whole(9)],
        "end_frame": [whole(8), None, whole(16), whole(8)],
        "start": [None, 0.5, None, None],
    }
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "data/train-0.parquet")
    found, rejections = load_source(str(tmp_path / "data"))
    assert [(row.caption, row.start, row.end) for row in found] == [
        ("all", None, None),
        ("seconds", 0.5, None),
        ("frames", 0.5, 1.125),
    ]
    assert [(r.key, "start_frame=9" in r.reason) for r in rejections] == [("train:3", True)]


@pytest.mark.parametrize("name", ["uneven.mp4", "uneven.mkv"])
def test_frames_are_counted_where_the_rate_varies(tmp_path: Path, name: str) -> None:
    write_clip(tmp_path / name, num_frames=74, stamps_ms=UNEVEN_MS)
    ranges = [(40, 60), (3, 20), (55, 71), (0, 70), (50, 73), (60, 200)]
    table = [{"video": name, "caption": "x", "start_frame": a, "end_frame": b} for a, b in ranges]
    for number, row in enumerate(table):
        write(tmp_path / "metadata.json", [row])
        (found,), rejections = load_source(str(tmp_path))
        assert not rejections
        clip = decode_clip(found.path, ClipSpec(fps=240), found.start, found.end)
        first, last = ranges[number]
        if last == 200:
            with pytest.raises(DataError, match=r"lasts .* less than end="):
                next(clip)
            continue
        seen = sorted(set(numbers(next(clip).frames)))
        assert seen[0] == first
        # The header of the mp4 ends inside the last two frames, and what it does not promise is not taken.
        assert seen == list(range(first, last + 1)) or last == 73


def test_images_are_clips_of_one_frame(tmp_path: Path) -> None:
    """Folders of diffusion-pipe, musubi, ai-toolkit: image.png + image.txt, videos among them."""
    for index, name in enumerate(["a.png", "b.jpg", "c.webp", "d.JPEG", "poster.jpg", "mute.png"]):
        image(tmp_path / name, 30 * index)
    for stem in ("a", "b", "c", "d", "poster"):
        write(tmp_path / f"{stem}.txt", f"caption of {stem}")
    clip(tmp_path / "poster.mp4", 40)
    rows, rejected = load(tmp_path)
    assert {key: caption for key, (_, caption) in rows.items()} == {
        stem: f"caption of {stem}" for stem in ("a", "b", "c", "d", "poster")
    }
    assert rows["poster"][0] == "poster.mp4"
    assert set(rejected) == {"poster", "mute"}
    assert "poster.mp4 of the same name" in rejected["poster"]
    still = next(decode_clip(tmp_path / "c.webp", ClipSpec(fps=16, max_frames=81)))
    assert still.frames.shape == (1, 32, 48, 3)
    assert abs(int(still.frames[0, 5, 5, 0]) - 60) <= 3


def test_pictures_of_a_readme_do_not_hide_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = clip(tmp_path / "made.mp4", 40).read_bytes()
    source = tmp_path / "repo"
    image(source / "assets/banner.png", 40)
    rows = {"video": [{"bytes": data, "path": "a.mp4"}], "caption": ["one"]}
    os.makedirs(source / "data")
    datasets.Dataset.from_dict(rows).to_parquet(source / "data/train-00000-of-00001.parquet")
    found, rejections = load_source(str(source), cache_dir=tmp_path / "clips")
    assert [row.caption for row in found] == ["one"]
    assert rejections == []
