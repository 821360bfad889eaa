"""Store text embeddings between the pass over captions and the pass over clips of `wands preprocess`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from wands.data.cache.format import from_bits, to_bits
from wands.data.cache.write_ahead_log import LogRecord, WriteAheadLog, read_records


def caption_name(caption: str) -> str:
    """Return the name of a caption's embedding: 32 hex digits."""
    return hashlib.blake2b(caption.encode(), digest_size=16).hexdigest()


def store_text(journal: WriteAheadLog, caption: str, embeds: Tensor) -> None:
    """Append the embedding of a caption, bf16 [L, D].

    Raises:
        CacheError: if the disk is full.
    """
    journal.add(caption_name(caption), [to_bits(embeds)], {})


class TextSpool:
    """Text embeddings in logs, found by caption. They stay on disk: a million embeddings have 800 GB."""

    def __init__(self, journals: Iterable[Path]) -> None:
        """Index the logs; records added later are not found."""
        self._places: dict[str, LogRecord] = {}
        for journal in journals:
            self._places.update((record.name, record) for record in read_records(journal))

    def __contains__(self, caption: str) -> bool:
        return caption_name(caption) in self._places

    def read(self, caption: str) -> Tensor:
        """Return the stored embedding of `caption`, bit for bit.

        Raises:
            CacheError: if the log is damaged.
        """
        return from_bits(self._places[caption_name(caption)].read()[0])
