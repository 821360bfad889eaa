"""One worker's share of `wands preprocess`: first captions, then clips, until nobody has anything left to do.

`wands/commands/preprocess/work_folder.py` says what lies in the folder where the workers meet.
"""

from __future__ import annotations

import fcntl
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from wands.commands.preprocess.claims import Claims
from wands.commands.preprocess.decoding import NO_MEMORY, Decoder, Piece, check_finite, load_encoder
from wands.commands.preprocess.work_folder import DTYPES, Lines, Run, WorkerStats
from wands.commands.progress import progress
from wands.data.cache.format import disk_error, to_bits
from wands.data.cache.write_ahead_log import WriteAheadLog, read_records
from wands.data.cache.writer import ShardWriter
from wands.data.clips.records import Rejection
from wands.encoders.image import WindowEncoder
from wands.encoders.spool import TextSpool, store_text
from wands.encoders.text import TextEncoder
from wands.errors import DataError

JOURNAL_BYTES = 1 << 30


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
            run = Run.read(work)
            if run.token != token:
                return
            encode_captions(work, slot, run, text_device)
            _free_memory()
            _ClipPass(work, slot, run, device).encode()
    except FileNotFoundError:
        if work.is_dir():
            raise
        # The others were done before this one began, and the leader has cleared up.


def encode_captions(work: Path, slot: int, run: Run, device: torch.device) -> None:
    """The pass over captions; UMT5 is loaded if there is a piece for this worker, and gone afterwards."""
    claims, pieces = Claims(work / "captions.claims"), Lines(work / "captions.jsonl")
    journal = WriteAheadLog(work / f"text-{slot}.journal", durable=False)
    encoder = None
    try:
        with _shown("captions", claims, slot) as show:
            while (piece := claims.take()) is not None:
                if encoder is None:
                    encoder = TextEncoder.load(run.model, device, DTYPES[run.text_dtype])
                for caption in pieces[piece]:
                    store_text(journal, caption, encoder.encode(caption))
                claims.done(piece)
                show()
    finally:
        journal.close()
        claims.close()


class _ClipPass:
    """The pass over clips: threads decode ahead, this thread encodes and stores."""

    def __init__(self, work: Path, slot: int, run: Run, device: torch.device) -> None:
        self.work, self.slot, self.run, self.device = work, slot, run, device
        self.journal = WriteAheadLog(work / f"samples-{slot}.journal")
        self.stats = WorkerStats()

    def encode(self) -> None:
        try:
            with Decoder(self.work, self.run, self.device) as decoder:
                if decoder.claims.num_pieces:
                    self._encode_pieces(decoder)
                self._to_shards()
                self.stats.write(self.work, self.slot)
        finally:
            self.journal.close()  # the leader waits for this one

    def _encode_pieces(self, decoder: Decoder) -> None:
        spool = TextSpool(sorted(self.work.glob("text-*.journal")))
        encoder = load_encoder(self.run, self.device) if self.run.needs_vae else None
        rejected: set[int] = set()
        pieces = iter(decoder)
        with _shown("clips", decoder.claims, self.slot) as show:
            while True:
                began = time.monotonic()
                piece = next(pieces, None)
                if piece is None:
                    return
                got = time.monotonic()
                if piece.number not in rejected:
                    decoder.enter_encoder(piece)
                    reason = piece.reason or self._store(piece, encoder, spool)
                    decoder.leave_encoder(piece)
                    if reason is not None:
                        rejected.add(piece.number)
                        self._reject(piece, reason)
                if piece.last:
                    decoder.done(piece)
                    show()
                self.stats.waited += got - began
                self.stats.worked += time.monotonic() - got

    def _store(self, piece: Piece, encoder: WindowEncoder | None, spool: TextSpool) -> str | None:
        """Encode a window once and append it to the journal for all its captions; returns why that cannot be."""
        encoded = piece.encoded
        if piece.pixels is not None:
            assert encoder is not None
            try:
                encoded = encoder.encode(piece.pixels)
            except (torch.OutOfMemoryError, MemoryError):
                _free_memory()
                return NO_MEMORY
            try:
                check_finite(piece.clip.path, encoded)
            except DataError as error:
                return str(error)
        if encoded is not None:
            self._append(piece, encoded, spool)
        return None

    def _append(self, piece: Piece, encoded: dict[str, Tensor], spool: TextSpool) -> None:
        """One record for all captions: a kill costs all of them or none."""
        assert piece.meta is not None
        rows, path, meta = piece.clip.lacks(piece.suffix), piece.clip.path, piece.meta
        own = [{"caption": row.caption, "source": path, "content": row.content} for row in rows]
        samples = [(row.key + piece.suffix, meta | of_row) for row, of_row in zip(rows, own, strict=True)]
        tensors = [*encoded.values(), *(spool.read(row.caption) for row in rows)]
        self.journal.add(piece.clip.video + piece.suffix, [*map(to_bits, tensors)], {"samples": samples})
        self.stats.num_windows += 1
        if self.journal.num_records >= self.run.max_samples or self.journal.num_bytes >= JOURNAL_BYTES:
            self._to_shards()

    def _to_shards(self) -> None:
        writer = ShardWriter(self.work.parent, self.run.digest, self.run.max_samples)
        for record in read_records(self.journal.path):
            writer.add_record(record)
        writer.finish_shard()
        self.journal.clear()

    def _reject(self, piece: Piece, reason: str) -> None:
        deadly = piece.clip.video if piece.deadly else ""
        lines = [
            json.dumps(asdict(Rejection(row.key, piece.clip.path, reason)) | {"deadly": deadly}) + "\n"
            for row in piece.clip.rows
        ]
        path, text = self.work / f"rejects-{self.slot}.jsonl", "".join(lines)
        try:
            with path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise disk_error(path, len(text), error, cache=self.work.parent) from None


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
