"""Dataset configurations of musubi-tuner, diffusion-pipe (dataset.toml) and finetrainers (training.json).

Each section names a folder, a table or a dataset, which is read like a SOURCE. Settings of sizes, lengths and repeats are not
applied but logged, each with the option of wands that has the same effect.

Sources: musubi-tuner (docs/dataset_config.md, dataset/config_utils.py), diffusion-pipe (examples/dataset.toml, utils/dataset.py),
finetrainers (examples/training, trainer/sft_trainer/trainer.py).
"""

from __future__ import annotations

import json
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from wands.data.clips.captions import check_caption
from wands.data.clips.file_kinds import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from wands.data.clips.hf_dataset import hub_dataset, saved_dataset
from wands.data.clips.listings import listed_file, listed_folder
from wands.data.clips.records import ClipRecord, Rejection, reject
from wands.data.clips.sidecars import folder_with_sidecars, tar_archive
from wands.data.clips.source import Source
from wands.errors import DataError, one_line
from wands.texts import printable

_Settings = dict[str, Any]
MAX_BYTES = 1 << 16
"""Largest size of a configuration in bytes: `tomllib` needs quadratic time for a key of many parts, such as a.b.c."""
SECTION_LAYOUTS = (tar_archive, listed_file, listed_folder, folder_with_sidecars, saved_dataset, hub_dataset)
"""Layouts of a section, in the order in which they are tried."""
# Folders whose sub-folders the trainers do not read, then other sources.
_FOLDERS = ("image_directory", "video_directory", "path")
_CLIPS = (*_FOLDERS, "image_jsonl_file", "video_jsonl_file", "data_root", "dataset_file")
_TEXTS = (*_CLIPS, "caption_extension", "caption_prefix", "id_token", "dataset_type", "mask_path")
_SIZES = ("resolution", "resolutions", "size_buckets", "image_resolution_buckets", "video_resolution_buckets")
_NOTES = {
    **dict.fromkeys(("enable_bucket", "enable_ar_bucket", "ar_buckets"), "not used; clips keep their shape"),
    **dict.fromkeys(("control_directory", "control_path"), "not supported, so it is ignored"),
    **dict.fromkeys(("caption_options", "rename_columns"), "use --video-column and --caption-column"),
    "batch_size": "not used; set packing.max_tokens in the recipe",
    "frame_extraction": "use --clip-mode: head in place of head and full, slide in place of other values",
    "num_repeats": "encode these clips into a separate cache, and set data.sources[].repeat in the recipe",
    "source_fps": "not used, because the frame rate is read from each video",
}
"""Messages about settings that wands does not apply. `_note` makes those about sizes and numbers of frames."""


def trainer_config(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Return the clips of all sections of another trainer's dataset configuration, or None for any other source."""
    file = source.path
    parse = {".toml": tomllib.loads, ".json": json.loads}.get(file.suffix.lower())
    if parse is None or not file.is_file():
        return None
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"the file has more than {MAX_BYTES:,} bytes; move sections to another file")
        config: Any = parse(file.read_text(encoding="utf-8-sig"))
        name = "directory" if "directory" in config else "datasets"
        sections = config.pop(name, None)
        general = config.pop("general", {})
        if not (sections and all(isinstance(part, dict) for part in [general, *sections])):
            raise ValueError("no section [[datasets]] or [[directory]]")
        _refuse_subsets(file, sections)
        return _scan(source, config | general, sections)
    except (OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
        if parse is json.loads:  # a table
            return None
        raise DataError(f"SOURCE={file} is not a dataset config ({one_line(error)}); fix the file") from None


def _refuse_subsets(file: Path, sections: list[_Settings]) -> None:
    """Raise DataError for a configuration of kohya's sd-scripts, whose sections have subsets."""
    subsets = [subset for section in sections for subset in section.get("subsets") or ()]
    if subsets:
        folders = dict.fromkeys(str(subset.get("image_dir", "")) for subset in subsets)
        named = printable(", ".join(filter(None, folders)))[:500] or "none"
        raise DataError(
            f"SOURCE={file} is a configuration of kohya's sd-scripts ([[datasets.subsets]]), which is not read; pass the folder "
            f"of a subset as SOURCE (image_dir: {named}), and use data.sources[].repeat in the recipe for num_repeats"
        )


def _scan(source: Source, shared: _Settings, sections: list[_Settings]) -> Iterator[ClipRecord | Rejection]:
    """Yield the clips of all sections. Names that occur in several folders get the path of their folder in front."""
    file = source.path
    notes = defaultdict[str, list[str]](list)
    for number, settings in enumerate((shared, *sections)):
        for note in filter(None, map(_note, settings, settings.values())):
            notes[note].append(f"section {number}" if number else "all sections")
    for note, places in notes.items():
        source.log(f"{file.name}, {', '.join(places[:9])}: {note}")
    items: list[tuple[Path, ClipRecord | Rejection]] = []
    roots = defaultdict[str, set[Path]](set)
    known = set()
    for number, section in enumerate(sections, start=1):
        place = f"{file.name}:section {number}"
        try:
            part, ignored, prefix, masks = parsed = _read_section(source, shared | section)
            if parsed in known:  # trainers name a folder again for each size or length
                continue
            known.add(parsed)
            root = part.path.parent if part.path.is_file() else part.path
            found = (result for layout in SECTION_LAYOUTS if (result := layout(part)) is not None)
            clips = next(found, [reject(place, part.name, "section contains no clip; correct the path")])
            unmasked = set[str]()
            of_stem = {mask.stem: mask for mask in masks}
            for item in (clip for clip in clips if not str(clip.path).lower().endswith(ignored)):
                if not isinstance(item, ClipRecord):
                    items.append((root, item))
                    continue
                mask = of_stem.get(PurePosixPath(item.name).stem)
                item = item.with_mask(mask) if mask else item
                unmasked |= set() if item.mask else {item.name}
                roots[item.name].add(root)
                if prefix and item.caption:
                    item = replace(item, caption=check_caption(prefix + item.caption, place))
                items.append((root, item))
            if "mask_path" in section and unmasked:
                some = f"{len(unmasked):,} of the clips, such as {min(unmasked)}"
                source.log(f"{place}: mask_path has no mask for {some}; all their pixels are trained")
        except (DataError, OSError) as error:
            fix = "; correct the path" if isinstance(error, OSError) else ""
            yield reject(place, file, one_line(error, 1000) + fix)
    top = os.path.commonpath([root for root, _ in items] or [file])
    for root, item in items:
        if isinstance(item, ClipRecord) and len(roots[item.name]) > 1:
            item = replace(item, name=(root.relative_to(top) / item.name).as_posix())
        yield item


def _read_section(
    source: Source, settings: _Settings
) -> tuple[Source, tuple[str, ...], str, tuple[Path, ...]]:
    """Return (part, ignored, prefix, masks) of one section.

    `part` is the source of its clips, `ignored` are extensions to leave out, `prefix` stands before each caption, and `masks` are
    loss masks for the clips of the same stem. As in the other trainer, a relative path is first looked up in the working
    directory, then in the folder of the configuration.

    Raises:
        DataError: if the section names no clips, a path in it does not exist, or a setting is not a text.
    """
    if wrong := [key for key in _TEXTS if not isinstance(settings.get(key, ""), str)]:
        raise DataError(f"{wrong[0]}={settings[wrong[0]]!s:.60} must be a text; write the value in quotes")
    if not (key := next((key for key in _CLIPS if settings.get(key)), "")):
        raise DataError(f"section of {source.name} names no clips; add the key {' or '.join(_CLIPS)}")

    def find(key: str, default: str = "") -> str:
        paths = [os.path.normpath(base / settings[key]) for base in (Path.cwd(), source.path.parent)]
        if not (path := next(filter(os.path.exists, paths), default)):
            raise DataError(f"{key}={settings[key][:99]} does not exist ({paths[0][:500]}); correct the path")
        return path

    name = settings[key]
    kind = settings.get("dataset_type") or key.partition("_")[0]
    path = find(key, name if key == "data_root" and name[0] not in "/~." else "")
    files = sorted(Path(find("mask_path")).glob("*")) if settings.get("mask_path") else []
    masks = tuple(file for file in files if file.name.lower().endswith(VIDEO_EXTENSIONS + IMAGE_EXTENSIONS))
    extension = settings.get("caption_extension")
    token = settings.get("id_token")
    sidecars = (f".{extension.lstrip('.')}",) if extension else source.sidecars
    ignored = {"image": VIDEO_EXTENSIONS, "video": IMAGE_EXTENSIONS}.get(kind, ())
    prefix = f"{token} " if token else settings.get("caption_prefix", "")
    part = replace(source, name=path, sidecars=sidecars, recursive=key not in _FOLDERS)
    return part, ignored, prefix, masks


def _note(key: str, value: Any) -> str:
    """Return the message about another trainer's setting that wands does not apply, or "" for a setting that wands applies."""
    if key in _TEXTS or (key == "num_repeats" and value == 1):
        return ""
    note = _NOTES.get(key, "ignored, because wands has no such setting")
    try:
        text = json.dumps(value, default=str)
        if key in ("target_frames", "frame_buckets", "max_frames"):
            note = f"use --max-frames {max(value) if isinstance(value, list) else int(value)}"
        elif key in _SIZES:
            note = f"use {_pixels(key, value)}"
    except (IndexError, OverflowError, RecursionError, TypeError, ValueError):
        text = "..."
        note = "not used, because wands cannot read this value"
    return printable(f"{key[:99]} = {text[:180]}: {note[:199]}")


def _pixels(key: str, value: Any) -> str:
    """Return the options of wands, such as "--max-pixels 230400", that replace a setting such as "resolution"."""
    sizes = [value] if key == "resolution" else value
    step = -1 if key.endswith("resolution_buckets") else 1  # (frames,) height, width, or the reverse
    sizes = [([size, size] if isinstance(size, int) else [*map(int, size)])[::step] for size in sizes]
    # diffusion-pipe scales each clip to all `resolutions`; of buckets, a clip uses only one.
    areas = dict.fromkeys(size[0] * size[1] for size in sizes)
    options = [f"--max-pixels {area}" for area in (areas if key == "resolutions" else [max(areas)])]
    options += [f"--max-frames {max(size[2] for size in sizes)}"] if len(sizes[0]) > 2 else []
    return " ".join(options)
