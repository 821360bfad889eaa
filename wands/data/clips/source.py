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
    """Source of clips as the user named it, with the options for reading it. Column names are case-insensitive.

    Attributes:
        name: path or name of a dataset, as the user wrote it.
        split: split of a Hugging Face dataset. In a folder without a table, the table in the sub-folder of this name is read.
        video_column: column of the clips. None takes the first filled column of `VIDEO_COLUMNS` in each row.
        caption_column: column of the captions. None takes the first filled column of `CAPTION_COLUMNS` in each row.
        cache_dir: folder for clips from datasets and archives. None is a folder in the cache of the `datasets` library.
        needs_caption: whether a clip without a caption is rejected. If False, its caption is "".
        other_columns: further columns to read from a Hugging Face dataset, written as in --where. Of tables and caption files,
            all columns are read.
        sidecars: extensions of caption files in the order of preference. Only the first existing file is read.
        files: kinds of files next to a clip from which conditions are made, such as loss masks.
        log: function that receives messages about the dataset configuration of another trainer.
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
        """The name as an absolute path, even of no file. Links to folders and ".." are resolved, so that keys do not depend on
        the spelling.
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
        """Raise DataError if no column in `present` can contain a video, or a caption where captions are needed."""
        names = {name.lower() for name in present}
        for kind, wanted in (("video", self.video_names), ("caption", self.caption_names)):
            if (kind == "video" or self.needs_caption) and not names.intersection(wanted):
                raise DataError(
                    f"SOURCE={self.name} has no {kind} column: expected one of {', '.join(wanted)}, found "
                    f"{', '.join(sorted(names)) or 'none'}; set --{kind}-column to the name of the column"
                )

    def pick(self, row: dict[str, Any]) -> tuple[Any, Any]:
        """Return the video and the caption of a row with lower-case names, None where the row has none."""
        return first_filled(row, self.video_names), self.pick_caption(row)

    def pick_caption(self, row: dict[str, Any]) -> Any:
        """Return the caption of a row, or None if the row has no caption. The column names of `row` are in lower case."""
        return first_filled(row, self.caption_names)

    def check_captions(self, value: Any, place: str) -> list[str]:
        """Return the stripped captions of a clip, from one caption or a list; [""] if there is none and none is needed.

        Raises:
            DataError: if a needed caption is missing, an item of a list is empty, or a caption is not a text, too long or not
                valid Unicode.
        """
        if not self.needs_caption and (not value or is_empty(value)):
            return [""]
        captions = value if isinstance(value, list | tuple) else [value]
        return [check_caption(caption, place) for caption in captions or [None]]
