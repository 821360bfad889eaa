"""What of a source a cache has already, what only the caption or the name is new of, and what must be encoded."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from wands.commands.encoding import Row
from wands.data.cache_format import Entry
from wands.data.captions import clean_caption
from wands.data.source import ManifestRow, Rejection

SCAN_THREADS = 16


@dataclass
class Scan:
    """The rows of the source, beside what the cache has of them.

    Attributes:
        contents: key of each usable row -> digest of what its samples are made from.
        pending: rows with a window that the cache lacks.
        rejected: what cannot be used, so far.
        before: keys of all samples that the cache had.
    """

    contents: dict[str, str]
    pending: list[Row]
    rejected: list[Rejection]
    before: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rows: Sequence[ManifestRow], entries: Mapping[str, Entry], rejected: Sequence[Rejection]
    ) -> Scan:
        """Compare the rows of a source with a cache."""
        scan = cls({}, [], list(rejected), {key: entry.content for key, entry in entries.items()})
        windows = _windows(entries)
        with ThreadPoolExecutor(SCAN_THREADS) as pool:  # small reads of many files: waiting for the disk
            for row, found in zip(rows, pool.map(_examine, rows), strict=True):
                if isinstance(found, Rejection):
                    scan.rejected.append(found)
                    continue
                scan.contents[row.key] = found.content
                if (pending := scan._lacking(found, windows, entries)) is not None:
                    scan.pending.append(pending)
        return scan

    def _lacking(
        self, row: Row, windows: Mapping[str, Mapping[str, Entry]], entries: Mapping[str, Entry]
    ) -> Row | None:
        """The row with what it needs not encode, or None if the cache has all of it."""
        if self.before.get(row.key) == row.content:
            return None
        present = tuple(
            row.key + suffix
            for suffix in windows.get(row.video, {})
            if self.before.get(row.key + suffix) == row.content
        )
        whole = windows.get(row.video, {})
        if sum(entry.last for entry in whole.values()) != 1 or len(whole) != 1 + _last_number(whole):
            return Row(**{**vars(row), "present": present})
        latents = tuple(
            (entry.shard, entry.row, suffix)
            for suffix, entry in sorted(whole.items())
            if row.key + suffix not in present
        )
        return Row(**{**vars(row), "latents": latents}) if latents else None

    def accepted(self, entries: Mapping[str, Entry]) -> set[str]:
        """Keys of every sample that the source gives: a row's own, or those of its windows."""
        return {
            key for key, entry in entries.items() if self.contents.get(key.partition("#")[0]) == entry.content
        }


def _windows(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """Digest of a video -> suffix of a window -> a sample that has its latents."""
    windows: dict[str, dict[str, Entry]] = defaultdict(dict)
    for key, entry in entries.items():
        if entry.video:
            windows[entry.video]["".join(key.partition("#")[1:])] = entry
    return windows


def _last_number(windows: Mapping[str, Entry]) -> int:
    last = next(suffix for suffix, entry in windows.items() if entry.last)
    return int(last[1:] or 0)


def _examine(row: ManifestRow) -> Row | Rejection:
    caption = clean_caption(row.caption)
    if not caption:
        return Rejection(row.key, str(row.path), "empty caption once cleaned; write one")
    try:
        content, video = _digests(row, caption)
    except OSError as error:
        return Rejection(
            row.key,
            str(row.path),
            f"video={row.path} cannot be read ({error.strerror}); mend its permissions",
        )
    return Row(row.key, str(row.path), caption, row.start, row.end, content, video)


def _digests(row: ManifestRow, caption: str) -> tuple[str, str]:
    """What a sample is made from, and what its latents are: the file by its size and both ends, range, caption.

    Size and time of change alone would encode a data set anew because it was copied. The settings are the same in all of a cache.
    """
    with row.path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        ends = head + file.read(1 << 16)
    content, video = (
        hashlib.blake2b(ends + json.dumps(rest).encode(), digest_size=16).hexdigest()
        for rest in ([size, caption, row.start, row.end], [size, row.start, row.end])
    )
    return content, video
