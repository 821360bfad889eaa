"""Samples to one packed batch, and a packed batch to this rank's shard of it.

T packed tokens, L local tokens, S samples, P channels of a token, D width of the text encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wands.config import FlowSection
from wands.data.patchify import grid_size, patchify
from wands.errors import DataError
from wands.flow.keys import SampleKey, rng
from wands.parallel.layout import ContextLayout, PackedMeta
from wands.variants import TEXT_LEN, DiTShape

PADDING_ID = "<padding>"
"""Sample id of the one zero token that stands for an empty bin."""


@dataclass(frozen=True)
class Sample:
    """One clip as a cache or the mock data give it.

    Attributes:
        sample_id: stable and unique name of the clip.
        latents: bf16 or fp32 [C, f, h, w], normalised.
        text_embeds: [n <= 512, D], trimmed to the caption.
    """

    sample_id: str
    latents: Tensor
    text_embeds: Tensor


@dataclass(frozen=True)
class Shard:
    """What one rank forwards: its tokens of a batch and what the model must know of them.

    Attributes:
        tokens: clean tokens, fp32 [L, P]; pads are zero.
        meta: positions, segments and lengths.
        text_embeds: [sum of text_lens, D], whole: every rank of a context-parallel group attends to all text.
        keys: one per sample of the pack.
        weights: fp32 [S], 0 for the sample of a padding bin.
        layout: which tokens of the pack these are.
    """

    tokens: Tensor
    meta: PackedMeta
    text_embeds: Tensor
    keys: tuple[SampleKey, ...]
    weights: Tensor
    layout: ContextLayout

    def to(self, device: torch.device | str) -> Shard:
        """The same shard with its tensors on `device`; the layout, which only the host reads, stays."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            meta=self.meta.to(device),
            text_embeds=self.text_embeds.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class PackedBatch:
    """The varlen batch: samples end to end, nothing padded.

    Attributes:
        tokens: clean tokens, fp32 [T, P].
        cu_seqlens: int32 [S+1], where each sample starts; the last entry is T.
        grid_sizes: int64 [S, 3], tokens along (frame, row, column).
        text_embeds: [sum of text lengths, D], trimmed; dropped captions are already replaced.
        cu_seqlens_text: int32 [S+1].
        keys: one per sample; noise and sigma are drawn from them.
        weights: fp32 [S], 1, or 0 for the sample of a padding bin.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    grid_sizes: Tensor
    text_embeds: Tensor
    cu_seqlens_text: Tensor
    keys: tuple[SampleKey, ...]
    weights: Tensor

    def __post_init__(self) -> None:
        for cu_seqlens, rows in ((self.cu_seqlens, self.tokens), (self.cu_seqlens_text, self.text_embeds)):
            lens = cu_seqlens.diff()
            assert cu_seqlens.dtype == torch.int32
            assert len(lens) == len(self.keys) == len(self.weights)
            assert int(cu_seqlens[0]) == 0
            assert bool((lens > 0).all())
            assert int(cu_seqlens[-1]) == len(rows)
        assert bool((self.grid_sizes.prod(dim=1) == self.cu_seqlens.diff()).all())

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(self.cu_seqlens.diff().tolist())

    @property
    def text_lens(self) -> tuple[int, ...]:
        """Text tokens of each sample, trimmed."""
        return tuple(self.cu_seqlens_text.diff().tolist())

    def split(self) -> list[PackedBatch]:
        """One batch per sample, for running a bin without packing."""
        tokens = self.tokens.split(self.seq_lens)
        texts = self.text_embeds.split(self.text_lens)
        return [
            PackedBatch(
                tokens=tokens[i],
                cu_seqlens=_cu_seqlens([len(tokens[i])]),
                grid_sizes=self.grid_sizes[i : i + 1],
                text_embeds=texts[i],
                cu_seqlens_text=_cu_seqlens([len(texts[i])]),
                keys=self.keys[i : i + 1],
                weights=self.weights[i : i + 1],
            )
            for i in range(len(self.keys))
        ]

    def shard(self, layout: ContextLayout) -> Shard:
        """The part of the batch that `layout` gives this rank.

        Args:
            layout: built from this batch's `seq_lens`.
        """
        assert layout.seq_lens == self.seq_lens
        pads = layout.token_index < 0
        index = layout.token_index.clamp(min=0)
        return Shard(
            tokens=self.tokens[index].masked_fill_(pads.unsqueeze(1), 0.0),
            meta=self._meta(layout),
            text_embeds=self.text_embeds,
            keys=self.keys,
            weights=self.weights,
            layout=layout,
        )

    def _meta(self, layout: ContextLayout) -> PackedMeta:
        positions = torch.cat([_positions(grid) for grid in self.grid_sizes.tolist()])
        return PackedMeta(
            positions=positions[layout.token_index.clamp(min=0)],
            segment_ids=layout.segment_ids,
            chunk_lens=layout.plan.chunk_lens,
            seq_lens=layout.local_lens,
            text_lens=self.text_lens,
        )


class PackingCollator:
    """Turns the samples of one bin into a `PackedBatch`.

    Args:
        shape: the DiT's channels, text width and patch.
        flow: for `cfg_dropout`.
        seed: `train.seed`.
        null_text_embeds: embedding of the empty caption, [n, D].
    """

    def __init__(self, shape: DiTShape, flow: FlowSection, seed: int, null_text_embeds: Tensor) -> None:
        self.shape = shape
        self.cfg_dropout = flow.cfg_dropout
        self.seed = seed
        self.null_text_embeds = null_text_embeds
        self._check_text("the empty caption", null_text_embeds)

    def __call__(self, samples: Sequence[Sample], occurrences: Sequence[int], epoch: int) -> PackedBatch:
        """Pack `samples` end to end in the order given.

        Args:
            samples: of one bin; none gives a batch of one zero token with weight 0, so that a rank with an
                empty bin runs as many forwards as the others.
            occurrences: which visit within the epoch each sample is.
            epoch: pass over the data.

        Raises:
            DataError: a sample's latents or text do not fit the model.
        """
        if not samples:
            return self._padding(epoch)
        keys = tuple(
            SampleKey(sample.sample_id, occurrence, epoch)
            for sample, occurrence in zip(samples, occurrences, strict=True)
        )
        for sample in samples:
            self._check(sample)
        tokens = [patchify(sample.latents, self.shape.patch_size).to(torch.float32) for sample in samples]
        texts = [self._text_of(sample, key) for sample, key in zip(samples, keys, strict=True)]
        grids = [grid_size(tuple(sample.latents.shape[1:]), self.shape.patch_size) for sample in samples]
        return PackedBatch(
            tokens=torch.cat(tokens),
            cu_seqlens=_cu_seqlens([len(rows) for rows in tokens]),
            grid_sizes=torch.tensor(grids, dtype=torch.int64),
            text_embeds=torch.cat(texts),
            cu_seqlens_text=_cu_seqlens([len(rows) for rows in texts]),
            keys=keys,
            weights=torch.ones(len(samples), dtype=torch.float32),
        )

    def _text_of(self, sample: Sample, key: SampleKey) -> Tensor:
        """The caption, or for a `cfg_dropout` share of visits the empty one."""
        if rng(self.seed, key, "cfg_dropout").random() < self.cfg_dropout:
            return self.null_text_embeds.to(sample.text_embeds.dtype)
        return sample.text_embeds

    def _padding(self, epoch: int) -> PackedBatch:
        pt, ph, pw = self.shape.patch_size
        return PackedBatch(
            tokens=torch.zeros(1, self.shape.in_channels * pt * ph * pw),
            cu_seqlens=_cu_seqlens([1]),
            grid_sizes=torch.ones(1, 3, dtype=torch.int64),
            text_embeds=self.null_text_embeds,
            cu_seqlens_text=_cu_seqlens([len(self.null_text_embeds)]),
            keys=(SampleKey(PADDING_ID, 0, epoch),),
            weights=torch.zeros(1),
        )

    def _check(self, sample: Sample) -> None:
        shape = tuple(sample.latents.shape)
        if len(shape) != 4 or shape[0] != self.shape.in_channels:
            raise DataError(
                f"sample={sample.sample_id} has latents {list(shape)}, but the model takes "
                f"[{self.shape.in_channels}, frames, height, width]; preprocess with this model's VAE."
            )
        if any(
            length == 0 or length % patch
            for length, patch in zip(shape[1:], self.shape.patch_size, strict=True)
        ):
            raise DataError(
                f"sample={sample.sample_id} has latents {list(shape)}, which do not divide into patches of "
                f"{list(self.shape.patch_size)}; preprocess it again."
            )
        self._check_text(f"sample={sample.sample_id}", sample.text_embeds)

    def _check_text(self, owner: str, text_embeds: Tensor) -> None:
        shape = tuple(text_embeds.shape)
        if len(shape) != 2 or not 0 < shape[0] <= TEXT_LEN or shape[1] != self.shape.text_dim:
            raise DataError(
                f"{owner} has text_embeds {list(shape)}, but the model takes [1 to {TEXT_LEN}, "
                f"{self.shape.text_dim}]; preprocess with this model's text encoder."
            )


def _positions(grid: Sequence[int]) -> Tensor:
    """(frame, row, column) of one sample's tokens, int64 [n, 3], in the order of `patchify`."""
    return torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), dim=-1).reshape(-1, 3)


def _cu_seqlens(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
