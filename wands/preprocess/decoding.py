"""Decode clips in subprocesses. If a file crashes or hangs its decoder, the clip is rejected and the run continues.

Each of `NUM_DECODERS` threads has a subprocess that decodes one clip at a time into windows (ranges of frames). At most
`NUM_READY` windows wait in a queue for the encoder; each thread and each subprocess keeps at most one more.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.conditions.arrays import ArraySpec
from wands.conditions.condition import Condition
from wands.config.options import PreprocessOptions
from wands.data.cache.shards import read_stored
from wands.data.clips.clip import ClipSpec, TooSmallError
from wands.data.clips.isolated import Crash, Hang, IsolatedWorker, run_in_workers
from wands.data.clips.video import DecodedClip, decode_clip
from wands.errors import DataError
from wands.plugin import plugin_importer
from wands.preprocess.clip_rules import LIMIT_SECONDS, NO_MEMORY, crash_reason
from wands.preprocess.scan import Clip

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
        spec: size, frame rate and length of the samples.
        fingerprint: digest of the settings and model files with which all samples in the cache are encoded.
        max_samples: largest number of samples in a shard.
        conditions: conditions of the model.
        arrays: arrays of the cache.
        patch_size: latent (frames, rows, columns) of one token.
    """

    cache: Path
    options: PreprocessOptions
    spec: ClipSpec
    fingerprint: str
    max_samples: int
    conditions: tuple[Condition, ...]
    arrays: tuple[ArraySpec, ...]
    patch_size: tuple[int, int, int]

    @property
    def work(self) -> Path:
        """Folder inside the cache folder for the write-ahead logs of samples and text embeddings."""
        return self.cache / WORK_NAME


@dataclass
class Window:
    """One window of a clip at one size, to be stored as one sample for each caption of the clip.

    Attributes:
        clip: clip that contains the window.
        suffix: end of the sample keys, such as "#0003#640x352", which names the window and the size.
        meta: metadata that is equal for all samples of the window.
        frames: uint8 [frames, height, width, 3], in pinned memory if a GPU encodes them; None if the latents are cached.
        files: result of `ClipFile.of_window` for each file next to the clip, by column, such as "mask".
        arrays: arrays to store, such as "latents", read from the cache or added by the encoder.
    """

    clip: Clip
    suffix: str
    meta: dict[str, Any]
    frames: Tensor | None = None
    files: dict[str, Tensor] = field(default_factory=dict)
    arrays: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClipEnd:
    """Marker after all windows of a clip.

    Attributes:
        clip: the clip that ends.
        reason: why the clip is rejected; None if every window could be decoded.
        deadly: whether the clip crashed its decoder or exceeded the time limit.
    """

    clip: Clip
    reason: str | None = None
    deadly: bool = False


def decode_clips(
    clips: Sequence[Clip], settings: EncodeSettings, pin_memory: bool = False
) -> Generator[Window | ClipEnd, None, None]:
    """Decode clips in subprocesses. Yield each window when it is ready, and a `ClipEnd` after the windows of each clip.

    Windows of different clips may alternate. A window whose latents are cached is not decoded, and contains the cached arrays.
    `pin_memory` copies the frames to pinned memory, from which copies to a GPU are fastest.

    Raises:
        CacheError: if latents in the cache are damaged.
    """
    remaining = iter(clips)  # shared by the threads: next() of a sequence's iterator is atomic

    def decode_next(worker: IsolatedWorker) -> Iterator[Window | ClipEnd]:
        for clip in remaining:
            end = ClipEnd(clip)
            try:
                for shard, row, suffix in clip.latents:
                    arrays, meta = read_stored(
                        settings.cache / shard,
                        settings.fingerprint,
                        row,
                        settings.arrays,
                        settings.patch_size,
                    )
                    yield Window(clip, suffix, meta, arrays=arrays)
                if clip.decode:
                    yield from _decoded_windows(clip, worker, settings, pin_memory)
            except Crash as crash:
                end = ClipEnd(clip, crash_reason(clip.path, crash), deadly=True)
            except (DataError, MemoryError) as error:
                end = ClipEnd(clip, str(error) or NO_MEMORY)
            yield end

    return run_in_workers(
        decode_next,
        min(NUM_DECODERS, len(clips)),
        [DecodedClip.__module__],
        NUM_READY,
        initialize=plugin_importer(settings.options.imports),
    )


def _decoded_windows(
    clip: Clip, worker: IsolatedWorker, settings: EncodeSettings, pin_memory: bool
) -> Iterator[Window]:
    """Decode a clip, a second time if the decoder crashes, and yield the windows whose latents are not in the cache."""
    finished = {suffix for _, _, suffix in clip.latents}
    for is_last_attempt in (False, True):
        try:
            yield from _decode_once(clip, worker, settings, pin_memory, finished)
            return
        except Crash as crash:
            # One crash may have an outside cause, such as a scheduler that kills all processes of the job.
            if is_last_attempt or isinstance(crash, Hang) or worker.killed:
                raise
            log.warning("%s: %s; decoding the clip again", clip.path, crash)


def _decode_once(
    clip: Clip, worker: IsolatedWorker, settings: EncodeSettings, pin_memory: bool, finished: set[str]
) -> Iterator[Window]:
    """Decode a clip, and yield its missing windows, except those in `finished`, to which each decoded window is added."""
    arguments = (Path(clip.path), settings.spec, *clip.part)
    with closing(worker.run(decode_clip, *arguments, limit_seconds=LIMIT_SECONDS)) as values:
        for decoded, last in mark_last(values):
            for condition in settings.conditions:
                condition.check_clip(clip.path, len(decoded.frames))
            if decoded.suffix not in finished and clip.lacks(decoded.suffix):
                yield _window_of(clip, decoded, last, pin_memory)
            finished.add(decoded.suffix)


def _window_of(clip: Clip, decoded: DecodedClip, last: bool, pin_memory: bool) -> Window:
    frames = torch.from_numpy(decoded.frames)
    frames = frames.pin_memory() if pin_memory else frames
    window = Window(clip=clip, suffix=decoded.suffix, meta=_meta(clip, decoded, last), frames=frames)
    window.files = {name: torch.from_numpy(file) for name, file in decoded.files.items()}
    return window


def mark_last(clips: Iterator[DecodedClip]) -> Iterator[tuple[DecodedClip, bool]]:
    """Yield each item of `clips` with a flag: whether it belongs to the last window of the file.

    A window has one item per size. Its items are held back until the next window or the end of the file. Before a DataError of
    `clips` is raised, they are yielded, with the flag True for a `TooSmallError`, which comes after all windows were decoded.
    """
    window: list[DecodedClip] = []
    try:
        for clip in clips:
            if window and clip.start_seconds != window[0].start_seconds:
                yield from ((previous, False) for previous in window)
                window = []
            window.append(clip)
    except DataError as error:
        # After a TooSmallError, every window has been decoded, because the file is not damaged.
        is_complete = isinstance(error, TooSmallError)
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
        "clip_seconds": decoded.span[1] - decoded.span[0],
        "video": clip.video,
        **({"matrix": decoded.source.matrix} if decoded.source.matrix else {}),
    }
