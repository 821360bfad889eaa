"""One worker's share of `wands preprocess`: first captions, then clips, until nobody has anything left to do.

The workers of a run meet in the folder `.work` of the cache, which `wands/commands/preprocess.py` fills:

    run.json                       model, settings
    captions.jsonl  rows.jsonl     the pieces of work, one on each line
    captions.claims rows.claims    which of them are taken and done
    text-0.journal samples-0.journal rejects-0.jsonl worker-0.json     what worker 0 has made

A piece is marked as done once its result is in such a file: a process that is killed loses what it had in hand, no more.
"""

from __future__ import annotations

import fcntl
import gc
import json
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.commands.claims import Claims
from wands.commands.progress import progress
from wands.data.cache_format import disk_error, from_bits, read_stored, to_bits
from wands.data.cache_writer import ShardWriter
from wands.data.clip import ClipSpec
from wands.data.journal import Journal, read_records
from wands.data.source import Rejection
from wands.data.video import DecodedClip, decode_clip, to_pixels
from wands.encode.spool import TextSpool, store_text
from wands.encode.text import TextEncoder
from wands.encode.vae import WanVideoEncoder
from wands.errors import DataError

WORK_NAME = ".work"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DECODING_THREADS = 2
CLIPS_AHEAD = 2
"""Decoded windows that wait for the encoder, besides those in the threads' hands."""
JOURNAL_BYTES = 1 << 30


@dataclass(frozen=True)
class Row:
    """A clip to be encoded, as rows.jsonl holds it.

    Attributes:
        key: of its sample; a window's suffix follows in slide mode.
        path: the file.
        caption: cleaned.
        start: seconds, None for the beginning.
        end: seconds, None for the end.
        content: digest of all that the sample is made from.
        video: digest of what its latents are made from.
        present: keys of its windows that are in the cache.
        latents: (shard, row, suffix) of each window whose latents the cache has with another caption or
            name; all that are missing, or none.
    """

    key: str
    path: str
    caption: str
    start: float | None
    end: float | None
    content: str
    video: str
    present: tuple[str, ...] = ()
    latents: tuple[tuple[str, int, str], ...] = ()


@dataclass
class Piece:
    """A window on its way from the decoder to the encoder.

    Attributes:
        number: of the row.
        row: the clip.
        key: of the sample.
        meta: of the sample.
        pixels: float32 [3, F, H, W] in [-1, 1], or None.
        latents: bf16 [C, f, h, w] where the cache has them.
        last: the row is done with this one.
        reason: why the row cannot be used.
        failure: what no rejection can express.
    """

    number: int
    row: Row
    key: str = ""
    meta: dict[str, Any] | None = None
    pixels: Tensor | None = None
    latents: Tensor | None = None
    last: bool = True
    reason: str | None = None
    failure: BaseException | None = None


@dataclass
class WorkerStats:
    """What a worker tells of itself at its end.

    Attributes:
        num_windows: encoded by it.
        waited: seconds that its encoder stood still for a clip to be decoded.
        worked: seconds that it encoded and stored.
        error: the mistake that ended it early.
    """

    num_windows: int = 0
    waited: float = 0.0
    worked: float = 0.0
    error: str | None = None


class _Lines:
    """The JSON values of a file, one on each line, read when asked for."""

    def __init__(self, path: Path) -> None:
        self._file, self._mutex = path.open("rb"), threading.Lock()
        self._offsets = array("q", [0])
        for line in self._file:
            self._offsets.append(self._offsets[-1] + len(line))

    def __getitem__(self, number: int) -> Any:
        with self._mutex:
            self._file.seek(self._offsets[number])
            return json.loads(self._file.readline())


def encode_share(work: Path, slot: int, token: str, device: torch.device, text_device: torch.device) -> None:
    """Do one worker's share of a run; what it did is in worker-`slot`.json.

    Args:
        work: folder in which the workers meet.
        slot: this worker's number; no two of a run have the same.
        token: of the run; nothing is done for one that is over.
        device: where the VAE runs.
        text_device: where UMT5 runs.

    Raises:
        CacheError: the disk is full.
        ConfigError: the model cannot be loaded.
    """
    try:
        with (work / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            run = json.loads((work / "run.json").read_text())
            if run["token"] != token:
                return
            encode_captions(work, slot, run, text_device)
            _free_memory()
            _ClipPass(work, slot, run, device).encode()
    except FileNotFoundError:
        if work.is_dir():
            raise
        # The others were done before this one began, and the leader has cleared up.


def encode_captions(work: Path, slot: int, run: dict[str, Any], device: torch.device) -> None:
    """The pass over captions; UMT5 is loaded if there is a piece for this worker, and gone afterwards."""
    claims, pieces = Claims(work / "captions.claims"), _Lines(work / "captions.jsonl")
    journal = Journal(work / f"text-{slot}.journal", durable=False)
    encoder = None
    try:
        with _shown("captions", claims, slot) as show:
            while (piece := claims.take()) is not None:
                if encoder is None:
                    encoder = TextEncoder.load(run["model"], device, DTYPES[run["text_dtype"]])
                for caption in pieces[piece]:
                    store_text(journal, caption, encoder.encode(caption))
                claims.done(piece)
                show()
    finally:
        journal.close()
        claims.close()


class _ClipPass:
    """The pass over clips: threads decode ahead, this thread encodes and stores."""

    def __init__(self, work: Path, slot: int, run: dict[str, Any], device: torch.device) -> None:
        self.work, self.slot, self.run, self.device = work, slot, run, device
        self.spec = ClipSpec(**run["clip"])
        self.claims, self.rows = Claims(work / "rows.claims"), _Lines(work / "rows.jsonl")
        self.journal = Journal(work / f"samples-{slot}.journal")
        self.stats = WorkerStats()
        self._ready: queue.Queue[Piece | None] = queue.Queue(CLIPS_AHEAD)
        self._stop = threading.Event()

    def encode(self) -> None:
        threads = [
            threading.Thread(target=self._decode_ahead, name=f"decode-{i}", daemon=True)
            for i in range(DECODING_THREADS)
        ]
        for thread in threads:
            thread.start()
        try:
            if self.claims.num_pieces:
                self._encode_pieces(len(threads))
            self._to_shards()
            (self.work / f"worker-{self.slot}.json").write_text(json.dumps(asdict(self.stats)))
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            self.claims.close()
            self.journal.close()  # the leader waits for this one

    def _encode_pieces(self, num_threads: int) -> None:
        spool = TextSpool(sorted(self.work.glob("text-*.journal")))
        encoder = WanVideoEncoder.load(self.run["model"], self.device) if self.run["needs_vae"] else None
        rejected: set[int] = set()
        with _shown("clips", self.claims, self.slot) as show:
            while num_threads:
                began = time.monotonic()
                piece = self._ready.get()
                got = time.monotonic()
                if piece is None:
                    num_threads -= 1
                    continue
                if piece.failure is not None:
                    raise piece.failure
                reason = piece.reason
                if reason is None and piece.number not in rejected:
                    reason = self._store(piece, encoder, spool)
                if reason is not None and piece.number not in rejected:
                    rejected.add(piece.number)
                    self._reject(piece.row, reason)
                if piece.last:
                    self.claims.done(piece.number)
                    show()
                self.stats.waited += got - began
                self.stats.worked += time.monotonic() - got

    def _store(self, piece: Piece, encoder: WanVideoEncoder | None, spool: TextSpool) -> str | None:
        """Encode a window and append it to the journal; returns why that cannot be."""
        latents, meta = piece.latents, piece.meta
        if piece.pixels is not None:
            assert encoder is not None
            try:
                encoded = encoder.encode(piece.pixels)
            except (torch.OutOfMemoryError, MemoryError):
                _free_memory()
                return "does not fit into memory; lower --max-frames or --max-pixels"
            if not encoded.isfinite().all():
                return f"video={piece.row.path} encodes to numbers that are not finite; replace the file"
            latents = encoded.to(torch.bfloat16)
        if latents is None or meta is None:  # a window that the cache has
            return None
        self.journal.add(piece.key, [to_bits(latents), to_bits(spool.read(piece.row.caption))], meta)
        self.stats.num_windows += 1
        if self.journal.num_records >= self.run["max_samples"] or self.journal.num_bytes >= JOURNAL_BYTES:
            self._to_shards()
        return None

    def _to_shards(self) -> None:
        writer = ShardWriter(self.work.parent, self.run["digest"], self.run["max_samples"])
        for record in read_records(self.journal.path):
            latents, text_embeds = map(from_bits, record.read())
            writer.add(record.name, latents, text_embeds, record.meta)
        writer.finish_shard()
        self.journal.clear()

    def _reject(self, row: Row, reason: str) -> None:
        line = json.dumps(asdict(Rejection(row.key, row.path, reason))) + "\n"
        path = self.work / f"rejects-{self.slot}.jsonl"
        try:
            with path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise disk_error(path, len(line), error, cache=self.work.parent) from None

    def _decode_ahead(self) -> None:
        number, row = 0, Row("", "", "", None, None, "", "")
        try:
            while (taken := self.claims.take(self._stop.is_set)) is not None:
                number, row = taken, Row(**self.rows[taken])
                try:
                    for piece in self._pieces(number, row):
                        self._hand_over(piece)
                        if self._stop.is_set():
                            return
                except (DataError, MemoryError) as error:
                    reason = str(error) or "does not fit into memory; lower --max-frames or --max-pixels"
                    self._hand_over(Piece(number, row, reason=reason))
            self._hand_over(None)
        except BaseException as error:  # the encoder's thread raises it
            self._hand_over(Piece(number, row, failure=error))

    def _hand_over(self, piece: Piece | None) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(piece, timeout=0.1)
            except queue.Full:
                pass

    def _pieces(self, number: int, row: Row) -> Iterator[Piece]:
        for i, (shard, place, suffix) in enumerate(row.latents, start=1):
            bits, meta = read_stored(self.work.parent / shard, self.run["digest"], place)
            meta |= {"caption": row.caption, "source": row.path, "content": row.content}
            key, last = row.key + suffix, i == len(row.latents)
            yield Piece(number, row, key, meta, latents=from_bits(bits), last=last)
        if row.latents:
            return
        for clip, last in _mark_last(decode_clip(Path(row.path), self.spec, row.start, row.end)):
            key = row.key + clip.suffix
            if key in row.present:
                yield Piece(number, row, last=last)
                continue
            meta = {
                "caption": row.caption,
                "source": row.path,
                "start_seconds": clip.start_seconds,
                "num_frames": len(clip.frames),
                "height": clip.frames.shape[1],
                "width": clip.frames.shape[2],
                "fps": clip.fps,
                "content": row.content,
                "video": row.video,
                "last": last,
            }
            yield Piece(number, row, key, meta, pixels=to_pixels(clip.frames), last=last)


def _mark_last(clips: Iterator[DecodedClip]) -> Iterator[tuple[DecodedClip, bool]]:
    previous = None
    try:
        for clip in clips:
            if previous is not None:
                yield previous, False
            previous = clip
    except DataError:
        if previous is not None:
            yield previous, False  # whole, though what follows it is not
        raise
    if previous is not None:
        yield previous, True


@contextmanager
def _shown(what: str, claims: Claims, slot: int) -> Iterator[Callable[[], None]]:
    """Progress of all workers together, shown by the first; gives a function to call after each piece."""
    if slot or not claims.num_pieces:
        yield lambda: None
        return
    with progress(what, claims.num_pieces) as advance:
        num_shown = 0

        def show() -> None:
            nonlocal num_shown
            for _ in range(claims.num_done() - num_shown):
                advance()
                num_shown += 1

        yield show
        show()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
