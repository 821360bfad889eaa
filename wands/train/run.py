"""Everything about a run that can be known, and refused, before the process group forms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wands.config.deepspeed import build_ds_config
from wands.config.recipe import FlowConfig, Recipe
from wands.data.cache.reader import LatentCache
from wands.data.collate import PackingCollator
from wands.data.datasets import CombinedDataset, Dataset, open_data
from wands.data.packing import assign_bins
from wands.data.patchify import grid_size
from wands.data.sampler import PlanSampler, StepPlan, check_enough_samples
from wands.distributed.dims import ContextDegrees, ParallelDims, check_world, choose_degrees
from wands.errors import ConfigError
from wands.flow.rng import SampleKey
from wands.model.files.loading import build_empty, check_weights, load_config, load_index
from wands.model.freezing import freeze_parameters
from wands.model.lora import MergedLoras, check_lora, find_targets, load_start
from wands.model.quantize import load_library
from wands.planning.activations import FP32
from wands.planning.memory import Load, Weight
from wands.train.precision import weight_dtype_policy
from wands.variants import TEXT_LEN, DiTShape, Expert, Variant, variant_of


@dataclass(frozen=True)
class TrainingRun:
    """A checked training run.

    Attributes:
        recipe: what was asked for.
        ds_config: complete config for `deepspeed.initialize`, learning rate not yet scaled.
        transformer_config: diffusers config of the DiT.
        shape: its numbers.
        variant: its row.
        experts: the DiTs that are trained, one after the other in every step.
        weights: the parameters of each.
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
    experts: tuple[Expert, ...]
    weights: tuple[Weight, ...]
    data: Dataset
    sampler: PlanSampler
    collator: PackingCollator
    world_size: int
    degrees: ContextDegrees

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the DeepSpeed config."""
        return int(self.ds_config["zero_optimization"].get("stage", 0))

    @cached_property
    def num_trained(self) -> int:
        """Parameters of each expert that are trained."""
        return sum(weight.numel for weight in self.weights if weight.trained)

    @property
    def dp_size(self) -> int:
        """Groups of ranks that hold different bins."""
        return self.grid(0).dp_size

    def grid(self, rank: int) -> ParallelDims:
        """Where a rank stands."""
        return ParallelDims(self.world_size, rank, self.degrees.ulysses, self.degrees.ring)

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
        if isinstance(self.data, CombinedDataset):
            text += repr([str(repeat) for repeat in self.data.schedule.repeats])
        if self.recipe.packing.buffer_size is not None:  # windows follow the places in the shards
            text += hashlib.sha256(np.ascontiguousarray(self.data.places).tobytes()).hexdigest()
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def step_flops(self, bins: Sequence[Sequence[int]]) -> int:
        """Matmul FLOPs of one step: of each expert forward once, backward twice that.

        Weights that are frozen have no gradient of their own, a third of their linear layers' work.
        """
        lens = self.seq_lens
        forward = sum(self.shape.forward_flops([int(lens[i]) for i in one]) for one in bins)
        squares = sum(int(lens[i]) ** 2 for one in bins for i in one)
        linear = forward - squares * self.shape.attention_flops_per_squared_token()
        frozen = 1.0 - min(self.num_trained / self.shape.num_params, 1.0)
        return len(self.experts) * (3 * forward - round(frozen * linear))

    def denominator(self, plan: StepPlan) -> float:
        """What the summed loss of a step is divided by for its gradient: see `StepPlan.denominators`.

        Of tokens only those count that are trained. How many of an epoch's first frames are given is a matter of chance: here
        it is the mean, so that every step of the epoch has the same denominator.
        """
        value = plan.denominators[self.recipe.loss.reduction]
        if self.recipe.loss.reduction == "token" and self._gives_first_frames:
            rows = self.sampler.rows(plan.epoch)
            mean = float((self._first_frames if rows is None else self._first_frames[rows]).mean())
            value -= self.recipe.flow.i2v_ratio * mean * plan.denominators["sample"]
        return value

    def count(self, plan: StepPlan) -> float:
        """What the summed loss of a step is divided by to be its mean: its own samples, or its trained tokens."""
        value = plan.counts[self.recipe.loss.reduction]
        if self.recipe.loss.reduction == "token" and self._gives_first_frames:
            for one in plan.bins:
                for i, repeat_index in zip(one, plan.repeat_indices(one), strict=True):
                    key = SampleKey(self.data.keys[i], repeat_index, plan.epoch)
                    grid = grid_size(self.data.latent_shape(i), self.shape.patch_size)
                    value -= self.collator.num_cond_tokens(key, grid)
        return value

    def load(self, device_type: str) -> Load:
        """The sizes that the memory of a rank follows from.

        Args:
            device_type: "cuda" or "cpu".
        """
        packs = self.recipe.packing.enabled
        bins = [one for step in self.sampler.epoch_plan(0).steps for one in step if one]
        forwards = bins if packs else [(i,) for one in bins for i in one]
        return Load(
            self.shape,
            self.weights,
            num_models=len(self.experts),
            world_size=self.world_size,
            ulysses_degree=self.degrees.ulysses,
            ring_degree=self.degrees.ring,
            micro_steps=self.recipe.train.bins_per_step // self.dp_size if packs else 2,
            max_tokens=max(sum(int(self.seq_lens[i]) for i in one) for one in forwards),
            max_samples=max(map(len, forwards)),
            device_type=device_type,
            text_len=self._text_len,
        )

    @property
    def _text_len(self) -> int:
        """Tokens of the longest caption, or the most that there can be."""
        mock = self.recipe.data.mock
        if mock is not None:
            return max(mock.text_lens)
        return int(self.data.index.text_lens.max()) if isinstance(self.data, LatentCache) else TEXT_LEN

    @property
    def _gives_first_frames(self) -> bool:
        return "first_frame" in self.variant.conditions

    @cached_property
    def _first_frames(self) -> np.ndarray:
        """Tokens of every row's first frame, int64; 0 where there is nothing but it."""
        shapes = (self.data.latent_shape(i) for i in range(len(self.data.keys)))
        grids = (grid_size(shape, self.shape.patch_size) for shape in shapes)
        return np.array([rows * columns if frames > 1 else 0 for frames, rows, columns in grids], np.int64)

    def imbalance(self, bins: Sequence[tuple[int, ...]]) -> float:
        """Cost of the slowest rank over the mean, summed over the micro steps of one optimizer step."""
        slowest = mean = 0.0
        for ranks in assign_bins(bins, self.dp_size, self.sampler.bin_cost):
            costs = [self.sampler.bin_cost(one) for one in ranks]
            slowest += max(costs)
            mean += sum(costs) / len(costs)
        return slowest / mean


def prepare_run(
    recipe: Recipe,
    ds_user: Mapping[str, Any],
    *,
    world_size: int,
    device_type: str,
    names: tuple[str, str],
    encoders: Callable[[str], Mapping[str, Any]],
    ranks_per_node: int | None = None,
    fresh: bool = True,
) -> TrainingRun:
    """Check a run and work out its plan.

    Args:
        recipe: the resolved recipe.
        ds_user: the user's DeepSpeed JSON.
        world_size: processes that the launcher started.
        device_type: "cuda" or "cpu".
        names: what to call the JSON and the recipe in errors.
        encoders: model path -> fingerprint of its VAE and text encoder, to hold a cache against.
        ranks_per_node: processes on each node; None is one node.
        fresh: False where a checkpoint is resumed, which `lora.init_from` has nothing to do with.

    Raises:
        ConfigError, CacheError, DataError: the run cannot be; each in a sentence with its cure.
    """
    check_world(recipe.parallel, world_size)
    dp_size = world_size // recipe.parallel.group_size
    ds_config = build_ds_config(ds_user, recipe, world_size=world_size, device_type=device_type, names=names)
    if weight_dtype_policy(recipe).quantize != "none":
        load_library()
    if recipe.train.bins_per_step % dp_size:
        raise ConfigError(
            f"train.bins_per_step={recipe.train.bins_per_step} must be a multiple of dp_size={dp_size} "
            f"({world_size} processes); use {dp_size} or a multiple of it."
        )
    if not recipe.model.path:
        raise ConfigError(
            "model.path is not set; give a diffusers pipeline folder or a Hub id, for example --set model.path=DIR."
        )
    config, variant, experts = read_model(recipe)
    shape, weights = variant.dit, list_weights(recipe, config, experts, fresh)
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
    if "first_frame" not in variant.conditions and recipe.flow.i2v_ratio != FlowConfig().i2v_ratio:
        raise ConfigError(
            f"flow.i2v_ratio={recipe.flow.i2v_ratio} is for TI2V models, and {variant.name} is none; leave it out."
        )
    if recipe.model.init == "pretrained":
        for expert in experts:
            check_weights(recipe.model.path, expert.subfolder)
    check_enough_samples(
        data.schedule.min_samples if isinstance(data, CombinedDataset) else len(data.keys), dp_size
    )
    collator = PackingCollator(
        shape, recipe.flow, recipe.train.seed, data.null_text_embeds, variant.conditions, recipe.drops
    )
    return TrainingRun(
        recipe,
        ds_config,
        config,
        shape,
        variant,
        experts,
        weights,
        data,
        _build_sampler(recipe, data, shape),
        collator,
        world_size,
        degrees,
    )


def _build_sampler(recipe: Recipe, data: Dataset, shape: DiTShape) -> PlanSampler:
    return PlanSampler(
        data.num_tokens(shape.patch_size),
        data.keys,
        max_tokens=recipe.packing.max_tokens,
        bins_per_step=recipe.train.bins_per_step,
        seed=recipe.train.seed,
        cost=(float(shape.linear_flops_per_token()), float(shape.attention_flops_per_squared_token())),
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        level_bins=recipe.packing.level_bins,
        schedule=data.schedule if isinstance(data, CombinedDataset) else None,
        buffer_size=recipe.packing.buffer_size,
        places=data.places,
    )


def read_model(recipe: Recipe) -> tuple[dict[str, Any], Variant, tuple[Expert, ...]]:
    """The DiT's config, what model it is, and the experts that the recipe asks for.

    Raises:
        ConfigError: there is no such model, it is none of Wan's, or it does not have these experts.
    """
    path, wanted = recipe.model.path, recipe.model.experts
    index, config = load_index(path), load_config(path)
    try:
        variant = variant_of(config, index)
    except ValueError as error:
        raise ConfigError(f"model.path={path}: {error}; give a pipeline of Wan 2.1 or 2.2.") from None
    experts = choose_experts(variant, wanted)
    for expert in experts:
        found = load_config(path, expert.subfolder)
        differing = [key for key in config if key[0] != "_" and found.get(key) != config[key]]
        if differing:
            raise ConfigError(
                f"model.path={path}: its two experts differ in {', '.join(differing)}; give a pipeline whose experts are alike."
            )
    return config, variant, experts


def choose_experts(variant: Variant, wanted: str | None) -> tuple[Expert, ...]:
    """The DiTs that `model.experts` names.

    Raises:
        ConfigError: the model has one DiT and no choice.
    """
    if len(variant.experts) == 1 and wanted is not None:
        raise ConfigError(
            f"model.experts={wanted} is for models of two experts, and {variant.name} has one; leave it out."
        )
    return tuple(expert for expert in variant.experts if wanted in (None, "both", expert.name))


def list_weights(
    recipe: Recipe, config: dict[str, Any], experts: Sequence[Expert], fresh: bool = True
) -> tuple[Weight, ...]:
    """The parameters of each expert as a run stores them; refuses patterns and LoRAs that do not fit the model."""
    model = build_empty(config)
    for expert in experts:
        MergedLoras.load(recipe.model.merge_loras, expert).check_fit(model)
    added: list[Weight] = []
    if recipe.lora is None:
        freeze_parameters(model, recipe.model.trainable, recipe.model.freeze)
    else:
        for expert in experts:
            check_lora(model, recipe.lora, load_start(recipe.lora, expert) if fresh else None)
        rank, targets = recipe.lora.rank, find_targets(model, recipe.lora.targets)
        for name, linear in targets.items():
            shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
            added += [Weight(f"{name}.{part}.weight", shape, FP32, True) for part, shape in shapes.items()]
        model.requires_grad_(False)
    weight_dtype_policy(recipe).apply(model)
    stored = [
        Weight(name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]
    return (*stored, *added)


Log = Callable[[str], None]
"""Function that prints one line or block for the user; it is called on rank 0."""
