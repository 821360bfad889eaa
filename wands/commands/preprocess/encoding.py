"""Encode one worker's share: first its captions, then its clips.

Both functions are generators that yield an event after each caption or clip. They run in this process, in a subprocess or on a
rank of a launcher. Each worker writes its results to its own write-ahead logs in the folder `.work` of the cache:

    text-0.journal       text embeddings
    samples-0.journal    samples that no shard contains yet
    encoding-0           digest of the clip in the encoder; not empty after the process was killed
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from wands.commands.clip_rules import NO_MEMORY
from wands.commands.preprocess.decoding import EncodeSettings, Window, decode_clips
from wands.commands.preprocess.scan import Clip
from wands.data.cache.format import to_bits
from wands.data.cache.write_ahead_log import WriteAheadLog, read_records
from wands.data.cache.writer import ShardWriter
from wands.data.clips.records import Rejection
from wands.encoders.image import WindowEncoder
from wands.encoders.spool import TextSpool, store_text
from wands.encoders.text import TextEncoder

LOG_BYTES = 1 << 30
"""Samples move from the write-ahead log to a shard when the log reaches this size."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Devices(NamedTuple):
    """Devices of one worker: for VAE and CLIP, and for UMT5."""

    vae: torch.device
    text: torch.device


@dataclass(frozen=True)
class Done:
    """Event: one caption or clip is finished.

    Attributes:
        rejections: one for each caption of a clip that cannot be used.
        video: digest of a rejected clip.
        deadly: the clip crashed or hung a process.
    """

    rejections: tuple[Rejection, ...] = ()
    video: str = ""
    deadly: bool = False

    @classmethod
    def rejected(cls, clip: Clip, reason: str, deadly: bool) -> Done:
        """Return the event for a clip that cannot be used."""
        return cls(tuple(Rejection(row.key, clip.path, reason) for row in clip.rows), clip.video, deadly)


@dataclass
class WorkerTimes:
    """Statistics of one worker's share of the clips.

    Attributes:
        num_windows: number of stored windows.
        waited: seconds that the encoder waited for decoding.
        worked: seconds that the worker encoded and stored.
    """

    num_windows: int = 0
    waited: float = 0.0
    worked: float = 0.0


def encode_captions(
    settings: EncodeSettings, slot: int, devices: Devices, captions: Sequence[str]
) -> Iterator[Done]:
    """Encode captions and append the embeddings to the worker's log. UMT5 is in memory only during this call.

    Args:
        settings: settings of the run.
        slot: number of the worker.
        devices: devices of the worker.
        captions: the worker's share.

    Raises:
        CacheError: if the disk is full.
        ConfigError: if the model cannot be loaded.
    """
    encoder = TextEncoder.load(settings.options.model, devices.text, DTYPES[settings.options.text_dtype])
    with closing(WriteAheadLog(settings.work / f"text-{slot}.journal", durable=False)) as embeddings:
        for caption in captions:
            store_text(embeddings, caption, encoder.encode(caption))
            yield Done()
    del encoder
    clear_device_cache(garbage_collection=True)


def encode_clips(
    settings: EncodeSettings, slot: int, devices: Devices, clips: Sequence[Clip]
) -> Iterator[Done | WorkerTimes]:
    """Decode and encode clips, and store one sample for each caption of a clip. The captions must be encoded already.

    Args:
        settings: settings of the run.
        slot: number of the worker.
        devices: devices of the worker.
        clips: the worker's share.

    Yields:
        An event for each clip, and finally the worker's times.

    Raises:
        CacheError: if the disk is full, or stored latents are damaged.
        ConfigError: if the model cannot be loaded.
    """
    with closing(WriteAheadLog(settings.work / f"samples-{slot}.journal")) as samples:
        yield from _ClipEncoder(settings, slot, devices.vae, samples).run(clips)
    clear_device_cache(garbage_collection=True)


class _ClipEncoder:
    """Encoder of one worker's clips; decoding runs ahead in threads."""

    def __init__(
        self, settings: EncodeSettings, slot: int, device: torch.device, samples: WriteAheadLog
    ) -> None:
        self.settings, self.device, self.samples = settings, device, samples
        self.in_encoder = settings.work / f"encoding-{slot}"
        self.spool = TextSpool(sorted(settings.work.glob("text-*.journal")))
        self.encoder: WindowEncoder | None = None
        self.num_windows = 0

    def run(self, clips: Sequence[Clip]) -> Iterator[Done | WorkerTimes]:
        options, times, began = self.settings.options, WorkerTimes(), time.monotonic()
        reasons: dict[str, str] = {}
        with closing(decode_clips(clips, self.settings)) as pieces:
            if any(clip.decode for clip in clips):
                self.encoder = WindowEncoder.load(
                    *(options.model, self.device, self.settings.conditions),
                    dtype=options.vae_dtype,
                    tiling=options.vae_tiling,
                )
            while True:
                ready = time.monotonic()
                piece = next(pieces, None)
                times.waited += time.monotonic() - ready
                if piece is None:
                    break
                video = piece.clip.video
                if isinstance(piece, Window):
                    if video not in reasons and (reason := self._store(piece)):
                        reasons[video] = reason
                elif reason := reasons.pop(video, piece.reason):
                    yield Done.rejected(piece.clip, reason, piece.deadly)
                else:
                    yield Done()
        times.worked, times.num_windows = time.monotonic() - began - times.waited, self.num_windows
        self._move_to_shard()
        yield times

    def _store(self, window: Window) -> str | None:
        """Encode a window and log its samples; return the reason if the window cannot be encoded."""
        encoded = window.encoded
        if window.pixels is not None:
            assert self.encoder is not None
            self._note(window.clip.video)
            try:
                encoded = self.encoder.encode(window.pixels)
            except (torch.OutOfMemoryError, MemoryError):
                clear_device_cache(garbage_collection=True)
                return NO_MEMORY
            finally:
                self._note("")  # this process is alive: the clip has not crashed it
            if not all(tensor.isfinite().all() for tensor in encoded.values()):
                return f"video={window.clip.path} encodes to numbers that are not finite; replace the file"
        assert encoded is not None
        self._append(window, encoded)
        return None

    def _append(self, window: Window, encoded: dict[str, Tensor]) -> None:
        """Append one record with the samples of all captions, so that a kill loses all these samples or none."""
        clip, rows = window.clip, window.clip.lacks(window.suffix)
        samples = [
            (
                row.key + window.suffix,
                window.meta | {"caption": row.caption, "source": clip.path, "content": row.content},
            )
            for row in rows
        ]
        tensors = [*encoded.values(), *(self.spool.read(row.caption) for row in rows)]
        self.samples.add(clip.video + window.suffix, [*map(to_bits, tensors)], {"samples": samples})
        self.num_windows += 1
        if self.samples.num_records >= self.settings.max_samples or self.samples.num_bytes >= LOG_BYTES:
            self._move_to_shard()

    def _move_to_shard(self) -> None:
        writer = ShardWriter(self.settings.cache, self.settings.fingerprint, self.settings.max_samples)
        for record in read_records(self.samples.path):
            writer.add_record(record)
        writer.finish_shard()
        self.samples.clear()

    def _note(self, video: str) -> None:
        with suppress(OSError):  # a full disk: the next write to the log reports it
            self.in_encoder.write_text(video)
