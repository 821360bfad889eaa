"""Encode the captions and the clips that are assigned to one worker: this process, a subprocess, or a rank of a launcher.

Each worker writes to its own files in the folder `.work` of the cache. The files of worker 0 are:

    text-0.journal       write-ahead log of text embeddings
    samples-0.journal    write-ahead log of samples that no shard contains yet
    encoding-0           digests of the clips that are being encoded, one per line, to be found if the process is killed
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache

from wands.conditions.arrays import to_bits
from wands.data.cache.write_ahead_log import WriteAheadLog
from wands.data.cache.writer import ShardWriter
from wands.encoders.image import PipelineEncoders, WindowEncoder
from wands.encoders.text import TextEncoder, TextSpool, caption_name
from wands.own_files import open_own_file
from wands.preprocess.clip_rules import NO_MEMORY
from wands.preprocess.decoding import ClipEnd, EncodeSettings, Window, decode_clips
from wands.preprocess.scan import Clip

LOG_BYTES = 1 << 30
"""Size of a write-ahead log in bytes at which its samples are moved to a shard."""
NUM_WRITES = 4
"""Largest number of encoded windows that wait for the thread that writes them to the disk."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Devices(NamedTuple):
    """Devices of one worker: of the VAE and CLIP, and of the text encoder UMT5."""

    vae: torch.device
    text: torch.device


class Done(NamedTuple):
    """Event that one caption or one clip is finished. `rejected` is None unless the clip is rejected."""

    rejected: ClipEnd | None = None


class WorkerTimes(NamedTuple):
    """Statistics of one worker after all its clips.

    Attributes:
        waited: seconds in which the encoder waited for decoded windows.
        worked: seconds in which the worker loaded the encoders, encoded clips and stored samples.
    """

    waited: float
    worked: float


def encode_captions(
    settings: EncodeSettings, slot: int, devices: Devices, captions: Sequence[str]
) -> Iterator[Done]:
    """Encode captions into the write-ahead log of worker `slot`. Yield an event after each caption.

    The text encoder UMT5 is in memory only during this call.

    Raises:
        CacheError: if the disk is full.
        ConfigError: if the model cannot be loaded.
    """
    encoder = TextEncoder.load(settings.options.model, devices.text, DTYPES[settings.options.text_dtype])
    with closing(WriteAheadLog(settings.work / f"text-{slot}.journal", durable=False)) as embeddings:
        for caption in captions:
            embeddings.add(caption_name(caption), [to_bits(encoder.encode(caption))], {})
            yield Done()
    del encoder
    clear_device_cache(garbage_collection=True)


def encode_clips(
    settings: EncodeSettings, slot: int, devices: Devices, clips: Sequence[Clip]
) -> Iterator[Done | WorkerTimes]:
    """Decode and encode clips, and store one sample for each combination of window, size and caption of a clip.

    `encode_captions` must have encoded the captions. Yield a `Done` for each clip, and finally the `WorkerTimes`.

    Raises:
        CacheError: if the disk is full, or stored latents are damaged.
        ConfigError: if the model cannot be loaded.
    """
    encoder = _ClipEncoder(settings, slot, devices.vae)
    with closing(encoder.samples), encoder.writer:
        yield from encoder.run(clips)
    clear_device_cache(garbage_collection=True)


class _ClipEncoder:
    """Encoder of the clips of one worker.

    While a clip is encoded, decoder threads decode the next clips, and one writer thread stores the previous samples. Only the
    writer thread uses the write-ahead log.
    """

    def __init__(self, settings: EncodeSettings, slot: int, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.writer = ThreadPoolExecutor(1, "write_samples")
        self.writes: deque[Future[None]] = deque()
        self.in_encoder = settings.work / f"encoding-{slot}"
        self.spool = TextSpool(sorted(settings.work.glob("text-*.journal")))
        self.encoder: WindowEncoder | None = None
        # Maps the digest of a clip with a window that cannot be stored to the reason.
        self.failed: dict[str, str] = {}
        self.samples = WriteAheadLog(settings.work / f"samples-{slot}.journal")

    def run(self, clips: Sequence[Clip]) -> Iterator[Done | WorkerTimes]:
        began = time.monotonic()
        waited = 0.0
        batch: list[Window | ClipEnd] = []
        with closing(decode_clips(clips, self.settings, self.device.type == "cuda")) as pieces:
            if any(clip.decode for clip in clips):
                options = self.settings.options
                encoders = PipelineEncoders(
                    options.model, self.device, vae_dtype=options.vae_dtype, vae_tiling=options.vae_tiling
                )
                self.encoder = WindowEncoder(encoders, self.settings.conditions, self.settings.patch_size)
            while True:
                ready = time.monotonic()
                piece = next(pieces, None)
                waited += time.monotonic() - ready
                if piece is not None:
                    batch.append(piece)
                    num_windows = sum(isinstance(item, Window) and item.frames is not None for item in batch)
                    if 0 < num_windows < self.settings.options.vae_batch:
                        continue
                yield from self._finish(batch)
                batch.clear()
                if piece is None:
                    break
        self._write(self._move_to_shard)
        while self.writes:
            self.writes.popleft().result()
        yield WorkerTimes(waited, time.monotonic() - began - waited)

    def _finish(self, pieces: Sequence[Window | ClipEnd]) -> Iterator[Done]:
        """Encode windows of one shape together, store them, and yield a `Done` for each clip that ends in `pieces`."""
        groups: dict[torch.Size, list[Window]] = {}
        for piece in pieces:
            if isinstance(piece, Window) and piece.clip.video not in self.failed and piece.frames is not None:
                groups.setdefault(piece.frames.shape, []).append(piece)
        for windows in groups.values():
            self._encode(windows)
        for piece in pieces:
            video = piece.clip.video
            if isinstance(piece, Window):
                if video not in self.failed and (reason := self._store(piece)):
                    self.failed[video] = reason
            else:
                end = replace(piece, reason=self.failed.pop(video, piece.reason))
                yield Done(end if end.reason else None)

    def _encode(self, windows: Sequence[Window]) -> None:
        """Add the latents and other encoded arrays to windows of one shape.

        If the memory is too small, the windows are encoded one by one. A window for which it is still too small gets no latents.
        """
        assert self.encoder is not None
        self._note("\n".join({window.clip.video for window in windows}))
        try:
            pieces = [(window.frames, window.files) for window in windows if window.frames is not None]
            encoded = self.encoder.encode(pieces)
        except (torch.OutOfMemoryError, MemoryError):
            clear_device_cache(garbage_collection=True)
            for window in windows if len(windows) > 1 else ():
                self._encode([window])
            return
        finally:
            self._note("")  # this process is alive: the clips have not crashed it
        for window, arrays in zip(windows, encoded, strict=True):
            window.arrays = arrays

    def _store(self, window: Window) -> str | None:
        """Pass an encoded window to the writer thread, or return the reason why it cannot be stored."""
        if "latents" not in window.arrays:
            return NO_MEMORY
        if not all(tensor.isfinite().all() for tensor in window.arrays.values()):
            return f"video={window.clip.path} encodes to numbers that are not finite; replace the file"
        self._write(self._append, window)
        return None

    def _write(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queue a call for the writer thread. If `NUM_WRITES` calls are queued, wait until the oldest ends."""
        if len(self.writes) >= NUM_WRITES:
            self.writes.popleft().result()
        self.writes.append(self.writer.submit(function, *arguments))

    def _append(self, window: Window) -> None:
        """Append one record with all missing samples of an encoded window to the write-ahead log.

        If the process is killed while writing, either all samples of the record are stored, or none.
        """
        clip = window.clip
        rows = window.clip.lacks(window.suffix)
        samples = []
        for row in rows:
            own = {"caption": row.caption, "license": row.license, "content": row.content}
            samples.append((row.key + window.suffix, window.meta | own | {"source": clip.path}))
        specs = [spec for spec in self.settings.arrays if spec.name in window.arrays]
        stored = [spec.store(window.arrays[spec.name]) for spec in specs]
        stored += [to_bits(self.spool.read(row.caption)) for row in rows]
        meta = {"arrays": [spec.name for spec in specs], "samples": samples}
        self.samples.add(clip.video + window.suffix, stored, meta)
        if self.samples.num_records >= self.settings.max_samples or self.samples.num_bytes >= LOG_BYTES:
            self._move_to_shard()

    def _move_to_shard(self) -> None:
        settings = self.settings
        writer = ShardWriter(
            path=settings.cache,
            fingerprint=settings.fingerprint,
            arrays=settings.arrays,
            max_samples=settings.max_samples,
        )
        writer.add_log(self.samples.path)
        self.samples.clear()

    def _note(self, videos: str) -> None:
        # If the disk is full, the next write to the log raises an error.
        with suppress(OSError), open(self.in_encoder, "w", opener=open_own_file) as file:
            file.write(videos)
