"""The decoding side of the pass over clips: threads take the next clip that nobody has and decode ahead of the encoder.

A decoder that crashes takes its whole process with it. A clip in hand is therefore marked, and the mark outlives the process:
whoever takes the clip next decodes it in a process of its own, and, if that was not it and the encoder's process ended over
it, encodes it in one too. What ends that process is rejected; what does not is used like any other clip.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from wands.commands.preprocess.claims import Claims
from wands.commands.preprocess.work_folder import BEGUN, IN_ENCODER, UNTOUCHED, Clip, Lines, Marks, Run
from wands.data.cache.format import from_bits, read_stored, to_bits
from wands.data.clips.clip import ClipSpec, TooSmallError, check_frames
from wands.data.clips.isolated import Crashed, iterate_isolated
from wands.data.clips.video import DecodedClip, decode_clip, to_pixels
from wands.encoders.image import WindowEncoder
from wands.errors import DataError

log = logging.getLogger(__name__)

DECODING_THREADS = 2
CLIPS_AHEAD = 2
"""Decoded windows that wait for the encoder, besides those in the threads' hands."""
LIMIT_SECONDS = 300.0
"""For one window, in a process of its own."""
NO_MEMORY = "does not fit into memory; lower --max-frames or --max-pixels"


@dataclass
class Piece:
    """A window of a clip at one size on its way to the encoder; a clip's last piece has none and says that it is done.

    Attributes:
        number: of the clip.
        clip: what it is a part of.
        suffix: that its samples' keys end in.
        meta: of its samples, without what differs from caption to caption.
        pixels: float32 [3, F, H, W] in [-1, 1], or None.
        encoded: what `WindowEncoder.encode` gives, where it need not be asked.
        suspect: a process ended with the clip in hand.
        last: the clip is done with this one.
        reason: why the clip cannot be used.
        deadly: it ended a process of its own.
        failure: what no rejection can express.
    """

    number: int
    clip: Clip
    suffix: str = ""
    meta: dict[str, Any] | None = None
    pixels: Tensor | None = None
    encoded: dict[str, Tensor] | None = None
    suspect: bool = False
    last: bool = False
    reason: str | None = None
    deadly: bool = False
    failure: BaseException | None = None


class Decoder:
    """Iterate over it to get the pieces of all clips that this process takes, as they become ready."""

    def __init__(self, work: Path, run: Run, device: torch.device) -> None:
        """Open the work; threads start on entering.

        Args:
            work: folder in which the workers meet.
            run: what is to be done.
            device: of an encoder in a process of its own.
        """
        self._cache, self._run, self._device = work.parent, run, device
        self._spec = ClipSpec(**run.clip)
        self.claims, self._clips = Claims(work / "clips.claims"), Lines(work / "clips.jsonl")
        self._marks = Marks(work / "clips.marks")
        self._in_hand: dict[int, int] = {}  # with the marks that they had
        self._ready: queue.Queue[Piece | None] = queue.Queue(CLIPS_AHEAD)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._decode_ahead, name=f"decode-{i}", daemon=True)
            for i in range(DECODING_THREADS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for number, mark in self._in_hand.items():  # this process is well: none of its clips is to blame
            self._marks[number] = mark
        self._marks.close()
        self.claims.close()

    def __iter__(self) -> Iterator[Piece]:
        left = len(self._threads)
        while left:
            piece = self._ready.get()
            if piece is None:
                left -= 1
            elif piece.failure is not None:
                raise piece.failure
            else:
                yield piece

    def enter_encoder(self, piece: Piece) -> None:
        """Say that the encoder begins with a piece."""
        if piece.suspect:
            self._marks[piece.number] = IN_ENCODER

    def leave_encoder(self, piece: Piece) -> None:
        """Say that the encoder has done a piece."""
        if piece.suspect:
            self._marks[piece.number] = BEGUN

    def done(self, piece: Piece) -> None:
        """Say that all of a piece's clip is on the disk."""
        self._marks[piece.number] = UNTOUCHED
        self.claims.done(piece.number)
        self._in_hand.pop(piece.number)

    def _decode_ahead(self) -> None:
        number, clip = 0, Clip("", None, None, "", ())
        try:
            while (taken := self.claims.take(self._stop.is_set)) is not None:
                number, clip = taken, Clip.from_json(self._clips[taken])
                mark = self._marks[number]
                self._in_hand[number] = mark
                self._marks[number] = max(mark, BEGUN)
                closing = Piece(number, clip, last=True)
                try:
                    for piece in self._pieces(number, clip, mark):
                        self._hand_over(piece)
                        if self._stop.is_set():
                            return
                except Crashed as error:
                    closing.reason = _why_it_crashed(clip, mark, error)
                    closing.deadly = True
                except (DataError, MemoryError) as error:
                    closing.reason = str(error) or NO_MEMORY
                self._hand_over(closing)
            self._hand_over(None)
        except BaseException as error:  # the encoder's thread raises it
            self._hand_over(Piece(number, clip, failure=error))

    def _hand_over(self, piece: Piece | None) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(piece, timeout=0.1)
            except queue.Full:
                pass

    def _pieces(self, number: int, clip: Clip, mark: int) -> Iterator[Piece]:
        for shard, place, suffix in clip.latents:
            bits, meta = read_stored(self._cache / shard, self._run.digest, place)
            yield Piece(number, clip, suffix, meta, encoded=_to_tensors(bits))
        if not clip.decode:
            return
        known = {suffix for _, _, suffix in clip.latents}
        arguments = (Path(clip.path), self._spec, clip.start, clip.end, self._run.more_pixels)
        if mark == IN_ENCODER:
            log.warning("%s is encoded in a process of its own: others have ended over it", clip.path)
            task = (self._run, str(self._device), arguments, [*known, *_everywhere(clip)])
            for suffix, meta, bits in iterate_isolated(encode_windows, *task, limit_seconds=LIMIT_SECONDS):
                yield Piece(number, clip, suffix, meta | {"video": clip.video}, encoded=_to_tensors(bits))
            return
        if mark == BEGUN:
            log.warning("%s is decoded in a process of its own: another ended with it in hand", clip.path)
            clips = iterate_isolated(
                decode_clip, *arguments, limit_seconds=LIMIT_SECONDS, preload=[decode_clip.__module__]
            )
        else:
            clips = decode_clip(*arguments)
        for decoded, last in mark_last(clips):
            check_frames(clip.path, len(decoded.frames), self._run.conditions)
            if decoded.suffix not in known and clip.lacks(decoded.suffix):
                meta = _meta(decoded, last) | {"video": clip.video}
                yield Piece(
                    *(number, clip, decoded.suffix, meta),
                    pixels=to_pixels(decoded.frames),
                    suspect=mark != UNTOUCHED,
                )


def encode_windows(
    run: Run, device: str, arguments: tuple[Any, ...], skipped: list[str]
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Decode and encode a clip, in a process that it may end: suffix, metadata, bits of what is stored."""
    encoder = load_encoder(run, torch.device(device))
    for decoded, last in mark_last(decode_clip(*arguments)):
        check_frames(str(arguments[0]), len(decoded.frames), run.conditions)
        if decoded.suffix not in skipped:
            encoded = encoder.encode(to_pixels(decoded.frames))
            check_finite(str(arguments[0]), encoded)
            yield decoded.suffix, _meta(decoded, last), {name: to_bits(t) for name, t in encoded.items()}


def load_encoder(run: Run, device: torch.device) -> WindowEncoder:
    """The encoders of pixels with the settings of a run.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    return WindowEncoder.load(run.model, device, run.conditions, dtype=run.vae_dtype, tiling=run.vae_tiling)


def check_finite(path: str, encoded: Mapping[str, Tensor]) -> None:
    """Refuse a clip that encodes to what are not numbers.

    Raises:
        DataError: it does.
    """
    if not all(tensor.isfinite().all() for tensor in encoded.values()):
        raise DataError(f"video={path} encodes to numbers that are not finite; replace the file")


def _to_tensors(bits: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: from_bits(array) for name, array in bits.items()}


def mark_last(clips: Iterator[DecodedClip]) -> Iterator[tuple[DecodedClip, bool]]:
    """Tell of each decoded clip whether its window is the last; all sizes of a window are held until that is known."""
    window: list[DecodedClip] = []
    try:
        for clip in clips:
            if window and clip.start_seconds != window[0].start_seconds:
                yield from ((previous, False) for previous in window)
                window = []
            window.append(clip)
    except DataError as error:
        whole = isinstance(error, TooSmallError)  # not damage: all windows have come
        yield from ((previous, whole) for previous in window)
        raise
    yield from ((previous, True) for previous in window)


def _why_it_crashed(clip: Clip, mark: int, error: Crashed) -> str:
    if mark == IN_ENCODER:
        return f"video={clip.path} cannot be encoded: {error}; lower --max-frames or --max-pixels"
    return f"video={clip.path} cannot be decoded: {error}; replace or re-encode the file"


def _everywhere(clip: Clip) -> set[str]:
    """Suffixes that no row lacks."""
    return set.intersection(*(set(row.present) for row in clip.rows))


def _meta(decoded: DecodedClip, last: bool) -> dict[str, Any]:
    return {
        "start_seconds": decoded.start_seconds,
        "num_frames": len(decoded.frames),
        "height": decoded.frames.shape[1],
        "width": decoded.frames.shape[2],
        "fps": decoded.fps,
        "display_size": [str(side) for side in decoded.source.display_size],
        "last": last,
    }
