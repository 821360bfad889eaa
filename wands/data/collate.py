"""Collate samples into a packed batch, and slice the batch for each rank.

A bin holds the clips of one forward pass.

Letters: T tokens of a bin, L tokens of a rank, S samples of a bin, P channels of a token, P' conditioning channels of a
token, D width of the text encoder, I CLIP tokens of a sample's images, E width of CLIP, C latent channels, (f, h, w)
latent frames, rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.config.recipe import FlowConfig
from wands.data.patchify import condition_channels, grid_size, patchify
from wands.errors import DataError
from wands.flow.rng import SampleKey, rng
from wands.variants import TEXT_LEN, DiTShape


@dataclass(frozen=True)
class Sample:
    """One encoded clip with its caption, from a latent cache or from mock data.

    Attributes:
        sample_id: stable and unique name of the clip.
        latents: bf16 or fp32 [C, f, h, w] (latent channels, frames, rows, columns), normalized.
        text_embeds: [n, D] (text tokens, width of the text encoder) with n <= 512, without padding.
        image_latents: bf16 or fp32 [C, f, h, w], normalized latents of a video in which all frames except the conditioning
            frames are gray. None for models without conditioning frames.
        image_embeds: [I, E] (CLIP tokens, width of CLIP), CLIP hidden states of the conditioning frames. None for
            models without CLIP.
        token_weights: bf16, weight of each token in the loss, from 0 to 1. The shape is the number of tokens along (frame, row,
            column). None for a sample without a loss mask.
        loss_weight: factor of the sample's loss. 0 for the placeholder sample of a forward pass that has no other sample.
        caption_dropout: probability of replacing the caption by the empty caption. None means `flow.cfg_dropout`.
    """

    sample_id: str
    latents: Tensor
    text_embeds: Tensor
    image_latents: Tensor | None = None
    image_embeds: Tensor | None = None
    token_weights: Tensor | None = None
    loss_weight: float = 1.0
    caption_dropout: float | None = None

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Maps the name of each array of the sample to the array, in the order in which a cache stores them."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class BinSamples:
    """Data of one bin (the samples of one forward pass) that is equal on all ranks of a context-parallel group.

    This is the base class of `PackedBatch` (the whole bin) and `RankSlice` (the part of the bin that one rank processes).

    Letters: S samples of the bin, D width of the text encoder, I CLIP tokens of a sample, E width of CLIP.

    Attributes:
        text_embeds: [sum of text lengths, D], without padding. For a sample with caption dropout, it contains the embedding of
            the empty caption. Every rank of a context-parallel group attends to all text.
        keys: for each sample, its `SampleKey`: sample id, epoch, and number of the sample's use in this epoch. The key seeds
            the random numbers of the sample, such as noise and sigma (noise level).
        weights: fp32 [S], factor of each sample's loss (`Sample.loss_weight`). 0 for the placeholder sample of an empty bin.
        num_cond_tokens: for each sample, number of tokens of the first frame if the model gets this frame without noise
            (TI2V). Otherwise 0. The tokens are counted over all ranks.
        image_embeds: [S, I, E], CLIP hidden states of the conditioning frames. None for models without CLIP.
    """

    text_embeds: Tensor
    keys: tuple[SampleKey, ...]
    weights: Tensor
    num_cond_tokens: tuple[int, ...]
    image_embeds: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RankSlice(BinSamples):
    """Tokens of a packed batch that one rank processes, with the data that belongs to these tokens.

    Letters: L tokens of the rank, P channels of a token, P' conditioning channels of a token.

    Attributes:
        tokens: fp32 [L, P], clean tokens of this rank. Padding tokens are zero.
        meta: position and sample number of each token, and lengths of the samples.
        token_weights: fp32 [L], weight of each token in the loss; 1 for samples without a mask.
        trained_lens: for each sample, sum of the token weights of all its tokens that have a loss, over all ranks.
            Conditioning tokens have no loss. Without a mask, the sum is the number of tokens that have a loss.
        layout: indices of the batch's tokens that this rank holds.
        condition_channels: fp32 [L, P'], conditioning channels that are appended to the channels of the noisy tokens. None
            for models without conditioning channels.
    """

    tokens: Tensor
    meta: PackedMeta
    token_weights: Tensor
    trained_lens: tuple[float, ...]
    layout: ContextLayout
    condition_channels: Tensor | None = None

    def model_inputs(self, noisy_tokens: Tensor, timesteps: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of `PackedWanTransformer.forward`: the noisy tokens, and the inputs of all conditions.

        Args:
            noisy_tokens: [L, P]. The conditioning channels, which get no noise, are appended to them.
            timesteps: fp32 [M], one for each entry of `meta.timestep_lens`.
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
    """Samples of one forward pass (a bin), concatenated without padding.

    Letters: T tokens of the bin, S samples, P channels of a token, P' conditioning channels of a token.

    Attributes:
        tokens: fp32 [T, P], clean tokens.
        cu_seqlens: int32 [S+1], cumulative sequence lengths, from 0 to T.
        grid_sizes: int64 [S, 3], number of tokens along (frame, row, column).
        cu_seqlens_text: int32 [S+1], cumulative numbers of text tokens of the samples.
        token_weights: fp32 [T], weight of each token in the loss; 1 for samples without a mask.
        condition_channels: fp32 [T, P'], see `wands.data.patchify.condition_channels`. None for models without
            conditioning channels.
        dropout_keys: 64 random bits per sample, from which dropout masks are drawn. Empty without dropout.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    grid_sizes: Tensor
    cu_seqlens_text: Tensor
    token_weights: Tensor
    condition_channels: Tensor | None = None
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
        """For each sample, sum of the token weights of all tokens that have a loss. Conditioning tokens have no loss.

        A sum of 0 is replaced by 1e-30. The weighted loss of the sample, divided by 1e-30, is then 0 and not NaN.
        """
        pairs = zip(self.token_weights.double().split(self.seq_lens), self.num_cond_tokens, strict=True)
        return tuple(max(float(rows[num_cond:].sum()), 1e-30) for rows, num_cond in pairs)

    def rank_slice(self, layout: ContextLayout) -> RankSlice:
        """Return the slice of the batch that one rank processes.

        Args:
            layout: indices of the batch's tokens that the rank holds. The layout must be made for the `seq_lens` of this
                batch.
        """
        assert layout.seq_lens == self.seq_lens
        is_padding = layout.token_index < 0
        index = layout.token_index.clamp(min=0)

        def local(rows: Tensor) -> Tensor:
            return rows[index].masked_fill_(is_padding.unsqueeze(1), 0.0)

        return RankSlice(
            **{field.name: getattr(self, field.name) for field in fields(BinSamples)},
            tokens=local(self.tokens),
            meta=self._meta(layout),
            token_weights=self.token_weights[index],
            trained_lens=self.trained_lens,
            layout=layout,
            condition_channels=None if self.condition_channels is None else local(self.condition_channels),
        )

    def _meta(self, layout: ContextLayout) -> PackedMeta:
        # (frame, row, column) of each token, in the order of `patchify`
        positions = torch.cat([torch.cartesian_prod(*map(torch.arange, grid)) for grid in self.grid_sizes])
        timestep_lens: list[int] = []
        timestep_samples: list[int] = []
        pairs = zip(layout.token_ranges, self.num_cond_tokens, strict=True)
        for sample, ((start, stop), num_cond) in enumerate(pairs):
            local_cond = max(min(stop, num_cond) - start, 0)
            timestep_lens += [local_cond, stop - start - local_cond] if num_cond else [stop - start]
            timestep_samples += [sample, sample] if num_cond else [sample]
        return PackedMeta(
            positions=positions[layout.token_index.clamp(min=0)],
            segment_ids=layout.segment_ids,
            chunk_lens=layout.plan.chunk_lens,
            local_seq_lens=layout.local_seq_lens,
            text_lens=self.text_lens,
            timestep_lens=tuple(timestep_lens),
            timestep_samples=tuple(timestep_samples),
            dropout_keys=self.dropout_keys,
        )


@dataclass(eq=False)
class PackingCollator:
    """Callable that concatenates the samples of a bin (one forward pass) into a `PackedBatch`.

    Attributes:
        shape: sizes of the DiT. The collator checks that every sample fits them.
        flow: `flow` section of the recipe. The collator uses its keys `cfg_dropout` and `i2v_ratio`.
        drops_captions: whether to replace captions at random by the empty caption. False in an evaluation.
        seed: `train.seed`.
        null_text_embeds: [text tokens, width of the text encoder], embedding of the empty caption.
        conditions: conditions (inputs other than noise) of the model variant, such as "text", "image" or "clip".
        has_dropout: whether to draw a dropout key for each sample: 64 bits that determine the sample's dropout masks.
    """

    shape: DiTShape
    flow: FlowConfig
    seed: int
    null_text_embeds: Tensor
    conditions: Sequence[str] = ("text",)
    has_dropout: bool = False
    drops_captions: bool = True

    def __post_init__(self) -> None:
        latents, dit = torch.zeros(self.shape.out_channels, *self.shape.patch_size), self.shape
        image_latents = latents if "image" in self.conditions else None
        image_embeds = torch.zeros(dit.image_len, dit.image_dim) if dit.image_dim else None
        arrays = (latents, self.null_text_embeds, image_latents, image_embeds)
        # the zero token of an empty bin
        self._padding = Sample("<padding>", *arrays, loss_weight=0.0)
        self._check(self._padding, "the empty caption")

    def __call__(self, samples: Sequence[Sample], repeat_indices: Sequence[int], epoch: int) -> PackedBatch:
        """Concatenate `samples` into a packed batch, in the given order.

        Args:
            samples: samples of one bin (packed sequence). If the list is empty, the batch contains one sample of one zero token,
                with weight 0. So all ranks run the same number of forward passes.
            repeat_indices: for each sample, 0 for the first occurrence of its sample id in the data, 1 for the second, and so
                on. Occurrences of the same sample get different noise.
            epoch: number of the pass over the data.

        Raises:
            DataError: if the latents, text or images of a sample do not fit the model.
        """
        if not samples:
            samples, repeat_indices = [self._padding], [0]
        pairs = zip(samples, repeat_indices, strict=True)
        keys = tuple(SampleKey(sample.sample_id, repeat_index, epoch) for sample, repeat_index in pairs)
        for sample in samples:
            self._check(sample, f"sample={sample.sample_id}")
        has_last, patch_size = "last_image" in self.conditions, self.shape.patch_size
        tokens = [patchify(sample.latents, patch_size).to(torch.float32) for sample in samples]
        texts = [self._text_of(sample, key) for sample, key in zip(samples, keys, strict=True)]
        grids = [grid_size(tuple(sample.latents.shape[1:]), patch_size) for sample in samples]
        latents = (sample.image_latents for sample in samples if sample.image_latents is not None)
        channels = [condition_channels(frames, has_last, patch_size) for frames in latents]
        images = [sample.image_embeds for sample in samples if sample.image_embeds is not None]
        words = (rng(self.seed, key, "dropout").bit_generator.random_raw() for key in keys)
        return PackedBatch(
            tokens=torch.cat(tokens),
            cu_seqlens=_cu_seqlens([len(rows) for rows in tokens]),
            grid_sizes=torch.tensor(grids, dtype=torch.int64),
            text_embeds=torch.cat(texts),
            cu_seqlens_text=_cu_seqlens([len(rows) for rows in texts]),
            keys=keys,
            weights=torch.tensor([sample.loss_weight for sample in samples]),
            token_weights=torch.cat([*map(_token_weights, samples, grids)]),
            num_cond_tokens=tuple(map(self.num_cond_tokens, keys, grids)),
            condition_channels=torch.cat(channels) if channels else None,
            image_embeds=torch.stack(images) if images else None,
            dropout_keys=tuple(int(word) - 2**63 for word in words) if self.has_dropout else (),
        )

    def num_cond_tokens(self, key: SampleKey, grid: tuple[int, int, int]) -> int:
        """Return the number of conditioning tokens of a sample: tokens that the model gets without noise.

        For a model with the condition "first_frame", a video's first frame gets no noise with probability `flow.i2v_ratio`. The
        result is then the number of tokens of this frame, otherwise 0. For images, and for other models, the result is 0.

        Args:
            key: key of the sample. The random choice depends only on the seed and on this key.
            grid: number of tokens along (frame, row, column).
        """
        if "first_frame" not in self.conditions or grid[0] == 1:  # an image would have no trained token
            return 0
        is_conditioned = rng(self.seed, key, "first_frame").random() < self.flow.i2v_ratio
        return grid[1] * grid[2] if is_conditioned else 0

    def _text_of(self, sample: Sample, key: SampleKey) -> Tensor:
        """Return the embedding of a sample's caption or, with the probability of caption dropout, of the empty caption.

        The random choice depends only on the seed and on `key`, which names one use of the sample in training.
        """
        rate = self.flow.cfg_dropout if sample.caption_dropout is None else sample.caption_dropout
        if self.drops_captions and rng(self.seed, key, "cfg_dropout").random() < rate:
            return self.null_text_embeds.to(sample.text_embeds.dtype)
        return sample.text_embeds

    def _check(self, sample: Sample, label: str) -> None:
        """Raise DataError if the shape of an array of the sample does not fit the model. The message starts with `label`."""
        dit, latents, text = self.shape, tuple(sample.latents.shape), tuple(sample.text_embeds.shape)
        sizes = zip(latents[1:], dit.patch_size, strict=False)
        fits_model = len(latents) == 4 and latents[0] == dit.out_channels
        fits_patches = fits_model and all(size and size % patch == 0 for size, patch in sizes)
        fits_text = len(text) == 2 and 0 < text[0] <= TEXT_LEN and text[1] == dit.text_dim
        image_latents = _shape(sample.latents) if "image" in self.conditions else "none"
        image_embeds = str([dit.image_len, dit.image_dim]) if dit.image_dim else "none"
        grid = str(list(grid_size(latents[1:], dit.patch_size))) if fits_patches else ""
        patches = f"{dit.out_channels} channels and (frames, height, width) divisible by {dit.patch_size}"
        for name, fits, expected in (
            ("latents", fits_patches, patches),
            ("text_embeds", fits_text, f"[1 to {TEXT_LEN}, {dit.text_dim}]"),
            ("image_latents", _shape(sample.image_latents) == image_latents, image_latents),
            ("image_embeds", _shape(sample.image_embeds) == image_embeds, image_embeds),
            ("token_weights", _shape(sample.token_weights) in ("none", grid), grid),
        ):
            if not fits:
                raise DataError(
                    f"{label} has {name} of shape {_shape(getattr(sample, name))}, but the model takes {expected}. "
                    "Run wands preprocess again with --model set to this model."
                )


def _shape(array: Tensor | None) -> str:
    return "none" if array is None else str(list(array.shape))


def _token_weights(sample: Sample, grid: tuple[int, int, int]) -> Tensor:
    weights = torch.ones(grid) if sample.token_weights is None else sample.token_weights
    return weights.flatten().to(torch.float32)


def _cu_seqlens(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
