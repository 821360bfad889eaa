"""The command `wands plan`: find settings with which a recipe fits the memory of a machine, and predict the step time."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wands.conditions.arrays import ClipSize
from wands.conditions.condition import Condition
from wands.conditions.published import arrays_of
from wands.config.auto import usual_steps
from wands.config.deepspeed import load_ds_config
from wands.config.options import PlanOptions
from wands.config.recipe import DataConfig, Recipe
from wands.config.recipe_loading import load_recipe
from wands.data.datasets import open_data
from wands.errors import CacheError, ConfigError
from wands.files import write_text
from wands.model.files.hub import published_name
from wands.objectives.causal import objective_of
from wands.objectives.objective import ClipCosts, ClipFacts
from wands.planning.cluster import Cluster, choose_cluster
from wands.planning.hardware import MACHINES, Machine, has_fp8, with_measurements
from wands.planning.memory import checkpoint_bytes, to_gib
from wands.planning.sampling_load import sampling_load
from wands.planning.search import SHIPPED, Candidate, Task, build_candidates, fastest_with_tensor, search
from wands.planning.weights import list_weights, read_model
from wands.planning.workload import Weight, Workload
from wands.plugin import load_plugins
from wands.run.schedule import plan_clips
from wands.run.sizes import forward_flops, objective_load
from wands.texts import format_seconds, plural
from wands.train.evaluation_plan import num_forwards
from wands.train.samples import plan_videos
from wands.variants import VARIANTS, Expert, Variant

SIZES = {"480p": "480x832", "720p": "720x1280"}
_NUM_ROWS = 10
USUAL_BATCH = 8
"""Number of clips in a step for which the time of a LoRA is also printed."""
_TEXT_TOKENS = 150  # in a usual caption
_MACHINE_OPTIONS = {"gpu_memory", "host_memory", "node_bandwidth", "network_bandwidth", "gpus_per_node"}
MARGIN = 0.03
"""Fraction of a GPU's usable memory that the chosen settings leave free, because the prediction is not exact."""
_COLUMNS: dict[str, Callable[[Candidate], str]] = {
    "deepspeed": lambda one: one.ds_name,
    "ring x ulysses": lambda one: _degrees(one.workload),
    "checkpointing": lambda one: one.workload.recipe.model.checkpointing,
    "recomputed": lambda one: str(one.workload.recipe.model.num_recomputed(one.workload.shape.num_layers)),
    "swapped": lambda one: str(one.workload.recipe.model.num_swapped(one.workload.shape.num_layers)),
    "bin": lambda one: f"{one.workload.recipe.packing.max_tokens:,}",
    "GiB/GPU": lambda one: f"{one.memory.needed / 2**30:.1f}",
    "host GiB": lambda one: f"{one.host / 2**30:.0f}",
    "s/step": lambda one: f"{one.seconds:.2f}",
    "tokens/s": lambda one: f"{one.tokens_per_second:,.0f}",
    "MFU": lambda one: f"{one.mfu:.1%}",
    "base": lambda one: one.workload.recipe.lora.quantize if one.workload.recipe.lora else "none",
}


def plan(options: PlanOptions) -> str:
    """Find settings with which a recipe fits a machine, and return a report as text; with --table, return `what_fits`.

    The report lists settings that fit, fastest first, with details of the fastest and the command that starts the training. With
    --out, the recipe and the DeepSpeed JSON of the fastest are written to this folder.

    Raises:
        ConfigError: if no settings fit (the message describes the smallest), an option is invalid, or the recipe names no model.
        CacheError: if the recipe names a cache that cannot be read.
    """
    if options.table:
        return what_fits()
    recipe = load_recipe(options.recipe, options.overrides)
    plugin = load_plugins(options.imports)
    model = find_model(recipe, options.variant, plugin.conditions)
    _, variant, experts = model
    objective = plugin.objective or objective_of(recipe)
    objective.setup(recipe, variant)
    clips = _clips(recipe, variant, options)
    costs = objective.costs(clips)
    videos = plan_videos(recipe, variant, experts, has_model=False, has_images=False)
    load = sampling_load(videos, variant, recipe.objective)
    load |= objective_load(objective, costs)
    cluster = choose_cluster(options.hardware, options.gpus, **options.model_dump(include=_MACHINE_OPTIONS))
    cluster = replace(cluster, machine=with_measurements(cluster.machine, options.hardware_file))
    task = build_task(recipe, model, costs.tokens, cluster, load, options.deepspeed)
    candidates = search(task)
    if not candidates:
        lora = "" if recipe.lora else " a LoRA (--set lora.rank=32),"
        raise ConfigError(
            describe_smallest(task, f"use more or larger GPUs,{lora} or shorter or smaller clips.")
        )
    best = candidates[0]
    if options.out is not None:
        write_text(options.out / "recipe.yaml", best.workload.recipe.to_yaml())
        ds_config = json.dumps(task.ds_configs[best.ds_name], indent=2)
        write_text(options.out / "deepspeed.json", ds_config + "\n")
    kind = "LoRA" if recipe.lora else "full finetune"
    head = f"{variant.name}, {kind}, on {cluster.gpus} x {task.machine.name} ({cluster.reason})"
    head += f"\nthis is a prediction, with the speeds of kernels from {task.machine.source}"
    if options.clips or not _has_data(recipe.data):
        head += f"\nassumed: {len(task.seq_lens)} clips (--clips) of {options.frames} frames (--frames), {options.size} (--size)"
    if len(candidates) > 1:
        head += "\nsorted by speed; the first line is the simplest of the settings that are at most 2 % slower than the fastest"
    details = (
        _describe_best(best, variant, clips, costs),
        f"start the training with\n  {start_command(best, options)}",
    )
    return "\n\n".join([head, _candidate_table(candidates[:_NUM_ROWS]), *details])


def what_fits(
    names: Sequence[str] = ("rtx4070", "rtx4080", "rtx4090", "rtx5090", "l40s", "h100", "h200"),
    counts: Sequence[int] = (1, 8, 64),
) -> str:
    """Return Markdown tables of the fastest settings with which published models can be trained on common machines.

    Each number of GPUs in `counts` gives a table, each GPU type of `MACHINES` in `names` a column. The tables assume clips of
    480p with 81 frames, and one clip in each bin.
    """
    tables = []
    for gpus in counts:
        machines = [MACHINES[name] for name in names]
        header = [f"{gpus} GPU{'s' * (gpus > 1)} of", *(f"{m.memory / 1e9:.0f} GB" for m in machines)]
        rows = [header, ["---"] * len(header)]
        for name in ("wan2.1-t2v-1.3b", "wan2.2-ti2v-5b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b"):
            for kind, label in (("lora", "LoRA"), ("finetune", "full")):
                cells = [_best_setting(name, kind, machine, gpus) for machine in machines]
                rows.append([f"{name.rsplit('-', 1)[1].upper()} {label}", *cells])
        tables.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(tables)


def _best_setting(name: str, kind: str, machine: Machine, gpus: int) -> str:
    """Return the fastest settings of a published model on a machine as short text, or "–" if none fit.

    `kind` is "lora" or "finetune".
    """
    variant = VARIANTS[name]
    lens = _clips(Recipe(), variant, PlanOptions()).num_tokens
    recipe = load_recipe(f"{name}-{kind}", [f"packing.max_tokens={lens[0]}"])
    model = (variant.dit.to_config(), variant, variant.experts)
    found = search(build_task(recipe, model, lens, Cluster(gpus, machine, ""), {}))
    if not found:
        return "–"
    best = found[0].workload
    settings = best.recipe.model
    base = best.recipe.lora.quantize if best.recipe.lora else "none"
    words = [
        found[0].ds_name,
        f"cp {best.cp_size}" * (best.cp_size > 1),
        settings.checkpointing,
        base * (base != "none"),
        f"swap {settings.swap_blocks}" * bool(settings.swap_blocks),
    ]
    return ", ".join(filter(None, words))


Model = tuple[dict[str, Any], Variant, tuple[Expert, ...]]
"""Config of the DiT, model variant, and trained experts."""


def build_task(
    recipe: Recipe,
    model: Model,
    lens: np.ndarray,
    cluster: Cluster,
    load: dict[str, Any],
    deepspeed: Path | None = None,
) -> Task:
    """Return the training run and the machine for which `search` finds settings.

    `model` is the result of `find_model`, `lens` the number of tokens that the model sees of each clip, int64. `load` are further
    arguments of `Workload`: results of `sampling_load` and `objective_load`. Without `deepspeed`, the shipped configs are tried.

    Raises:
        ConfigError: if the DeepSpeed config is unknown, or does not fit the recipe.
    """
    machine = cluster.machine
    gpus = cluster.gpus
    per_node = machine.ranks_per_node
    (config, variant, experts) = model
    if gpus > per_node and gpus % per_node:
        raise ConfigError(
            f"--gpus {gpus} must be a multiple of {per_node}, the number of GPUs per node; use {gpus // per_node * per_node}."
        )
    if not has_fp8(machine.name) and "fp8" in (
        recipe.precision.linears,
        recipe.lora and recipe.lora.quantize,
    ):
        raise ConfigError(
            f"--hardware: {machine.name} does not multiply in fp8; set precision.linears=bf16, and "
            "lora.quantize=int8, nf4 or none."
        )
    names = SHIPPED if deepspeed is None else (str(deepspeed),)
    weights = list_weights(recipe, config, experts)
    workload = Workload(
        recipe=recipe,
        shape=variant.dit,
        weights=weights,
        num_models=len(experts),
        world_size=gpus,
        **load,
    )
    may_quantize = (
        recipe.lora is not None and recipe.lora.quantize == "none" and recipe.precision.linears == "bf16"
    )
    return Task(
        workload=workload,
        seq_lens=lens,
        machine=machine,
        ds_configs={name: load_ds_config(name) for name in names},
        margin=MARGIN,
        quantize=partial(_quantized_weights, recipe, config, experts) if may_quantize else None,
    )


def _quantized_weights(
    recipe: Recipe, config: dict[str, Any], experts: Sequence[Expert], codec: str
) -> Sequence[Weight]:
    assert recipe.lora is not None
    lora = recipe.lora.model_copy(update={"quantize": codec})
    return list_weights(recipe.model_copy(update={"lora": lora}), config, experts)


def find_model(recipe: Recipe, variant: str | None = None, conditions: Sequence[Condition] = ()) -> Model:
    """Return the model that the recipe trains.

    No file of a published model is read; its name is `variant`, or part of the Hub id in `model.path`. For other models, the
    config files in `model.path` are read.

    Raises:
        ConfigError: if the variant is unknown, or the recipe names no model.
    """
    name = variant or published_name(recipe.model.path)
    if name and name not in VARIANTS:
        raise ConfigError(f"--variant {name} is not a published model; use one of {', '.join(VARIANTS)}.")
    return read_model(recipe, name, conditions)


def _has_data(data: DataConfig) -> bool:
    return bool(data.cache or data.sources or data.mock)


def _clips(recipe: Recipe, variant: Variant, options: PlanOptions) -> ClipFacts:
    """Return the token grids of the clips in the recipe's data.

    With `options.clips`, or without data, assume that many clips (default 1,000) of `options.frames` frames of `options.size`.
    """
    data = recipe.data
    dit = variant.dit
    if options.clips is None and _has_data(data):
        try:
            dataset = open_data(data, variant, recipe.train.seed, fingerprint=dict)
        except CacheError as error:
            raise CacheError(f"{error} To plan without a cache, add --clips N.") from None
        return plan_clips(dataset, dit.patch_size, first_frame_ratio=0.0)
    size = options.size
    sides = re.fullmatch(r"(\d+)x(\d+)", SIZES.get(size, size.lower()))
    if sides is None:
        raise ConfigError(f"--size {size} is neither 480p, 720p nor HEIGHTxWIDTH; write for example 480x832.")
    latents = variant.latent_size(options.frames, *map(int, sides.groups()))
    grid = np.array(latents) // dit.patch_size
    if grid.prod() < 1:
        raise ConfigError(f"--size {size} is smaller than one video token; use for example 480p.")
    grids = np.tile(grid.astype(np.int64), (options.clips or 1000, 1))
    return ClipFacts(grids=grids, trained_tokens=grids.prod(axis=1).astype(np.float64))


def _candidate_table(candidates: Sequence[Candidate]) -> str:
    columns = []
    is_lora = candidates[0].workload.recipe.lora is not None
    described = {name: describe for name, describe in _COLUMNS.items() if is_lora or name != "base"}
    for i, (heading, describe) in enumerate(described.items()):
        cells = [heading, *map(describe, candidates)]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if i < 3 else cell.rjust(width) for cell in cells])
    return "\n".join("  " + "  ".join(row) for row in zip(*columns, strict=True))


def _describe_best(best: Candidate, variant: Variant, of_clips: ClipFacts, costs: ClipCosts) -> str:
    task = best.task
    recipe = best.workload.recipe
    parts = ", ".join(f"{name} {to_gib(size)}" for name, size in best.memory.device.items())
    tokens = int(task.seq_lens.sum())
    bins = recipe.train.bins_per_step
    steps = max(round(tokens / (bins * sum(best.prediction.plan.seq_lens))), 1)
    cache = _planned_cache_bytes(of_clips, variant) / 1e9
    checkpoint = checkpoint_bytes(best.workload) / 1e9
    total = recipe.train.max_steps or recipe.train.epochs * steps
    if total == "auto":
        total = usual_steps(steps, bins)
    lines = [
        "details of the first line of the table",
        f"memory  {to_gib(best.memory.needed)} of the {to_gib(best.usable)} that a GPU has for tensors",
        f"        {parts}, fragmentation {to_gib(best.memory.needed - best.memory.peak)}",
        f"host    {best.describe_host()} in each node",
        f"disk    latent cache about {cache:,.1f} GB for {len(task.seq_lens):,} clips; a checkpoint {checkpoint:,.1f} GB, "
        f"{recipe.checkpoint.keep + 1} checkpoints while a new checkpoint is written",
        f"time    {best.seconds:.2f} s per step of {plural(bins, 'bin')}, {best.mfu:.1%} MFU; the run of {total:,} steps takes "
        f"{format_seconds(total * best.seconds)}; an epoch of {tokens:,} tokens has {steps:,} steps",
    ]
    clips = bins * len(best.prediction.plan.seq_lens)
    if recipe.lora and clips < USUAL_BATCH:
        hours = format_seconds(total * best.seconds * USUAL_BATCH / clips)
        lines.append(
            f"        {plural(clips, 'clip')} in a step; with {USUAL_BATCH} (train.bins_per_step), as many steps take {hours}"
        )
    lines += _compare_tensor(best)
    if recipe.eval:
        # All clips are assumed to have the mean length.
        load = best.workload
        length = int(costs.tokens.mean())
        ranks = load.cp_size * load.tensor_degree
        training = total * bins * ranks * best.prediction.flops * load.num_models
        forwards = 9 * num_forwards(recipe, total, variant, load.num_models)
        each = forwards * forward_flops(variant.dit, [length], int(costs.pairs.mean()))
        share = min(recipe.eval.max_share, 2 * recipe.eval.max_clips * each / training)
        lines.append(
            f"eval    {share:.2%} of the time, every {recipe.eval.every:,} steps; it needs no more memory than a training step"
        )
    if recipe.sample:
        speed = best.mfu * task.machine.peak * best.workload.world_size
        seconds = format_seconds(best.workload.video_flops / speed)
        lines.append(
            f"samples about {seconds} every {recipe.sample.every:,} steps, if sampling has the MFU of training"
        )
    return "\n  ".join(lines)


def _degrees(workload: Workload) -> str:
    degrees = f"{workload.ring_degree} x {workload.ulysses_degree}"
    return degrees if workload.tensor_degree == 1 else f"{degrees}, tensor {workload.tensor_degree}"


def _compare_tensor(best: Candidate) -> list[str]:
    """Return a line that compares the best settings with tensor parallelism, which `search` does not try."""
    parallel = best.task.workload.recipe.parallel
    if parallel.group_size > 1:
        return []
    other = fastest_with_tensor(best.task, best.workload.recipe.packing.max_tokens)
    if other is None:
        return []
    ratio = other.tokens_per_second / best.tokens_per_second
    settings = f"{other.ds_name}, ring x ulysses {_degrees(other.workload)}, {other.workload.recipe.model.checkpointing}"
    verdict = "slower" if ratio < 1 else "faster, but not measured on GPUs"
    return [
        f"tensor  parallel.tensor_degree={other.workload.tensor_degree} is {verdict}: {other.tokens_per_second:,.0f} tokens/s, "
        f"{ratio:.2f} times as many ({settings})"
    ]


def start_command(best: Candidate, options: PlanOptions) -> str:
    """Return the command line that starts a training run with the settings `best`, from the files in `options.out` if set."""
    gpus = best.workload.world_size
    per_node = best.task.ranks_per_node
    if options.out is not None:
        ds_json = shlex.quote(str(options.out / "deepspeed.json"))
        words = [shlex.quote(str(options.out / "recipe.yaml")), f"--deepspeed {ds_json}"]
    else:
        recipe = best.workload.recipe
        missing = [] if recipe.model.path else ["model.path=DIR_OR_HUB_ID"]
        missing += [] if _has_data(recipe.data) else ["data.cache=DIR"]
        words = [*([options.recipe] if options.recipe else []), f"--deepspeed {best.ds_name}"]
        words += [f"--set {shlex.quote(key)}" for key in (*missing, *options.overrides, *best.changes())]
    launcher = f"deepspeed --num_gpus {gpus} --module wands train" if gpus > 1 else "wands train"
    if gpus > per_node:
        nodes = f"--nnodes {gpus // per_node} --node-rank R --master-addr HOST"
        launcher = f"bash scripts/launch_multinode.sh {nodes} --"
    return f"{launcher} {' '.join(words)}"


def describe_smallest(task: Task, fix: str) -> str:
    """Return the error message for the case that no settings fit: the settings that need the least memory, and the `fix`."""
    gpus = task.workload.world_size
    longest = task.longest
    cp_sizes = (1, task.ranks_per_node)
    modes = ("offload", "full")
    settings = [
        one
        for base in task.bases()
        for one in build_candidates(base, task.ds_configs, [longest], cp_sizes, modes)
    ]
    if not settings:
        return f"--gpus {gpus}: no DeepSpeed config is valid for this recipe; run wands train --dry-run to see the reasons."
    least = min(settings, key=lambda setting: setting.memory.needed)
    load = least.workload
    how = f"{least.ds_name}, cp {load.cp_size}, checkpointing {load.recipe.model.checkpointing}"
    how += f", lora.quantize={load.recipe.lora.quantize}" if load.recipe.lora else ""
    return (
        f"no settings fit {gpus} x {task.machine.name}: the smallest settings ({how}, clips of up to {longest:,} "
        f"tokens) need {least.describe_memory()}; {fix}"
    )


def _planned_cache_bytes(clips: ClipFacts, variant: Variant) -> float:
    """Return the size of a latent cache in bytes, for clips of the mean length and captions of `_TEXT_TOKENS` tokens."""
    patch_size = variant.dit.patch_size
    frames, rows, columns = patch_size
    tokens = round(float(clips.num_tokens.mean()))
    size = ClipSize((frames, rows, columns * tokens), patch_size)  # only the number of tokens counts
    specs = [spec for spec in arrays_of(variant) if not spec.optional]
    of_clip = sum(spec.num_bytes(spec.shape(size, [_TEXT_TOKENS] * spec.num_free)) for spec in specs)
    return float(of_clip * len(clips))
