"""Hugging Face datasets of clips. The only file that imports `datasets`, and only when one is asked for."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from wands.data.clips.records import CLIP_EXTENSIONS
from wands.data.clips.tables import RANGE_COLUMNS, Columns
from wands.errors import CacheError, DataError


def read_dataset(source: str, split: str, columns: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index, row with lower-case names) of a split, videos undecoded: a path, or {"path", "bytes"}.

    Rows are streamed: nothing is copied to disk before its turn, whatever the size of the dataset.

    Args:
        source: an existing folder (of `save_to_disk`, or of data files), else a name on the Hub.
        split: its name.
        columns: which columns are wanted; the others are not read.

    Raises:
        DataError: the dataset cannot be loaded or has no such split or columns.
    """
    import datasets

    data = _load(source, split)
    try:
        columns.check(data.column_names)
        wanted = {*columns.video_names, *columns.caption_names, *RANGE_COLUMNS}
        data = data.select_columns([name for name in data.column_names if name.lower() in wanted])
        for name, feature in data.features.items():
            if isinstance(feature, datasets.Video):  # reading a row would call torchcodec
                data = data.cast_column(name, datasets.Video(decode=False))
            elif isinstance(feature, datasets.Image):
                data = data.cast_column(name, datasets.Image(decode=False))
        for index, row in enumerate(data):
            yield index, {name.lower(): value for name, value in row.items()}
    except DataError:
        raise
    except Exception as error:  # a connection that breaks, a damaged file in the middle
        raise _cannot_load(source, split, error) from error


def _load(source: str, split: str) -> Any:
    import datasets

    saved = any((Path(source) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if not saved:
            data = datasets.load_dataset(source, split=split, streaming=True)
            # Some files name their columns only when the first row is read.
            return data if data.features is not None else data._resolve_features()
        data = datasets.load_from_disk(source)
        if not isinstance(data, datasets.DatasetDict):
            return data
        if split in data:
            return data[split]
    except Exception as error:  # no connection, no such split, damaged files: as many types as causes
        raise _cannot_load(source, split, error) from error
    raise DataError(f"source={source} has no split {split}; use one of {', '.join(sorted(data))}")


def _cannot_load(source: str, split: str, error: Exception) -> DataError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return DataError(
        f"source={source} could not be loaded as a Hugging Face dataset ({reason}); check the name, the "
        f"split ({split}) and the network, or give a folder of clips"
    )


def fetch_clip(source: str, written: str) -> tuple[str, Path]:
    """Download a clip that a row of a Hub dataset names, unless the Hub's cache has it.

    Args:
        source: the dataset, owner/name.
        written: path in its repository, or an hf:// address as videofolder gives it when streamed.

    Returns:
        Its path in the repository, and the file.

    Raises:
        DataError: the name leads out of the repository, or it cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    address = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", written)
    repo, revision, name = address.groups() if address else (source, None, written)
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError("its path leads out of the dataset's repository; correct it")
    try:
        path = hf_hub_download(
            repo, name, repo_type="dataset", revision=unquote(revision) if revision else None
        )
    except Exception as error:  # not there, no connection, no access
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{name} cannot be fetched from the Hub ({reason}); check the row") from None
    return name, Path(path)


def clips_dir(folder: Path | None) -> Path:
    """Where clips go that are no files of their own: ``folder``, or else the cache of `datasets`."""
    if folder is not None:
        return folder
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "wands_clips"


def write_clip(data: bytes, written: str | None, folder: Path | None) -> tuple[str, Path]:
    """Write a clip that came as bytes to a file named by its content, unless it is there already.

    Args:
        data: the file's bytes.
        written: its name in the dataset, or the address that it was fetched from.
        folder: where to; default: in the cache of `datasets`.

    Returns:
        A name that stays the same when the dataset's order changes, and the file.

    Raises:
        CacheError: the disk is full or refuses.
    """
    folder = clips_dir(folder)
    digest = hashlib.sha256(data).hexdigest()
    written = written or "clip"
    if re.match(r"https?://", written, re.IGNORECASE):
        written = re.split(r"[?#]", written)[0]  # a signature may be longer than a file name can be
    origin = PurePosixPath(written)
    suffix = origin.suffix if origin.suffix.lower() in CLIP_EXTENSIONS else ""
    path = folder.absolute() / f"{digest}{suffix}"
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if not path.is_file() or path.stat().st_size != len(data):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(data)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(
            f"{folder} cannot take {origin.name[:100]} ({error.strerror or error}: {len(data):,} bytes); "
            "free some space, or name another disk with HF_DATASETS_CACHE"
        ) from None
    return f"{origin.stem}-{digest[:12]}{origin.suffix}", path
