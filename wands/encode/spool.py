"""Text embeddings on their way from the pass over captions to the pass over clips."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from torch import Tensor

from wands.data.cache_format import disk_error, from_bits, to_bits


class TextSpool:
    """A temporary file of embeddings, each found by its caption: in memory a million of them are 800 GB.

    A context manager; the file is gone afterwards.
    """

    def __init__(self, path: Path) -> None:
        """Name the file."""
        self._path = path
        self._places: dict[str, tuple[int, tuple[int, int]]] = {}

    def __enter__(self) -> TextSpool:
        self._file = self._path.open("w+b")
        return self

    def __exit__(self, *unused: object) -> None:
        with suppress(OSError):  # closing flushes what a full disk has refused, and fails once more
            self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, caption: str, embeds: Tensor) -> None:
        """Append bf16 [L, D].

        Raises:
            CacheError: the disk is full.
        """
        bits = to_bits(embeds)
        try:
            self._places[caption] = (self._file.tell(), bits.shape)
            self._file.write(bits.tobytes())
            self._file.flush()
        except OSError as error:
            raise disk_error(self._path, bits.nbytes, error) from None

    def read(self, caption: str) -> Tensor:
        """The embedding that was added for `caption`, bit for bit."""
        offset, shape = self._places[caption]
        self._file.seek(offset)
        bits = np.frombuffer(self._file.read(2 * shape[0] * shape[1]), np.uint16).copy()
        return from_bits(bits.reshape(shape))
