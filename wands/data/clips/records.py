"""What a scan gives: manifest rows with settled keys, and rejections with their reasons. Rules of names and captions."""

import hashlib
import math
import os
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from wands.data.clips.tables import read_frames, read_window
from wands.errors import DataError

# fmt: off
VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)
# fmt: on
IMAGE_EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
CLIP_EXTENSIONS = (*VIDEO_EXTENSIONS, *IMAGE_EXTENSIONS)


@dataclass(frozen=True)
class ClipRecord:
    """One clip to be decoded.

    Attributes:
        key: unique and stable: the path below SOURCE without its extension, which stays where two clips
            differ in nothing else; "@start-end" follows where the row cuts a window, "~" and eight digits of
            the caption's hash from the second caption of one clip on. Never contains "#".
        path: absolute.
        caption: as written, stripped of outer white space; never empty.
        start: seconds, None for the beginning.
        end: seconds, None for the end.
    """

    key: str
    path: Path
    caption: str
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Rejection:
    """Something in the source, or later a clip, that cannot be used.

    Attributes:
        key: the clip's key, or table:line where there is no clip to name.
        path: the file concerned, as written in the source.
        reason: the rule that is broken; the cure.
    """

    key: str
    path: str
    reason: str


@dataclass(frozen=True)
class _Entry:
    """A usable clip before its key is settled.

    ``name`` is its path below the source, extension included; ``further``: not the first caption of the clip.
    """

    name: str
    path: Path
    caption: str
    start: float | None = None
    end: float | None = None
    further: bool = False

    @property
    def window(self) -> str:
        if self.start is None and self.end is None:
            return ""
        return f"@{self.start or 0.0:.3f}" + ("" if self.end is None else f"-{self.end:.3f}")

    @property
    def suffix(self) -> str:
        if not self.further:
            return self.window
        return f"{self.window}~{hashlib.sha256(self.caption.encode()).hexdigest()[:8]}"

    @property
    def short_key(self) -> str:
        return clip_key(self.name) + self.suffix

    @property
    def full_key(self) -> str:
        return safe_name(self.name) + self.suffix


@dataclass
class Scan:
    """What has been found so far."""

    entries: list[_Entry] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)

    def reject(self, key: str, path: object, reason: str) -> None:
        self.rejections.append(Rejection(printable(key), printable(str(path)), printable(reason)))

    def add(
        self,
        where: str,
        name: str,
        path: Path,
        captions: list[str],
        window: tuple[float | None, float | None] = (None, None),
    ) -> None:
        """Add a clip once for each of its captions; ``where`` they are written."""
        if twice := [caption for caption, count in Counter(captions).items() if count > 1]:
            self.reject(where, path, f"caption is there twice ({twice[0][:60]}); keep one of them")
        for index, caption in enumerate(dict.fromkeys(captions)):
            self.entries.append(_Entry(name, path, caption, *window, further=index > 0))

    def finish(self) -> tuple[list[ClipRecord], list[Rejection]]:
        """Drop duplicates, settle the keys, sort both lists by key.

        A later row of the same clip and range with another caption is a further caption of it.
        """
        unique: dict[tuple[Path, str], _Entry] = {}
        first: dict[tuple[Path, str], _Entry] = {}
        for entry in self.entries:
            known, named = first.setdefault((entry.path, entry.window), entry), entry
            if known is not entry:
                # Under the name of the first: all captions of a clip have one key before the "~".
                named = replace(entry, name=known.name, further=entry.caption != known.caption)
            if unique.setdefault((named.path, named.suffix), named) is not named:
                self.reject(entry.short_key, entry.path, "duplicate of an earlier row; keep one of them")
        shorts = Counter(entry.short_key for entry in unique.values())
        fulls = Counter(entry.full_key for entry in unique.values())
        rows = []
        for entry in unique.values():
            short, full = entry.short_key, entry.full_key
            key = short if shorts[short] == 1 and short not in fulls else full
            if key == full and fulls[full] > 1:
                self.reject(full, entry.path, "another clip has the same key; rename one of them")
            else:
                rows.append(ClipRecord(key, entry.path, entry.caption, entry.start, entry.end))
        rows.sort(key=lambda row: row.key)
        self.rejections.sort(key=lambda rejection: (rejection.key, rejection.path, rejection.reason))
        return rows, self.rejections


def safe_name(name: str) -> str:
    """A name that may be part of a key."""
    return name.replace("#", "%23")  # "#" starts the suffix that the decoder gives to windows


def clip_key(name: str) -> str:
    """The key of a clip that needs no more than its name: without the extension."""
    return safe_name(str(PurePosixPath(name).with_suffix("")))


def printable(text: str) -> str:
    """Names that are not UTF-8 reach Python as surrogates, which no report or cache can store."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def check_captions(value: Any, written: str) -> list[str]:
    """Strip the caption or captions of a clip; ``written`` says where they were looked for.

    Raises:
        DataError: there is none, or one that is no text.
    """
    if isinstance(value, list | tuple):
        if not value:
            raise DataError(f"missing caption; write one in {written}")
        return [_check_caption(item, written) for item in value]
    return [_check_caption(value, written)]


def _check_caption(value: Any, written: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"missing caption; write one in {written}")
    if not isinstance(value, str):
        raise DataError(f"caption is a {type(value).__name__}, not text; write text in {written}")
    if not value.strip():
        raise DataError(f"empty caption; write one in {written}")
    if value != printable(value):
        raise DataError(f"caption is not valid Unicode; rewrite it in {written}")
    return value.strip()


def locate(video: str, folders: tuple[Path, ...]) -> tuple[str, Path]:
    """Name and absolute path of a clip that a table names: from the first folder, or a later one that has it.

    Where no file has the name as written, one whose letters are composed otherwise counts: zips of macOS keep
    an accent apart from its letter. The name, and so the key, is the written one on any system.

    Raises:
        DataError: it is not there.
    """
    if re.match(r"[a-zA-Z][\w+.-]+://", video):
        raise DataError("a URL is no file; download the clip and write its path")
    folder = folders[0]
    forms = dict.fromkeys((video, *(unicodedata.normalize(form, video) for form in ("NFC", "NFD"))))
    paths = [Path(os.path.normpath(base / form)) for form in forms for base in folders]
    try:
        index = next((index for index, path in enumerate(paths) if path.is_file()), None)
    except OSError as error:
        raise DataError(f"path cannot be looked up ({error.strerror}); correct it") from None
    if index is None:
        raise DataError(f"no such file (looked for {paths[0]}); correct the path, it counts from {folder}")
    written = paths[index % len(folders)]
    name = (
        written.relative_to(folder) if written.is_relative_to(folder) else written.relative_to(written.anchor)
    )
    if str(name) != printable(str(name)):
        raise DataError("file name is not valid UTF-8; rename it")
    return name.as_posix(), paths[index]


def check_file(name: str, path: Path) -> None:
    """Make sure that a listed file can be named and is there.

    Raises:
        DataError: it is not.
    """
    if name != printable(name):
        raise DataError("file name is not valid UTF-8; rename it")
    if not path.is_file():
        raise DataError("no such file (a broken link?); mend or remove it")


def read_range(row: dict[str, Any], path: Path) -> tuple[float | None, float | None]:
    """A row's range in seconds; one in frames needs the clip's rate, or the times of its frames if that varies.

    Raises:
        DataError: a range that cannot be, or a clip that does not open.
    """
    frames = read_frames(row)
    if frames is None:
        return read_window(row)
    from wands.data.clips.video import frame_times, probe

    info, (first, last) = probe(path), frames
    if first == 0 and last + 1 >= info.num_frames > 0:
        return None, None
    times = frame_times(path)
    if times is None:
        return first / info.fps, (last + 1) / info.fps
    begin, end = (
        # Beyond the clip's end at its mean rate: a range that is too long is refused by whoever decodes it.
        times[min(number, len(times) - 1)] + max(0, number + 1 - len(times)) / info.fps
        for number in (first, last + 1)
    )
    return begin, end
