"""Compare a source of clips with the latent cache, and find the clips with samples that the cache lacks."""

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
from typing import Any, TypeVar

from wands.data.cache.shards import IndexEntry
from wands.data.clips.captions import clean_caption
from wands.data.clips.clip import ClipSpec, TooSmallError, plan_sizes, split_suffix
from wands.data.clips.file_kinds import IMAGE_EXTENSIONS
from wands.data.clips.records import ClipRecord, Part, Rejection
from wands.data.clips.source import Source
from wands.errors import ConfigError, one_line
from wands.preprocess.clip_rules import EMPTY_CAPTION, Footage, measure_footage, no_access_reason

SCAN_THREADS = 16
FromSource = TypeVar("FromSource", ClipRecord, Rejection)
Samples = dict[str, IndexEntry]
"""Cached samples of one time range of a file by suffix (window and size).

If the time range has several captions, the map has one of their samples, any of which has the same latents.
"""


@dataclass(frozen=True)
class Row:
    """One caption of a clip, and its samples in the cache.

    Attributes:
        key: id of clip and caption. A sample's key is this key and a suffix such as "#0003#640x352", which names the window and
            the size, see `wands.data.clips.clip`.
        caption: cleaned caption.
        content: digest of the file, the time range, the crop, the files next to the clip, the caption and the license.
        license: license of the clip, "" if it is not stated.
        present: suffixes of the cached samples of this caption.
    """

    key: str
    caption: str
    content: str
    license: str = ""
    present: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clip:
    """A time range of a file with all its captions. It is decoded and encoded only once.

    Attributes:
        path: the video or image file.
        part: time range, crop and files next to the clip, such as a mask.
        video: digest of the file and of `part`. Clips with equal digests have equal latents.
        rows: captions. From `SourceScan.pending`, only those for which the cache lacks a sample.
        latents: (shard name, index in the shard, suffix) of the cached samples whose latents `rows` can reuse.
        decode: whether the cache lacks latents, or the number of samples is unknown.
    """

    path: str
    part: Part
    video: str
    rows: tuple[Row, ...]
    latents: tuple[tuple[str, int, str], ...] = ()
    decode: bool = True

    def lacks(self, suffix: str) -> list[Row]:
        """Return the captions for which the cache has no sample with a suffix."""
        return [row for row in self.rows if suffix not in row.present]


class SourceScan:
    """Clips of a source, identified by the content of their files.

    Attributes:
        contents: `Row.content` of each usable row (clip with one caption), by key.
        clips: each clip with all its captions, by (path, digest without captions).
        rejected: rejections of the rows that cannot be used.
    """

    def __init__(
        self,
        rows: Sequence[ClipRecord],
        rejected: Sequence[Rejection],
        spec: ClipSpec,
        quarantine: Mapping[str, str],
    ) -> None:
        """Read some bytes of every file to identify its content, and collect the captions of each clip.

        `quarantine` has the rejection reasons of clips that crashed a process or exceeded a time limit, by digest.
        """
        self.spec = spec
        self.rejected = list(rejected)
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
                # Another caption of a known clip is added to this clip, so that the clip is decoded once for all captions.
                known = self.clips.setdefault((clip.path, clip.video), replace(clip, rows=()))
                self.clips[clip.path, clip.video] = replace(clip, rows=(*known.rows, *clip.rows))

    def pending(self, entries: Mapping[str, IndexEntry], rejected_videos: Collection[str] = ()) -> list[Clip]:
        """Return the clips with captions for which the cache lacks a sample, with the cached latents to reuse.

        Clips with a digest in `rejected_videos` are left out.
        """
        stored: dict[str, Samples] = defaultdict(dict)
        for key, entry in entries.items():
            if entry.video:
                stored[entry.video]["".join(key.partition("#")[1:])] = entry
        clips = (clip for clip in self.clips.values() if clip.video not in rejected_videos)
        lacking = (self._lacking(clip, stored.get(clip.video, {}), entries) for clip in clips)
        return [clip for clip in lacking if clip is not None]

    def _lacking(self, clip: Clip, stored: Samples, entries: Mapping[str, IndexEntry]) -> Clip | None:
        """Return a copy of a clip with the captions for which the cache lacks a sample, or None if there is none.

        `stored` has all cached samples of the clip's file and time range, `entries` all samples of the cache by key.
        """
        expected = self._expected(stored)
        rows = []
        for row in clip.rows:
            of_row = {suffix: entries.get(row.key + suffix) for suffix in stored}
            present = [suffix for suffix, entry in of_row.items() if entry and entry.content == row.content]
            if expected is None or not expected <= set(present):
                rows.append(replace(row, present=tuple(present)))
        if not rows:
            return None
        lacking = replace(clip, rows=tuple(rows))
        wanted = filter(lacking.lacks, sorted(stored if expected is None else expected & stored.keys()))
        latents = tuple((stored[suffix].shard, stored[suffix].row, suffix) for suffix in wanted)
        return replace(lacking, latents=latents, decode=expected is None or not expected <= stored.keys())

    def _expected(self, stored: Samples) -> set[str] | None:
        """Return the suffixes of all samples that a clip must have; None if only decoding shows them."""
        by_size: dict[str, Samples] = defaultdict(dict)
        for suffix, entry in stored.items():
            window, size = split_suffix(suffix)
            by_size[size][window] = entry
        windows = next((windows for windows in by_size.values() if _is_complete(windows)), None)
        sizes: frozenset[str] | None = frozenset({""})
        if self.spec.more_pixels:
            display_size = next((entry.display_size for entry in stored.values() if entry.display_size), ())
            sizes = _size_suffixes(self.spec, display_size)
        if windows is None or sizes is None:
            return None
        return {window + size for window in windows for size in sizes}

    def accepted(self, entries: Mapping[str, IndexEntry]) -> set[str]:
        """Return the keys of the cached samples that belong to the source and have a size that --max-pixels selects."""
        return {key for key, entry in entries.items() if self._is_wanted(key, entry)}

    def footage(self, entries: Mapping[str, IndexEntry]) -> dict[str, Footage]:
        """Return the `Footage` of each video clip with cached samples, by key.

        Clips whose samples were imported are left out, because their length is unknown.
        """
        windows: dict[str, Samples] = defaultdict(dict)
        for key in self.accepted(entries):
            windows[entries[key].video][split_suffix("".join(key.partition("#")[1:]))[0]] = entries[key]
        footage = {}
        for clip in self.clips.values():
            samples = [*windows[clip.video].values()]
            if samples and samples[0].clip_seconds and not clip.path.lower().endswith(IMAGE_EXTENSIONS):
                lengths = [sample.num_frames for sample in samples]
                footage[clip.rows[0].key] = measure_footage(self.spec, lengths, samples[0].clip_seconds)
        return footage

    def _is_wanted(self, key: str, entry: IndexEntry) -> bool:
        row, sign, suffix = key.partition("#")
        if self.contents.get(row) != entry.content:
            return False
        _, size = split_suffix(sign + suffix)
        return not size or size in (_size_suffixes(self.spec, entry.display_size) or ())


@lru_cache(1 << 16)
def _size_suffixes(spec: ClipSpec, display_size: tuple[str, ...]) -> frozenset[str] | None:
    """Return the size suffixes of a clip's samples: "" for the first value of --max-pixels, "#640x352" and the like for others.

    Return None if the size is unknown or too small for a value; the clip must then be decoded. `display_size` is (width, height)
    in pixels as a player shows the clip, each an integer or a fraction, such as ("2560/3", "480"), or () if unknown.
    """
    if not display_size:
        return None
    try:
        sizes, size_error = plan_sizes(spec, *map(Fraction, display_size))
    except TooSmallError:
        return None
    return None if size_error else frozenset(sizes)


def _is_complete(windows: Mapping[str, IndexEntry]) -> bool:
    last = [int(window[1:] or 0) for window, entry in windows.items() if entry.last]
    return len(last) == 1 and len(windows) == 1 + last[0]


def _examine(row: ClipRecord) -> Clip | Rejection:
    caption = clean_caption(row.caption)
    if row.unmet or not caption:
        return Rejection(row.key, str(row.path), row.unmet or EMPTY_CAPTION)
    try:
        content, video = _digests(row, caption)
    except OSError as error:
        return Rejection(row.key, str(row.path), no_access_reason(row.path, one_line(error)))
    return Clip(
        path=str(row.path),
        part=row.part,
        video=video,
        rows=(Row(key=row.key, caption=caption, content=content, license=row.license),),
    )


_PIECE = 1 << 16
_PIECES = 8
_WHOLE = 1 << 24


def _digests(row: ClipRecord, caption: str) -> tuple[str, str]:
    """Return two digests (content, video) of a row. Only `content` depends on the caption and the license.

    They use the content instead of the modification time, so that a copied data set is not encoded again, and no settings, which
    are equal for all samples of a cache.
    """
    pieces = _read_pieces(row.path)
    part: list[Any] = [row.start, row.end, *filter(None, [row.crop])]
    size = row.path.stat().st_size
    for kind, path in row.files:
        part.append({kind.column: hashlib.blake2b(_read_pieces(path), digest_size=16).hexdigest()})

    def digest(*facts: Any) -> str:
        return hashlib.blake2b(pieces + json.dumps(facts).encode(), digest_size=16).hexdigest()

    return digest(size, caption, *part, *filter(None, [row.license])), digest(size, *part)


def _read_pieces(path: Path) -> bytes:
    """Read bytes that identify the content of a file.

    They are a whole image of at most 16 MiB, or else nine blocks of 64 KiB: the first, the last, and seven between them.
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
    """Parse a value of the option --part: "3/16" gives (3, 16).

    Raises:
        ConfigError: if the value is not I/N with integers 1 <= I <= N.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part {text} is not a valid part. Use I/N with 1 <= I <= N, for example 3/16.")
    return int(number), int(count)


def select_part(items: Sequence[FromSource], source: str, part: tuple[int, int]) -> list[FromSource]:
    """Return the items of a source in one part: (number from 1, number of parts). All captions of a file are in one part.

    The part depends only on the file's path, relative to the folder `source` or the folder of the table or archive `source`, so
    other files stay in their parts if files are added. The path of a file elsewhere is absolute.
    """
    folder = Source(source).path
    folder = folder if folder.is_dir() else folder.parent

    def number(item: ClipRecord | Rejection) -> int:
        path = Path(item.path)
        name = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % part[1] + 1

    return [item for item in items if number(item) == part[0]]
