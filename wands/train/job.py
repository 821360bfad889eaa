"""Everything about a run that can be known, and refused, before the process group forms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wands.config import Recipe
from wands.data.collate import PackingCollator
from wands.data.packing import assign_bins
from wands.data.sampler import PlanSampler, check_enough_samples
from wands.data.sources import Dataset, Sources, open_data
from wands.errors import ConfigError
from wands.model.loading import check_weights, load_config, load_index
from wands.parallel.mesh import Degrees, RankGrid, check_world, choose_degrees
from wands.train.ds_config import build_ds_config
from wands.variants import DiTShape, Variant, variant_of


@dataclass(frozen=True)
class Job:
    """A checked training run.

    Attributes:
        recipe: what was asked for.
        ds_config: complete config for `deepspeed.initialize`, learning rate not yet scaled.
        transformer_config: diffusers config of the DiT.
        shape: its numbers.
        variant: its row.
        data: what the recipe names.
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
        """Changes when a sample, its length, the order or the visits change: the position in the data depends on all of them."""
        rows = zip(self.data.keys, self.seq_lens.tolist(), strict=True)
        text = "".join([f"{key}\0{length}\n" for key, length in rows])
        if isinstance(self.data, Sources):
            text += repr([str(repeat) for repeat in self.data.visits.repeats])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

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
        variant = variant_of(config, load_index(recipe.model.path))
    except ValueError as error:
        raise ConfigError(
            f"model.path={recipe.model.path}: {error}; give a pipeline of Wan 2.1 or 2.2."
        ) from None
    shape = DiTShape.from_config(config)
    degrees = choose_degrees(
        recipe.parallel,
        num_heads=shape.num_heads,
        ranks_per_node=ranks_per_node or world_size,
        model=variant.name,
    )
    data = open_data(
        recipe.data,
        shape=shape,
        variant=variant,
        seed=recipe.train.seed,
        fingerprint=lambda: encoders(recipe.model.path),
    )
    visits = data.visits if isinstance(data, Sources) else None
    if recipe.model.init == "pretrained":
        check_weights(recipe.model.path)
    check_enough_samples(len(data.keys) if visits is None else visits.at_least, dp_size)
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
        visits=visits,
        buffer_size=recipe.packing.buffer_size,
        places=data.places,
    )
    collator = PackingCollator(
        shape, recipe.flow, recipe.train.seed, data.null_text_embeds, variant.conditions
    )
    return Job(recipe, ds_config, config, shape, variant, data, sampler, collator, world_size, degrees)


Report = Callable[[str], None]
"""How the loop speaks: called on rank 0 with one line or block."""
