"""Check a training run before the process group starts, and report every problem at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wands.config.deepspeed import build_ds_config, load_ds_config
from wands.config.deepspeed_rules import check_json
from wands.config.recipe import FlowConfig, Recipe, SourceConfig, read_recipe
from wands.data.cache.reader import LatentCache
from wands.data.collate import PackingCollator
from wands.data.datasets import CombinedDataset, Dataset, open_data
from wands.data.sampler import PlanSampler, check_enough_samples
from wands.distributed.dims import check_world, choose_degrees
from wands.errors import ConfigError, Problems
from wands.model.files.checkpoint_files import Checkpoint
from wands.model.files.loading import check_weights
from wands.model.quantize import load_library
from wands.train.precision import weight_dtype_policy
from wands.train.resume import check_resumable, find_resume
from wands.train.run import TrainingRun
from wands.train.weights import list_weights, read_model
from wands.variants import DiTShape, Variant


def load_run(
    recipe_path: str | None,
    deepspeed: str | Path | None,
    overrides: Sequence[str],
    *,
    world_size: int | None,
    device_type: str,
    encoders: Callable[[str], Mapping[str, Any]],
    ranks_per_node: int | None = None,
    resume: str | None = None,
    ignore_output_dir: bool = False,
) -> TrainingRun:
    """Read recipe, DeepSpeed JSON and checkpoint, check everything, and plan the run.

    Args:
        recipe_path: YAML file or name of a shipped recipe; None for the defaults.
        deepspeed: DeepSpeed JSON; None for ZeRO-2.
        overrides: ``section.key=value`` strings.
        world_size: number of ranks; None for the smallest world of the recipe.
        device_type: "cuda" or "cpu".
        encoders: model path -> fingerprint of VAE and text encoder, to compare with a cache.
        ranks_per_node: ranks of each node; None for a single node.
        resume: see `find_resume`.
        ignore_output_dir: do not look for checkpoints in the run folder.

    Raises:
        WandsError: with every problem that was found; a check that needs the result of a failed check is skipped.
    """
    problems = Problems()
    names = (str(deepspeed or "the built-in DeepSpeed config"), str(recipe_path or "the recipe"))
    recipe: Recipe | None = None
    ds_user: dict[str, Any] = {}
    checkpoint = None
    with problems.check("recipe"):
        recipe, messages, sections = read_recipe(recipe_path, overrides)
        problems.failed |= sections
        if messages:
            raise ConfigError(messages)
    with problems.check("DeepSpeed JSON"):
        ds_user = load_ds_config(deepspeed)
    if recipe is None:
        problems.raise_all()
    assert recipe is not None
    world_size = world_size or recipe.parallel.group_size
    if not ignore_output_dir and problems.passed("output_dir"):
        with problems.check("checkpoint"):
            checkpoint = find_resume(recipe.output_dir, resume)
    run = prepare_run(
        recipe,
        ds_user,
        world_size=world_size,
        device_type=device_type,
        names=names,
        encoders=encoders,
        ranks_per_node=ranks_per_node,
        checkpoint=checkpoint,
        problems=problems,
    )
    if checkpoint:
        check_resumable(
            checkpoint.state,
            where=str(checkpoint.folder),
            world_size=world_size,
            zero_stage=run.zero_stage,
            recipe=recipe.model_dump(mode="json"),
            parts=[expert.subfolder for expert in run.experts],
            transformer_config=run.transformer_config,
            data_fingerprint=run.data_fingerprint(),
        )
        if checkpoint.state.step >= run.sampler.total_steps:
            raise ConfigError(
                f"--resume {checkpoint.folder}: the checkpoint's step {checkpoint.state.step} is already the end of this run "
                f"(train.max_steps or train.epochs gives {run.sampler.total_steps} steps); raise train.max_steps to train on."
            )
    return run


def prepare_run(
    recipe: Recipe,
    ds_user: Mapping[str, Any],
    *,
    world_size: int,
    device_type: str,
    names: tuple[str, str],
    encoders: Callable[[str], Mapping[str, Any]],
    ranks_per_node: int | None = None,
    checkpoint: Checkpoint | None = None,
    problems: Problems | None = None,
) -> TrainingRun:
    """Check a recipe with a DeepSpeed JSON and plan the run.

    Args:
        recipe: the resolved recipe.
        ds_user: the user's DeepSpeed JSON.
        world_size: number of ranks.
        device_type: "cuda" or "cpu".
        names: names of the JSON and the recipe in errors.
        encoders: see `load_run`.
        ranks_per_node: ranks of each node; None for a single node.
        checkpoint: checkpoint to resume from; it replaces `lora.init_from`.
        problems: problems found so far. Its `failed` names recipe sections and "DeepSpeed JSON".

    Raises:
        WandsError: with every problem that was found.
    """
    problems = problems or Problems()
    dp_size, path = 1, recipe.model.path
    if problems.passed("parallel"):
        with problems.check("world size"):
            check_world(recipe.parallel, world_size)
            dp_size = world_size // recipe.parallel.group_size
    if problems.passed("world size", "parallel", "train") and recipe.train.bins_per_step % dp_size:
        with problems.check("bins_per_step"):
            raise ConfigError(
                f"train.bins_per_step={recipe.train.bins_per_step} must be a multiple of dp_size={dp_size} ({world_size} "
                f"processes); use {dp_size} or a multiple of it."
            )
    with problems.check("merged config"):
        if problems.passed("recipe", "DeepSpeed JSON", "world size", "bins_per_step"):
            ds_config = build_ds_config(
                ds_user, recipe, world_size=world_size, device_type=device_type, names=names
            )
        elif messages := check_json(dict(ds_user), names[0]):  # the JSON alone
            raise ConfigError(messages)
    if problems.passed("lora") and weight_dtype_policy(recipe).quantize != "none":
        with problems.check("quantize"):
            load_library()
    if problems.passed("model"):
        with problems.check("model files"):
            config, variant, experts = read_model(recipe)
    if problems.passed("model", "model files"):
        if problems.passed("lora", "precision", "quantize"):
            with problems.check("weights"):
                weights = list_weights(recipe, config, experts, is_new=checkpoint is None)
        if recipe.model.init == "pretrained":
            for expert in experts:
                with problems.check("weight files"):
                    check_weights(path, expert.subfolder)
        if problems.passed("parallel", "world size"):
            with problems.check("degrees"):
                degrees = choose_degrees(
                    recipe.parallel,
                    num_heads=variant.dit.num_heads,
                    ranks_per_node=ranks_per_node or world_size,
                    model=variant.name,
                )
        if problems.passed("flow"):
            with problems.check("i2v_ratio"):
                _check_i2v_ratio(recipe, variant)
    if problems.passed("data", "model", "model files"):
        with problems.check("data files"):
            data = open_data(
                recipe.data,
                shape=variant.dit,
                variant=variant,
                seed=recipe.train.seed,
                fingerprint=lambda: encoders(path),
            )
            least = data.schedule.min_samples if isinstance(data, CombinedDataset) else len(data.keys)
            check_enough_samples(least, dp_size)
    elif problems.passed("data"):  # without a model, only whether the caches can be opened
        for source in recipe.data.sources or (
            [SourceConfig(path=recipe.data.cache)] if recipe.data.cache else []
        ):
            with problems.check("data files"):
                LatentCache(source.path)
    problems.raise_all()
    collator = PackingCollator(
        variant.dit,
        recipe.flow,
        recipe.train.seed,
        data.null_text_embeds,
        variant.conditions,
        recipe.uses_dropout,
    )
    return TrainingRun(
        recipe,
        ds_config,
        config,
        variant.dit,
        variant,
        experts,
        weights,
        data,
        _build_sampler(recipe, data, variant.dit),
        collator,
        world_size,
        degrees,
        checkpoint,
    )


def _check_i2v_ratio(recipe: Recipe, variant: Variant) -> None:
    if "first_frame" not in variant.conditions and recipe.flow.i2v_ratio != FlowConfig().i2v_ratio:
        raise ConfigError(
            f"flow.i2v_ratio={recipe.flow.i2v_ratio} applies to TI2V models only, and model.path is {variant.name}; remove the "
            "key."
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
