"""Compare the source with the cache: find the clips whose samples the cache lacks, wholly or in part."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from wands.commands.clip_rules import EMPTY_CAPTION, no_access_reason
from wands.data.cache.shards import IndexEntry
from wands.data.clips.captions import clean_caption
from wands.data.clips.clip import ClipSpec, TooSmallError, plan_sizes, split_suffix
from wands.data.clips.records import IMAGE_EXTENSIONS, ClipRecord, Rejection
from wands.errors import ConfigError, one_line

SCAN_THREADS = 16
FromSource = TypeVar("FromSource", ClipRecord, Rejection)
Samples = dict[str, IndexEntry]
"""Samples of one range of a file in the cache, by suffix. If several captions share a window, any of their samples."""


@dataclass(frozen=True)
class Row:
    """One caption of a clip.

    Attributes:
        key: key of the row; `wands.data.clips.clip` lists the suffixes of windows and further sizes.
        caption: cleaned caption.
        content: digest of everything that the samples are made from.
        present: suffixes of the samples that the cache has.
    """

    key: str
    caption: str
    content: str
    present: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clip:
    """A range of a file with all its captions, so that the range is decoded and encoded once.

    Attributes:
        path: the file.
        start: seconds, None for the beginning.
        end: seconds, None for the end.
        video: digest of what the latents are made from.
        rows: captions; a pending clip has only captions without all samples.
        latents: (shard, row of the shard, suffix) of latents in the cache that a caption of this clip lacks.
        decode: whether the cache lacks windows, which must be decoded.
    """

    path: str
    start: float | None
    end: float | None
    video: str
    rows: tuple[Row, ...]
    latents: tuple[tuple[str, int, str], ...] = ()
    decode: bool = True

    def lacks(self, suffix: str) -> list[Row]:
        """Return the captions that have no sample with this suffix."""
        return [row for row in self.rows if suffix not in row.present]


class SourceScan:
    """Clips of the source, identified by the content of their files.

    Attributes:
        contents: key of each usable row -> digest of what its samples are made from.
        clips: clips by (path, digest of the video).
        rejected: rows that cannot be used.
    """

    def __init__(
        self,
        rows: Sequence[ClipRecord],
        rejected: Sequence[Rejection],
        spec: ClipSpec,
        more_pixels: tuple[int, ...],
        quarantine: Mapping[str, str],
    ) -> None:
        """Read the size of every file, its beginning, its end and some pieces between.

        Args:
            rows: usable rows of the source.
            rejected: rows that the source rejects.
            spec: size, rate and length of the samples.
            more_pixels: further area limits.
            quarantine: digests of clips that crash or hang a process, with the reason.
        """
        self.spec, self.more_pixels, self.rejected = spec, more_pixels, list(rejected)
        self.contents: dict[str, str] = {}
        self.clips: dict[tuple[str, str], Clip] = {}
        with ThreadPoolExecutor(SCAN_THREADS) as pool:  # many small reads: the threads wait for the disk
            for row, clip in zip(rows, pool.map(_examine, rows), strict=True):
                if isinstance(clip, Rejection):
                    self.rejected.append(clip)
                    continue
                self.contents[row.key] = clip.rows[0].content
                if reason := quarantine.get(clip.video):
                    self.rejected.append(Rejection(row.key, clip.path, reason))
                    continue
                same_clip = self.clips.get((clip.path, clip.video))
                if same_clip is not None:  # another caption: decode once for both
                    clip = replace(clip, rows=(*same_clip.rows, *clip.rows))
                self.clips[clip.path, clip.video] = clip

    def pending(self, entries: Mapping[str, IndexEntry], rejected_videos: Collection[str] = ()) -> list[Clip]:
        """Return the clips with missing samples, each with the captions that lack samples and the cached latents to reuse.

        Args:
            entries: samples of the cache by key.
            rejected_videos: digests of clips to leave out.
        """
        stored: dict[str, Samples] = defaultdict(dict)
        for key, entry in entries.items():
            if entry.video:
                stored[entry.video]["".join(key.partition("#")[1:])] = entry
        lacking = (
            self._lacking(clip, stored.get(clip.video, {}), entries)
            for clip in self.clips.values()
            if clip.video not in rejected_videos
        )
        return [clip for clip in lacking if clip is not None]

    def _lacking(self, clip: Clip, stored: Samples, entries: Mapping[str, IndexEntry]) -> Clip | None:
        """Return the clip reduced to its missing samples, or None if the cache has all samples of the clip."""
        expected = self._expected(stored)
        rows = []
        for row in clip.rows:
            own = entries.get(row.key)
            if expected is None and not self.more_pixels and own is not None and own.content == row.content:
                continue  # made by an early version of wands, which stored less metadata
            present = [
                suffix
                for suffix in stored
                if (entry := entries.get(row.key + suffix)) is not None and entry.content == row.content
            ]
            if expected is None or not expected <= set(present):
                rows.append(replace(row, present=tuple(present)))
        if not rows:
            return None
        lacking = replace(clip, rows=tuple(rows))
        wanted = sorted(stored if expected is None else expected & stored.keys())
        return replace(
            lacking,
            latents=tuple(
                (stored[suffix].shard, stored[suffix].row, suffix)
                for suffix in wanted
                if lacking.lacks(suffix)
            ),
            decode=expected is None or not expected <= stored.keys(),
        )

    def _expected(self, stored: Samples) -> set[str] | None:
        """Return the suffixes of all samples of a clip, or None if they are known only after decoding."""
        by_size: dict[str, Samples] = defaultdict(dict)
        for suffix, entry in stored.items():
            window, size = split_suffix(suffix)
            by_size[size][window] = entry
        windows = next((windows for windows in by_size.values() if _is_complete(windows)), None)
        sizes: frozenset[str] | None = frozenset({""})
        if self.more_pixels:
            display_size = next((entry.display_size for entry in stored.values() if entry.display_size), ())
            sizes = _size_suffixes(self.spec, self.more_pixels, display_size)
        if windows is None or sizes is None:
            return None
        return {window + size for window in windows for size in sizes}

    def accepted(self, entries: Mapping[str, IndexEntry]) -> set[str]:
        """Return the keys of the cached samples that belong to the source and have a requested size."""
        return {key for key, entry in entries.items() if self._is_wanted(key, entry)}

    def _is_wanted(self, key: str, entry: IndexEntry) -> bool:
        row, sign, suffix = key.partition("#")
        if self.contents.get(row) != entry.content:
            return False
        _, size = split_suffix(sign + suffix)
        return not size or size in (_size_suffixes(self.spec, self.more_pixels, entry.display_size) or ())


@lru_cache(1 << 16)
def _size_suffixes(
    spec: ClipSpec, more_pixels: tuple[int, ...], display_size: tuple[str, ...]
) -> frozenset[str] | None:
    """Return the suffixes of a clip's sizes; None if the display size is unknown or a limit gives no size.

    A clip that is too small for a limit is decoded, and decoding rejects the clip.
    """
    if not display_size:
        return None
    try:
        sizes, size_error = plan_sizes(spec, more_pixels, *map(Fraction, display_size))
    except TooSmallError:
        return None
    return None if size_error else frozenset(sizes)


def _is_complete(windows: Mapping[str, IndexEntry]) -> bool:
    last = [int(window[1:] or 0) for window, entry in windows.items() if entry.last]
    return len(last) == 1 and len(windows) == 1 + last[0]


def _examine(row: ClipRecord) -> Clip | Rejection:
    caption = clean_caption(row.caption)
    if not caption:
        return Rejection(row.key, str(row.path), EMPTY_CAPTION)
    try:
        content, video = _digests(row, caption)
    except OSError as error:
        return Rejection(row.key, str(row.path), no_access_reason(row.path, one_line(error)))
    return Clip(str(row.path), row.start, row.end, video, (Row(row.key, caption, content),))


_PIECE, _PIECES = 1 << 16, 8
_WHOLE = 1 << 24


def _digests(row: ClipRecord, caption: str) -> tuple[str, str]:
    """Return two digests: of a row's file content, range and caption, and of the file content and range alone.

    Size and modification time alone would encode a copied data set anew. All samples of a cache have the same settings.
    """
    pieces = _read_pieces(row.path)
    size = row.path.stat().st_size
    content, video = (
        hashlib.blake2b(pieces + json.dumps(rest).encode(), digest_size=16).hexdigest()
        for rest in ([size, caption, row.start, row.end], [size, row.start, row.end])
    )
    return content, video


def _read_pieces(path: Path) -> bytes:
    """Read a whole image, or both ends of a video and some pieces between.

    A video encoder's output differs everywhere if its input differs anywhere, but uncompressed files may begin and end alike.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if path.suffix.lower() in IMAGE_EXTENSIONS and size <= _WHOLE:
            file.seek(0)
            return file.read()
        pieces = []
        for number in range(_PIECES + 1):
            file.seek(max(0, size - _PIECE) * number // _PIECES)
            pieces.append(file.read(_PIECE))
    return b"".join(pieces)


def parse_part(text: str) -> tuple[int, int]:
    """Parse the value of --part, such as "3/16".

    Raises:
        ConfigError: if it is not I/N with 1 <= I <= N.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part {text} is not a part. Use I/N with 1 <= I <= N, for example 3/16.")
    return int(number), int(count)


def select_part(items: Sequence[FromSource], source: str, part: tuple[int, int]) -> list[FromSource]:
    """Return one part of the source's clips; all captions of a file are in one part.

    The part of a file depends only on the path below the source, so that new files do not change the parts of other files.

    Args:
        items: rows or rejections of the source.
        source: folder, table or archive of the source.
        part: (number of the part from 1, number of parts).
    """
    folder = Path(source).expanduser().absolute()
    folder = folder if folder.is_dir() else folder.parent

    def number(item: ClipRecord | Rejection) -> int:
        path = Path(item.path)
        name = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % part[1] + 1

    return [item for item in items if number(item) == part[0]]
