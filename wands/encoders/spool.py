"""Text embeddings on disk: stored after the captions are encoded, and read while the clips are encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from wands.data.cache.format import from_bits, to_bits
from wands.data.cache.write_ahead_log import WriteAheadLog, read_records


def caption_name(caption: str) -> str:
    """Return the name of a caption's record in a write-ahead log: 32 hex digits, a digest of the caption."""
    return hashlib.blake2b(caption.encode(), digest_size=16).hexdigest()


def store_text(log: WriteAheadLog, caption: str, embeds: Tensor) -> None:
    """Append the text embedding of a caption to a write-ahead log.

    Args:
        log: write-ahead log.
        caption: the caption.
        embeds: bf16 [L, D], for L text tokens and width D of the text encoder.

    Raises:
        CacheError: if the disk is full.
    """
    log.add(caption_name(caption), [to_bits(embeds)], {})


class TextSpool:
    """Reader that finds the text embedding of a caption in write-ahead logs.

    Only the positions of the embeddings are in memory, because a million embeddings would need 800 GB.
    """

    def __init__(self, logs: Iterable[Path]) -> None:
        """Index the text embeddings that the logs contain now. Embeddings that are appended later are not found."""
        self._records = {record.name: record for log in logs for record in read_records(log)}

    def __contains__(self, caption: str) -> bool:
        return caption_name(caption) in self._records

    def read(self, caption: str) -> Tensor:
        """Return the stored embedding of a caption, bf16 [text tokens, width of the text encoder].

        Raises:
            CacheError: if the log is damaged.
            KeyError: if no log contains the caption. Check with `caption in spool` first.
        """
        return from_bits(self._records[caption_name(caption)].read()[0])
