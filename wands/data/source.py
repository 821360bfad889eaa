"""A SOURCE of clips -> manifest rows: keys, paths, captions. Nothing is decoded here.

A SOURCE is a folder of clips with captions beside them, a table of clips and captions (or the folder that
holds it), or a Hugging Face dataset (a `save_to_disk` folder, a folder of parquet or arrow files, or a name).
What cannot be used comes back as a `Rejection` with its reason; a file name is never taken for a caption.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from wands.data.hf_dataset import read_dataset, write_clip
from wands.data.table import CAPTION_COLUMNS, Columns, read_table, read_window
from wands.errors import DataError

# fmt: off
VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)
# fmt: on
_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.json")


@dataclass(frozen=True)
class ManifestRow:
    """One clip to be decoded.

    Attributes:
        key: unique and stable: the path below SOURCE without its extension, which stays where two clips
            differ in nothing else; "@start-end" follows where the row cuts a window. Never contains "#".
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
    """A usable clip before its key is settled; ``name`` is its path below the source, extension included."""

    name: str
    path: Path
    caption: str
    start: float | None = None
    end: float | None = None

    @property
    def window(self) -> str:
        if self.start is None and self.end is None:
            return ""
        return f"@{self.start or 0.0:.3f}" + ("" if self.end is None else f"-{self.end:.3f}")

    @property
    def short_key(self) -> str:
        return _key(self.name) + self.window

    @property
    def full_key(self) -> str:
        return _safe(self.name) + self.window


@dataclass
class _Scan:
    """What has been found so far."""

    entries: list[_Entry] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)

    def reject(self, key: str, path: object, reason: str) -> None:
        self.rejections.append(Rejection(_printable(key), _printable(str(path)), _printable(reason)))

    def finish(self) -> tuple[list[ManifestRow], list[Rejection]]:
        """Drop duplicates, settle the keys, sort both lists by key."""
        unique: dict[tuple[Path, str], _Entry] = {}
        for entry in self.entries:
            if unique.setdefault((entry.path, entry.window), entry) is not entry:
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
                rows.append(ManifestRow(key, entry.path, entry.caption, entry.start, entry.end))
        rows.sort(key=lambda row: row.key)
        self.rejections.sort(key=lambda rejection: (rejection.key, rejection.path, rejection.reason))
        return rows, self.rejections


def load_source(
    source: str,
    *,
    split: str = "train",
    video_column: str | None = None,
    caption_column: str | None = None,
    cache_dir: Path | None = None,
) -> tuple[list[ManifestRow], list[Rejection]]:
    """List the clips of a source with their captions, both lists sorted by key and the same on every call.

    Hidden files and folders are not looked at. What exists on disk is never looked up on the Hub.

    Args:
        source: folder, table (.csv, .jsonl, .json) or name of a Hugging Face dataset (owner/name).
        split: of a Hugging Face dataset.
        video_column: of a table or dataset; default: the first of `table.VIDEO_COLUMNS` that is there.
        caption_column: likewise, of `table.CAPTION_COLUMNS`.
        cache_dir: where clips that a dataset holds as bytes are written, by content; default: in the cache of
            `datasets`.

    Returns:
        The usable rows, and what was rejected with the reason.

    Raises:
        DataError: the source does not exist, cannot be read, or holds no clip at all.
    """
    if not source.strip():
        raise DataError("source= is empty; give a folder, a table or the name of a dataset")
    scan = _Scan()
    path = Path(source).expanduser().absolute()
    columns = Columns(source, video_column, caption_column)
    if path.is_file():
        _scan_table(path, columns, scan)
    elif path.is_dir():
        tables = [path / name for name in _TABLES if (path / name).is_file()]
        if len(tables) > 1:
            names = " and ".join(table.name for table in tables)
            raise DataError(f"source={source} holds {names}; name the one that counts")
        if tables:
            _scan_table(tables[0], columns, scan)
        elif not _scan_folder(path, scan):
            if not any(path.rglob("*.parquet")) and not any(path.rglob("*.arrow")):
                raise DataError(
                    f"source={source} holds no clip; looked for {' '.join(VIDEO_EXTENSIONS)} at any depth"
                )
            _scan_dataset(str(path), path, split, columns, cache_dir, scan)
    elif _may_be_hub_name(source):
        _scan_dataset(source, Path.cwd(), split, columns, cache_dir, scan)
    else:
        raise DataError(
            f"source={source} does not exist (looked for {path}); correct the path, or name a Hugging Face "
            "dataset as owner/name"
        )
    return scan.finish()


def _may_be_hub_name(source: str) -> bool:
    """owner/name, unless there is a local folder "owner": then the path is mistyped, not a dataset meant."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source)) and not Path(source).parent.exists()


def _safe(name: str) -> str:
    return name.replace("#", "%23")  # "#" starts the suffix that the decoder gives to windows


def _key(name: str) -> str:
    return _safe(str(PurePosixPath(name).with_suffix("")))


def _printable(text: str) -> str:
    """Names that are not UTF-8 reach Python as surrogates, which no report or cache can store."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _check_caption(value: Any, written: str) -> str:
    """Strip a caption; ``written`` says where one was looked for.

    Raises:
        DataError: there is none, or it is no text.
    """
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"missing caption; write one in {written}")
    if not isinstance(value, str):
        raise DataError(f"caption is a {type(value).__name__}, not text; write text in {written}")
    if not value.strip():
        raise DataError(f"empty caption; write one in {written}")
    if value != _printable(value):
        raise DataError(f"caption is not valid Unicode; rewrite it in {written}")
    return value.strip()


def _scan_folder(folder: Path, scan: _Scan) -> int:
    """Add the clips of a folder with the captions beside them; returns the number of clips, usable or not."""
    clips = 0
    for root, files in _walk(folder, scan):
        present = set(files)
        for file in files:
            if not file.lower().endswith(VIDEO_EXTENSIONS):
                continue
            clips += 1
            path = root / file
            name = path.relative_to(folder).as_posix()
            try:
                if name != _printable(name):
                    raise DataError("file name is not valid UTF-8; rename it")
                if not path.is_file():
                    raise DataError("no such file (a broken link?); mend or remove it")
                scan.entries.append(_Entry(name, path, _read_sidecar(path, present)))
            except DataError as error:
                scan.reject(_key(name), path, str(error))
    return clips


def _walk(folder: Path, scan: _Scan) -> Iterator[tuple[Path, list[str]]]:
    """Folders in sorted order with their visible files; each real folder once, so that links cannot loop."""
    seen: set[tuple[int, int]] = set()

    def unreadable(error: OSError) -> None:
        name = os.path.relpath(error.filename, folder)
        scan.reject(name, error.filename, f"folder cannot be read ({error.strerror}); mend its permissions")

    for root, folders, files in os.walk(folder, followlinks=True, onerror=unreadable):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(root), sorted(name for name in files if not name.startswith("."))


def _read_sidecar(clip: Path, present: set[str]) -> str:
    """Read the caption beside a clip: same stem, .txt before .json.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    text, data = f"{clip.stem}.txt", f"{clip.stem}.json"
    if text not in present and data not in present:
        raise DataError(f"missing caption; write one in {text} or {data} beside it")
    file = clip.with_name(text if text in present else data)
    try:
        value: Any = file.read_text(encoding="utf-8-sig")
        if file.name == data:
            value = json.loads(value)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not JSON
        raise DataError(f"{file.name} cannot be read ({error}); save it as UTF-8 text") from error
    if file.name == data:
        if not isinstance(value, dict):
            raise DataError(f"{file.name} holds a {type(value).__name__}; write an object with a caption")
        value = next((value[name] for name in CAPTION_COLUMNS if name in value), None)
    return _check_caption(value, file.name)


def _scan_table(table: Path, columns: Columns, scan: _Scan) -> None:
    rows = read_table(table)
    if not rows:
        raise DataError(f"source={table} lists no clip; add rows with a video and a caption")
    readable = [row for _, row in rows if isinstance(row, dict)]
    if readable:
        columns.check({name for row in readable for name in row})
    for number, row in rows:
        where = f"{table.name}:{number}"
        if isinstance(row, str):
            scan.reject(where, table, row)
            continue
        video, caption = columns.pick(row)
        try:
            if not isinstance(video, str) or not video.strip():
                raise DataError("no video in this row; write its path")
            name, path = _locate(video.strip(), table.parent)
            scan.entries.append(_Entry(name, path, _check_caption(caption, where), *read_window(row)))
        except DataError as error:
            scan.reject(where, video or table, str(error))


def _locate(video: str, folder: Path) -> tuple[str, Path]:
    """Name and absolute path of a clip that is written in a table which lies in ``folder``.

    Raises:
        DataError: it is not there.
    """
    if re.match(r"[a-zA-Z][\w+.-]+://", video):
        raise DataError("a URL is no file; download the clip and write its path")
    path = Path(os.path.normpath(folder / video))
    if not path.is_file():
        raise DataError(f"no such file (looked for {path}); correct the path, it counts from {folder}")
    name = path.relative_to(folder) if path.is_relative_to(folder) else path.relative_to(path.anchor)
    if str(name) != _printable(str(name)):
        raise DataError("file name is not valid UTF-8; rename it")
    return name.as_posix(), path


def _scan_dataset(
    source: str, folder: Path, split: str, columns: Columns, cache_dir: Path | None, scan: _Scan
) -> None:
    for index, row in read_dataset(source, split, columns):
        video, caption = columns.pick(row)
        if isinstance(video, bytes):
            video = {"bytes": video}
        data, written = (video.get("bytes"), video.get("path")) if isinstance(video, dict) else (None, video)
        where = f"{split}:{index}"
        try:
            text, window = _check_caption(caption, where), read_window(row)
            if data:
                name, path = write_clip(data, written, cache_dir)
            elif isinstance(written, str) and written:
                name, path = _locate(written, folder)
                name = re.sub(r"^.*/snapshots/[0-9a-f]{40}/", "", name)  # the Hub cache's own folders
            else:
                raise DataError("no video in this row; remove it")
            scan.entries.append(_Entry(name, path, text, *window))
        except DataError as error:
            scan.reject(where, written or where, str(error))
