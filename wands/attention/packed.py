"""Packed sequences: segment boundaries for attention, and the metadata that the model needs for each token.

Without ring attention, the whole bin is one ring row.

Letters: T tokens of a bin, L local tokens of a rank with padding, S samples, R ring degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from wands.transfer import to_device

ChunkLens = tuple[tuple[int, ...], ...]
"""Entry [r][u] is the number of tokens of unit u (units.py) in ring row r. A sample of bidirectional training is one unit."""


@dataclass(frozen=True)
class Segments:
    """Block-diagonal attention pattern: rows of q in segment i attend only to rows of k in segment i. Segments are contiguous.

    Attributes:
        lens_q: number of rows of q in each segment, may be 0. Python integers, so reading them never waits for a GPU.
        lens_k: number of rows of k in each segment, may be 0.
        cu_seqlens_q: int32 [S+1] for S segments, cumulative sum of `lens_q`, starting with 0.
        cu_seqlens_k: int32 [S+1], cumulative sum of `lens_k`, starting with 0.
    """

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def build(
        cls, lens_q: Sequence[int], lens_k: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Segments:
        """Build segments on a device. `lens_k` None means `lens_q`."""
        queries = tuple(lens_q)
        keys = tuple(lens_q if lens_k is None else lens_k)
        assert len(queries) == len(keys), f"{len(queries)} segments of q, but {len(keys)} segments of k"
        sums_q = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        sums_k = torch.tensor([0, *accumulate(keys)], dtype=torch.int32)
        return to_device(cls(queries, keys, sums_q, sums_k), device)

    @property
    def max_seqlen_q(self) -> int:
        """Largest number of rows of q in a segment; 0 without segments."""
        return max(self.lens_q, default=0)

    @property
    def max_seqlen_k(self) -> int:
        """Largest number of rows of k in a segment; 0 without segments."""
        return max(self.lens_k, default=0)

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        """Yield (slice of q, slice of k) for every segment that has rows of q and rows of k."""
        start_q = start_k = 0
        for len_q, len_k in zip(self.lens_q, self.lens_k, strict=True):
            if len_q and len_k:
                yield slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
            start_q = start_q + len_q
            start_k = start_k + len_k


def idle_rows(lens: Sequence[int], partner_lens: Sequence[int], num_rows: int) -> Iterator[slice]:
    """Yield slices of the rows of one tensor, q or k, that attention does not use.

    These are rows of segments with no row of the other tensor (`partner_lens`), and the rows after the last segment.
    """
    start = 0
    for length, partner in zip(lens, partner_lens, strict=True):
        if length and not partner:
            yield slice(start, start + length)
        start += length
    assert start <= num_rows, f"segments cover {start} rows, but the tensor has {num_rows} rows"
    if start < num_rows:
        yield slice(start, num_rows)


@dataclass(frozen=True)
class PackedMeta:
    """Positions, sample indices and lengths of the tokens that one rank holds.

    Attributes:
        positions: int64 [L, 3], (frame, row, column) of each token in the token grid of its sample.
        segment_ids: int64 [L], sample index of each token, ascending.
        chunk_lens: entry [r][u] is the number of tokens of unit u in ring row r.
        local_seq_lens: number of local tokens of each sample, without the padding that can follow the last one.
        text_lens: number of text tokens of each sample, without padding.
        timestep_lens: number of local tokens of each timestep. In training, a sample with conditioning tokens has two timesteps:
            0 for these tokens, then the timestep of its others. If empty, each sample has one timestep. The collator never leaves
            it empty.
        timestep_samples: sample index of each timestep. Empty if `timestep_lens` is empty.
        dropout_keys: 64 random bits for each sample's dropout masks. Empty without dropout.
        visible: which units see which, see `wands.attention.units.Visible`. Empty: every unit sees itself.
    """

    positions: Tensor
    segment_ids: Tensor
    chunk_lens: ChunkLens
    local_seq_lens: tuple[int, ...]
    text_lens: tuple[int, ...]
    timestep_lens: tuple[int, ...] = ()
    timestep_samples: tuple[int, ...] = ()
    dropout_keys: tuple[int, ...] = ()
    visible: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        lens = self.local_seq_lens
        text_lens = self.text_lens
        assert sum(self.timestep_lens or lens) == sum(lens), (self.timestep_lens, lens)
        assert len(lens) == len(text_lens), f"{len(lens)} samples, but {len(text_lens)} texts"
        assert self.positions.shape == (len(self.segment_ids), 3), tuple(self.positions.shape)

    @property
    def padded_seq_lens(self) -> tuple[int, ...]:
        """Number of local tokens of each sample. The padding at the end counts as tokens of the last sample."""
        return self._with_padding(self.local_seq_lens)

    @property
    def padded_timestep_lens(self) -> tuple[int, ...]:
        """Number of local tokens of each timestep. The padding at the end counts as tokens of the last timestep."""
        return self._with_padding(self.timestep_lens or self.local_seq_lens)

    def _with_padding(self, lens: tuple[int, ...]) -> tuple[int, ...]:
        *first, last = lens
        return *first, last + len(self.segment_ids) - sum(lens)


def segment_ids_of(seq_lens: Sequence[int]) -> Tensor:
    """Return the sample index of each token, int64 [sum of `seq_lens`]."""
    return torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens, dtype=torch.int64))
