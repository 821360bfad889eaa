"""Dataset configurations as musubi-tuner, diffusion-pipe and finetrainers document them, with real tiny clips."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.listing_folders import clip, image, load, write
from wands.data.clips.file_kinds import IMAGE_EXTENSIONS
from wands.data.clips.layouts import load_source
from wands.errors import DataError

MUSUBI = """
# general configurations
[general]
resolution = [960, 544]
caption_extension = ".caption"
batch_size = 1
enable_bucket = true
bucket_no_upscale = false

[[datasets]]
image_directory = "ROOT/images"
cache_directory = "ROOT/cache_images"
num_repeats = 1
control_directory = "ROOT/control"

[[datasets]]
video_directory = "ROOT/videos" # next to the clips are images
cache_directory = "ROOT/cache_videos"
target_frames = [1, 25, 45]
frame_extraction = "head"
source_fps = 30.0
num_repeats = 2

[[datasets]]
image_jsonl_file = "ROOT/image_metadata.jsonl"
cache_directory = "ROOT/cache_jsonl"

[[datasets]]
video_jsonl_file = "ROOT/metadata.jsonl"
target_frames = [1, 25, 45]
frame_extraction = "head"
cache_directory = "ROOT/cache_head"

[[datasets]] # the same file again
video_jsonl_file = "ROOT/metadata.jsonl"
target_frames = [1]
frame_stride = 10
frame_extraction = "full"
max_frames = 45
resolution = 512
cache_directory = "ROOT/cache_stride"
fp_latent_window_size = 9
"""
DIFFUSION_PIPE = """
resolutions = [512, [1280, 720]]
enable_ar_bucket = true
min_ar = 0.5
ar_buckets = [[512, 512], [448, 576]]
frame_buckets = [1, 33]
caption_prefix = 'In the style of TRG, '

[[directory]]
path = 'ROOT/grayscale'
mask_path = 'ROOT/grayscale/masks'
num_repeats = 10

[[directory]]
path = 'ROOT/something_else'
num_repeats = 5
resolutions = [[448, 576]]
size_buckets = [[960, 960, 1], [1280, 704, 33]]
caption_prefix = ''
"""
FINETRAINERS: dict[str, Any] = {
    "datasets": [
        {
            "data_root": "ROOT/crush-smol",
            "dataset_type": "video",
            "id_token": "PIKA_CRUSH",
            "video_resolution_buckets": [[49, 512, 512], [49, 480, 704]],
            "reshape_mode": "bicubic",
            "remove_common_llm_caption_prefixes": True,
        },
        {
            "data_root": "ROOT/crush-smol",
            "dataset_type": "video",
            "id_token": "PIKA_CRUSH",
            "video_resolution_buckets": [[81, 480, 832]],
            "reshape_mode": "bicubic",
        },
        {
            "data_root": "ROOT/pairs",
            "dataset_type": "image",
            "image_resolution_buckets": [[1280, 720]],
            "caption_options": {"column_names": ["caption.txt", "detailed_caption.txt"]},
            "rename_columns": {"edited_img": "image"},
            "reshape_mode": "center_crop",
        },
    ]
}


def write_config(folder: Path, name: str, content: str | dict[str, Any]) -> Path:
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    return write(folder / name, text.replace("ROOT", str(folder)))


def pair(path: Path, caption: str, extension: str = ".txt") -> None:
    """A clip or image with a caption file next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (image if path.suffix in IMAGE_EXTENSIONS else clip)(path, 40)
    write(path.with_suffix(extension), caption)


def load_notes(source: Path) -> tuple[dict[str, tuple[str, str]], dict[str, str], list[str]]:
    notes: list[str] = []
    return *load(source, log=notes.append), [note.removeprefix(f"{source.name}, ") for note in notes]


def test_musubi_tuner(tmp_path: Path) -> None:
    pair(tmp_path / "images/one.png", "an image", ".caption")
    write(tmp_path / "images/one.txt", "not the caption")
    pair(tmp_path / "images/nested/two.png", "a sub-folder, which musubi-tuner does not read", ".caption")
    pair(tmp_path / "control/one.png", "a control image", ".caption")
    pair(tmp_path / "videos/run.mp4", "a video", ".caption")
    pair(tmp_path / "videos/still.png", "an image in a folder of videos", ".caption")
    clip(tmp_path / "videos/bare.mp4", 80)
    for kind, name in (("image", "a.jpg"), ("video", "b.mp4")):
        pair(tmp_path / "more" / name, "unread")
        row = {f"{kind}_path": f"{tmp_path}/more/{name}", "caption": f"a listed {kind}"}
        write(tmp_path / ("image_" * (kind == "image") + "metadata.jsonl"), json.dumps(row))
    rows, rejected, notes = load_notes(write_config(tmp_path, "dataset.toml", MUSUBI))
    assert rows == {
        "one": ("one.png", "an image"),
        "run": ("run.mp4", "a video"),
        "more/a": ("a.jpg", "a listed image"),
        "more/b": ("b.mp4", "a listed video"),
    }
    assert list(rejected) == ["bare"]
    assert "missing caption; write a caption in bare.caption next to the clip" in rejected["bare"]
    unknown = "ignored, because wands has no such setting"
    shape = "not used; clips keep their shape"
    clip_mode = "use --clip-mode: head in place of head and full, slide in place of other values"
    assert notes == [
        "all sections: resolution = [960, 544]: use --max-pixels 522240",
        "all sections: batch_size = 1: not used; set packing.max_tokens in the recipe",
        f"all sections: enable_bucket = true: {shape}",
        f"all sections: bucket_no_upscale = false: {unknown}",
        f'section 1: cache_directory = "{tmp_path}/cache_images": {unknown}',
        f'section 1: control_directory = "{tmp_path}/control": not supported, so it is ignored',
        f'section 2: cache_directory = "{tmp_path}/cache_videos": {unknown}',
        "section 2, section 4: target_frames = [1, 25, 45]: use --max-frames 45",
        f'section 2, section 4: frame_extraction = "head": {clip_mode}',
        "section 2: source_fps = 30.0: not used, because the frame rate is read from each video",
        "section 2: num_repeats = 2: encode these clips into a separate cache, and set data.sources[].repeat in the recipe",
        f'section 3: cache_directory = "{tmp_path}/cache_jsonl": {unknown}',
        f'section 4: cache_directory = "{tmp_path}/cache_head": {unknown}',
        "section 5: target_frames = [1]: use --max-frames 1",
        f"section 5: frame_stride = 10: {unknown}",
        f'section 5: frame_extraction = "full": {clip_mode}',
        "section 5: max_frames = 45: use --max-frames 45",
        "section 5: resolution = 512: use --max-pixels 262144",
        f'section 5: cache_directory = "{tmp_path}/cache_stride": {unknown}',
        f"section 5: fp_latent_window_size = 9: {unknown}",
    ]
    # musubi-tuner also reads a configuration in JSON.
    same = {"general": {"caption_extension": "caption"}, "datasets": [{"image_directory": "images"}]}
    assert load(write(tmp_path / "dataset.json", same)) == ({"one": ("one.png", "an image")}, {})


def test_diffusion_pipe(tmp_path: Path) -> None:
    pair(tmp_path / "grayscale/1.png", "a house")
    pair(tmp_path / "grayscale/2.png", "a tree")
    image(tmp_path / "grayscale/masks/1.png", 255)
    write(tmp_path / "grayscale/masks/1.txt", "no mask")
    clip(tmp_path / "something_else/2.mp4", 40)
    write(tmp_path / "something_else/captions.json", {"2.mp4": ["a dog", "a puppy"]})
    config = write_config(tmp_path, "dataset.toml", DIFFUSION_PIPE)
    rows, rejected, notes = load_notes(config)
    assert rejected == {}
    assert set(rows.values()) == {
        ("1.png", "In the style of TRG, a house"),
        ("2.png", "In the style of TRG, a tree"),
        ("2.mp4", "a dog"),
        ("2.mp4", "a puppy"),
    }
    repeat = "encode these clips into a separate cache, and set data.sources[].repeat in the recipe"
    assert notes == [
        "all sections: resolutions = [512, [1280, 720]]: use --max-pixels 262144 --max-pixels 921600",
        "all sections: enable_ar_bucket = true: not used; clips keep their shape",
        "all sections: min_ar = 0.5: ignored, because wands has no such setting",
        "all sections: ar_buckets = [[512, 512], [448, 576]]: not used; clips keep their shape",
        "all sections: frame_buckets = [1, 33]: use --max-frames 33",
        f"section 1: num_repeats = 10: {repeat}",
        f"section 2: num_repeats = 5: {repeat}",
        "section 2: resolutions = [[448, 576]]: use --max-pixels 258048",
        "section 2: size_buckets = [[960, 960, 1], [1280, 704, 33]]: use --max-pixels 921600 --max-frames 33",
        "dataset.toml:section 1: mask_path has no mask for 1 of the clips, such as 2.png; all their pixels are trained",
    ]
    masks = {record.path.name: record.mask for record in load_source(str(config), log=notes.append)[0]}
    assert masks == {"1.png": tmp_path / "grayscale/masks/1.png", "2.png": None, "2.mp4": None}
    # Clips whose masks are missing would be trained on with the parts that the masks leave out.
    config.write_text(config.read_text().replace("/grayscale/masks", "/grayscale/mask"))
    rows, rejected = load(config)
    assert {name for name, _ in rows.values()} == {"2.mp4"}
    assert "mask_path=" in rejected["dataset.toml:section 1"]


def test_finetrainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip(tmp_path / "crush-smol/videos/0.mp4", 40)
    write(tmp_path / "crush-smol/videos.txt", "videos/0.mp4\n")
    write(tmp_path / "crush-smol/prompt.txt", "a hydraulic press\n")
    pair(tmp_path / "pairs/a.png", "a card")
    pair(tmp_path / "pairs/b.mp4", "not an image")
    config = write_config(tmp_path, "training.json", FINETRAINERS)
    rows, rejected, notes = load_notes(config)
    assert rows == {"videos/0": ("0.mp4", "PIKA_CRUSH a hydraulic press"), "a": ("a.png", "a card")}
    assert rejected == {}
    columns = "use --video-column and --caption-column"
    assert [note for note in notes if "no such setting" not in note] == [
        "section 1: video_resolution_buckets = [[49, 512, 512], [49, 480, 704]]: use --max-pixels 337920 --max-frames 49",
        "section 2: video_resolution_buckets = [[81, 480, 832]]: use --max-pixels 399360 --max-frames 81",
        "section 3: image_resolution_buckets = [[1280, 720]]: use --max-pixels 921600",
        f'section 3: caption_options = {{"column_names": ["caption.txt", "detailed_caption.txt"]}}: {columns}',
        f'section 3: rename_columns = {{"edited_img": "image"}}: {columns}',
    ]
    # Paths are relative to the working directory or, in a data set that was moved, to the configuration.
    config.write_text(config.read_text().replace(f"{tmp_path}/", ""))
    assert load(config) == (rows, {})
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load(config.rename(tmp_path / "configs/training.json")) == (rows, {})


def test_a_data_root_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[str] = []

    def load_dataset(name: str, **_: Any) -> None:
        asked.append(name)
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for key in ("data_root", "path", "video_directory"):
        config = write(tmp_path / f"{key}.json", {"datasets": [{key: "finetrainers/crush-smol"}]})
        (rejection,) = load_source(str(config))[1]
        assert ("offline" if key == "data_root" else "does not exist") in rejection.reason
    assert asked == ["finetrainers/crush-smol"]


def test_keys_do_not_depend_on_how_the_source_is_named(tmp_path: Path) -> None:
    for name in ("set/anna/clips/walk.mp4", "set/anna/clips/run.mp4", "set/bert/clips/walk.mp4"):
        pair(tmp_path / name, name)
    sections = [{"path": f"set/{name}/clips"} for name in ("anna", "bert")]
    first = write(tmp_path / "first.json", {"datasets": sections[:1]})
    assert load(first) == load(tmp_path / "set/anna/clips")
    both = load(write(tmp_path / "both.json", {"datasets": sections}))[0]
    named = load(tmp_path / "set")[0]
    # Only equal names get a prefix: the path that they have in the common folder.
    assert sorted(both) == ["anna/clips/walk", "bert/clips/walk", "run"]
    assert both["bert/clips/walk"] == named["bert/clips/walk"]


HOSTILE: dict[str, str | bytes] = {
    "empty.toml": "",
    "text.toml": "no config",
    "binary.toml": bytes(range(256)),
    "utf16.toml": "a = 1".encode("utf-16"),
    "nested.toml": "a = " + "[" * 50_000,
    "parts.toml": ".".join("a" * 10_000) + " = 1",
    "large.toml": "#" * 70_000,
    "number.toml": "datasets = 5",
    "texts.toml": 'datasets = ["a", "b"]',
    "table.toml": "[datasets]\npath = '/'",
    "general.toml": "general = 5\n[[datasets]]\npath = 'x'",
    "main.toml": "dataset = 'examples/dataset.toml'\nepochs = 1000\n[model]\ntype = 'wan'",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "parts.toml" else ()) for name in HOSTILE]
)
def test_a_file_that_is_no_configuration_ends_in_one_sentence(tmp_path: Path, name: str) -> None:
    content = HOSTILE[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.monotonic()
    with pytest.raises(DataError, match=r"SOURCE=.* is not a dataset config \(.*\); fix the file") as caught:
        load_source(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 60


SECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"path": 5},
    {"path": ["a"]},
    {"path": "a\0b"},
    {"path": "x" * 5000},
    {"path": "../" * 50 + "etc/nothing"},
    {"path": "~nobody-of-this-name"},
    {"path": "a\ud800"},
    {"data_root": "~nobody-of-this-name/x"},
    {"data_root": "y" * 5000},
    {"data_root": "one_word"},
    {"video_directory": "empty"},
    {"video_jsonl_file": "good/a.mp4"},
    {"path": "good", "caption_prefix": ["x"]},
    {"path": "good", "id_token": "\ud800"},
    *({"path": "good", "mask_path": value} for value in (5, "gone", "a\0b", "a\ud800", "m" * 5000)),
    {"dataset_file": "gone.jsonl"},
)


def test_a_damaged_section_costs_only_itself(tmp_path: Path) -> None:
    pair(tmp_path / "good/a.mp4", "a good clip")
    (tmp_path / "empty").mkdir()
    config = write(tmp_path / "dataset.json", {"datasets": [*SECTIONS, {"path": "good"}]})
    rows, rejections = load_source(str(config))
    assert [row.key for row in rows] == ["a"]
    assert [item.key for item in rejections] == sorted(
        f"dataset.json:section {number}" for number in range(1, len(SECTIONS) + 1)
    )
    assert all("\n" not in item.reason and len(item.reason) < 11_000 for item in rejections)
    values = [None, "x", {"x": [1]}, ["x"], [], [[]], [[1]], [1e308, 2], -1, True, "\x1b[2J\n", 10**4000]
    keys = (
        "resolution",
        "resolutions",
        "size_buckets",
        "video_resolution_buckets",
        "target_frames",
        "num_repeats",
        "x\n",
    )
    for value in values:
        notes: list[str] = []
        write(config, {"datasets": [{"path": "good", **dict.fromkeys(keys, value)}]})
        assert len(load_source(str(config), log=notes.append)[0]) == 1
        assert len(notes) >= len(keys) - 1
        assert all(len(note) < 500 and note.isprintable() for note in notes)


def test_other_json_files_are_tables(tmp_path: Path) -> None:
    clip(tmp_path / "datasets.mp4", 40)
    table = write(tmp_path / "table.json", {"datasets.mp4": ["a caption"]})
    assert load(table) == ({"datasets": ("datasets.mp4", "a caption")}, {})
    shutil.copy(tmp_path / "datasets.mp4", tmp_path / "datasets")
    write(table, {"datasets": ["a caption"]})
    assert [row.caption for row in load_source(str(table))[0]] == ["a caption"]


def test_a_config_of_sd_scripts_has_its_own_message(tmp_path: Path) -> None:
    path = tmp_path / "dataset.toml"
    path.write_text(
        "[general]\ncaption_extension = '.txt'\n[[datasets]]\nresolution = 512\n"
        "[[datasets.subsets]]\nimage_dir = 'cats'\nnum_repeats = 10\n[[datasets.subsets]]\nimage_dir = 'dogs'\n"
    )
    with pytest.raises(DataError, match="configuration of kohya's sd-scripts") as caught:
        load_source(str(path))
    assert "(image_dir: cats, dogs)" in str(caught.value)
    assert "data.sources[].repeat" in str(caught.value)
