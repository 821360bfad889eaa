"""Compare a source of clips with the latent cache, and find the clips with samples that are missing in the cache."""

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
"""Maps a sample suffix (window and size) to a cached sample. All samples come from one time range of a file.

If a time range has several captions, several samples have the same suffix, and the map contains only one of these
samples. Any of these samples can be used, because all of them contain latents of the same frames.
"""


@dataclass(frozen=True)
class Row:
    """One caption of a clip, with facts about the clip, and with the caption's samples in the cache.

    Attributes:
        key: id of the pair of clip and caption. The key of a sample is this key and a suffix, for example "#0003#640x352".
            The suffix names the window (range of frames) and the size, see `wands.data.clips.clip`.
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
    """A time range of a file with all its captions. The time range is decoded and encoded only once.

    Attributes:
        path: the video or image file.
        part: time range, crop and files next to the clip, such as a mask.
        video: digest of the file and of `part`. Clips with equal digests have equal latents.
        rows: captions. A clip from `SourceScan.pending` contains only captions for which the cache lacks a sample.
        latents: cached samples of this time range, each as a tuple (shard name, index of the sample in the shard, suffix). The
            latents of these samples can be reused for `rows`. The suffix is the end of the sample's key, which names the
            window (range of frames) and the size.
        decode: whether the file must be decoded. True if the cache lacks latents, or the number of samples is unknown.
    """

    path: str
    part: Part
    video: str
    rows: tuple[Row, ...]
    latents: tuple[tuple[str, int, str], ...] = ()
    decode: bool = True

    def lacks(self, suffix: str) -> list[Row]:
        """Return the captions of this clip for which the cache has no sample with the given suffix.

        The cache has one sample for each caption, window and size of a clip.

        Args:
            suffix: end of the sample key, which names the window (range of frames) and the size.
        """
        return [row for row in self.rows if suffix not in row.present]


class SourceScan:
    """Clips of a source, identified by the content of their files.

    Attributes:
        contents: maps the key of each usable row (clip with one caption) to `Row.content`, a digest of the clip and caption.
        clips: maps (path, digest of the clip without captions) to the clip with all its captions.
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

        Args:
            rows: rows of the source that are not rejected yet; a row is a clip with one caption.
            rejected: rows that were rejected while the source was read.
            spec: frame rate, size and length of the samples.
            quarantine: maps the digest of a clip to the reason why the clip is rejected. It contains only clips that
                crashed a process or exceeded a time limit.
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
        """Return the clips for which the cache lacks a sample.

        Each returned clip contains only the captions for which the cache lacks a sample, and names the cached latents to reuse.

        Args:
            entries: samples of the cache by key.
            rejected_videos: digests (`Clip.video`) of clips that are left out because this run rejected them.
        """
        stored: dict[str, Samples] = defaultdict(dict)
        for key, entry in entries.items():
            if entry.video:
                stored[entry.video]["".join(key.partition("#")[1:])] = entry
        clips = (clip for clip in self.clips.values() if clip.video not in rejected_videos)
        lacking = (self._lacking(clip, stored.get(clip.video, {}), entries) for clip in clips)
        return [clip for clip in lacking if clip is not None]

    def _lacking(self, clip: Clip, stored: Samples, entries: Mapping[str, IndexEntry]) -> Clip | None:
        """Return a copy of a clip with only those captions for which the cache lacks a sample.

        Args:
            clip: clip with all its captions.
            stored: all cached samples with the clip's file and time range. The dictionary maps the end of a sample's key, such as
                "#0003#640x352", to the sample's index entry. The end names the window (range of frames) and the frame size.
            entries: maps the key of each sample in the cache to its index entry.

        Returns:
            The copy, or None if the cache contains all samples of the clip.
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
        """Return the key suffixes of all samples that a clip must have. The suffix is the end of a sample's key in the cache. It
        names a window (range of frames) and a size.

        Return None if the number of windows or the sizes cannot be derived from the cached samples. The clip must then be
        decoded.

        Args:
            stored: all cached samples with the clip's file and time range, as a dictionary of index entries by suffix.
        """
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
        """Return the keys of the cached samples that belong to the source and have a size that --max-pixels selects.

        Args:
            entries: samples of the cache by key.
        """
        return {key for key, entry in entries.items() if self._is_wanted(key, entry)}

    def footage(self, entries: Mapping[str, IndexEntry]) -> dict[str, Footage]:
        """Return a dictionary that maps the key of each video clip with cached samples to three lengths in seconds.

        The lengths are the part of the clip that its cached samples cover, the whole clip, and the part that samples would
        cover with --clip-mode slide. This mode cuts the clip into consecutive samples, so at most a few frames at the end stay
        unused.

        Clips whose samples were imported are left out, because their length is unknown.

        Args:
            entries: samples of the cache by key.
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
    """Return the size suffixes of a clip's samples. A size suffix is the end of a sample's key, which names the frame size. It is
    "" for the first value of --max-pixels (largest area of a frame), and a text such as "#640x352" for each further value.

    Return None if the display size is unknown, or if the clip is too small for one of the values. The clip must then be
    decoded.

    Args:
        spec: settings of the samples, with all values of --max-pixels.
        display_size: (width, height) in pixels at which a player shows the clip, after it applies the pixel aspect ratio. Width
            and height are texts with an integer or a fraction, such as ("2560/3", "480"). () if the size is unknown.
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
    """Return two digests (content, video) of a row (clip with one caption).

    The digest `video` depends on the file's content, the time range, and the crop and other files if the row has them. The digest
    `content` also depends on the caption, and on the license if the row has a license.

    The digests use the content instead of the modification time, so that a copied data set is not encoded again. The
    digests do not include the settings of the samples, because all samples of a cache have the same settings.
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

    From an image of at most 16 MiB, read the whole file. From other files, read nine blocks of 64 KiB: the first block, the
    last block, and seven blocks between them.
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
    """Parse a value of the option --part, such as "3/16".

    Returns:
        (number of the part, counted from 1; number of all parts). For "3/16", this is (3, 16).

    Raises:
        ConfigError: if the value is not I/N with integers 1 <= I <= N.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part {text} is not a valid part. Use I/N with 1 <= I <= N, for example 3/16.")
    return int(number), int(count)


def select_part(items: Sequence[FromSource], source: str, part: tuple[int, int]) -> list[FromSource]:
    """Return the items of a source that belong to one part (the value of --part). All captions of a file belong to
    the same part.

    The part of a file depends only on the file's path. If files are added to the source, the other files stay in their parts.
    The path is relative to the folder `source`, or to the folder that contains the table or archive `source`. The path of
    a file in another folder is absolute.

    Args:
        items: rows (clips with one caption) or rejections of the source.
        source: folder, table or archive that contains the clips.
        part: (number of the part from 1, number of parts).
    """
    folder = Source(source).path
    folder = folder if folder.is_dir() else folder.parent

    def number(item: ClipRecord | Rejection) -> int:
        path = Path(item.path)
        name = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % part[1] + 1

    return [item for item in items if number(item) == part[0]]
