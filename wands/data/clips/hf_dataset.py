"""Hugging Face datasets of clips: on the Hub, in a `save_to_disk` folder, or in a folder of parquet or arrow files.

Only this module imports `datasets`, and only if a source needs it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from wands.conditions.clip_files import MASK_FILE, ClipFile
from wands.data.clips.file_kinds import CLIP_EXTENSIONS
from wands.data.clips.filters import identifier
from wands.data.clips.records import ClipRecord, Rejection, locate, records_of_clip, reject, store_clip
from wands.data.clips.rows import LICENSE_COLUMNS, RANGE_COLUMNS
from wands.data.clips.source import Source
from wands.data.clips.tables import lower_names
from wands.errors import DataError, one_line


def hub_dataset(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Return the clips of a dataset on the Hub, or None if the source is not written owner/name.

    Also None if a local folder has the owner's name, because the user then probably mistyped a local path.
    """
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source.name) and not Path(source.name).parent.exists():
        return scan_dataset(source, source.name)
    return None


def saved_dataset(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Return the clips of a local dataset (parquet or arrow files at any depth), or None for another source."""
    if any(source.path.rglob("*.parquet")) or any(source.path.rglob("*.arrow")):
        return scan_dataset(source, str(source.path), source.path)
    return None


def scan_dataset(source: Source, name: str, folder: Path | None = None) -> Iterator[ClipRecord | Rejection]:
    """Yield a record for each usable clip, and a rejection for each unusable row, of a dataset.

    Relative paths in rows are relative to `folder` or, if it is None, to the dataset's repository on the Hub.
    """
    for index, row in _read_rows(source, name):
        video, caption = source.pick(row)
        if isinstance(video, bytes):
            video = {"bytes": video}
        data, written = (video.get("bytes"), video.get("path")) if isinstance(video, dict) else (None, video)
        place = f"{source.split}:{index}"
        try:
            captions = source.check_captions(caption, place)
            if data:
                clip, path = write_clip(data, written, clips_dir(source))
            elif not isinstance(written, str) or not written:
                raise DataError("this row names no clip; write a path in the video column, or remove the row")
            elif folder is None and not os.path.isabs(written):
                clip, path = _fetch_clip(name, written)
            else:
                clip, path = locate(written, (folder or Path.cwd(),))
            # Remove the folders of the Hub's local cache.
            clip = re.sub(r"^.*/snapshots/[0-9a-f]{40}/", "", clip)
            # All records are in memory together, which has no room for the bytes of all clips.
            row = {name: cell for name, cell in row.items() if name not in source.video_names}
            row |= {kind.column: _stored_file(source, row.get(kind.column)) for kind in _kinds(source)}
            yield from records_of_clip(clip, path, captions, place, row, kinds=source.files)
        except DataError as error:
            yield reject(place, written or place, error)


def _kinds(source: Source) -> list[ClipFile]:
    """Return the kinds of files that columns of a dataset may contain. Masks in datasets are rarely masks of the loss."""
    return [kind for kind in source.files if kind != MASK_FILE]


def _stored_file(source: Source, cell: Any) -> Any:
    """Return the path of a file in a cell. Bytes in the cell are written to a file first."""
    if isinstance(cell, bytes):
        cell = {"bytes": cell}
    if isinstance(cell, dict):
        data = cell.get("bytes")
        written = cell.get("path")
        return str(write_clip(data, written, clips_dir(source))[1]) if data else written
    return cell


def _read_rows(source: Source, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index, row) of the split, with lower-case names, streamed and without decoding videos.

    The cell of a video is a path, or a dictionary with "path" and "bytes".

    Raises:
        DataError: if the dataset cannot be loaded, or lacks the split, a column of videos or a required column of captions.
    """
    import datasets

    try:
        data = _load_dataset(source, name)
        source.check_columns(data.column_names)
        wanted = {*source.video_names, *source.caption_names, *RANGE_COLUMNS, "crop", *LICENSE_COLUMNS}
        wanted |= {kind.column for kind in _kinds(source)}
        wanted |= {name for name in data.column_names if identifier(name) in source.other_columns}
        data = data.select_columns([name for name in data.column_names if {name, name.lower()} & wanted])
        for column, feature in data.features.items():
            if isinstance(feature, datasets.Video | datasets.Image):  # reading a row would call torchcodec
                data = data.cast_column(column, type(feature)(decode=False))
        for index, row in enumerate(data):
            yield index, lower_names(row)
    except DataError:
        raise
    except Exception as error:  # each cause (no connection, no such split, damaged files) has its own type
        raise DataError(
            f"SOURCE={name} could not be loaded as a Hugging Face dataset ({_first_line(error)}); check the name, "
            f"--split={source.split} and the network, or pass a folder of clips"
        ) from error


def _load_dataset(source: Source, name: str) -> Any:
    import datasets

    if not any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        data = datasets.load_dataset(name, split=source.split, streaming=True, trust_remote_code=False)
        # Some files name their columns only when the first row is read.
        return data if data.features is not None else data._resolve_features()
    data = datasets.load_from_disk(name)
    if not isinstance(data, datasets.DatasetDict):
        return data
    if source.split in data:
        return data[source.split]
    splits = ", ".join(sorted(data))
    raise DataError(f"SOURCE={name} has no split {source.split}; set --split to one of {splits}")


def _fetch_clip(dataset: str, written: str) -> tuple[str, Path]:
    """Return (path in the repository, local file) of a clip, downloaded unless cached.

    Raises:
        DataError: if the path is a URL or leads out of the repository, or the download fails.
    """
    from huggingface_hub import hf_hub_download

    address = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", written)
    repo, revision, name = address.groups() if address else (dataset, None, written)
    if "://" in name:  # may contain a password
        raise DataError("path is a URL, not a file of the dataset; write the path in the repository")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"path leads out of repository {repo} ({name[:99]}); use a relative path without ..")
    try:
        revision = unquote(revision) if revision else None
        return name, Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    except Exception as error:  # the file does not exist, no connection, or no access
        raise DataError(
            f"file cannot be fetched from the Hub ({name[:99]}, {_first_line(error)}); check the path and your access"
        ) from None


def _first_line(error: Exception) -> str:
    return one_line(Exception((str(error) or type(error).__name__).splitlines()[0]))


def clips_dir(source: Source) -> Path:
    """Return the folder in which clips from archives and dataset rows are stored as files."""
    if source.cache_dir is not None:
        return source.cache_dir
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "wands_clips"


def write_clip(data: bytes, written: str | None, folder: Path) -> tuple[str, Path]:
    """Write a clip to a file named by the hash of its bytes, unless it exists, and return (name, path).

    The name is that in `written` (path or URL) with 12 digits of the hash, such as "cat-0123456789ab.mp4" for "videos/cat.mp4".

    Raises:
        CacheError: if the disk is full or not writable.
    """
    digest = hashlib.sha256(data).hexdigest()
    written = written or "clip"
    if re.match(r"https?://", written, re.IGNORECASE):
        written = re.split(r"[?#]", written)[0]  # remove the query, which may be too long for a file name
    origin = PurePosixPath(written)
    suffix = origin.suffix if origin.suffix.lower() in CLIP_EXTENSIONS else ""
    path = folder.absolute() / f"{digest}{suffix}"
    store_clip(path, len(data), lambda file: file.write(data), origin.name[:100])
    return f"{origin.stem}-{digest[:12]}{origin.suffix}", path
