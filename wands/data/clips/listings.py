"""Folders of clips as other trainers lay them out: tables, line-aligned text, merged lists, one file of captions."""

import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wands.data.clips.archives import TAR_EXTENSIONS
from wands.data.clips.records import (
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    VIDEO_EXTENSIONS,
    Scan,
    check_captions,
    check_file,
    clip_key,
    locate,
    read_range,
    safe_name,
)
from wands.data.clips.sidecars import (
    CAPTION_LINES,
    CAPTIONS_OF_FOLDER,
    VIDEO_LINES,
    as_written,
    scan_tar,
    walk,
)
from wands.data.clips.tables import Columns, NumberedRow, read_pairs, read_table
from wands.errors import DataError

_TABLES = (
    "metadata.csv",
    "metadata.jsonl",
    "metadata.json",
    "meta.json",  # NVIDIA DFM
    "videos2caption.json",  # FastVideo
    "json_of_internal_datasets.json",  # VideoX-Fun
)
_MERGE = "merge.txt"  # FastVideo
_TOLD_SINGLY = 10  # so many clips that a listing leaves out are told of one by one whatever it names
# Where tools keep the clips of a table whose paths do not name that folder: FastVideo, DiffSynth.
_CLIP_FOLDERS = ("videos", "train")


def find_listing(folder: Path, source: str, split: str) -> Path | None:
    """The file that lists a folder's clips, if there is one: in the folder, else in that of the split.

    Raises:
        DataError: there are several.
    """
    names = (*_TABLES, CAPTIONS_OF_FOLDER, _MERGE)
    for place in (folder, folder / split):
        found = [place / name for name in names if (place / name).is_file()]
        if any((place / name).is_file() for name in CAPTION_LINES):
            found += [place / name for name in VIDEO_LINES if (place / name).is_file()]
        found = [file for file in found if not _is_sidecar(file)]
        if place / _MERGE in found:  # it names the others
            found = [place / _MERGE]
        if len(found) > 1:
            raise DataError(
                f"source={source} holds {' and '.join(file.name for file in found)}; name the one that counts"
            )
        if found:
            return found[0]
    return None


def _is_sidecar(file: Path) -> bool:
    """Whether a clip of the same stem lies beside it: video.txt is then the caption of video.mp4."""
    return any(file.with_suffix(extension).exists() for extension in CLIP_EXTENSIONS)


def scan_listing(
    listing: Path, columns: Columns, cache_dir: Path | None, scan: Scan, *, whole_folder: bool
) -> None:
    """Read a file that lists clips; which kind it is, its name says.

    Args:
        listing: the file.
        columns: of a table.
        cache_dir: where clips of archives are written.
        scan: to add to.
        whole_folder: the source is the folder of the file, so clips there that it does not list are told of.
    """
    if listing.name == CAPTIONS_OF_FOLDER and _scan_captioned_folder(listing, columns, cache_dir, scan):
        return
    named = _Named()
    if listing.name == _MERGE:
        _scan_merged(listing, columns, scan, named)
    elif listing.name in VIDEO_LINES:
        captions = [listing.with_name(name) for name in CAPTION_LINES]
        present = [file for file in captions if file.is_file()]
        if len(present) != 1:
            raise DataError(
                f"source={listing.parent} holds {len(present)} files of captions for {listing.name}; keep one "
                f"of {', '.join(CAPTION_LINES)}"
            )
        rows = read_pairs(listing, present[0])
        _scan_rows(listing, rows, Columns(columns.source), listing.parent, scan, named)
    else:
        _scan_rows(listing, read_table(listing), columns, listing.parent, scan, named)
    if whole_folder:
        _reject_unlisted(listing, named, scan)


@dataclass
class _Named:
    """What the rows of a listing name: clips that were found, and what stands in other columns, an input image."""

    clips: set[Path] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    def add_others(self, row: dict[str, Any], video: object, folders: tuple[Path, ...]) -> None:
        for value in row.values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, str) and item != video and item.lower().endswith(CLIP_EXTENSIONS):
                    self.others |= {_composed(os.path.normpath(folder / item)) for folder in folders}


def _composed(path: str | Path) -> str:
    return unicodedata.normalize("NFC", str(path))


def _reject_unlisted(listing: Path, named: _Named, scan: Scan) -> None:
    """Tell of the clips below a listing that it does not name; of images only if it names any.

    A folder of many clips of which it names less than half is told of as a whole: the listing is then a selection.
    """
    folder = listing.parent
    images = any(path.name.lower().endswith(IMAGE_EXTENSIONS) for path in named.clips)
    wanted = CLIP_EXTENSIONS if images else VIDEO_EXTENSIONS
    known = named.others | {_composed(path) for path in named.clips}
    nodes: set[tuple[int, int]] | None = None  # for links, and systems for which A.MP4 is a.mp4
    keys = {clip_key(entry.name) for entry in scan.entries}
    table = f"the tables of {listing.name}" if listing.name == _MERGE else listing.name
    for root, files in walk(folder, scan):
        clips = [root / file for file in files if file.lower().endswith(wanted)]
        left = [path for path in clips if _composed(path) not in known]
        if left:
            if nodes is None:
                nodes = {node for node in map(_node, named.clips) if node}
            left = [path for path in left if _node(path) not in nodes]
        if len(left) <= max(_TOLD_SINGLY, len(clips) - len(left)):
            for path in left:
                name = path.relative_to(folder).as_posix()
                key = safe_name(name) if clip_key(name) in keys else clip_key(name)
                reason = (
                    f"no readable row in {table} names it; write one with its caption, or move it elsewhere"
                )
                scan.reject(key, path, reason)
        else:
            reason = (
                f"no readable row in {table} names {len(left):,} clips of this folder ({left[0].name}, "
                f"{left[1].name} ...); write rows with their captions, or move them elsewhere"
            )
            below = f":{root.relative_to(folder).as_posix()}" if root != folder else ""
            scan.reject(f"{listing.name}{below}", root, reason)


def _node(path: Path) -> tuple[int, int] | None:
    """What tells a file from others whatever its name; None for a broken link."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _scan_rows(
    table: Path, rows: list[NumberedRow], columns: Columns, folder: Path, scan: Scan, named: _Named
) -> None:
    """Add the clips that a table's rows name; their paths count from ``folder``."""
    if not rows:
        raise DataError(f"source={table} lists no clip; add rows with a video and a caption")
    readable = [row for _, row in rows if isinstance(row, dict)]
    if readable:
        columns.check({name for row in readable for name in row})
    folders = (folder, *(folder / name for name in _CLIP_FOLDERS))
    for number, row in rows:
        where = f"{table.name}:{number}"
        if isinstance(row, str):
            scan.reject(where, table, row)
            continue
        video, caption = columns.pick(row)
        named.add_others(row, video, folders)
        try:
            if not isinstance(video, str) or not video.strip():
                raise DataError("no video in this row; write its path")
            name, path = locate(video.strip(), folders)
            named.clips.add(path)
            scan.add(where, name, path, check_captions(caption, where), read_range(row, path))
        except DataError as error:
            scan.reject(where, video or table, str(error))


def _scan_merged(listing: Path, columns: Columns, scan: Scan, named: _Named) -> None:
    """FastVideo's merge.txt: each line a folder of clips and, after a comma, the table of its captions."""
    try:
        lines = listing.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"source={listing} cannot be read ({error}); save it as UTF-8 text") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 2 or not all(parts):
            scan.reject(
                f"{listing.name}:{number}",
                listing,
                "unreadable line; write a folder, a comma and its table on it",
            )
            continue
        # FastVideo counts them from where it is started; a data set that was moved as a whole, from the list.
        folder, table = (
            next(
                (path for path in (Path(part).absolute(), listing.parent / part) if path.exists()), Path(part)
            )
            for part in parts
        )
        if not table.is_file():
            reason = f"no such table (looked for {parts[1]}); correct the path"
            scan.reject(f"{listing.name}:{number}", parts[1], reason)
            continue
        _scan_rows(table, read_table(table), columns, folder, scan, named)


def _scan_captioned_folder(listing: Path, columns: Columns, cache_dir: Path | None, scan: Scan) -> bool:
    """diffusion-pipe: captions.json has the captions of the files beside it, and of members of archives.

    Returns:
        False if it is a table of another form.
    """
    rows = read_table(listing)
    if not rows or any(isinstance(row, str) or set(row) != {"file_name", "caption"} for _, row in rows):
        return False
    captions = {str(row["file_name"]): row["caption"] for _, row in rows if isinstance(row, dict)}
    if len(captions) < len(rows):  # a list that names a clip twice: the last must not silently win
        return False
    folder, missing = listing.parent, set(captions)
    paths = sorted(folder.iterdir())
    present = {path.name for path in paths}
    for path in paths:
        name = path.name
        if name.startswith("."):
            continue
        if name.lower().endswith(TAR_EXTENSIONS):
            missing -= scan_tar(path, folder, columns, captions, cache_dir, scan)
        elif name.lower().endswith(CLIP_EXTENSIONS):
            written = as_written(name, captions, present)
            missing.discard(written or name)
            try:
                check_file(name, path)
                if written is None:
                    raise DataError(f"no entry in {listing.name}; add one with its captions")
                scan.add(clip_key(name), written, path, check_captions(captions[written], listing.name))
            except DataError as error:
                scan.reject(clip_key(name), path, str(error))
    for name in sorted(missing):
        try:  # other tools' captions.json may name clips in sub-folders
            found, path = locate(name, (folder,))
            scan.add(clip_key(found), found, path, check_captions(captions[name], listing.name))
        except DataError as error:
            scan.reject(f"{listing.name}:{name}", name, str(error))
    return True
