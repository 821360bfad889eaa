"""A SOURCE of clips -> manifest rows: keys, paths, captions. Nothing is decoded here.

A SOURCE is a folder of clips and images with captions beside them, a table of clips and captions (or the folder
that holds it), tar archives, or a Hugging Face dataset (a `save_to_disk` folder, a folder of parquet or arrow
files, or a name). An image is a clip of one frame; several captions of one clip make several rows.
What cannot be used comes back as a `Rejection` with its reason; a file name is never taken for a caption.
"""

import os
import re
from pathlib import Path

from wands.data.clips.archives import TAR_EXTENSIONS
from wands.data.clips.hf_dataset import fetch_clip, read_dataset, write_clip
from wands.data.clips.listings import find_listing, scan_listing
from wands.data.clips.records import (
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    VIDEO_EXTENSIONS,
    ClipRecord,
    Rejection,
    Scan,
    check_captions,
    locate,
    read_range,
)
from wands.data.clips.sidecars import scan_folder, scan_tar
from wands.data.clips.tables import Columns
from wands.errors import DataError

__all__ = ["IMAGE_EXTENSIONS", "VIDEO_EXTENSIONS", "ClipRecord", "Rejection", "load_source"]


def load_source(
    source: str,
    *,
    split: str = "train",
    video_column: str | None = None,
    caption_column: str | None = None,
    cache_dir: Path | None = None,
) -> tuple[list[ClipRecord], list[Rejection]]:
    """List the clips of a source with their captions, both lists sorted by key and the same on every call.

    Hidden files and folders are not looked at. What exists on disk is never looked up on the Hub.

    Args:
        source: folder, table (.csv, .jsonl, .json, videos.txt, merge.txt), tar archive or name of a Hugging
            Face dataset (owner/name).
        split: of a Hugging Face dataset, or the sub-folder of a data set that has one table for each split.
        video_column: of a table or dataset; default: the first of `table.VIDEO_COLUMNS` that is there.
        caption_column: likewise, of `table.CAPTION_COLUMNS`.
        cache_dir: where clips that a dataset or an archive holds are written; default: in the cache of
            `datasets`.

    Returns:
        The usable rows, and what was rejected with the reason.

    Raises:
        DataError: the source does not exist, cannot be read, or holds no clip at all.
    """
    if not source.strip():
        raise DataError("source= is empty; give a folder, a table or the name of a dataset")
    scan = Scan()
    path = Path(source).expanduser().absolute()
    columns = Columns(source, video_column, caption_column)
    if path.is_file():
        if path.name.lower().endswith(TAR_EXTENSIONS):
            scan_tar(path, path.parent, columns, {}, cache_dir, scan)
        else:
            scan_listing(path, columns, cache_dir, scan, whole_folder=False)
    elif path.is_dir():
        if listing := find_listing(path, source, split):
            scan_listing(listing, columns, cache_dir, scan, whole_folder=True)
        else:
            found = scan_folder(path, columns, cache_dir, scan)
            if not scan.entries and (any(path.rglob("*.parquet")) or any(path.rglob("*.arrow"))):
                scan = Scan()  # what was found are pictures of its README, or clips that its rows name
                _scan_dataset(str(path), split, columns, cache_dir, scan, path)
            elif not found:
                raise DataError(f"source={source} holds no clip; {_what_was_sought(path)}")
    elif _may_be_hub_name(source):
        _scan_dataset(source, split, columns, cache_dir, scan)
    else:
        raise DataError(
            f"source={source} does not exist (looked for {path}); correct the path, or name a Hugging Face "
            "dataset as owner/name"
        )
    return scan.finish()


def _what_was_sought(folder: Path) -> str:
    if any(folder.rglob("*.tfrec*")):
        return "its .tfrec shards hold latents, not clips: python -m data_tools.import_shards reads them"
    return f"looked for {' '.join((*CLIP_EXTENSIONS, '.tar'))} at any depth"


def _may_be_hub_name(source: str) -> bool:
    """owner/name, unless there is a local folder "owner": then the path is mistyped, not a dataset meant."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source)) and not Path(source).parent.exists()


def _scan_dataset(
    source: str,
    split: str,
    columns: Columns,
    cache_dir: Path | None,
    scan: Scan,
    folder: Path | None = None,
) -> None:
    """Add the clips of a dataset; paths in its rows count from ``folder``, without one from its repository."""
    for index, row in read_dataset(source, split, columns):
        video, caption = columns.pick(row)
        if isinstance(video, bytes):
            video = {"bytes": video}
        data, written = (video.get("bytes"), video.get("path")) if isinstance(video, dict) else (None, video)
        where = f"{split}:{index}"
        try:
            captions = check_captions(caption, where)
            if data:
                name, path = write_clip(data, written, cache_dir)
            elif isinstance(written, str) and written:
                if folder is None and not os.path.isabs(written):
                    name, path = fetch_clip(source, written)
                else:
                    name, path = locate(written, (folder or Path.cwd(),))
                name = re.sub(r"^.*/snapshots/[0-9a-f]{40}/", "", name)  # the Hub cache's own folders
            else:
                raise DataError("no video in this row; remove it")
            scan.add(where, name, path, captions, read_range(row, path))
        except DataError as error:
            scan.reject(where, written or where, str(error))
