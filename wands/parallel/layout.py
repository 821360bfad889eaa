"""Which tokens of a packed batch a rank holds: index arithmetic only, no process group.

Letters: T tokens of the whole pack, L tokens of this rank, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wands.attention.segments import Segments


@dataclass(frozen=True)
class ContextLayout:
    """This rank's share of a pack.

    Attributes:
        seq_lens: tokens of each sample of the whole pack.
        token_index: int64 [L], the packed token at each local place; -1 is tail padding.
        segment_ids: int64 [L], the sample of each local token; tail padding counts as the last sample.
        local_lens: tokens of each sample that this rank holds, padding left out.
    """

    seq_lens: tuple[int, ...]
    token_index: Tensor
    segment_ids: Tensor
    local_lens: tuple[int, ...]

    @classmethod
    def build(
        cls, seq_lens: Sequence[int], *, ulysses_degree: int = 1, ring_degree: int = 1, cp_rank: int = 0
    ) -> ContextLayout:
        """Lay out a pack over the ranks of a context-parallel group.

        Args:
            seq_lens: tokens of each sample, in packed order.
            ulysses_degree: ranks that share heads; 1 in this version.
            ring_degree: ranks that share each sample's tokens; 1 in this version.
            cp_rank: this rank inside the group.
        """
        assert (ulysses_degree, ring_degree, cp_rank) == (1, 1, 0), (
            "context parallelism is not in this version"
        )
        lens = tuple(seq_lens)
        return cls(lens, torch.arange(sum(lens)), segment_ids_of(lens), lens)

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds, tail padding included."""
        return len(self.token_index)


@dataclass(frozen=True)
class PackedMeta:
    """All that the model must know of the tokens it is given.

    Attributes:
        positions: int64 [L, 3], each token's (frame, row, column) inside its own sample.
        segment_ids: int64 [L], each token's sample, ascending.
        segments: who attends to whom in self-attention.
        seq_lens: local tokens of each sample; tail padding, if any, comes behind the last.
        text_lens: text tokens of each sample, trimmed.
    """

    positions: Tensor
    segment_ids: Tensor
    segments: Segments
    seq_lens: tuple[int, ...]
    text_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.seq_lens) == len(self.text_lens), (
            f"{len(self.seq_lens)} samples, {len(self.text_lens)} texts"
        )
        assert self.positions.shape == (len(self.segment_ids), 3), tuple(self.positions.shape)

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Local rows of each sample, the tail padding given to the last one: these cover all L rows."""
        *rest, last = self.seq_lens
        return *rest, last + len(self.segment_ids) - sum(self.seq_lens)

    def to(self, device: torch.device | str) -> PackedMeta:
        """The same, its tensors on `device`."""
        return PackedMeta(
            self.positions.to(device, non_blocking=True),
            self.segment_ids.to(device, non_blocking=True),
            self.segments.to(device),
            self.seq_lens,
            self.text_lens,
        )


def segment_ids_of(seq_lens: Sequence[int]) -> Tensor:
    """The sample of each token of a pack, int64 [T]."""
    return torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens, dtype=torch.int64))
