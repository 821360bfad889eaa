"""Text embeddings on their way from the pass over captions to the pass over clips."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from wands.data.cache.format import from_bits, to_bits
from wands.data.cache.write_ahead_log import LogRecord, WriteAheadLog, read_records


def caption_name(caption: str) -> str:
    """What a caption's embedding is found by: 32 hex digits."""
    return hashlib.blake2b(caption.encode(), digest_size=16).hexdigest()


def store_text(journal: WriteAheadLog, caption: str, embeds: Tensor) -> None:
    """Append the embedding of a caption, bf16 [L, D].

    Raises:
        CacheError: the disk is full.
    """
    journal.add(caption_name(caption), [to_bits(embeds)], {})


class TextSpool:
    """The embeddings in some journals, each found by its caption: in memory a million of them are 800 GB."""

    def __init__(self, journals: Iterable[Path]) -> None:
        """Look through the journals; what is added to them later is not seen."""
        self._places: dict[str, LogRecord] = {}
        for journal in journals:
            self._places.update((record.name, record) for record in read_records(journal))

    def __contains__(self, caption: str) -> bool:
        return caption_name(caption) in self._places

    def read(self, caption: str) -> Tensor:
        """The embedding that was stored for `caption`, bit for bit.

        Raises:
            CacheError: the journal is damaged.
        """
        return from_bits(self._places[caption_name(caption)].read()[0])
