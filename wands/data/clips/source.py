"""Source of clips (a folder, table, archive or Hugging Face dataset), with the options for reading the clips."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wands.conditions.clip_files import MASK_FILE, ClipFile
from wands.data.clips.captions import check_caption
from wands.data.clips.rows import first_filled, is_empty
from wands.errors import DataError

# fmt: off
VIDEO_COLUMNS = (
    "video", "video_path", "file_name", "file_path", "path", "video_file_name",
    "image", "image_path", "image_file_name", "mp4",
)
CAPTION_COLUMNS = ("caption", "prompt", "text", "cap", "captions", "vila_caption", "gemini_v2_caption", "txt")
# fmt: on


@dataclass(frozen=True)
class Source:
    """Source of clips as the user named it, with the options for reading the clips. Column names are
    case-insensitive.

    Attributes:
        name: the source as the user wrote it: a path, or the name of a dataset.
        split: split of a Hugging Face dataset to read, such as "train". In a folder without a table, the table in the
            sub-folder with this name is read.
        video_column: column that contains the clips. None takes, in each row, the first filled column of `VIDEO_COLUMNS`.
        caption_column: column that contains the captions. None takes, in each row, the first filled column of
            `CAPTION_COLUMNS`.
        cache_dir: folder in which clips from datasets and archives are stored as files. None is a folder in the cache
            of the `datasets` library.
        needs_caption: whether a clip without a caption is rejected. If False, its record has the caption "".
        other_columns: further columns to read from a Hugging Face dataset, written as in a --where
            condition, such as "motion_score" for the column "Motion score". In tables and caption files, all columns are read.
        sidecars: extensions of caption files next to a clip, in the order of preference. Only the first existing file is read.
        files: kinds of files next to a clip from which conditions are made, such as loss masks.
        recursive: whether the sub-folders of a folder are searched for clips.
        log: function that receives messages about the dataset configuration of another trainer, such as a message for each
            setting that wands does not apply.
    """

    name: str
    split: str = "train"
    video_column: str | None = None
    caption_column: str | None = None
    cache_dir: Path | None = None
    needs_caption: bool = True
    other_columns: tuple[str, ...] = ()
    sidecars: tuple[str, ...] = (".txt", ".json", ".jsonl", ".caption")
    files: tuple[ClipFile, ...] = (MASK_FILE,)
    recursive: bool = True
    log: Callable[[str], object] = field(default=logging.getLogger(__name__).warning, compare=False)

    @property
    def path(self) -> Path:
        """The name of the source as an absolute path, whether or not the path exists. Links to folders and ".." are
        resolved, so that the keys of clips do not depend on how the user names the source.
        """
        path = Path(os.path.expanduser(self.name))  # an unknown user is kept as it is
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
        """Raise DataError if no column in `present` can contain a video, or if captions are needed and no column can contain a
        caption.
        """
        names = {name.lower() for name in present}
        for kind, wanted in (("video", self.video_names), ("caption", self.caption_names)):
            if (kind == "video" or self.needs_caption) and not names.intersection(wanted):
                raise DataError(
                    f"SOURCE={self.name} has no {kind} column: expected one of {', '.join(wanted)}, found "
                    f"{', '.join(sorted(names)) or 'none'}; set --{kind}-column to the name of the column"
                )

    def pick(self, row: dict[str, Any]) -> tuple[Any, Any]:
        """Return the values of the video column and of the caption column of a row. A value that the row lacks is None.

        The column names of `row` are in lower case.
        """
        return first_filled(row, self.video_names), self.pick_caption(row)

    def pick_caption(self, row: dict[str, Any]) -> Any:
        """Return the caption of a row, or None if the row has no caption. The column names of `row` are in lower case."""
        return first_filled(row, self.caption_names)

    def check_captions(self, value: Any, place: str) -> list[str]:
        """Check the captions of a clip, and return them without leading and trailing white space.

        Args:
            value: one caption or a list of captions.
            place: file or row that contains the captions, for error messages.

        Returns:
            The captions. If `value` is None, NaN, an empty list or a text of only white space, and the source needs no
            captions, the result is [""].

        Raises:
            DataError: if the source needs captions and `value` contains none. The error is also raised if a list contains an
                empty caption, or if a caption is not a text, too long or not valid Unicode.
        """
        if not self.needs_caption and (not value or is_empty(value)):
            return [""]
        captions = value if isinstance(value, list | tuple) else [value]
        return [check_caption(caption, place) for caption in captions or [None]]
