"""Packed sequences: segment boundaries for attention, and the metadata that the model needs for each token.

Letters: T tokens of a bin, L local tokens of a rank, S samples, R ring degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

ChunkLens = tuple[tuple[int, ...], ...]
"""[R][S]: number of tokens of each sample in each ring row."""


@dataclass(frozen=True)
class Segments:
    """Block-diagonal attention pattern: rows of q in segment i attend to rows of k in segment i only.

    Attributes:
        lens_q: number of rows of q per segment; host integers, so that planning never waits for a device.
        lens_k: number of rows of k per segment. Zero is allowed for q and for k.
        cu_seqlens_q: int32 [S+1], cumulative `lens_q`, starting with 0.
        cu_seqlens_k: int32 [S+1], cumulative `lens_k`, starting with 0.
    """

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def build(
        cls, lens_q: Sequence[int], lens_k: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Segments:
        """Build segments from their lengths. Without `lens_k`, every segment attends to itself."""
        queries = tuple(lens_q)
        keys = queries if lens_k is None else tuple(lens_k)
        assert len(queries) == len(keys), f"{len(queries)} segments of q, {len(keys)} segments of k"
        cu_q = torch.tensor([0, *accumulate(queries)], dtype=torch.int32).to(device, non_blocking=True)
        cu_k = torch.tensor([0, *accumulate(keys)], dtype=torch.int32).to(device, non_blocking=True)
        return cls(queries, keys, cu_q, cu_k)

    @property
    def max_seqlen_q(self) -> int:
        """Number of rows of the longest segment of q."""
        return max(self.lens_q, default=0)

    @property
    def max_seqlen_k(self) -> int:
        """Number of rows of the longest segment of k."""
        return max(self.lens_k, default=0)

    def to(self, device: torch.device | str) -> Segments:
        """Copy the segments to `device`."""
        cu_q, cu_k = (x.to(device, non_blocking=True) for x in (self.cu_seqlens_q, self.cu_seqlens_k))
        return Segments(self.lens_q, self.lens_k, cu_q, cu_k)

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of q and the rows of k of every segment that has both."""
        start_q = start_k = 0
        for len_q, len_k in zip(self.lens_q, self.lens_k, strict=True):
            if len_q and len_k:
                yield slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
            start_q, start_k = start_q + len_q, start_k + len_k

    def idle_q(self, num_rows: int) -> Iterator[slice]:
        """Yield the rows of q that attend to nothing: no keys in the segment, or rows after the last segment."""
        yield from _idle(self.lens_q, self.lens_k, num_rows)

    def idle_k(self, num_rows: int) -> Iterator[slice]:
        """Yield the rows of k that no row of q attends to."""
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


@dataclass(frozen=True)
class PackedMeta:
    """Positions, samples and lengths of a rank's tokens.

    Attributes:
        positions: int64 [L, 3], (frame, row, column) of each token in the token grid of its sample.
        segment_ids: int64 [L], sample index of each token, ascending.
        chunk_lens: number of tokens of each sample in each ring row, for self-attention; one ring row without a ring.
        local_seq_lens: number of local tokens of each sample. Tail padding, if any, follows the last sample.
        text_lens: number of text tokens of each sample, without padding.
        timestep_lens: number of local tokens of each timestep, if a sample can have several timesteps. Empty means one
            timestep per sample.
        timestep_samples: sample index of each timestep. Empty means one timestep per sample.
        dropout_keys: 64 random bits per sample for the dropout masks. Empty without dropout.
    """

    positions: Tensor
    segment_ids: Tensor
    chunk_lens: ChunkLens
    local_seq_lens: tuple[int, ...]
    text_lens: tuple[int, ...]
    timestep_lens: tuple[int, ...] = ()
    timestep_samples: tuple[int, ...] = ()
    dropout_keys: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert sum(self.timestep_lens or self.local_seq_lens) == sum(self.local_seq_lens), (
            f"timesteps of {sum(self.timestep_lens)} tokens, samples of {sum(self.local_seq_lens)}"
        )
        assert len(self.local_seq_lens) == len(self.text_lens), (
            f"{len(self.local_seq_lens)} samples, {len(self.text_lens)} texts"
        )
        assert self.positions.shape == (len(self.segment_ids), 3), tuple(self.positions.shape)

    @property
    def padded_seq_lens(self) -> tuple[int, ...]:
        """`local_seq_lens` with the tail padding added to the last sample; the sum is L."""
        return self._with_padding(self.local_seq_lens)

    @property
    def padded_timestep_lens(self) -> tuple[int, ...]:
        """`timestep_lens` with the tail padding added to the last timestep; the sum is L."""
        return self._with_padding(self.timestep_lens or self.local_seq_lens)

    def _with_padding(self, lens: tuple[int, ...]) -> tuple[int, ...]:
        *first, last = lens
        return *first, last + len(self.segment_ids) - sum(lens)

    def to(self, device: torch.device | str) -> PackedMeta:
        """Copy the tensors to `device`."""
        return replace(
            self,
            positions=self.positions.to(device, non_blocking=True),
            segment_ids=self.segment_ids.to(device, non_blocking=True),
        )


def segment_ids_of(seq_lens: Sequence[int]) -> Tensor:
    """Return the sample index of each token of a bin, int64 [T]."""
    return torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens, dtype=torch.int64))
