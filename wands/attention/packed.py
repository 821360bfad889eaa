"""Where samples begin and end in packed rows: the only thing that attention knows of a pack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which rows of q attend to which rows of k: segment i of q to segment i of k, and to nothing else.

    Attributes:
        lens_q: rows of q in each segment; host integers, so that planning never waits for a device.
        lens_k: rows of k in each segment. Zero is legal on both sides.
        cu_seqlens_q: int32 [S+1], where each segment of q begins and ends.
        cu_seqlens_k: int32 [S+1], the same for k.
    """

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def build(
        cls, lens_q: Sequence[int], lens_k: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Segments:
        """Make segments from their lengths; without `lens_k` every segment attends to itself."""
        queries = tuple(lens_q)
        keys = queries if lens_k is None else tuple(lens_k)
        assert len(queries) == len(keys), f"{len(queries)} segments of q, {len(keys)} of k"
        cu_q = torch.tensor([0, *accumulate(queries)], dtype=torch.int32).to(device, non_blocking=True)
        cu_k = torch.tensor([0, *accumulate(keys)], dtype=torch.int32).to(device, non_blocking=True)
        return cls(queries, keys, cu_q, cu_k)

    @property
    def max_seqlen_q(self) -> int:
        """Rows of the longest segment of q."""
        return max(self.lens_q, default=0)

    @property
    def max_seqlen_k(self) -> int:
        """Rows of the longest segment of k."""
        return max(self.lens_k, default=0)

    def to(self, device: torch.device | str) -> Segments:
        """The same segments, their tensors on `device`."""
        cu_q, cu_k = (x.to(device, non_blocking=True) for x in (self.cu_seqlens_q, self.cu_seqlens_k))
        return Segments(self.lens_q, self.lens_k, cu_q, cu_k)

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        """Rows of q and of k, segment by segment, leaving out those with nothing to compute."""
        start_q = start_k = 0
        for len_q, len_k in zip(self.lens_q, self.lens_k, strict=True):
            if len_q and len_k:
                yield slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
            start_q, start_k = start_q + len_q, start_k + len_k

    def idle_q(self, num_rows: int) -> Iterator[slice]:
        """Rows of q that attend to nothing: an empty key segment, or rows behind the last segment."""
        yield from _idle(self.lens_q, self.lens_k, num_rows)

    def idle_k(self, num_rows: int) -> Iterator[slice]:
        """Rows of k that nothing attends to."""
        yield from _idle(self.lens_k, self.lens_q, num_rows)


def _idle(lens: Sequence[int], partner_lens: Sequence[int], num_rows: int) -> Iterator[slice]:
    start = 0
    for length, partner in zip(lens, partner_lens, strict=True):
        if length and not partner:
            yield slice(start, start + length)
        start += length
    assert start <= num_rows, f"segments cover {start} rows of a tensor of {num_rows}"
    if start < num_rows:
        yield slice(start, num_rows)
