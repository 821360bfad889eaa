"""Decode clips in subprocesses: a file that crashes or hangs its decoder is rejected and the run continues.

`NUM_DECODERS` threads each take the next clip and have a subprocess decode it. At most `NUM_READY` windows wait for the
encoder, besides one in each thread and one in each subprocess.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from wands.commands.clip_rules import LIMIT_SECONDS, NO_MEMORY, crash_reason
from wands.commands.preprocess.scan import Clip
from wands.config.options import PreprocessOptions
from wands.data.cache.format import from_bits
from wands.data.cache.shards import read_stored
from wands.data.clips.clip import ClipSpec, TooSmallError, check_frames
from wands.data.clips.isolated import Crash, Hang, IsolatedWorker, run_in_threads
from wands.data.clips.video import DecodedClip, decode_clip, to_pixels
from wands.errors import DataError

log = logging.getLogger(__name__)

WORK_NAME = ".work"
NUM_DECODERS = 2
NUM_READY = 2


@dataclass(frozen=True)
class EncodeSettings:
    """Settings that all workers of a run share.

    Attributes:
        cache: cache folder.
        options: options of the command.
        spec: size, rate and length of the samples.
        more_pixels: further bounds of a frame's area; each gives one more sample of every clip.
        fingerprint: digest of the cache's fingerprint.
        max_samples: largest number of samples in a shard.
        conditions: conditions of the variant.
    """

    cache: Path
    options: PreprocessOptions
    spec: ClipSpec
    more_pixels: tuple[int, ...]
    fingerprint: str
    max_samples: int
    conditions: tuple[str, ...]

    @property
    def work(self) -> Path:
        """Folder of the write-ahead logs."""
        return self.cache / WORK_NAME


@dataclass
class Window:
    """One window of a clip at one size, to be encoded and stored.

    Attributes:
        clip: the clip.
        suffix: end of the keys of the window's samples.
        meta: metadata of the samples, without the entries that differ between captions.
        pixels: float32 [3, F, H, W] in [-1, 1]; None if the cache has the latents.
        encoded: stored arrays of the window, if the cache has them.
    """

    clip: Clip
    suffix: str
    meta: dict[str, Any]
    pixels: Tensor | None = None
    encoded: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class ClipEnd:
    """End marker of a clip, which follows all windows of the clip.

    Attributes:
        clip: the clip.
        reason: why the clip is rejected; None if every window could be decoded.
        deadly: the clip crashed or hung its decoder.
    """

    clip: Clip
    reason: str | None = None
    deadly: bool = False


def decode_clips(clips: Sequence[Clip], settings: EncodeSettings) -> Generator[Window | ClipEnd, None, None]:
    """Yield the windows of all clips as they are decoded, and a `ClipEnd` after the windows of each clip.

    Raises:
        CacheError: if latents in the cache are damaged.
    """
    remaining = iter(clips)  # shared by the threads: next() of a sequence's iterator is atomic
    workers = [IsolatedWorker([DecodedClip.__module__]) for _ in range(min(NUM_DECODERS, len(clips)))]
    try:
        yield from run_in_threads(
            [_decode_next_clips(worker, remaining, settings) for worker in workers], NUM_READY
        )
    finally:
        for worker in workers:
            worker.kill()


def _decode_next_clips(
    worker: IsolatedWorker, remaining: Iterator[Clip], settings: EncodeSettings
) -> Iterator[Window | ClipEnd]:
    with worker:
        for clip in remaining:
            end = ClipEnd(clip)
            try:
                for shard, row, suffix in clip.latents:
                    bits, meta = read_stored(settings.cache / shard, settings.fingerprint, row)
                    encoded = {name: from_bits(array) for name, array in bits.items()}
                    yield Window(clip, suffix, meta, encoded=encoded)
                if clip.decode:
                    yield from _decoded_windows(clip, worker, settings)
            except Crash as crash:
                end = ClipEnd(clip, crash_reason(clip.path, crash), deadly=True)
            except (DataError, MemoryError) as error:
                end = ClipEnd(clip, str(error) or NO_MEMORY)
            yield end


def _decoded_windows(clip: Clip, worker: IsolatedWorker, settings: EncodeSettings) -> Iterator[Window]:
    """Yield the windows of a clip that a caption lacks. After a crash, decode the clip a second time.

    Raises:
        Crash: if the decoder crashed twice, or hung.
        DataError: if the clip cannot be used.
    """
    finished = {suffix for _, _, suffix in clip.latents}
    for is_last_attempt in (False, True):
        try:
            arguments = (Path(clip.path), settings.spec, clip.start, clip.end, settings.more_pixels)
            with closing(worker.run(decode_clip, *arguments, limit_seconds=LIMIT_SECONDS)) as values:
                for decoded, last in mark_last(values):
                    check_frames(clip.path, len(decoded.frames), settings.conditions)
                    if decoded.suffix not in finished and clip.lacks(decoded.suffix):
                        pixels = to_pixels(decoded.frames)
                        yield Window(clip, decoded.suffix, _meta(clip, decoded, last), pixels)
                    finished.add(decoded.suffix)
            return
        except Crash as crash:
            # One crash may have an outside cause, such as a scheduler that kills all processes of the job.
            if is_last_attempt or isinstance(crash, Hang) or worker.killed:
                raise
            log.warning("%s: %s; decoding it again", clip.path, crash)


def mark_last(clips: Iterator[DecodedClip]) -> Iterator[tuple[DecodedClip, bool]]:
    """Yield each decoded clip and whether its window is the last of the file.

    All sizes of a window wait until the next window has been decoded.
    """
    window: list[DecodedClip] = []
    try:
        for clip in clips:
            if window and clip.start_seconds != window[0].start_seconds:
                yield from ((previous, False) for previous in window)
                window = []
            window.append(clip)
    except DataError as error:
        is_complete = isinstance(
            error, TooSmallError
        )  # the file is not damaged: every window has been decoded
        yield from ((previous, is_complete) for previous in window)
        raise
    yield from ((previous, True) for previous in window)


def _meta(clip: Clip, decoded: DecodedClip, last: bool) -> dict[str, Any]:
    return {
        "start_seconds": decoded.start_seconds,
        "num_frames": len(decoded.frames),
        "height": decoded.frames.shape[1],
        "width": decoded.frames.shape[2],
        "fps": decoded.fps,
        "display_size": [str(side) for side in decoded.source.display_size],
        "last": last,
        "video": clip.video,
    }
