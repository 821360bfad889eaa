"""Clip records and clip keys. A clip record describes a clip until the clip is encoded. A clip key is a unique name."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from wands.conditions.clip_files import MASK_FILE, ClipFile, FoundFile
from wands.data.clips.clip import Crop
from wands.data.clips.file_kinds import CLIP_EXTENSIONS, explain_no_file
from wands.data.clips.rows import is_empty, pick_crop, pick_license, read_range
from wands.errors import CacheError, DataError, WandsError, one_line
from wands.files import atomic_path
from wands.texts import printable

REJECTS_NAME = "rejects.jsonl"
"""File of a cache that lists the rejected clips. Each line is a JSON object with the fields of `Rejection`."""
MAX_PATH = 4096
"""Longest path in bytes on Linux. Unicode normalization of a much longer text could take minutes."""

Part = tuple[float | None, float | None, Crop | None, tuple[FoundFile, ...]]
"""(start in seconds, end in seconds, crop, files next to the clip). None is the start, the end, and the whole frame."""


@dataclass(frozen=True)
class ClipRecord:
    """One clip with one caption. A clip with several captions has several records.

    Attributes:
        key: unique, stable name, empty until `settle_keys` sets it: the path relative to the source, without extension unless
            only that tells two clips apart, and `suffix`. A key never contains "#", which starts a suffix in the keys of samples.
        path: absolute path of the file.
        caption: text as written, stripped. Empty for a clip without a caption, if the source needs none.
        start: start of the time range in seconds. None is the start of the file.
        end: end of the time range in seconds. None is the end of the file.
        name: path relative to the source, including the extension.
        license: license that the source states (`wands.data.clips.rows.pick_license`), or "".
        is_extra_caption: whether an earlier record has the same clip and time range with a different caption.
        row: table row or JSON object of the clip with lower-case names, {} if there is none.
        unmet: reason why the clip does not meet --where (`wands.data.clips.filters`), or "".
        files: files next to the clip from which conditions are made, such as the loss mask.
    """

    key: str
    path: Path
    caption: str
    start: float | None = None
    end: float | None = None
    name: str = field(default="", compare=False)
    is_extra_caption: bool = field(default=False, compare=False)
    license: str = ""
    row: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    crop: Crop | None = None
    unmet: str = field(default="", compare=False)
    files: tuple[FoundFile, ...] = ()

    @property
    def part(self) -> Part:
        """Part of the file that the clip uses: (start in seconds, end in seconds, crop rectangle, files next to the clip)."""
        return self.start, self.end, self.crop, self.files

    @property
    def mask(self) -> Path | None:
        """Image or video that weights the loss, from black (0) to white (1). None weights all pixels with 1."""
        return next((path for kind, path in self.files if kind.column == MASK_FILE.column), None)

    def with_mask(self, mask: Path) -> ClipRecord:
        """Return a copy with another loss mask."""
        others = [found for found in self.files if found.kind.column != MASK_FILE.column]
        return replace(self, files=(FoundFile(MASK_FILE, mask), *others))

    @property
    def range_suffix(self) -> str:
        """Part of the key for the time range in seconds, such as "@2.000-9.500", or "@2.000" without an end."""
        if self.start is None and self.end is None:
            return ""
        return f"@{self.start or 0.0:.3f}" + ("" if self.end is None else f"-{self.end:.3f}")

    @property
    def suffix(self) -> str:
        """Time range and, for all captions of a clip except the first, a hash of the caption: "@2.000-9.500~0123abcd"."""
        if not self.is_extra_caption:
            return self.range_suffix
        return f"{self.range_suffix}~{hashlib.sha256(self.caption.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Rejection:
    """A clip, or another file or row of a source, that cannot be used.

    Attributes:
        key: key of the clip or, if no clip can be named, the place of the error, such as "clips.csv:12".
        path: path of the file: absolute, or as the source writes it.
        reason: rule that is violated, and the fix.
    """

    key: str
    path: str
    reason: str


def reject(key: str, path: object, reason: object) -> Rejection:
    """Return a `Rejection` with escaped texts of at most 4,096 characters."""

    def escape(text: object) -> str:
        return printable(str(text)[:4096])

    return Rejection(key=escape(key), path=escape(path), reason=escape(reason))


def records_of_clip(
    name: str,
    path: Path,
    captions: list[str],
    place: str,
    row: Mapping[str, Any],
    folders: tuple[Path, ...] = (),
    kinds: Sequence[ClipFile] = (MASK_FILE,),
) -> Iterator[ClipRecord | Rejection]:
    """Yield one record for each caption of a clip, and a rejection for each repeated caption.

    `name` is relative to the source, with extension; `captions` come from `Source.check_captions`; `place` is their file or row,
    for the rejection. `row` may state a time range, a license, a crop and paths of `kinds`, relative to `folders` (default: the
    folder of the clip).

    Raises:
        DataError: if the name cannot be stored or printed, the time range is invalid, the crop is not a rectangle, or a file of
            `kinds` does not exist.
    """
    _check_name(name)
    if repeated := next((caption for caption, count in Counter(captions).items() if count > 1), ""):
        yield reject(place, path, f"caption is listed twice ({repeated[:60]}); keep one of the two")
    found = [
        (kind, _find_file(kind, path, row.get(kind.column), folders or (path.parent,))) for kind in kinds
    ]
    files = tuple(FoundFile(kind, file) for kind, file in found if file is not None)
    facts: dict[str, Any] = {"license": pick_license(row), "row": row, "crop": pick_crop(row), "files": files}
    start, end = read_range(row, path)
    for index, caption in enumerate(dict.fromkeys(captions)):
        yield ClipRecord(
            key="",
            path=path,
            caption=caption,
            start=start,
            end=end,
            name=name,
            is_extra_caption=index > 0,
            **facts,
        )


def _check_name(name: str) -> None:
    # Caches and tables cannot store invalid UTF-8, and a terminal executes control characters.
    if name != printable(name):
        raise DataError("file name is not valid UTF-8 or contains control characters; rename the file")


def _find_file(kind: ClipFile, path: Path, written: object, folders: tuple[Path, ...]) -> Path | None:
    """Return the file that `written` names, else the file next to the clip, else None.

    Raises:
        DataError: if `written` leads to no file, the file next to the clip is no file, or a required file is missing.
    """
    text = "" if is_empty(written) else str(written).strip()
    try:
        if text:
            _check_name(text)
            return locate(text, folders)[1]
    except DataError as error:
        raise DataError(f"for the {kind.column}, {error}") from None
    candidates = [path.with_name(path.stem + ending) for ending in kind.endings]
    found = next(filter(os.path.lexists, candidates), None)
    if found and not found.is_file():  # a broken link must not become a clip without the file
        raise DataError(f"{kind.column}={found} {explain_no_file(found)}")
    if found is None and kind.required:
        wanted = " or ".join(candidate.name for candidate in candidates)
        raise DataError(
            f"video={path} has no {kind.column}; add {wanted} next to the clip, or write the path in the column {kind.column}"
        )
    return found


def clip_names(
    files: Collection[str],
    extensions: tuple[str, ...] = CLIP_EXTENSIONS,
    kinds: Sequence[ClipFile] = (MASK_FILE,),
) -> list[str]:
    """Return the sorted names of the clips among `files`, without files that belong to a clip, such as a.mask.png."""
    stems = {PurePosixPath(file).stem for file in files}
    others = {stem + ending for stem in stems for kind in kinds for ending in kind.endings}
    return sorted(file for file in files if file.lower().endswith(extensions) and file not in others)


def settle_keys(items: Iterable[ClipRecord | Rejection]) -> tuple[list[ClipRecord], list[Rejection]]:
    """Drop duplicate records, set keys and `is_extra_caption`, and return (records, rejections), each sorted by key.

    New rejections name duplicate records, and clips whose keys would be equal.
    """
    rejections: list[Rejection] = []
    unique: dict[tuple[Path, str], ClipRecord] = {}
    first: dict[tuple[Path, str], ClipRecord] = {}
    for item in items:
        if isinstance(item, Rejection):
            rejections.append(item)
            continue
        known = first.setdefault((item.path, item.range_suffix), item)
        record = item
        if known is not item:
            # All captions of a clip get the name of the first record, so their keys are equal before the "~".
            record = replace(item, name=known.name, is_extra_caption=item.caption != known.caption)
        if unique.setdefault((record.path, record.suffix), record) is not record:
            reason = "duplicate of an earlier row; remove one of the two rows"
            rejections.append(reject(clip_key(item.name) + item.suffix, item.path, reason))
    short_keys = Counter(clip_key(record.name) + record.suffix for record in unique.values())
    full_keys = Counter(safe_name(record.name) + record.suffix for record in unique.values())
    records = []
    for record in unique.values():
        key = clip_key(record.name) + record.suffix
        full_key = safe_name(record.name) + record.suffix
        if short_keys[key] > 1 or key in full_keys:
            key = full_key
        if key == full_key and full_keys[full_key] > 1:
            reason = "another clip has the same name after # is replaced by %23; rename one of the two clips"
            rejections.append(reject(key, record.path, reason))
        else:
            records.append(replace(record, key=key))
    records.sort(key=lambda record: record.key)
    rejections.sort(key=lambda rejection: (rejection.key, rejection.path, rejection.reason))
    return records, rejections


# ---- names and files


def safe_name(name: str) -> str:
    """Return a name that can be part of a key: "#" becomes "%23"."""
    return name.replace("#", "%23")


def shown_key(key: str) -> str:
    """Return a key as a person knows it from the name of the file: "%23" becomes "#"."""
    return key.replace("%23", "#")


def clip_key(name: str) -> str:
    """Return the key of the clip with this name (path relative to the source). The key does not contain the extension."""
    return safe_name(str(PurePosixPath(name).with_suffix("")))


def spellings(name: str) -> tuple[str, ...]:
    """Return a name with composed (NFC) and with decomposed accents (NFD), as archives from macOS have them."""
    return tuple(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))


def locate(video: str, folders: tuple[Path, ...], root: Path | None = None) -> tuple[str, Path]:
    """Find the file of a clip that a table names, and return its name and its absolute path.

    The first of `folders` that contains it, in either spelling of accents, is used. The name has the accents as written, so the
    key is the same on every system. It is relative to `root` or else `folders[0]`, or the absolute path without the first "/".

    Raises:
        DataError: if the path is a URL, or the file does not exist.
    """
    if re.match(r"[a-zA-Z][\w+.-]+://", video):
        raise DataError("path is a URL, not a file; download the file and write its local path")
    folder = folders[0]
    names = dict.fromkeys((video, *spellings(video[:MAX_PATH])))
    paths = [Path(os.path.normpath(base / name)) for name in names for base in folders]
    try:
        index = next((index for index, path in enumerate(paths) if path.is_file()), None)
    except OSError as error:
        raise DataError(f"path cannot be read ({error.strerror}, {video[:99]}); correct this path") from None
    if index is None:
        if odd := next(filter(os.path.lexists, paths), None):
            raise DataError(f"video={odd} {explain_no_file(odd)}")
        raise DataError(f"no such file ({paths[0]}); correct this path (absolute, or relative to {folder})")
    written = paths[index % len(folders)]
    bases = (root or folder, folder)
    if not any(map(written.is_relative_to, bases)):
        # The table may write a path through a link.
        real = Path(os.path.realpath(written.parent), written.name)
        written = real if any(map(real.is_relative_to, bases)) else written
    base = next(filter(written.is_relative_to, bases), written.anchor)
    return written.relative_to(base).as_posix(), paths[index]


def store_clip(path: Path, num_bytes: int, write: Callable[[IO[bytes]], object], label: str) -> None:
    """Let `write` fill the file `path`, whose name identifies the content, unless it exists with `num_bytes` bytes.

    Raises:
        CacheError: if the disk is full or not writable.
    """
    if path.is_file() and path.stat().st_size == num_bytes:
        return
    try:
        with atomic_path(path) as partial, partial.open("wb") as file:
            write(file)
    except WandsError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):  # `write` could not read the clip
            raise
        fix = "free some space, or set HF_DATASETS_CACHE to a folder on another disk"
        if cause.errno == errno.EFBIG:
            fix = "raise the limit of file sizes (ulimit -f unlimited)"
        raise CacheError(
            f"folder {path.parent} cannot store {label} ({one_line(cause)}: {num_bytes:,} bytes needed); {fix}"
        ) from None
