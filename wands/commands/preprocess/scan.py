"""What of a source a cache has already, what only the caption or the name is new of, and what must be encoded."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path

from wands.commands.preprocess.work_folder import Clip, Row
from wands.data.cache.format import IndexEntry
from wands.data.clips.captions import clean_caption
from wands.data.clips.clip import ClipSpec, TooSmallError, plan_sizes, split_suffix
from wands.data.clips.records import IMAGE_EXTENSIONS, ClipRecord, Rejection

SCAN_THREADS = 16


@dataclass
class Scan:
    """The rows of the source, beside what the cache has of them.

    Attributes:
        spec: what clips are turned into.
        more_pixels: further bounds of a frame's area.
        contents: key of each usable row -> digest of what its samples are made from.
        pending: clips with a row that lacks a sample.
        rejected: what cannot be used, so far.
        before: keys of all samples that the cache had, with their digests.
    """

    spec: ClipSpec
    more_pixels: tuple[int, ...]
    contents: dict[str, str] = field(default_factory=dict)
    pending: list[Clip] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Sequence[ClipRecord],
        entries: Mapping[str, IndexEntry],
        rejected: Sequence[Rejection],
        spec: ClipSpec,
        more_pixels: Sequence[int] = (),
        quarantine: Mapping[str, str] | None = None,
    ) -> Scan:
        """Compare the rows of a source with a cache.

        Args:
            rows: of the source.
            entries: of the cache, by key.
            rejected: by the source.
            spec: what clips are turned into.
            more_pixels: further bounds of a frame's area.
            quarantine: digests of clips that end a process, with what is said of them.
        """
        scan = cls(spec, tuple(more_pixels), rejected=list(rejected))
        scan.before = {key: entry.content for key, entry in entries.items()}
        stored = _Stored.of(entries)
        clips: dict[tuple[str, str], Clip] = {}
        with ThreadPoolExecutor(SCAN_THREADS) as pool:  # small reads of many files: waiting for the disk
            for row, found in zip(rows, pool.map(_examine, rows), strict=True):
                if isinstance(found, Rejection):
                    scan.rejected.append(found)
                    continue
                (of_row,) = found.rows
                scan.contents[row.key] = of_row.content
                if reason := (quarantine or {}).get(found.video):
                    scan.rejected.append(Rejection(row.key, found.path, reason))
                    continue
                clip = clips.setdefault((found.path, found.video), found)
                if clip is not found:  # another caption: one decoding for both
                    clips[found.path, found.video] = replace(clip, rows=(*clip.rows, of_row))
        scan.pending = [lacking for clip in clips.values() if (lacking := scan._lacking(clip, stored))]
        return scan

    def _lacking(self, clip: Clip, stored: Mapping[str, _Stored]) -> Clip | None:
        """The clip with what it need not encode, or None if the cache has all of it."""
        of_clip = stored.get(clip.video, _Stored({}))
        expected = self._expected(of_clip)
        rows = []
        for row in clip.rows:
            if expected is None and not self.more_pixels and self.before.get(row.key) == row.content:
                continue  # made by a wands that told less of its samples
            has = [suffix for suffix in of_clip.entries if self.before.get(row.key + suffix) == row.content]
            if expected is None or not expected <= set(has):
                rows.append(replace(row, present=tuple(has)))
        if not rows:
            return None
        found = replace(clip, rows=tuple(rows))
        wanted = of_clip.entries if expected is None else expected & of_clip.entries.keys()
        places = [(suffix, of_clip.entries[suffix]) for suffix in sorted(wanted) if found.lacks(suffix)]
        return replace(
            found,
            latents=tuple((entry.shard, entry.row, suffix) for suffix, entry in places),
            decode=expected is None or not expected <= of_clip.entries.keys(),
        )

    def _expected(self, stored: _Stored) -> set[str] | None:
        """Suffixes of all samples that a clip gives; None where only decoding can tell."""
        sizes = self._sizes(stored.display_size) if self.more_pixels else frozenset({""})
        if stored.windows is None or sizes is None:
            return None
        return {window + size for window in stored.windows for size in sizes}

    def _sizes(self, display_size: tuple[str, ...]) -> frozenset[str] | None:
        if not display_size:
            return None
        return _plan(self.spec, self.more_pixels, display_size)

    def accepted(self, entries: Mapping[str, IndexEntry]) -> set[str]:
        """Keys of every sample that the source gives: a row's own, or those of its windows and sizes."""
        return {key for key, entry in entries.items() if self._is_wanted(key, entry)}

    def _is_wanted(self, key: str, entry: IndexEntry) -> bool:
        row, sign, suffix = key.partition("#")
        if self.contents.get(row) != entry.content:
            return False
        _, size = split_suffix(sign + suffix)
        return not size or size in (self._sizes(entry.display_size) or ())

    @property
    def num_relabelled(self) -> int:
        """Samples whose latents the cache has."""
        return sum(len(clip.lacks(suffix)) for clip in self.pending for _, _, suffix in clip.latents)


@lru_cache(1 << 16)
def _plan(
    spec: ClipSpec, more_pixels: tuple[int, ...], display_size: tuple[str, str]
) -> frozenset[str] | None:
    """Suffixes of a clip's sizes; None where a bound gives none, which decoding rejects."""
    try:
        sizes = plan_sizes(spec, more_pixels, *map(Fraction, display_size))
    except TooSmallError:
        return None
    return None if sizes.error else frozenset(sizes.by_suffix)


@dataclass(frozen=True)
class _Stored:
    """The samples that have the latents of one range of one file, by suffix; of several rows any will do."""

    entries: Mapping[str, IndexEntry]

    @staticmethod
    def of(entries: Mapping[str, IndexEntry]) -> dict[str, _Stored]:
        """By digest of the video."""
        found: dict[str, dict[str, IndexEntry]] = defaultdict(dict)
        for key, entry in entries.items():
            if entry.video:
                found[entry.video]["".join(key.partition("#")[1:])] = entry
        return {video: _Stored(samples) for video, samples in found.items()}

    @cached_property
    def windows(self) -> set[str] | None:
        """Suffixes of the clip's windows; None while no size has all of them."""
        by_size: dict[str, dict[str, IndexEntry]] = defaultdict(dict)
        for suffix, entry in self.entries.items():
            window, size = split_suffix(suffix)
            by_size[size][window] = entry
        return next((set(windows) for windows in by_size.values() if _are_whole(windows)), None)

    @property
    def display_size(self) -> tuple[str, ...]:
        """Of the source, as its samples tell."""
        return next((entry.display_size for entry in self.entries.values() if entry.display_size), ())


def _are_whole(windows: Mapping[str, IndexEntry]) -> bool:
    last = [int(window[1:] or 0) for window, entry in windows.items() if entry.last]
    return len(last) == 1 and len(windows) == 1 + last[0]


def _examine(row: ClipRecord) -> Clip | Rejection:
    caption = clean_caption(row.caption)
    if not caption:
        return Rejection(row.key, str(row.path), "empty caption once cleaned; write one")
    try:
        content, video = _digests(row, caption)
    except OSError as error:
        return Rejection(
            row.key,
            str(row.path),
            f"video={row.path} cannot be read ({error.strerror}); fix its permissions",
        )
    return Clip(str(row.path), row.start, row.end, video, (Row(row.key, caption, content),))


_PIECE, _PIECES = 1 << 16, 8
_WHOLE = 1 << 24


def _digests(row: ClipRecord, caption: str) -> tuple[str, str]:
    """What a sample is made from, and what its latents are: the file's content, range, caption.

    Size and time of change alone would encode a data set anew because it was copied. The settings are the same in all of a cache.
    """
    ends = _read_pieces(row.path)
    size = row.path.stat().st_size
    content, video = (
        hashlib.blake2b(ends + json.dumps(rest).encode(), digest_size=16).hexdigest()
        for rest in ([size, caption, row.start, row.end], [size, row.start, row.end])
    )
    return content, video


def _read_pieces(path: Path) -> bytes:
    """Of a picture, which is small, everything; of a video both ends and pieces from between.

    An encoder's output differs everywhere if its input does anywhere, but files without compression may begin and end alike.
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
