"""`wands plan`: find settings that fit a recipe on a machine, and predict the step time."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wands.config.deepspeed import load_ds_config
from wands.config.recipe import Recipe, list_recipes, load_recipe
from wands.data.datasets import open_data
from wands.errors import ConfigError
from wands.files import write_text
from wands.planning.hardware import MACHINES, Machine
from wands.planning.memory import to_gib
from wands.planning.search import SHIPPED, Candidate, Task, build_candidate, search
from wands.train.checkpoint import checkpoint_bytes
from wands.train.weights import choose_experts, list_weights, read_model
from wands.variants import VARIANTS, Expert, Variant, legal_frames

SIZES = {"480p": (480, 832), "720p": (720, 1280)}
_ROWS = 10
_TEXT_BYTES = 150 * 2  # of a caption, per channel of the text encoder: some 150 tokens in bf16


def plan(
    recipe_path: str | None,
    *,
    overrides: Sequence[str],
    variant: str | None,
    deepspeed: Path | None,
    machine: Machine,
    gpus: int,
    size: str,
    frames: int,
    clips: int,
    out: Path | None,
) -> str:
    """Find settings that fit a machine.

    Args:
        recipe_path: YAML file or name of a shipped recipe; None takes the defaults and the overrides.
        overrides: ``section.key=value`` each.
        variant: published model to plan for, instead of the files at `model.path`.
        deepspeed: the only DeepSpeed JSON to try; None for the files of ds_configs/.
        machine: GPU, node and links.
        gpus: total number of GPUs.
        size: "480p", "720p" or HEIGHTxWIDTH of the clips, if the recipe names no data.
        frames: frames per clip, if the recipe names no data.
        clips: number of clips, if the recipe names no data.
        out: folder for the recipe and the DeepSpeed JSON of the best setting.

    Returns:
        The report.

    Raises:
        ConfigError: if nothing fits; the message has the smallest requirement.
    """
    recipe = load_recipe(recipe_path, overrides)
    if gpus > machine.ranks_per_node and gpus % machine.ranks_per_node:
        raise ConfigError(
            f"--gpus {gpus} must be a multiple of {machine.ranks_per_node}, the GPUs of a node; use "
            f"{gpus // machine.ranks_per_node * machine.ranks_per_node}."
        )
    model, experts, config = _find_model(recipe, recipe_path, overrides, variant)
    lens = _lengths(recipe, model, size, frames, clips)
    names = SHIPPED if deepspeed is None else (str(deepspeed),)
    task = Task(
        model.dit,
        list_weights(recipe, config, experts),
        len(experts),
        recipe,
        lens,
        machine,
        gpus,
        {name: load_ds_config(name) for name in names},
    )
    found = search(task)
    if not found:
        raise ConfigError(_nothing(task))
    best = found[0]
    if out is not None:
        write_text(out / "recipe.yaml", best.recipe.to_yaml())
        write_text(out / "deepspeed.json", json.dumps(task.ds_configs[best.ds_name], indent=2) + "\n")
    kind = "LoRA" if recipe.lora else "full finetune"
    head = f"{model.name}, {kind}, on {gpus} x {machine.name}; this is a prediction, nothing is measured"
    return "\n\n".join(
        [head, _table(found[:_ROWS]), _best(best, model), _start(best, recipe_path, overrides, out)]
    )


def what_fits(
    memories: Sequence[str] = ("rtx4090", "l40s", "h100", "h200"), counts: Sequence[int] = (1, 8, 64)
) -> str:
    """Markdown tables of the published models on common machines: clips of 480p and 81 frames, one of them a bin.

    Args:
        memories: names in `MACHINES`, a column each.
        counts: GPUs, a table each.
    """
    tables = []
    for gpus in counts:
        machines = [MACHINES[name] for name in memories]
        header = (
            f"| {gpus} GPU{'s' * (gpus > 1)} of | "
            + " | ".join(f"{m.memory / 1e9:.0f} GB" for m in machines)
            + " |"
        )
        rows = [header, "|---" * (len(machines) + 1) + "|"]
        for name in ("wan2.1-t2v-1.3b", "wan2.2-ti2v-5b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b"):
            for kind in ("lora", "finetune"):
                cells = [_cell(name, kind, machine, gpus) for machine in machines]
                label = f"{name.rsplit('-', 1)[1].upper()} {'LoRA' if kind == 'lora' else 'full'}"
                rows.append(f"| {label} | " + " | ".join(cells) + " |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


def _cell(name: str, kind: str, machine: Machine, gpus: int) -> str:
    """Return the best setting that fits; for a LoRA, on a quantised base if nothing else fits."""
    variant = VARIANTS[name]
    for quantize in ("none", "nf4") if kind == "lora" else ("none",):
        # The copy skips checks that depend on the local installation.
        recipe = load_recipe(f"{name}-{kind}")
        if recipe.lora and quantize != "none":
            recipe = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"quantize": quantize})})
        lens = _lengths(recipe, variant, "480p", 81, 1000)
        bins = recipe.packing.model_copy(update={"max_tokens": int(lens.max())})
        recipe = recipe.model_copy(update={"packing": bins})
        weights = list_weights(recipe, variant.dit.to_config(), variant.experts)
        configs = {one: load_ds_config(one) for one in SHIPPED}
        found = search(Task(variant.dit, weights, len(variant.experts), recipe, lens, machine, gpus, configs))
        if found:
            best = found[0]
            words = [
                best.ds_name.replace("_offload", " offload"),
                *([f"cp {best.cp}"] if best.cp > 1 else []),
            ]
            words += [best.recipe.model.checkpointing] + ([quantize] if quantize != "none" else [])
            return ", ".join(words)
    return "–"


def _find_model(
    recipe: Recipe, recipe_path: str | None, overrides: Sequence[str], variant: str | None
) -> tuple[Variant, tuple[Expert, ...], dict[str, Any]]:
    """Return the variant, the trained experts, and the DiT's config."""
    if (
        variant is None
        and recipe_path in list_recipes()
        and not any(x.startswith("model.path") for x in overrides)
    ):
        # A shipped recipe says by its name what its model is: no file of it is needed.
        variant = next((name for name in VARIANTS if str(recipe_path).startswith(f"{name}-")), None)
    if variant is None:
        if not recipe.model.path:
            raise ConfigError(
                "model.path is not set; give a pipeline folder, or --variant with the name of a published model, for example "
                "wan2.1-t2v-14b."
            )
        config, found, experts = read_model(recipe)
        return found, experts, config
    if variant not in VARIANTS:
        raise ConfigError(f"--variant {variant} is not a published model; use one of {', '.join(VARIANTS)}.")
    row = VARIANTS[variant]
    return row, choose_experts(row, recipe.model.experts), row.dit.to_config()


def _lengths(recipe: Recipe, variant: Variant, size: str, frames: int, clips: int) -> np.ndarray:
    """Return the tokens of each clip of the recipe's data, or of equal clips if the recipe names no data."""
    data = recipe.data
    if data.cache or data.sources or data.mock:
        opened = open_data(
            data, shape=variant.dit, variant=variant, seed=recipe.train.seed, fingerprint=lambda: {}
        )
        return opened.num_tokens(variant.dit.patch_size)
    sides = SIZES.get(size)
    if sides is None:
        parts = size.lower().split("x")
        if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(
                f"--size {size} is neither 480p, 720p nor HEIGHTxWIDTH; write for example 480x832."
            )
        sides = int(parts[0]), int(parts[1])
    stride, patch = variant.vae_stride, variant.dit.patch_size
    rows, columns = (
        side // (step * cut) for side, step, cut in zip(sides, stride[1:], patch[1:], strict=True)
    )
    latent_frames = (legal_frames(frames) - 1) // stride[0] + 1
    tokens = latent_frames // patch[0] * rows * columns
    if tokens < 1:
        raise ConfigError(f"--size {size} is smaller than a token of {variant.name}; give a larger size.")
    return np.full(clips, tokens, np.int64)


def _table(found: Sequence[Candidate]) -> str:
    header = (
        "deepspeed",
        "ring x ulysses",
        "checkpointing",
        "bin",
        "GiB/GPU",
        "host GiB",
        "s/step",
        "tokens/s",
        "MFU",
    )
    rows = [
        (
            one.ds_name,
            f"{one.workload.ring_degree} x {one.workload.ulysses_degree}",
            one.recipe.model.checkpointing,
            f"{one.recipe.packing.max_tokens:,}",
            f"{one.memory.needed / 2**30:.1f}",
            f"{one.host / 2**30:.0f}" if one.host else "",
            f"{one.seconds:.2f}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.prediction.mfu:.1%}",
        )
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    )


def _best(best: Candidate, variant: Variant) -> str:
    task, recipe = best.task, best.recipe
    parts = ", ".join(f"{name} {to_gib(size)}" for name, size in best.memory.device.items())
    margin = best.memory.needed - best.memory.peak
    tokens = int(task.seq_lens.sum())
    steps = max(round(tokens / (recipe.train.bins_per_step * sum(best.prediction.plan.seq_lens))), 1)
    lines = [
        ("memory", f"{to_gib(best.memory.needed)} of the {to_gib(task.usable)} that a GPU has for tensors"),
        ("", f"{parts}, fragmentation {to_gib(margin)}"),
        (
            "host",
            f"{to_gib(best.host)} of {to_gib(task.machine.host_memory)} in each node"
            if best.host
            else "nothing is offloaded",
        ),
        (
            "disk",
            f"latent cache about {_cache_bytes(task, variant) / 1e9:,.1f} GB for {len(task.seq_lens):,} clips; a checkpoint "
            f"{_checkpoint_bytes(best) / 1e9:,.1f} GB, {recipe.checkpoint.keep + 1} of them while one is written",
        ),
        (
            "time",
            f"{best.seconds:.2f} s per step of {recipe.train.bins_per_step} bins, {best.prediction.mfu:.1%} MFU; an epoch of "
            f"{tokens:,} tokens is {steps:,} steps, {_duration(steps * best.seconds)}",
        ),
    ]
    return "the first of these\n" + "\n".join(f"  {name:<7} {text}" for name, text in lines)


def _start(best: Candidate, recipe_path: str | None, overrides: Sequence[str], out: Path | None) -> str:
    """Return the command that starts the run."""
    task = best.task
    if out is not None:
        words = [
            shlex.quote(str(out / "recipe.yaml")),
            f"--deepspeed {shlex.quote(str(out / 'deepspeed.json'))}",
        ]
    else:
        model = [] if best.recipe.model.path else ["model.path=DIR_OR_HUB_ID"]
        words = [*([recipe_path] if recipe_path else []), f"--deepspeed {best.ds_name}"]
        words += [f"--set {shlex.quote(one)}" for one in (*model, *overrides, *best.changes())]
    launcher = f"deepspeed --num_gpus {task.gpus} --module wands train"
    if task.gpus > task.ranks_per_node:
        nodes = task.gpus // task.ranks_per_node
        launcher = f"bash scripts/launch_multinode.sh --nnodes {nodes} --node-rank R --master-addr HOST --"
    return f"start it with\n  {launcher} {' '.join(words)}"


def _nothing(task: Task) -> str:
    """Describe the setting that needs least, and what would help."""
    least = None
    for name in task.ds_configs:
        for cp in (1, task.ranks_per_node):
            for checkpointing in ("offload", "full"):
                try:
                    one = build_candidate(task, name, cp, checkpointing, task.longest)
                except ConfigError:
                    continue
                if least is None or one.memory.needed < least.memory.needed:
                    least = one
    if least is None:
        return f"--gpus {task.gpus}: no DeepSpeed config is valid for this recipe; wands train --dry-run prints the reasons."
    host = (
        f" and {to_gib(least.host)} of each node's {to_gib(task.machine.host_memory)}" if least.host else ""
    )
    lora = "" if task.recipe.lora else " a LoRA (--set lora.rank=32),"
    how = f"{least.ds_name}, cp {least.cp}, checkpointing {least.recipe.model.checkpointing}"
    return (
        f"nothing fits {task.gpus} x {task.machine.name}: the least is {to_gib(least.memory.needed)} a GPU of "
        f"{to_gib(task.usable)}{host} ({how}, clips of up to {task.longest:,} tokens); use more or larger GPUs,{lora} "
        "lora.quantize, or shorter or smaller clips."
    )


def _cache_bytes(task: Task, variant: Variant) -> float:
    shape = variant.dit
    pt, ph, pw = shape.patch_size
    latents = (
        2 * shape.out_channels * pt * ph * pw * float(task.seq_lens.sum()) * (1 + (variant.num_images > 0))
    )
    pictures = 2 * shape.image_len * (shape.image_dim or 0)
    return latents + len(task.seq_lens) * (_TEXT_BYTES * shape.text_dim + pictures)


def _checkpoint_bytes(best: Candidate) -> int:
    trained = [(weight.name, weight.shape) for weight in best.workload.weights if weight.trained]
    held = (
        best.workload.trained if best.recipe.lora else sum(weight.numel for weight in best.workload.weights)
    )
    stage = int(best.ds_config["zero_optimization"].get("stage", 0))
    size = sum(checkpoint_bytes(held, trained, best.recipe.optim.name, stage))
    return best.task.num_models * (size + (4 * best.workload.trained if best.recipe.ema else 0))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
