"""Collate samples into a packed batch, and slice the batch for each rank.

Letters: T tokens of a bin, L tokens of a rank, S samples of a bin, E entries of its loss, P channels of a token, P' conditioning
channels of a token, D width of the text encoder, I CLIP tokens of a sample's images, E' width of CLIP, C latent channels, (f, h,
w) latent frames, rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.attention.units import UnitRule
from wands.conditions.arrays import ClipSize
from wands.conditions.condition import (
    Channels,
    Condition,
    CrossAttention,
    Entry,
    LossWeights,
    SecondClip,
    TextTokens,
    check_entry,
)
from wands.conditions.published import Text, published_conditions, specs_of
from wands.config.recipe import FlowConfig
from wands.errors import DataError
from wands.flow.rng import SampleKey, rng
from wands.patches import grid_size, latent_size, patchify
from wands.variants import DiTShape

NO_TOKENS = 1e-30
"""Takes the place of a sum of token weights that is 0, so that a loss divided by it is 0 and not NaN."""


@dataclass(frozen=True)
class Sample:
    """One encoded clip with its caption, from a latent cache or from mock data.

    Attributes:
        arrays: "latents", normalized, and the arrays of the conditions, without optional arrays that the sample lacks. bf16
            arrays may also be fp32.
        loss_weight: factor of the sample's loss. 0 for the placeholder sample of an empty bin.
        caption_dropout: probability of replacing the caption by the empty caption. None means `flow.cfg_dropout`.
    """

    sample_id: str
    arrays: Mapping[str, Tensor]
    loss_weight: float = 1.0
    caption_dropout: float | None = None

    @property
    def latents(self) -> Tensor:
        """Normalized latents [C, f, h, w]."""
        return self.arrays["latents"]

    @property
    def text_embeds(self) -> Tensor:
        """Embedding of the caption [n, D], without padding."""
        return self.arrays["text_embeds"]


@dataclass(frozen=True, kw_only=True)
class BinSamples:
    """Data of one bin that is equal on all ranks of a context-parallel group; base of `PackedBatch` and `RankSlice`.

    Attributes:
        text_embeds: [sum of text lengths, D], without padding; the embedding of the empty caption after caption dropout.
        keys: for each sample, its `SampleKey`, which seeds its random numbers, such as noise and sigma.
        weights: fp32 [S], factor of each sample's loss.
        num_cond_tokens: for each sample, number of tokens of the first frame, over all ranks, if the model gets it without noise
            (TI2V). Otherwise 0.
        image_embeds: [S, I, E'], CLIP hidden states of the conditioning frames. None for models without CLIP.
    """

    text_embeds: Tensor
    keys: tuple[SampleKey, ...]
    weights: Tensor
    num_cond_tokens: tuple[int, ...]
    image_embeds: Tensor | None = None


class LossEntry(NamedTuple):
    """Tokens whose errors are added up: a sample, or in causal training one of its chunks.

    Attributes:
        sample: index of the sample.
        chunk: number of the chunk; None for a sample without chunks.
        trained_len: sum of the token weights, on all ranks together; 1e-30 instead of 0.
    """

    sample: int
    chunk: int | None
    trained_len: float


@dataclass(frozen=True, kw_only=True)
class RankSlice(BinSamples):
    """Tokens of a packed batch that one rank processes, with the data that belongs to these tokens.

    Attributes:
        tokens: fp32 [L, P], clean tokens of this rank. Padding tokens are zero.
        token_weights: fp32 [L], weight of each token in the loss; 1 for samples without a mask.
        trained_lens: see `PackedBatch.trained_lens`.
        entries: parts of the bin whose errors are added up and logged.
        entry_weights: fp32 [E], `weights` of the sample of each entry.
        layout: indices of the batch's tokens that this rank holds.
        condition_channels: fp32 [L, P'], appended to the channels of the noisy tokens. None for models without them.
    """

    tokens: Tensor
    meta: PackedMeta
    token_weights: Tensor
    trained_lens: tuple[float, ...]
    entries: tuple[LossEntry, ...]
    entry_weights: Tensor
    layout: ContextLayout
    condition_channels: Tensor | None = None

    def model_inputs(self, noisy_tokens: Tensor, timesteps: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of `PackedWanTransformer.forward`.

        `noisy_tokens` is [L, P], without the conditioning channels; `timesteps` is fp32, one for each entry of
        `meta.timestep_lens`.
        """
        tokens = noisy_tokens
        if self.condition_channels is not None:
            tokens = torch.cat([noisy_tokens, self.condition_channels], dim=1)
        return {
            "tokens": tokens,
            "meta": self.meta,
            "timesteps": timesteps,
            "text_embeds": self.text_embeds,
            "image_embeds": self.image_embeds,
        }


@dataclass(frozen=True, kw_only=True)
class PackedBatch(BinSamples):
    """Samples of a bin, concatenated without padding.

    Attributes:
        tokens: fp32 [T, P], clean tokens.
        cu_seqlens: int32 [S+1], cumulative sequence lengths, from 0 to T.
        grid_sizes: int64 [S, 3], number of tokens along (frame, row, column).
        cu_seqlens_text: int32 [S+1], cumulative numbers of text tokens.
        token_weights: fp32 [T], weight of each token in the loss; 1 for samples without a mask.
        condition_channels: fp32 [T, P'], see `wands.patches.condition_channels`. None for models without them.
        second_tokens: fp32 [T, P], clean tokens of the samples' second clips. None without them.
        dropout_keys: 64 random bits per sample, from which dropout masks are drawn. Empty without dropout.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    grid_sizes: Tensor
    cu_seqlens_text: Tensor
    token_weights: Tensor
    condition_channels: Tensor | None = None
    second_tokens: Tensor | None = None
    dropout_keys: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for cu_seqlens, rows in ((self.cu_seqlens, self.tokens), (self.cu_seqlens_text, self.text_embeds)):
            lens = cu_seqlens.diff()
            assert cu_seqlens.dtype == torch.int32
            assert len(lens) == len(self.keys) == len(self.weights)
            assert int(cu_seqlens[0]) == 0
            assert bool((lens > 0).all())
            assert int(cu_seqlens[-1]) == len(rows)
        assert len(self.token_weights) == len(self.tokens)
        assert bool((self.grid_sizes.prod(dim=1) == self.cu_seqlens.diff()).all())
        pairs = zip(self.num_cond_tokens, self.seq_lens, strict=True)
        assert all(0 <= num_cond < length for num_cond, length in pairs), self.num_cond_tokens
        assert self.condition_channels is None or len(self.condition_channels) == len(self.tokens)
        assert self.image_embeds is None or len(self.image_embeds) == len(self.keys)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Number of video tokens of each sample."""
        return tuple(self.cu_seqlens.diff().tolist())

    @property
    def text_lens(self) -> tuple[int, ...]:
        """Number of text tokens of each sample, without padding."""
        return tuple(self.cu_seqlens_text.diff().tolist())

    @property
    def trained_lens(self) -> tuple[float, ...]:
        """Sum of the token weights of all tokens of each sample that have a loss; conditioning tokens have none.

        A sum of 0 is replaced by 1e-30, so that the sample's loss divided by it is 0 and not NaN.
        """
        pairs = zip(self.token_weights.double().split(self.seq_lens), self.num_cond_tokens, strict=True)
        return tuple(max(float(rows[num_cond:].sum()), NO_TOKENS) for rows, num_cond in pairs)

    def rank_slice(self, layout: ContextLayout) -> RankSlice:
        """Return the slice of the batch that one rank processes. `layout` must be made for the `seq_lens` of this batch."""
        assert layout.seq_lens == self.seq_lens
        is_padding = layout.token_index < 0
        index = layout.token_index.clamp(min=0)

        entries = self._entries(layout)

        def local(rows: Tensor) -> Tensor:
            return rows[index].masked_fill_(is_padding.unsqueeze(1), 0.0)

        tokens = local(self.tokens)
        units = [unit for own in layout.samples for unit in own]
        if self.second_tokens is not None:
            is_second = torch.tensor([unit.is_second for unit in units])[layout.unit_ids]
            tokens = torch.where(is_second.unsqueeze(1), local(self.second_tokens), tokens)
        return RankSlice(
            **{field.name: getattr(self, field.name) for field in fields(BinSamples)},
            tokens=tokens,
            meta=self._meta(layout),
            token_weights=self.token_weights[index],
            trained_lens=self.trained_lens,
            entries=entries,
            entry_weights=self.weights[[entry.sample for entry in entries]],
            layout=layout,
            condition_channels=None if self.condition_channels is None else local(self.condition_channels),
        )

    def _entries(self, layout: ContextLayout) -> tuple[LossEntry, ...]:
        trained_lens = self.trained_lens
        starts = self.cu_seqlens.tolist()
        entries = []
        for sample, _, unit in layout.loss_units(self.num_cond_tokens):
            if len(layout.samples[sample]) == 1:
                entries.append(LossEntry(sample, None, trained_lens[sample]))
                continue
            first = max(unit.start, self.num_cond_tokens[sample])
            rows = self.token_weights[starts[sample] + first : starts[sample] + unit.stop]
            entries.append(LossEntry(sample, unit.chunk, max(float(rows.double().sum()), NO_TOKENS)))
        return tuple(entries)

    def _meta(self, layout: ContextLayout) -> PackedMeta:
        # (frame, row, column) of each token, in the order of `patchify`
        positions = torch.cat([torch.cartesian_prod(*map(torch.arange, grid)) for grid in self.grid_sizes])
        parts = layout.timestep_parts(self.num_cond_tokens)
        return PackedMeta(
            positions=positions[layout.token_index.clamp(min=0)],
            segment_ids=layout.segment_ids,
            chunk_lens=layout.plan.chunk_lens,
            local_seq_lens=layout.local_seq_lens,
            text_lens=self.text_lens,
            timestep_lens=tuple(part.num_tokens for part in parts),
            timestep_samples=tuple(part.sample for part in parts),
            dropout_keys=self.dropout_keys,
            visible=layout.plan.visible,
        )


@dataclass(eq=False)
class PackingCollator:
    """Callable that concatenates the samples of a bin into a `PackedBatch`.

    Attributes:
        null_text_embeds: [text tokens, D], embedding of the empty caption.
        conditions: conditions of the model (`wands.conditions.published.conditions_of`). None for a text-to-video model.
        has_dropout: whether to draw a dropout key for each sample.
        drops_captions: whether to replace captions and other conditions at random by absent ones. False in an evaluation.
        unit_rule: function from a sample's token grid to its units. None: every sample is one unit.
    """

    shape: DiTShape
    flow: FlowConfig
    seed: int
    null_text_embeds: Tensor
    conditions: Sequence[Condition] | None = None
    has_dropout: bool = False
    drops_captions: bool = True
    unit_rule: UnitRule | None = None

    def __post_init__(self) -> None:
        if self.conditions is None:
            self.conditions = published_conditions(self.shape)
        self._conditions = [self._with_null(condition) for condition in self.conditions]
        self._specs = specs_of(self.shape, self._conditions)
        patch_size = self.shape.patch_size
        one_token = ClipSize(patch_size, patch_size)
        arrays = {"latents": self._specs[0].zeros(one_token).float()}
        for condition in self._conditions:
            arrays |= condition.absent(one_token)
        # the zero token of an empty bin
        self._padding = Sample("<padding>", arrays, loss_weight=0.0)
        self._check(self._padding, "the empty caption")

    def _with_null(self, condition: Condition) -> Condition:
        """Return the condition, in a `Text` with the embedding of the empty caption."""
        return (
            replace(condition, null_embeds=self.null_text_embeds)
            if isinstance(condition, Text)
            else condition
        )

    def __call__(self, samples: Sequence[Sample], repeat_indices: Sequence[int], epoch: int) -> PackedBatch:
        """Concatenate `samples` in the given order. Without samples, the batch is one zero token of weight 0, so that all ranks
        run the same number of forward passes.

        `repeat_indices` are the repeats of the samples; each repeat gets other noise.

        Raises:
            DataError: if an array of a sample does not fit the model.
        """
        if not samples:
            samples = [self._padding]
            repeat_indices = [0]
        pairs = zip(samples, repeat_indices, strict=True)
        keys = tuple(SampleKey(sample.sample_id, repeat_index, epoch) for sample, repeat_index in pairs)
        for sample in samples:
            self._check(sample, f"sample={sample.sample_id}")
        patch_size = self.shape.patch_size
        tokens = [patchify(sample.latents, patch_size).to(torch.float32) for sample in samples]
        grids = [grid_size(latent_size(sample.latents), patch_size) for sample in samples]
        entries = [self._enter(sample, key) for sample, key in zip(samples, keys, strict=True)]
        texts = [
            torch.cat([entry.tokens for entry in each if isinstance(entry, TextTokens)]) for each in entries
        ]
        channels = [
            _joined([entry.rows for entry in each if isinstance(entry, Channels)], 1) for each in entries
        ]
        images = [
            _joined([entry.tokens for entry in each if isinstance(entry, CrossAttention)], 0)
            for each in entries
        ]
        weights = [
            next((entry.weights for entry in each if isinstance(entry, LossWeights)), torch.ones(len(rows)))
            for each, rows in zip(entries, tokens, strict=True)
        ]
        words = (rng(self.seed, key, "dropout").bit_generator.random_raw() for key in keys)
        return PackedBatch(
            tokens=torch.cat(tokens),
            cu_seqlens=_cu_seqlens([len(rows) for rows in tokens]),
            grid_sizes=torch.tensor(grids, dtype=torch.int64),
            text_embeds=torch.cat(texts),
            cu_seqlens_text=_cu_seqlens([len(rows) for rows in texts]),
            keys=keys,
            weights=torch.tensor([sample.loss_weight for sample in samples]),
            token_weights=torch.cat(weights),
            num_cond_tokens=tuple(map(self.num_cond_tokens, keys, grids)),
            condition_channels=_joined([rows for rows in channels if rows is not None], 0),
            second_tokens=_joined(
                [entry.tokens for each in entries for entry in each if isinstance(entry, SecondClip)], 0
            ),
            image_embeds=torch.stack([rows for rows in images if rows is not None])
            if images[0] is not None
            else None,
            dropout_keys=tuple(int(word) - 2**63 for word in words) if self.has_dropout else (),
        )

    def num_cond_tokens(self, key: SampleKey, grid: tuple[int, int, int]) -> int:
        """Return the number of tokens of a sample that the model gets without noise.

        With the condition "first_frame", these are the tokens of a video's first frame with probability `flow.i2v_ratio`, else 0.
        The choice depends only on the seed and `key`. Images and other models have none.
        """
        draw = partial(rng, self.seed, key)
        return max(condition.num_clean_tokens(draw, grid, self.flow) for condition in self._conditions)

    def _enter(self, sample: Sample, key: SampleKey) -> list[Entry]:
        """Return what the model and the loss get of a sample's conditions. Dropout depends only on the seed and `key`."""
        size = ClipSize(latent_size(sample.latents), self.shape.patch_size)
        entries = []
        for condition in self._conditions:
            own = {
                spec.name: sample.arrays[spec.name] for spec in condition.arrays if spec.name in sample.arrays
            }
            rate = condition.dropout_rate(self.flow, sample.caption_dropout)
            if (
                self.drops_captions
                and rate
                and rng(self.seed, key, condition.dropout_purpose).random() < rate
            ):
                absent = condition.absent(size)
                own = {
                    name: array.to(own[name].dtype) if name in own else array
                    for name, array in absent.items()
                }
            if (entry := condition.enter(own, size)) is not None:
                check_entry(condition, entry, size)
                entries.append(entry)
        return entries

    def _check(self, sample: Sample, label: str) -> None:
        """Raise DataError if the shape of an array of the sample does not fit the model. The message starts with `label`."""
        dit = self.shape
        latents = tuple(sample.latents.shape)
        sizes = zip(latents[1:], dit.patch_size, strict=False)
        fits_model = len(latents) == 4 and latents[0] == dit.out_channels
        problem = None
        if not fits_model or any(size < 1 or size % patch for size, patch in sizes):
            expected = (
                f"{dit.out_channels} channels and (frames, height, width) divisible by {dit.patch_size}"
            )
            problem = "latents", _shape(sample.latents), expected
        else:
            problem = self._find_misfit(sample)
        if problem is not None:
            name, found, expected = problem
            raise DataError(
                f"{label} has {name} of shape {found}, but the model takes {expected}. "
                "Run wands preprocess again with --model set to this model."
            )

    def _find_misfit(self, sample: Sample) -> tuple[str, str, str] | None:
        """Return (name, shape, expected shape) of the first array that does not fit the latents and the model."""
        size = ClipSize(latent_size(sample.latents), self.shape.patch_size)
        for spec in self._specs:
            array = sample.arrays.get(spec.name)
            if not (spec.optional if array is None else spec.fits(array.shape, size)):
                return spec.name, _shape(array), spec.describe(size)
        unknown = sample.arrays.keys() - {spec.name for spec in self._specs}
        return next(((name, _shape(sample.arrays[name]), "none") for name in sorted(unknown)), None)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Concatenate tensors. Return a single tensor unchanged, and None for no tensor."""
    return (parts[0] if len(parts) == 1 else torch.cat([*parts], dim)) if parts else None


def _shape(array: Tensor | None) -> str:
    return "none" if array is None else str(list(array.shape))


def _cu_seqlens(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
