"""Read files that list clips.

These files are tables, pairs of text files (paths and captions), FastVideo's merge.txt, and diffusion-pipe's
captions.json.
"""

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
    """A file that lists clips, such as a table, and the clips and images that the file's rows name.

    Attributes:
        file: the file that lists clips.
        source: source of the clips, with the names of the columns.
        clips: paths of the listed clips that exist.
        other_files: normalized paths of videos and images that rows name outside the video column, such as input images.
            These files are not clips of the source, and are not rejected as unlisted clips.
        is_complete: whether every clip in the folder of `file` has already been listed or rejected. If False, the folder
            is searched for clips that the file does not list.
    """

    file: Path
    source: Source
    clips: set[Path] = field(default_factory=set)
    other_files: set[str] = field(default_factory=set)
    is_complete: bool = False


def listed_file(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Read a source that is one file with a list of clips, such as a table. Return the clips and the rejections,
    or None if the source is not a file.
    """
    return _scan_listing(Listing(source.path, source)) if source.path.is_file() else None


def single_clip(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Read a source that is one clip file, without a caption. Return the clip's record, or None if the source is not a clip
    or `Source.needs_caption` is true.
    """
    path = source.path
    if source.needs_caption or not (path.is_file() and path.name.lower().endswith(CLIP_EXTENSIONS)):
        return None
    return records_of_clip(path.name, path, [""], path.name, {}, kinds=source.files)


def listed_folder(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Read a source that is a folder with a file that lists the folder's clips. Return the listed clips, or None if there
    is no such file.

    Unlisted clips in the folder are rejected.
    """
    file = _find_listing(source)
    return None if file is None else _scan_whole_folder(Listing(file, source))


def _find_listing(source: Source) -> Path | None:
    """Return the file that lists the clips of a folder, or None if there is no such file.

    The function searches the folder and, after that, its sub-folder with the name `source.split`, such as "train".

    Raises:
        DataError: if a folder contains several files that list clips.
    """
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
    """Yield the clips that a listing (a file such as a table) names. The name of the file decides the format."""
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
    """Yield the clips that a listing (a file such as a table) names, and rejections of unlisted clips.

    An unlisted clip is a video (in the listing's folder or below) that no readable row of the listing names. If the
    listing names an image, unlisted images are rejected, too. A folder with more than `_MAX_SINGLE_REPORTS` unlisted clips,
    and fewer listed than unlisted clips, gets one rejection for all its unlisted clips. In any other folder, each unlisted
    clip gets its own rejection.
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
    """Yield the records of a table's clips (one record for each caption), and a rejection for each row that cannot be used.

    Args:
        listing: the table itself, or the merge.txt (FastVideo's list of tables) that names the table. The function adds the
            paths of the clips to `listing.clips`, and the paths of other files in the rows to `listing.other_files`.
        table: file of the table, for error messages.
        rows: rows of the table.
        folder: folder to which paths in the rows are relative. Paths may also be relative to its sub-folders "videos" and
            "train".
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
            yield reject(place, video or table, error)


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
    """Yield the clips that FastVideo's merge.txt lists. A line contains two paths, separated by a comma: a folder of clips, and
    a table with the captions of these clips.
    """
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
    """Convert the rows of diffusion-pipe's captions.json to a dictionary from file name to captions.

    Return None if the rows have other columns than file_name and caption, or name a file twice.
    """
    if not rows or any(isinstance(row, str) or set(row) != {"file_name", "caption"} for _, row in rows):
        return None
    captions = {str(row["file_name"]): row["caption"] for _, row in rows if isinstance(row, dict)}
    # A list may name a clip twice: the last caption must not silently win.
    return captions if len(captions) == len(rows) else None


def _scan_captioned_folder(listing: Listing, captions: dict[str, Any]) -> Iterator[ClipRecord | Rejection]:
    """Yield the clips in the folder of diffusion-pipe's captions.json: video and image files, and clips in tar archives.

    Files in sub-folders are read only if captions.json names them.

    Args:
        listing: the file captions.json, with the source that contains this file.
        captions: maps file names to captions. A clip without an entry is rejected if the source needs captions.
    """
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
