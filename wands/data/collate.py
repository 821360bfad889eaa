"""Samples to one packed batch, and a packed batch to this rank's shard of it.

T packed tokens, L local tokens, S samples, P channels of a token, D width of the text encoder, I rows of CLIP's states
of a sample's pictures, E their width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wands.attention.packed import PackedMeta
from wands.config.recipe import FlowConfig
from wands.data.conditions import condition_tokens
from wands.data.patchify import grid_size, patchify
from wands.distributed.layout import ContextLayout
from wands.errors import DataError
from wands.flow.rng import SampleKey, rng
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
        image_latents: bf16 or fp32 [C, f, h, w], normalised latents of the given frames between grey ones; for
            models that take them.
        image_embeds: [I, E], CLIP's states of these frames; likewise.
    """

    sample_id: str
    latents: Tensor
    text_embeds: Tensor
    image_latents: Tensor | None = None
    image_embeds: Tensor | None = None


@dataclass(frozen=True)
class RankSlice:
    """What one rank forwards: its tokens of a batch and what the model must know of them.

    Attributes:
        tokens: clean tokens, fp32 [L, P]; pads are zero.
        meta: positions, segments and lengths.
        text_embeds: [sum of text_lens, D], whole: every rank of a context-parallel group attends to all text.
        keys: one per sample of the pack.
        weights: fp32 [S], 0 for the sample of a padding bin.
        layout: which tokens of the pack these are.
        num_cond_tokens: tokens at the start of each sample that are given and stay clean; whole, as `layout.seq_lens`.
        condition_tokens: fp32 [L, P'], channels that follow those of the noisy tokens, or None.
        image_embeds: [S, I, E], whole like the text, or None.
    """

    tokens: Tensor
    meta: PackedMeta
    text_embeds: Tensor
    keys: tuple[SampleKey, ...]
    weights: Tensor
    layout: ContextLayout
    num_cond_tokens: tuple[int, ...]
    condition_tokens: Tensor | None = None
    image_embeds: Tensor | None = None

    @property
    def trained_lens(self) -> tuple[int, ...]:
        """Tokens of each sample whose velocity is trained, whole: all but the clean ones."""
        pairs = zip(self.layout.seq_lens, self.num_cond_tokens, strict=True)
        return tuple(length - clean for length, clean in pairs)

    def model_input(self, noisy_tokens: Tensor) -> Tensor:
        """[L, P] -> [L, P + P'], the conditions behind the noisy channels; they are never noised themselves."""
        if self.condition_tokens is None:
            return noisy_tokens
        return torch.cat([noisy_tokens, self.condition_tokens], dim=1)

    def to(self, device: torch.device | str) -> RankSlice:
        """The same shard with its tensors on `device`; the layout, which only the host reads, stays."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            meta=self.meta.to(device),
            text_embeds=self.text_embeds.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
            condition_tokens=_moved(self.condition_tokens, device),
            image_embeds=_moved(self.image_embeds, device),
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
        num_cond_tokens: tokens at the start of each sample that are given and stay clean, of TI2V's first frames.
        condition_tokens: fp32 [T, P'], see `wands.data.conditions`, or None.
        image_embeds: [S, I, E], or None.
        dropout_keys: one per sample, see `PackedMeta.dropout_keys`, or none.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    grid_sizes: Tensor
    text_embeds: Tensor
    cu_seqlens_text: Tensor
    keys: tuple[SampleKey, ...]
    weights: Tensor
    num_cond_tokens: tuple[int, ...]
    condition_tokens: Tensor | None = None
    image_embeds: Tensor | None = None
    dropout_keys: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for cu_seqlens, rows in ((self.cu_seqlens, self.tokens), (self.cu_seqlens_text, self.text_embeds)):
            lens = cu_seqlens.diff()
            assert cu_seqlens.dtype == torch.int32
            assert len(lens) == len(self.keys) == len(self.weights)
            assert int(cu_seqlens[0]) == 0
            assert bool((lens > 0).all())
            assert int(cu_seqlens[-1]) == len(rows)
        assert bool((self.grid_sizes.prod(dim=1) == self.cu_seqlens.diff()).all())
        pairs = zip(self.num_cond_tokens, self.seq_lens, strict=True)
        assert all(0 <= clean < length for clean, length in pairs), (self.num_cond_tokens, self.seq_lens)
        assert self.condition_tokens is None or len(self.condition_tokens) == len(self.tokens)
        assert self.image_embeds is None or len(self.image_embeds) == len(self.keys)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(self.cu_seqlens.diff().tolist())

    @property
    def text_lens(self) -> tuple[int, ...]:
        """Text tokens of each sample, trimmed."""
        return tuple(self.cu_seqlens_text.diff().tolist())

    def rank_slice(self, layout: ContextLayout) -> RankSlice:
        """The part of the batch that `layout` gives this rank.

        Args:
            layout: built from this batch's `seq_lens`.
        """
        assert layout.seq_lens == self.seq_lens
        pads = layout.token_index < 0
        index = layout.token_index.clamp(min=0)

        def local(rows: Tensor) -> Tensor:
            return rows[index].masked_fill_(pads.unsqueeze(1), 0.0)

        return RankSlice(
            tokens=local(self.tokens),
            meta=self._meta(layout),
            text_embeds=self.text_embeds,
            keys=self.keys,
            weights=self.weights,
            layout=layout,
            num_cond_tokens=self.num_cond_tokens,
            condition_tokens=None if self.condition_tokens is None else local(self.condition_tokens),
            image_embeds=self.image_embeds,
        )

    def _meta(self, layout: ContextLayout) -> PackedMeta:
        positions = torch.cat([_positions(grid) for grid in self.grid_sizes.tolist()])
        timestep_lens: list[int] = []
        owners: list[int] = []
        for sample, ((start, stop), clean) in enumerate(
            zip(layout.token_ranges, self.num_cond_tokens, strict=True)
        ):
            here = max(min(stop, clean) - start, 0)
            timestep_lens += [here, stop - start - here] if clean else [stop - start]
            owners += [sample, sample] if clean else [sample]
        return PackedMeta(
            positions=positions[layout.token_index.clamp(min=0)],
            segment_ids=layout.segment_ids,
            chunk_lens=layout.plan.chunk_lens,
            local_seq_lens=layout.local_seq_lens,
            text_lens=self.text_lens,
            timestep_lens=tuple(timestep_lens),
            timestep_samples=tuple(owners),
            dropout_keys=self.dropout_keys,
        )


class PackingCollator:
    """Turns the samples of one bin into a `PackedBatch`.

    Args:
        shape: the DiT's channels, text and picture width and patch.
        flow: for `cfg_dropout` and `i2v_ratio`.
        seed: `train.seed`.
        null_text_embeds: embedding of the empty caption, [n, D].
        conditions: of the variant.
        drops: whether the model has dropout, which needs a key for each sample.
    """

    def __init__(
        self,
        shape: DiTShape,
        flow: FlowConfig,
        seed: int,
        null_text_embeds: Tensor,
        conditions: Sequence[str] = ("text",),
        drops: bool = False,
    ) -> None:
        self.shape = shape
        self.flow = flow
        self.seed = seed
        self.conditions = conditions
        self.drops = drops
        self.null_text_embeds = null_text_embeds
        self._check_text("the empty caption", null_text_embeds)

    def __call__(self, samples: Sequence[Sample], repeat_indices: Sequence[int], epoch: int) -> PackedBatch:
        """Pack `samples` end to end in the order given.

        Args:
            samples: of one bin; none gives a batch of one zero token with weight 0, so that a rank with an
                empty bin runs as many forwards as the others.
            repeat_indices: which visit within the epoch each sample is.
            epoch: pass over the data.

        Raises:
            DataError: a sample's latents or text do not fit the model.
        """
        if not samples:
            return self._padding(epoch)
        keys = tuple(
            SampleKey(sample.sample_id, repeat_index, epoch)
            for sample, repeat_index in zip(samples, repeat_indices, strict=True)
        )
        for sample in samples:
            self._check(sample)
        tokens = [patchify(sample.latents, self.shape.patch_size).to(torch.float32) for sample in samples]
        texts = [self._text_of(sample, key) for sample, key in zip(samples, keys, strict=True)]
        grids = [grid_size(tuple(sample.latents.shape[1:]), self.shape.patch_size) for sample in samples]
        pictures = [sample.image_embeds for sample in samples if sample.image_embeds is not None]
        return PackedBatch(
            tokens=torch.cat(tokens),
            cu_seqlens=_cu_seqlens([len(rows) for rows in tokens]),
            grid_sizes=torch.tensor(grids, dtype=torch.int64),
            text_embeds=torch.cat(texts),
            cu_seqlens_text=_cu_seqlens([len(rows) for rows in texts]),
            keys=keys,
            weights=torch.ones(len(samples), dtype=torch.float32),
            num_cond_tokens=tuple(
                self.num_cond_tokens(key, grid) for key, grid in zip(keys, grids, strict=True)
            ),
            condition_tokens=self._conditions_of(samples),
            image_embeds=torch.stack(pictures) if pictures else None,
            dropout_keys=self._dropout_keys(keys),
        )

    def num_cond_tokens(self, key: SampleKey, grid: tuple[int, int, int]) -> int:
        """Tokens at the start of a sample that this visit gives clean: those of its first frame, or none.

        Args:
            key: the visit.
            grid: tokens along (frame, row, column).
        """
        if "first_frame" not in self.conditions or grid[0] == 1:  # a picture has nothing left to predict
            return 0
        chosen = rng(self.seed, key, "first_frame").random() < self.flow.i2v_ratio
        return grid[1] * grid[2] if chosen else 0

    def _dropout_keys(self, keys: Sequence[SampleKey]) -> tuple[int, ...]:
        if not self.drops:
            return ()
        drawn = (rng(self.seed, key, "dropout").bit_generator.random_raw() for key in keys)
        return tuple(int(bits) - 2**63 for bits in drawn)

    def _conditions_of(self, samples: Sequence[Sample]) -> Tensor | None:
        if "image" not in self.conditions:
            return None
        last, patch = "last_image" in self.conditions, self.shape.patch_size
        found = [sample.image_latents for sample in samples]
        return torch.cat([condition_tokens(latents, last, patch) for latents in found if latents is not None])

    def _text_of(self, sample: Sample, key: SampleKey) -> Tensor:
        """The caption, or for a `cfg_dropout` share of visits the empty one."""
        if rng(self.seed, key, "cfg_dropout").random() < self.flow.cfg_dropout:
            return self.null_text_embeds.to(sample.text_embeds.dtype)
        return sample.text_embeds

    def _padding(self, epoch: int) -> PackedBatch:
        shape, volume, key = self.shape, math.prod(self.shape.patch_size), SampleKey(PADDING_ID, 0, epoch)
        conditions = torch.zeros(1, shape.condition_channels * volume)
        return PackedBatch(
            tokens=torch.zeros(1, shape.out_channels * volume),
            cu_seqlens=_cu_seqlens([1]),
            grid_sizes=torch.ones(1, 3, dtype=torch.int64),
            text_embeds=self.null_text_embeds,
            cu_seqlens_text=_cu_seqlens([len(self.null_text_embeds)]),
            keys=(key,),
            weights=torch.zeros(1),
            num_cond_tokens=(0,),
            condition_tokens=conditions if shape.condition_channels else None,
            image_embeds=torch.zeros(1, shape.image_len, shape.image_dim) if shape.image_dim else None,
            dropout_keys=self._dropout_keys([key]),
        )

    def _check(self, sample: Sample) -> None:
        shape = tuple(sample.latents.shape)
        if len(shape) != 4 or shape[0] != self.shape.out_channels:
            raise DataError(
                f"sample={sample.sample_id} has latents {list(shape)}, but the model takes "
                f"[{self.shape.out_channels}, frames, height, width]; preprocess with this model's VAE."
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
        pictures = (self.shape.image_len, self.shape.image_dim) if self.shape.image_dim else None
        for name, value, wanted in (
            ("image_latents", sample.image_latents, shape if "image" in self.conditions else None),
            ("image_embeds", sample.image_embeds, pictures),
        ):
            found = None if value is None else tuple(value.shape)
            if found != wanted:
                raise DataError(
                    f"sample={sample.sample_id} has {name} {_shape_text(found)}, but the model takes {_shape_text(wanted)}; "
                    "preprocess with this model."
                )

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


def _moved(x: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if x is None else x.to(device, non_blocking=True)


def _shape_text(shape: tuple[int | None, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _cu_seqlens(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
