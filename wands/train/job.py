"""Everything about a run that can be known, and refused, before the process group forms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from wands.config import Recipe
from wands.data.cache import LatentCache
from wands.data.collate import PackingCollator, Sample
from wands.data.mock import MockDataset
from wands.data.packing import assign_bins
from wands.data.sampler import PlanSampler, check_enough_samples
from wands.errors import CacheError, ConfigError
from wands.model.loading import check_weights, load_config
from wands.parallel.mesh import Degrees, RankGrid, check_world, choose_degrees
from wands.train.ds_config import build_ds_config
from wands.variants import DiTShape, Variant, variant_of


class Dataset(Protocol):
    """What the loop asks of a latent cache and of mock data alike."""

    keys: list[str]
    null_text_embeds: torch.Tensor

    def num_tokens(self, patch_size: tuple[int, int, int]) -> np.ndarray:
        """Video tokens of every sample, int64 [N]."""

    def latent_shape(self, index: int) -> tuple[int, int, int]:
        """Latent (frames, height, width) of a sample, without reading it."""

    def read(self, index: int, frames: tuple[int, int] | None = None) -> Sample:
        """One sample; of its latents only these frames, when they are given."""


@dataclass(frozen=True)
class Job:
    """A checked training run.

    Attributes:
        recipe: what was asked for.
        ds_config: complete config for `deepspeed.initialize`, learning rate not yet scaled.
        transformer_config: diffusers config of the DiT.
        shape: its numbers.
        variant: its row.
        data: cache or mock data.
        sampler: the plan of every optimizer step.
        collator: samples to packed batches.
        world_size: all ranks.
        degrees: of context parallelism.
    """

    recipe: Recipe
    ds_config: dict[str, Any]
    transformer_config: dict[str, Any]
    shape: DiTShape
    variant: Variant
    data: Dataset
    sampler: PlanSampler
    collator: PackingCollator
    world_size: int
    degrees: Degrees

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the DeepSpeed config."""
        return int(self.ds_config["zero_optimization"].get("stage", 0))

    @property
    def dp_size(self) -> int:
        """Groups of ranks that hold different bins."""
        return self.grid(0).dp_size

    def grid(self, rank: int) -> RankGrid:
        """Where a rank stands."""
        return RankGrid(self.world_size, rank, self.degrees.ulysses, self.degrees.ring)

    @property
    def output_dir(self) -> Path:
        """The run folder."""
        return Path(self.recipe.output_dir)

    @cached_property
    def seq_lens(self) -> np.ndarray:
        """Video tokens of every sample."""
        return self.data.num_tokens(self.shape.patch_size)

    def data_fingerprint(self) -> str:
        """Changes when a sample, its length or the order changes: the position in the data depends on all three."""
        digest = hashlib.sha256()
        for key, length in zip(self.data.keys, self.seq_lens.tolist(), strict=True):
            digest.update(f"{key}\0{length}\n".encode())
        return digest.hexdigest()[:16]

    def step_flops(self, bins: Sequence[Sequence[int]]) -> int:
        """Matmul FLOPs of one optimizer step: forward once, backward twice that."""
        lens = self.seq_lens
        return 3 * sum(self.shape.forward_flops([int(lens[i]) for i in one]) for one in bins)

    def imbalance(self, bins: Sequence[tuple[int, ...]]) -> float:
        """Cost of the slowest rank over the mean, summed over the micro steps of one optimizer step."""
        slowest = mean = 0.0
        for ranks in assign_bins(bins, self.dp_size, self.sampler.bin_cost):
            costs = [self.sampler.bin_cost(one) for one in ranks]
            slowest += max(costs)
            mean += sum(costs) / len(costs)
        return slowest / mean


def prepare_job(
    recipe: Recipe,
    ds_user: Mapping[str, Any],
    *,
    world_size: int,
    device_type: str,
    names: tuple[str, str],
    encoders: Callable[[str], Mapping[str, Any]],
    ranks_per_node: int | None = None,
) -> Job:
    """Check a run and work out its plan.

    Args:
        recipe: the resolved recipe.
        ds_user: the user's DeepSpeed JSON.
        world_size: processes that the launcher started.
        device_type: "cuda" or "cpu".
        names: what to call the JSON and the recipe in errors.
        encoders: model path -> fingerprint of its VAE and text encoder, to hold a cache against.
        ranks_per_node: processes on each node; None is one node.

    Raises:
        ConfigError, CacheError, DataError: the run cannot be; each in a sentence with its cure.
    """
    check_world(recipe.parallel, world_size)
    dp_size = world_size // recipe.parallel.group_size
    ds_config = build_ds_config(ds_user, recipe, world_size=world_size, device_type=device_type, names=names)
    if recipe.train.bins_per_step % dp_size:
        raise ConfigError(
            f"train.bins_per_step={recipe.train.bins_per_step} must be a multiple of dp_size={dp_size} "
            f"({world_size} processes); use {dp_size} or a multiple of it."
        )
    if not recipe.model.path:
        raise ConfigError(
            "model.path is not set; give a diffusers pipeline folder or a Hub id, for example --set model.path=DIR."
        )
    config = load_config(recipe.model.path)
    try:
        variant = variant_of(config)
    except ValueError as error:
        raise ConfigError(
            f"model.path={recipe.model.path}: {error}; this version trains Wan 2.1 T2V."
        ) from None
    shape = DiTShape.from_config(config)
    degrees = choose_degrees(
        recipe.parallel,
        num_heads=shape.num_heads,
        ranks_per_node=ranks_per_node or world_size,
        model=variant.name,
    )
    data = _open_data(recipe, shape, variant, encoders)
    if recipe.model.init == "pretrained":
        check_weights(recipe.model.path)
    check_enough_samples(len(data.keys), dp_size)
    cost = (float(shape.linear_flops_per_token()), float(shape.attention_flops_per_squared_token()))
    sampler = PlanSampler(
        data.num_tokens(shape.patch_size),
        data.keys,
        max_tokens=recipe.packing.max_tokens,
        bins_per_step=recipe.train.bins_per_step,
        seed=recipe.train.seed,
        cost=cost,
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        level_bins=recipe.packing.level_bins,
    )
    collator = PackingCollator(shape, recipe.flow, recipe.train.seed, data.null_text_embeds)
    return Job(recipe, ds_config, config, shape, variant, data, sampler, collator, world_size, degrees)


def _open_data(
    recipe: Recipe, shape: DiTShape, variant: Variant, encoders: Callable[[str], Mapping[str, Any]]
) -> Dataset:
    if recipe.data.mock is not None:
        return MockDataset(recipe.data.mock, shape, recipe.train.seed)
    if recipe.data.cache is None:
        raise ConfigError(
            "data.cache is not set; give a folder written by wands preprocess, for example --set data.cache=DIR."
        )
    cache = LatentCache(recipe.data.cache, verify=recipe.data.verify)
    if not cache.keys:
        raise CacheError(
            f"data.cache={recipe.data.cache} holds no sample; run wands preprocess on a folder with clips."
        )
    cache.check_fits(variant, encoders(recipe.model.path))
    return cache


Report = Callable[[str], None]
"""How the loop speaks: called on rank 0 with one line or block."""
