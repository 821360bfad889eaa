"""Hugging Face datasets of clips. The only file that imports `datasets`, and only when one is asked for."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from wands.data.table import Columns
from wands.errors import DataError


def read_dataset(source: str, split: str, columns: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index, row with lower-case names) of a split, videos undecoded: a path, or {"path", "bytes"}.

    Args:
        source: an existing folder (of `save_to_disk`, or of data files), else a name on the Hub.
        split: its name.
        columns: which columns are wanted; the others are not read.

    Raises:
        DataError: the dataset cannot be loaded or has no such split or columns.
    """
    import datasets

    data = _load(source, split)
    columns.check(data.column_names)
    wanted = {*columns.video_names, *columns.caption_names, "start", "end"}
    data = data.select_columns([name for name in data.column_names if name.lower() in wanted])
    for name, feature in data.features.items():
        if isinstance(feature, datasets.Video):  # reading a row would call torchcodec
            data = data.cast_column(name, datasets.Video(decode=False))
    for index, row in enumerate(data):
        yield index, {name.lower(): value for name, value in row.items()}


def _load(source: str, split: str) -> Any:
    import datasets

    saved = any((Path(source) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if not saved:
            return datasets.load_dataset(source, split=split)
        data = datasets.load_from_disk(source)
        if not isinstance(data, datasets.DatasetDict):
            return data
        if split in data:
            return data[split]
    except Exception as error:  # no connection, no such split, damaged files: as many types as causes
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"source={source} could not be loaded as a Hugging Face dataset ({reason}); check the name, the "
            f"split ({split}) and the network, or give a folder of clips"
        ) from error
    raise DataError(f"source={source} has no split {split}; use one of {', '.join(sorted(data))}")


def write_clip(data: bytes, written: str | None, folder: Path | None) -> tuple[str, Path]:
    """Write a clip that came as bytes to a file named by its content, unless it is there already.

    Args:
        data: the file's bytes.
        written: its name in the dataset.
        folder: where to; default: in the cache of `datasets`.

    Returns:
        A name that stays the same when the dataset's order changes, and the file.
    """
    if folder is None:
        import datasets

        folder = Path(datasets.config.HF_DATASETS_CACHE) / "wands_clips"
    digest = hashlib.sha256(data).hexdigest()
    origin = PurePosixPath(written or "clip")
    path = folder.absolute() / f"{digest}{origin.suffix}"
    if not path.is_file() or path.stat().st_size != len(data):
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        partial.write_bytes(data)
        os.replace(partial, path)
    return f"{origin.stem}-{digest[:12]}{origin.suffix}", path
