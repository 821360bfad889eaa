"""Prepare a training run: check all settings and data, plan its steps, and later compare the hashes of its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wands.checkpoint.checkpoint_files import Checkpoint, find_damage
from wands.checkpoint.epoch_files import follow_data, follow_plan
from wands.checkpoint.resume import check_resumable, find_resume
from wands.conditions.condition import Condition
from wands.conditions.published import conditions_of
from wands.config.auto import usual_interval
from wands.config.deepspeed import build_ds_config, load_ds_config
from wands.config.deepspeed_rules import check_json
from wands.config.recipe import FlowConfig, Recipe, SourceConfig
from wands.config.recipe_loading import read_recipe
from wands.data.cache.reader import LatentCache
from wands.data.collate import PackingCollator
from wands.data.datasets import CombinedDataset, Dataset, check_excluded, open_data, open_held_out
from wands.data.sampler import PlanSampler, check_enough_samples
from wands.distributed.bootstrap import accelerator_type, gather_objects, ranks_per_node
from wands.distributed.dims import check_ffn, check_world, choose_degrees
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.errors import CheckpointError, ConfigError, Problems
from wands.model.files.hashes import find_changed_files
from wands.model.files.hub import fetch_model, is_downloaded, published_name
from wands.model.files.loading import check_weights
from wands.model.quantized import load_library
from wands.objectives.causal import objective_of
from wands.objectives.objective import Objective
from wands.planning.weights import list_weights, read_model
from wands.plugin import Plugin
from wands.run.data_identity import DataIdentity
from wands.run.run_model import RunModel
from wands.run.schedule import Schedule, plan_clips
from wands.run.sizes import flops_of_clips
from wands.run.trackers import check_trackers
from wands.train.evaluation_plan import check_held_out
from wands.train.prepared_run import PreparedRun
from wands.train.samples import plan_videos
from wands.variants import Variant

_NO_MODEL: Any = (None, None, ())  # config, variant and experts if the model cannot be read


def fingerprint_once(model: str) -> Mapping[str, Any]:
    """Return the fingerprint of a model's encoders on rank 0, and {} on other ranks, because hashing is slow."""
    return fingerprint_pipeline(model) if os.environ.get("RANK", "0") == "0" else {}


def load_run(
    source: Recipe | str | Path | None,
    deepspeed: str | Path | None,
    overrides: Sequence[str],
    *,
    world_size: int | None = None,
    resume: str | None = None,
    ignore_output_dir: bool = False,
    claim: Callable[[Path], None] | None = None,
    damaged: Mapping[Path, str] = MappingProxyType({}),
    **options: Any,
) -> PreparedRun:
    """Read the recipe, the DeepSpeed JSON and the checkpoint of a run, check everything, and return the planned run.

    Args:
        source: the recipe, a YAML file, or the name of a shipped recipe; None for the defaults.
        deepspeed: DeepSpeed JSON; None for the built-in config with ZeRO-2.
        overrides: ``section.key=value`` strings that override a recipe of a name or file.
        world_size: number of ranks; 0 for the smallest number that the recipe allows, None for that of the launcher.
        resume: value of --resume. None for a new run, "auto" for the newest checkpoint of the run folder, or a path.
        ignore_output_dir: whether to skip the search for checkpoints in the run folder.
        claim: function that locks the run folder before the search for checkpoints, so that no other process adds one after it.
        damaged: maps the folders of checkpoints from which the run must not resume to an error message.
        options: arguments of `prepare_run`: `device_type`, `encoders`, `is_dry_run` and `plugin`.

    Raises:
        WandsError: with all problems. A check that needs the result of a failed check is skipped.
    """
    problems = Problems()
    if isinstance(source, Recipe):
        recipe: Recipe | None = source
        name = "the recipe"
    else:
        recipe = problems.run("recipe", partial(read_recipe, source, overrides, problems))
        name = str(source or "the recipe")
    ds_user = problems.run("DeepSpeed JSON", lambda: load_ds_config(deepspeed)) or {}
    if recipe is None:
        problems.raise_all()
        raise AssertionError("a recipe that cannot be read is a problem")
    checkpoint = None
    if claim:
        problems.run("lock", lambda: claim(Path(recipe.output_dir)), "output_dir")
    if not ignore_output_dir:
        find = partial(find_resume, recipe.output_dir, resume, damaged)
        checkpoint = problems.run("checkpoint", find, "output_dir", "lock")
    run = prepare_run(
        recipe,
        ds_user,
        world_size=recipe.parallel.group_size if world_size == 0 else world_size,
        names=(str(deepspeed or "the built-in DeepSpeed config"), name),
        checkpoint=checkpoint,
        problems=problems,
        **options,
    )
    if checkpoint:
        check_resumable(checkpoint.state, run.state, f"--resume {checkpoint.folder}")
        if checkpoint.state.step >= run.schedule.total_steps:
            raise ConfigError(
                f"--resume {checkpoint.folder}: the checkpoint's step {checkpoint.state.step} is already the end of this run "
                f"(train.max_steps or train.epochs gives {run.schedule.total_steps} steps). Export the "
                "checkpoint with wands export, or raise train.max_steps (or train.epochs) to continue."
            )
    return run


def prepare_run(
    recipe: Recipe,
    ds_user: Mapping[str, Any],
    *,
    world_size: int | None = None,
    device_type: str | None = None,
    names: tuple[str, str] = ("the DeepSpeed config", "the recipe"),
    encoders: Callable[[str], Mapping[str, Any]] = fingerprint_once,
    checkpoint: Checkpoint | None = None,
    is_dry_run: bool = False,
    problems: Problems | None = None,
    plugin: Plugin | None = None,
) -> PreparedRun:
    """Check a recipe together with a DeepSpeed JSON, and return the planned run.

    Args:
        recipe: recipe with all defaults filled in.
        ds_user: the user's DeepSpeed JSON.
        world_size: number of ranks, all on one node; None for the ranks and nodes of the launcher.
        device_type: "cuda" or "cpu"; None for the device of this machine.
        names: (name of the DeepSpeed JSON, name of the recipe) for error messages.
        encoders: function from a model path to the fingerprint of its encoders, to compare with that of a cache.
        checkpoint: checkpoint that the run resumes from. With a checkpoint, `lora.init_from` is not read.
        is_dry_run: whether the run is only checked. Without a checkpoint, a published model need then not be downloaded, and its
            files are not checked.
        problems: problems found before. Checks that need a failed section or file are skipped.
        plugin: outside code of the run.

    Raises:
        WandsError: with all problems, including those found before.
    """
    problems = problems or Problems()
    plugin = plugin or Plugin()
    objective = plugin.objective or objective_of(recipe)
    device_type = device_type or accelerator_type()
    per_node = world_size or ranks_per_node()
    world_size = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    dp_size = world_size // recipe.parallel.group_size
    check = problems.run
    # Arguments of `check`: its name, the function to run, and the recipe sections and checks that must have passed before.
    check("world size", lambda: check_world(recipe.parallel, world_size), "parallel")
    check("bins_per_step", lambda: _check_bins(recipe, dp_size, world_size), "world size", "train")
    merge = partial(build_ds_config, world_size=world_size, device_type=device_type, names=names)
    ds_config = _merge_configs(recipe, ds_user, merge, names[0], plugin.optimizer, problems)
    check("trackers", lambda: check_trackers(recipe.logging.trackers), "logging")
    model = _read_model(recipe, plugin.conditions, problems, is_dry_run, is_new=checkpoint is None)
    variant = model.variant
    degrees = _choose_degrees(recipe, variant, per_node, problems)
    check("i2v_ratio", lambda: _check_i2v_ratio(recipe, variant), "model files", "flow")
    check("objective", lambda: _set_up(plugin, objective, recipe, variant), *_OBJECTIVE_SECTIONS)
    fingerprint = partial(encoders, recipe.model.path) if model.has_files else dict
    data = _open_data(recipe, variant, fingerprint, problems)
    _check_data(recipe, data, variant, dp_size, device_type, problems)
    held_out = _open_held_out(recipe, variant, fingerprint, problems)
    plan_samples = partial(plan_videos, recipe, variant, model.experts, has_model=model.has_files)
    samples = check("samples", plan_samples, "model files", "sample")
    problems.raise_all()
    identity = DataIdentity.of(recipe, data, data.num_tokens(model.shape.patch_size))
    collator = _build_collator(recipe, variant, data, objective)
    schedule = _plan(recipe, data, model, objective, collator)
    schedule, data_change = _follow(schedule, recipe, data, checkpoint, identity.fingerprint)
    return PreparedRun(
        recipe=settle_length(recipe, schedule.total_steps),
        ds_config=ds_config,
        model=model,
        data=data,
        held_out=held_out,
        identity=identity,
        schedule=schedule,
        collator=collator,
        objective=objective,
        plugin=plugin,
        world_size=world_size,
        degrees=degrees,
        checkpoint=checkpoint,
        samples=samples,
        data_change=data_change,
    )


_OBJECTIVE_SECTIONS = "model files", "flow", "objective", "loss", "train"


def _set_up(plugin: Plugin, objective: Objective, recipe: Recipe, variant: Variant) -> None:
    if plugin.objective and recipe.objective.name != "flow_matching":
        raise ConfigError(
            f"objective.name={recipe.objective.name}, but the run has the objective {objective.name} of outside code; remove one "
            "of them."
        )
    objective.setup(recipe, variant)


def settle_length(recipe: Recipe, total_steps: int) -> Recipe:
    """Return the recipe of a run of this length, with numbers in place of `auto`."""
    changes: dict[str, Any] = {}
    if recipe.train.max_steps == "auto":
        changes["train"] = recipe.train.model_copy(update={"max_steps": total_steps})
    if recipe.checkpoint.every == "auto":
        every = usual_interval(total_steps)
        changes["checkpoint"] = recipe.checkpoint.model_copy(update={"every": every})
    return recipe.model_copy(update=changes)


def check_hashes(run: PreparedRun, rank: int) -> str | None:
    """Compare the files of the model and of the checkpoint with their hashes. Every rank must call this function.

    The ranks divide the files among them. All return the same message about the first damaged file of the checkpoint, or None.

    Raises:
        CheckpointError: if a file of the model is damaged.
    """
    problems = []
    share = (rank, run.world_size)
    if run.recipe.model.init == "pretrained" and run.model.has_files:
        parts = {expert.subfolder for expert in run.model.experts}
        root = fetch_model(run.recipe.model.path, allow=[f"{part}/*" for part in parts])
        problems = find_changed_files(root, parts=parts, share=share)[1]
    if problems := list(chain(*gather_objects(problems))):
        label = f"model.path={run.recipe.model.path}"
        texts = [f"{label}: {text}. Write or download the file again." for text in problems]
        raise CheckpointError(texts, agreed=True)
    damage = find_damage(run.checkpoint, share) if run.checkpoint else None
    return next(filter(None, gather_objects(damage)), None)


def _merge_configs(
    recipe: Recipe,
    ds_user: Mapping[str, Any],
    merge: Callable[[Mapping[str, Any], Recipe], dict[str, Any]],
    ds_name: str,
    optimizer: Callable[..., Any] | None,
    problems: Problems,
) -> Any:
    """Return the DeepSpeed config of the run, or None if a check before has failed; the JSON is then checked alone."""
    ds_config = None
    if problems.passed("recipe", "DeepSpeed JSON", "world size", "bins_per_step"):
        ds_config = problems.run("merged config", lambda: merge(ds_user, recipe))
        if optimizer:
            problems.run("optimizer", lambda: _name_optimizer(ds_config, ds_user, optimizer), "merged config")
    elif messages := check_json(dict(ds_user), ds_name):
        problems.add("merged config", ConfigError(messages))
    return ds_config


def _read_model(
    recipe: Recipe, conditions: Sequence[Condition], problems: Problems, is_dry_run: bool, is_new: bool
) -> RunModel:
    """Read the configs of the model, and check its weights. After a failed check, fields of the result are None or ()."""
    if recipe.lora and recipe.lora.quantize in ("int8", "nf4"):
        problems.run("quantize", load_library, "lora")
    path = recipe.model.path
    published = published_name(path) if is_dry_run and is_new else None
    if published and problems.run("downloaded weights", partial(is_downloaded, path)):
        published = None
    read_configs = partial(read_model, recipe, published, conditions)
    config, variant, experts = problems.run("model files", read_configs, "model") or _NO_MODEL
    read_weights = partial(list_weights, recipe, config, experts, is_new=is_new)
    weights = problems.run("weights", read_weights, "model files", "lora", "precision", "quantize")
    for expert in experts if recipe.model.init == "pretrained" and not published else ():
        problems.run("weight files", partial(check_weights, path, expert.subfolder))
    return RunModel(config=config, variant=variant, experts=experts, weights=weights, has_files=not published)


def _choose_degrees(recipe: Recipe, variant: Variant, per_node: int, problems: Problems) -> Any:
    """Return the degrees of context parallelism, and check that tensor parallelism can divide the feed-forward layers."""
    choose = partial(choose_degrees, recipe.parallel, ranks_per_node=per_node)
    degrees = problems.run(
        "degrees",
        lambda: choose(num_heads=variant.dit.num_heads, model=variant.name),
        *("model files", "world size"),
    )
    problems.run(
        "feed-forward",
        lambda: check_ffn(recipe.parallel, ffn_dim=variant.dit.ffn_dim, model=variant.name),
        *("model files", "parallel"),
    )
    return degrees


def _open_data(
    recipe: Recipe, variant: Variant, fingerprint: Callable[[], Mapping[str, Any]], problems: Problems
) -> Any:
    read_data = partial(open_data, recipe.data, variant, recipe.train.seed, fingerprint)
    data = problems.run("data files", read_data, "data", "model files")
    if problems.passed("data") and not problems.passed("model files"):
        sources = recipe.data.sources or ([SourceConfig(path=recipe.data.cache)] if recipe.data.cache else [])
        for source in sources:  # without a model, check only that the caches can be opened
            problems.run("data files", partial(LatentCache, source.path))
    return data


def _check_data(
    recipe: Recipe, data: Dataset, variant: Variant, dp_size: int, device_type: str, problems: Problems
) -> None:
    problems.run("clips", lambda: _check_samples(data, dp_size), "data files", "world size")
    if device_type == "cuda" and recipe.precision.compute == "fp32":
        problems.run("fp32", lambda: _check_fp32(data, variant), "data files", "precision")
    problems.run("data.exclude", lambda: check_excluded(recipe.data, data), "data files")


def _open_held_out(
    recipe: Recipe, variant: Variant, fingerprint: Callable[[], Mapping[str, Any]], problems: Problems
) -> Any:
    """Return the clips of the evaluation; None without an evaluation."""
    held_out = None
    if recipe.eval:
        cache = recipe.eval.cache
        open_clips = partial(open_held_out, recipe.data, cache, variant, recipe.train.seed, fingerprint)
        held_out = problems.run("eval", open_clips, "data files", "model files")
    problems.run("keep_best", lambda: check_held_out(recipe, held_out), "eval", "checkpoint")
    return held_out


def _build_collator(recipe: Recipe, variant: Variant, data: Dataset, objective: Objective) -> PackingCollator:
    return PackingCollator(
        shape=variant.dit,
        flow=recipe.flow,
        seed=recipe.train.seed,
        null_text_embeds=data.null_text_embeds,
        conditions=conditions_of(variant),
        has_dropout=recipe.uses_dropout,
        unit_rule=objective.unit_rule,
    )


def _follow(
    schedule: Schedule, recipe: Recipe, data: Dataset, checkpoint: Checkpoint | None, fingerprint: str
) -> tuple[Schedule, str | None]:
    """Let the steps follow `packing.plan` and the checkpoint. Return also a line about data that has changed, or None."""
    data_change = None
    if recipe.packing.plan:
        sampler = follow_plan(schedule.sampler, Path(recipe.packing.plan), fingerprint)
        schedule = replace(schedule, sampler=sampler)
    if checkpoint:
        sampler, data_change = follow_data(schedule.sampler, data, checkpoint, fingerprint)
        schedule = replace(schedule, sampler=sampler)
    return schedule, data_change


def _check_bins(recipe: Recipe, dp_size: int, world_size: int) -> None:
    bins = recipe.train.bins_per_step
    if bins % dp_size:
        size = "cp_size" if recipe.parallel.tensor_degree == 1 else "(cp_size x tensor_degree)"
        fitting = -(-bins // dp_size) * dp_size
        raise ConfigError(
            f"train.bins_per_step={bins}: all data-parallel ranks train equally many bins of a step, so the number must be a "
            f"multiple of dp_size={dp_size} ({world_size} processes / {size}). Add --set train.bins_per_step={fitting}; in a "
            "resumed run, change parallel.cp_size or the number of processes instead."
        )


def _check_i2v_ratio(recipe: Recipe, variant: Variant) -> None:
    if "first_frame" not in variant.conditions and recipe.flow.i2v_ratio != FlowConfig().i2v_ratio:
        raise ConfigError(
            f"flow.i2v_ratio={recipe.flow.i2v_ratio} applies to TI2V models only, but the model is {variant.name}; remove the "
            "key."
        )


def _check_samples(data: Dataset, dp_size: int) -> None:
    """Check that an epoch has at least one sample for each data-parallel rank."""
    fewest = data.schedule.min_samples if isinstance(data, CombinedDataset) else len(data.keys)
    check_enough_samples(fewest, dp_size)


def _check_fp32(data: Dataset, variant: Variant) -> None:
    """Raise a ConfigError if a clip is too long for fp32 on a GPU: only the reference kernel, with quadratic memory, runs it."""
    if (longest := int(data.num_tokens(variant.dit.patch_size).max())) > 4096:
        raise ConfigError(
            f"precision.compute=fp32: on a GPU, attention in fp32 stores a score for every pair of a clip's tokens. A clip may "
            f"have at most 4,096 tokens, but the longest clip has {longest:,}. Set precision.compute=bf16."
        )


def _plan(
    recipe: Recipe, data: Dataset, model: RunModel, objective: Objective, collator: PackingCollator
) -> Schedule:
    shape = model.shape
    ratio = recipe.flow.i2v_ratio if "first_frame" in model.variant.conditions else 0.0
    clips = plan_clips(data, shape.patch_size, ratio)
    costs = objective.costs(clips)
    sampler = PlanSampler(
        costs.tokens,
        data.keys,
        cost=flops_of_clips(shape, costs),
        schedule=data.schedule if isinstance(data, CombinedDataset) else None,
        places=data.places,
        excluded=frozenset(recipe.data.exclude),
        **recipe.packing.model_dump(include={"max_tokens", "level_bins", "buffer_size"}),
        **recipe.train.model_dump(include={"bins_per_step", "seed", "epochs", "max_steps"}),
    )
    return Schedule(
        sampler=sampler,
        objective=objective,
        data=data,
        clips=clips,
        costs=costs,
        num_cond_tokens=collator.num_cond_tokens,
    )


def _name_optimizer(
    ds_config: dict[str, Any], ds_user: Mapping[str, Any], optimizer: Callable[..., Any]
) -> None:
    """Write the name of an outside optimizer into the config, so that a resumed run notices another one."""
    if "optimizer" in ds_user:
        raise ConfigError(
            f"the DeepSpeed JSON sets optimizer.type={ds_user['optimizer'].get('type')}, but the run has an optimizer of outside "
            "code; remove one of them."
        )
    function = getattr(optimizer, "func", optimizer)  # of a functools.partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    ds_config["optimizer"] = {"type": name, "params": {"lr": ds_config["optimizer"]["params"]["lr"]}}
