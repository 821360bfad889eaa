"""Source of clips (a folder, table, archive or Hugging Face dataset), with the options for reading the clips."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wands.errors import DataError
from wands.texts import printable

# fmt: off
VIDEO_COLUMNS = (
    "video", "video_path", "file_name", "file_path", "path", "video_file_name",
    "image", "image_path", "image_file_name", "mp4",
)
CAPTION_COLUMNS = ("caption", "prompt", "text", "cap", "captions", "vila_caption", "gemini_v2_caption", "txt")
# fmt: on
LICENSE_COLUMNS = ("license", "licence")
Crop = tuple[int, int, int, int]
"""(x, y, width, height) of a rectangle in pixels of the upright, displayed frame. The upper left corner is (x, y)."""


@dataclass(frozen=True)
class Source:
    """Source of clips as the user named it, with the options for reading the clips. Column names are
    case-insensitive.

    Attributes:
        name: the source as the user wrote it: a path, or the name of a dataset.
        split: split of a Hugging Face dataset, or the sub-folder of a data set with one table per split.
        video_column: column that contains the clips. None takes the first existing column of `VIDEO_COLUMNS`.
        caption_column: column that contains the captions. None takes the first existing column of `CAPTION_COLUMNS`.
        cache_dir: folder in which clips from datasets and archives are stored as files. None is a folder in the cache
            of the `datasets` library.
        needs_caption: whether a clip without a caption is rejected. If False, its record has the caption "".
        other_columns: further columns to read from a Hugging Face dataset, as `wands.data.clips.filters.identifier` writes
            them. Tables and caption files are always read with all columns.
        sidecars: extensions of caption files next to a clip. The first existing file counts.
        recursive: whether the sub-folders of a folder are searched for clips.
        log: function that receives messages about settings of the source that are not applied.
    """

    name: str
    split: str = "train"
    video_column: str | None = None
    caption_column: str | None = None
    cache_dir: Path | None = None
    needs_caption: bool = True
    other_columns: tuple[str, ...] = ()
    sidecars: tuple[str, ...] = (".txt", ".json", ".jsonl")
    recursive: bool = True
    log: Callable[[str], object] = field(default=logging.getLogger(__name__).warning, compare=False)

    @property
    def path(self) -> Path:
        """The name of the source as an absolute path, whether or not the path exists. Links to folders and ".." are
        resolved, so that the keys of clips do not depend on how the user names the source.
        """
        path = Path(self.name).expanduser()
        if path.is_dir():
            return Path(os.path.realpath(path))
        return Path(os.path.realpath(path.parent), path.name)

    @property
    def video_names(self) -> tuple[str, ...]:
        """Lower-case names of the columns that can contain the clips."""
        return (self.video_column.lower(),) if self.video_column else VIDEO_COLUMNS

    @property
    def caption_names(self) -> tuple[str, ...]:
        """Lower-case names of the columns that can contain the captions."""
        return (self.caption_column.lower(),) if self.caption_column else CAPTION_COLUMNS

    def check_columns(self, present: Iterable[str]) -> None:
        """Raise DataError if none of the columns in `present` can contain a video, or none can contain a needed caption."""
        names = {name.lower() for name in present}
        for kind, wanted in (("video", self.video_names), ("caption", self.caption_names)):
            if (kind == "video" or self.needs_caption) and not names.intersection(wanted):
                raise DataError(
                    f"SOURCE={self.name} has no {kind} column: expected one of {', '.join(wanted)}, found "
                    f"{', '.join(sorted(names)) or 'none'}; set --{kind}-column to the name of the column"
                )

    def pick(self, row: dict[str, Any]) -> tuple[Any, Any]:
        """Return (video, caption) of a row with lower-case column names. A value that the row lacks is None."""
        return _first_filled(row, self.video_names), self.pick_caption(row)

    def pick_caption(self, row: dict[str, Any]) -> Any:
        """Return the caption of a row with lower-case column names. Return None if the row has no caption."""
        return _first_filled(row, self.caption_names)


def pick_license(row: Mapping[str, Any]) -> str:
    """Return the licence of a row with lower-case column names, or of the metadata of a sample, as one line of text.

    The line has at most 100 characters, and no control characters. Return "" if the row states no licence.
    """
    value = _first_filled(row, LICENSE_COLUMNS)
    # pandas writes NaN, which differs from itself, for an empty cell.
    return "" if value is None or value != value else printable(" ".join(str(value).split()))[:100]


def pick_crop(row: Mapping[str, Any]) -> Crop | None:
    """Return the part of the frames that the column `crop` of a row selects, or None for whole frames.

    Args:
        row: row with lower-case column names. The crop is a text such as "0,140,1920,800", or a list of four numbers.

    Raises:
        DataError: if the crop is not a rectangle.
    """
    value = row.get("crop")
    if value is None or value != value or not str(value).strip():
        return None
    with suppress(TypeError, ValueError):
        x, y, width, height = map(int, map(str, value.split(",") if isinstance(value, str) else value))
        if min(x, y) >= 0 and min(width, height) > 0:
            return x, y, width, height
    raise DataError(
        f"crop={str(value)[:60]} is not x,y,width,height in whole pixels; correct the row, or leave the cell empty"
    )


def _first_filled(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first non-empty value of the named columns. If all values are empty, return the first value. Return
    None if the row has none of the columns.

    For example, in a table with a video column and an image column, each row has one empty cell.
    """
    values = [row[name] for name in names if name in row]
    return next((value for value in values if value not in (None, "")), next(iter(values), None))
