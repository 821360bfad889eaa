"""Read files that list clips: tables, pairs of text files, FastVideo's merge.txt, and diffusion-pipe's captions.json."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from wands.data.clips.archives import is_tar
from wands.data.clips.file_kinds import CLIP_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from wands.data.clips.list_cells import split_lists
from wands.data.clips.records import (
    MAX_PATH,
    ClipRecord,
    Rejection,
    clip_key,
    clip_names,
    locate,
    records_of_clip,
    reject,
    safe_name,
)
from wands.data.clips.sidecars import (
    CAPTION_LINES,
    CAPTIONS_OF_FOLDER,
    VIDEO_LINES,
    name_in_captions,
    scan_tar,
    walk,
)
from wands.data.clips.source import Source
from wands.data.clips.tables import NumberedRow, read_lines, read_pairs, read_table
from wands.errors import DataError

_MERGE = "merge.txt"  # FastVideo
_TABLES = (
    "metadata.csv",
    "metadata.jsonl",
    "metadata.json",
    "meta.json",  # NVIDIA DFM
    "videos2caption.json",  # FastVideo
    "json_of_internal_datasets.json",  # VideoX-Fun
)
# Up to this number, unlisted clips of a folder are always reported one by one.
_MAX_SINGLE_REPORTS = 10
# Folders that contain the clips of a table, although the table's paths do not name the folder: FastVideo, DiffSynth.
_CLIP_FOLDERS = ("videos", "train")


@dataclass
class Listing:
    """A file that lists clips, and the clips and images that its rows name.

    Attributes:
        clips: paths of the listed clips that exist.
        other_files: normalized paths of videos and images that rows name outside the video column, such as input images. They are
            neither clips of the source nor unlisted clips.
        is_complete: whether every clip in the folder of `file` is listed or rejected. If False, unlisted clips are searched.
    """

    file: Path
    source: Source
    clips: set[Path] = field(default_factory=set)
    other_files: set[str] = field(default_factory=set)
    is_complete: bool = False


def listed_file(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Return the clips and rejections of a source that is one file with a list of clips, or None if it is no file."""
    return _scan_listing(Listing(source.path, source)) if source.path.is_file() else None


def single_clip(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Return the record of a source that is one clip file, or None for another source or if captions are needed."""
    path = source.path
    if source.needs_caption or not (path.is_file() and path.name.lower().endswith(CLIP_EXTENSIONS)):
        return None
    return records_of_clip(path.name, path, [""], path.name, {}, kinds=source.files)


def listed_folder(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Return the listed clips of a folder with a listing, and rejections of unlisted clips; None without a listing."""
    file = _find_listing(source)
    return None if file is None else _scan_whole_folder(Listing(file, source))


def _find_listing(source: Source) -> Path | None:
    """Return the listing of a folder, else of its sub-folder `source.split`, else None. DataError if there are several."""
    if not source.path.is_dir():
        return None
    for folder in (source.path, source.path / source.split):
        names = [*_TABLES, CAPTIONS_OF_FOLDER, _MERGE]
        if any((folder / name).is_file() for name in CAPTION_LINES):
            names += VIDEO_LINES
        files = [folder / name for name in names if (folder / name).is_file()]
        # If a clip has the same stem, the file is the caption of the clip: video.txt of video.mp4.
        files = [file for file in files if not any(file.with_suffix(end).exists() for end in CLIP_EXTENSIONS)]
        if folder / _MERGE in files:  # merge.txt names the other tables
            files = [folder / _MERGE]
        if len(files) > 1:
            found = " and ".join(file.name for file in files)
            fix = "pass the path of one of these files as SOURCE"
            raise DataError(f"SOURCE={source.name} contains several files that list clips ({found}); {fix}")
        if files:
            return files[0]
    return None


def _scan_listing(listing: Listing) -> Iterator[ClipRecord | Rejection]:
    """Yield the clips that a listing names. The name of the file decides the format."""
    file = listing.file
    if file.name == _MERGE:
        yield from _scan_merged(listing)
    elif file.name in VIDEO_LINES:
        captions = [path for path in map(file.with_name, CAPTION_LINES) if path.is_file()]
        if len(captions) != 1:
            found = f"contains {len(captions)} caption files for {file.name}"
            fix = f"the folder must contain exactly one of {', '.join(CAPTION_LINES)}"
            raise DataError(f"SOURCE={file.parent} {found}; {fix}")
        listing.source = replace(listing.source, video_column=None, caption_column=None)
        yield from _scan_rows(listing, file, read_pairs(file, captions[0]), file.parent)
    else:
        rows = read_table(file)
        captions_by_name = _captions_of_folder(rows) if file.name == CAPTIONS_OF_FOLDER else None
        if captions_by_name is not None:
            listing.is_complete = True
            yield from _scan_captioned_folder(listing, captions_by_name)
        else:
            yield from _scan_rows(listing, file, rows, file.parent)


def _scan_whole_folder(listing: Listing) -> Iterator[ClipRecord | Rejection]:
    """Yield the clips of a listing, and rejections of unlisted videos in its folder or below.

    Unlisted images are rejected if the listing names an image. More than `_MAX_SINGLE_REPORTS` unlisted clips, if fewer are
    listed, get one rejection together.
    """
    items = list(_scan_listing(listing))
    yield from items
    if listing.is_complete:
        return
    file = listing.file
    folder = file.parent
    images = any(path.name.lower().endswith(IMAGE_EXTENSIONS) for path in listing.clips)
    wanted = CLIP_EXTENSIONS if images else VIDEO_EXTENSIONS
    known = listing.other_files | {_composed(path) for path in listing.clips}
    # Nodes detect links, and names on systems that treat A.MP4 and a.mp4 as equal.
    nodes = cache(lambda: set(map(_node, listing.clips)))
    unreadable: list[Rejection] = []
    keys = {clip_key(item.name) for item in items if isinstance(item, ClipRecord)}
    table = f"the tables of {file.name}" if file.name == _MERGE else file.name
    problem = f"no readable row in {table} names"
    for root, files in walk(folder, unreadable, listing.source.recursive):
        clips = [root / name for name in clip_names(files, wanted, listing.source.files)]
        left = [path for path in clips if _composed(path) not in known and _node(path) not in nodes()]
        if len(left) <= max(_MAX_SINGLE_REPORTS, len(clips) - len(left)):
            for path in left:
                name = path.relative_to(folder).as_posix()
                key = safe_name(name) if clip_key(name) in keys else clip_key(name)
                fix = "add a row with its caption, or move the clip elsewhere"
                yield reject(key, path, f"{problem} this clip; {fix}")
        else:
            clips_left = f"{len(left):,} of the clips in this folder ({left[0].name}, {left[1].name} ...)"
            reason = f"{problem} {clips_left}; add rows with their captions, or move the clips elsewhere"
            below = f":{root.relative_to(folder).as_posix()}" if root != folder else ""
            yield reject(f"{file.name}{below}", root, reason)
    yield from unreadable


def _composed(path: str | Path) -> str:
    return unicodedata.normalize("NFC", str(path))


def _node(path: Path) -> tuple[int, int] | None:
    """Return (device, inode), which is equal for two names of the same file. Return None for a broken link."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _scan_rows(
    listing: Listing, table: Path, rows: list[NumberedRow], folder: Path
) -> Iterator[ClipRecord | Rejection]:
    """Yield the records of a table's clips, and a rejection for each unusable row, and complete `listing`.

    Paths in the rows are relative to `folder` or its sub-folders "videos" and "train".
    """
    source = listing.source
    if not rows:
        raise DataError(f"SOURCE={table} lists no clip; add rows with a video and a caption")
    readable = [row for _, row in rows if isinstance(row, dict)]
    if readable:
        source.check_columns({name for row in readable for name in row})
    folders = (folder, *(folder / name for name in _CLIP_FOLDERS))
    for number, row in rows:
        place = f"{table.name}:{number}"
        if isinstance(row, str):
            yield reject(place, table, row)
            continue
        video, _ = source.pick(row)
        path: Any = video or table
        listing.other_files |= _files_in_other_columns(row, video, folders)
        try:
            if not isinstance(video, str) or not video.strip():
                raise DataError("this row names no clip; write a path in the video column, or remove the row")
            name, path = locate(video.strip(), folders, listing.file.parent)
            listing.clips.add(path)
            for part in split_lists(row, source.caption_names):
                captions = source.check_captions(source.pick_caption(part), place)
                yield from records_of_clip(name, path, captions, place, part, folders, source.files)
        except DataError as error:
            yield reject(place, path, error)


def _files_in_other_columns(row: dict[str, Any], video: object, folders: tuple[Path, ...]) -> set[str]:
    values = [item for value in row.values() for item in (value if isinstance(value, list) else [value])]
    files = [item for item in values if isinstance(item, str) and item != video and len(item) <= MAX_PATH]
    return {
        _composed(os.path.normpath(folder / file))
        for file in files
        if file.lower().endswith(CLIP_EXTENSIONS)
        for folder in folders
    }


def _scan_merged(listing: Listing) -> Iterator[ClipRecord | Rejection]:
    """Yield the clips of FastVideo's merge.txt: lines of a folder and a table of captions, separated by a comma."""
    file = listing.file
    for number, line in enumerate(read_lines(file), start=1):
        if not line:
            continue
        place = f"{file.name}:{number}"
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 2 or not all(parts):
            reason = "unreadable line; write the path of a folder, a comma, and the path of a table"
            yield reject(place, file, reason)
            continue
        # FastVideo resolves paths from the working directory. In a data set that was moved, they are relative to the list.
        folder, table = (
            next(filter(os.path.exists, (Path(part).absolute(), file.parent / part)), Path(part))
            for part in parts
        )
        if os.path.isfile(table):  # False for a name of 5,000 characters
            yield from _scan_rows(listing, table, read_table(table), folder)
        else:
            yield reject(place, parts[1], f"no such table (looked for {parts[1]}); correct the path")


def _captions_of_folder(rows: list[NumberedRow]) -> dict[str, Any] | None:
    """Return the captions by file name from captions.json, or None if it has other columns or names a file twice."""
    if not rows or any(isinstance(row, str) or set(row) != {"file_name", "caption"} for _, row in rows):
        return None
    captions = {str(row["file_name"]): row["caption"] for _, row in rows if isinstance(row, dict)}
    # A list may name a clip twice: the last caption must not silently win.
    return captions if len(captions) == len(rows) else None


def _scan_captioned_folder(listing: Listing, captions: dict[str, Any]) -> Iterator[ClipRecord | Rejection]:
    """Yield the files and archive members in the folder of captions.json; of sub-folders, only those that it names."""
    file = listing.file
    source = listing.source
    folder = file.parent
    used = set[str]()
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for archive in filter(is_tar, map(folder.joinpath, sorted(present))):
        yield from scan_tar(archive, folder, source, captions, used)
    clips = [
        name_in_captions(name, captions, present) or name for name in clip_names(present, kinds=source.files)
    ]
    # captions.json of other tools may name clips in sub-folders.
    elsewhere = captions.keys() - used - set(clips)
    for name in (*clips, *sorted(elsewhere)):
        try:
            located, path = locate(name, (folder,))
            if name not in captions and source.needs_caption:
                raise DataError(f"{file.name} has no entry for this clip ({name}); add its captions")
            texts = source.check_captions(captions.get(name), file.name)
            yield from records_of_clip(located, path, texts, clip_key(located), {}, kinds=source.files)
        except DataError as error:
            key = f"{file.name}:{name}" if name in elsewhere else clip_key(name)
            yield reject(key, folder / name, error)
