"""Describe a run before training starts, in a text about parallelism, batch size, data, kernels and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wands.config.deepspeed import learning_rate
from wands.config.recipe import FlowConfig, ModelConfig, Recipe
from wands.data.datasets import describe_data
from wands.data.packing import EpochPlan
from wands.distributed.bootstrap import accelerator_type, ranks_per_node
from wands.engine.engine import attention_backend
from wands.files import read_rows
from wands.model.lora import find_merge_loras, find_run_loras
from wands.objectives.flow_matching import FlowMatching
from wands.planning.memory import estimate_memory, to_gib
from wands.planning.workload import Workload
from wands.run.run_model import RunModel
from wands.run.sizes import step_flops
from wands.texts import plural
from wands.train.evaluation_plan import get_plan
from wands.train.prepared_run import PreparedRun
from wands.variants import ExtraInput


def start_block(run: PreparedRun) -> str:
    """Return the text that a run prints before training starts."""
    recipe = run.recipe
    model = run.model
    shape = model.shape
    schedule = run.schedule
    sampler = schedule.sampler
    workload = run.workload(accelerator_type())
    kernel: str = recipe.attention.backend
    if kernel != "auto" or accelerator_type() == "cpu":  # otherwise, training measures the kernels
        kernel = attention_backend(recipe, shape.head_dim, torch.device(accelerator_type())).name
    plan = sampler.epoch_plan(sampler.start[0])
    bins = [bin for step in plan.steps for bin in step if bin]
    rows = {
        "model": [
            f"{model.variant.name}  {recipe.model.path} ({recipe.model.init}), {shape.num_params / 1e6:,.1f} M parameters",
            f"{shape.num_layers} layers, {shape.num_heads} heads x {shape.head_dim}, ffn {shape.ffn_dim}",
            *(f"input {extra.name}: {_size_of(extra)}" for extra in model.variant.extra),
            *_trained(recipe, model, is_new=run.checkpoint is None),
        ],
        "grid": [_grid(run)],
        "engine": [
            f"ZeRO-{workload.zero_stage}, compute {recipe.precision.compute}, reduce {recipe.precision.reduce}, "
            f"{_optimizer(run.ds_config, recipe)}",
            *_storage(recipe),
        ],
        "attention": [f"{kernel} kernels, checkpointing {_checkpointing(recipe.model)}"],
        **_data_rows(run, plan, bins),
        "steps": [
            f"{sampler.total_steps:,} in all, {plan.num_steps:,} per epoch, starting at {run.start_step:,}",
            f"{plural(recipe.train.bins_per_step, 'bin')} per step = dp {run.dp_size} x accumulation "
            f"{recipe.train.bins_per_step // run.dp_size}, loss per {recipe.loss.reduction}",
        ],
        "flow": [_flow(recipe.flow, has_first_frame="first_frame" in model.variant.conditions)],
    }
    objective = run.objective
    if type(objective) is not FlowMatching:
        with_gradient, without_gradient = objective.forwards
        rows["objective"] = [
            f"{objective.name} (version {objective.version}), forwards of a bin: {with_gradient} with gradient, "
            f"{without_gradient} without"
        ]
    if sampler.total_steps <= recipe.optim.warmup and "scheduler" not in run.ds_config:
        rows["steps"].append(
            f"WARNING: all {sampler.total_steps:,} steps are warm-up (optim.warmup={recipe.optim.warmup:g}), so that little is "
            "learned; set train.max_steps=auto and optim.warmup=0.05"
        )
    if recipe.eval:
        rows["evaluation"] = [f"{get_plan(run)[0].describe()}, every {recipe.eval.every:,} steps"]
    if recipe.sample:
        flops = sampler.total_steps * step_flops(model, schedule, bins) / plan.num_steps
        rows["samples"] = [_samples(run, workload.video_flops, flops)]
    rows["plugins"] = [", ".join(run.plugin.sources)] if run.plugin.sources else []
    rows |= {"memory": [_memory_line(workload)], "output": [str(run.output_dir)]}
    rows["changed"] = run.changes()
    names = [(name if i == 0 else "", line) for name, lines in rows.items() for i, line in enumerate(lines)]
    return "\n".join(f"  {name:<12}{line}" for name, line in names)


def describe_lr_change(run: PreparedRun, planned_lr: float, lr: float) -> str | None:
    """Return a line about a learning rate that jumps in a resumed run because its settings have changed; None without a jump.

    `planned_lr` is the learning rate of the next step in the schedule of the checkpoint's run, `lr` that of this run.
    """
    checkpoint = run.checkpoint
    assert checkpoint is not None
    step = checkpoint.state.step
    rows = read_rows(checkpoint.folder.parents[1] / "metrics.jsonl")
    before = next(
        (row["lr"] for row in reversed(rows) if row.get("step") == step and row.get("lr")), planned_lr
    )
    if any(math.isclose(lr, other, rel_tol=1e-3) for other in (planned_lr, before)):
        return None
    key = before * run.recipe.optim.lr / learning_rate(run.ds_config, run.recipe)
    keep = f"--set optim.schedule=constant --set optim.warmup=0 --set optim.lr={key:.6g}"
    return (
        f"the learning rate changes from {before:.2e} at step {step} to {lr:.2e} at step {step + 1}, because the settings have "
        "changed since the checkpoint" + (f"; to keep {before:.2e}, add {keep}" if before else "")
    )


def _grid(run: PreparedRun) -> str:
    parallel = run.recipe.parallel
    return (
        f"{plural(run.world_size, 'rank')} = dp {run.dp_size} x ring {run.degrees.ring} x ulysses {run.degrees.ulysses}"
        + (f" x tensor {parallel.tensor_degree}" if parallel.tensor_degree > 1 else "")
        + (f" (parallel.cp_size={parallel.cp_size})" if parallel.cp_size else "")
        + (", all-to-alls cross nodes" if ranks_per_node() % run.degrees.ulysses else "")
        + (", tensor parallelism crosses nodes" if ranks_per_node() % parallel.tensor_degree else "")
    )


def _data_rows(run: PreparedRun, plan: EpochPlan, bins: Sequence[Sequence[int]]) -> dict[str, list[str]]:
    """Return the lines about the data and about its packing in the first epoch of this process, with its plan and its bins."""
    recipe = run.recipe
    schedule = run.schedule
    lens = schedule.num_tokens
    epoch = f"epoch {schedule.sampler.start[0]}"
    samples = [i for bin in bins for i in bin]
    imbalance = float(np.mean([schedule.imbalance(step, run.dp_size) for step in plan.steps[:64]]))
    return {
        "data": [
            *describe_data(recipe.data, run.data),
            f"{epoch}: {plural(len(samples), 'sample')}, {int(lens[samples].sum()):,} tokens",
            f"tokens per clip: min {lens.min():,}, median {int(np.median(lens)):,}, max {lens.max():,}",
        ],
        "packing": [
            f"{'on' if recipe.packing.enabled else 'off (one clip per forward)'}, bins of {recipe.packing.max_tokens:,} tokens",
            f"{epoch}: {plural(len(bins), 'bin')}, fill {plan.fill:.1%}, imbalance {imbalance:.2f}",
        ],
    }


def _flow(flow: FlowConfig, has_first_frame: bool) -> str:
    return (
        f"{flow.preset}: {'stratified ' * flow.stratified}{flow.timestep_sampling}, shift {flow.flow_shift}"
        f"{' by size' * flow.shift_by_size}, timesteps {flow.min_timestep:g} to {flow.max_timestep:g}, "
        f"uniform share {flow.mix_uniform}, weighting {flow.weighting}, caption dropout {flow.cfg_dropout}"
        + (f", first frame given {flow.i2v_ratio:.0%}" if has_first_frame else "")
    )


def _samples(run: PreparedRun, video_flops: float, training_flops: float) -> str:
    """Return the line about the samples, of which one set needs `video_flops`."""
    recipe = run.recipe
    assert recipe.sample is not None
    sets = 1 + -(-run.schedule.total_steps // recipe.sample.every) * (2 if recipe.ema else 1)
    share = sets * video_flops / training_flops
    text = f"{plural(len(run.samples), 'video')} every {recipe.sample.every:,} steps"
    return f"{text}: {share:.1%} of the training's FLOPs"


def _size_of(extra: ExtraInput) -> str:
    if extra.cross_tokens:
        return f"{extra.cross_tokens} tokens of the cross-attention to images"
    return f"{extra.channels} channels"


def _trained(recipe: Recipe, model: RunModel, is_new: bool) -> list[str]:
    expert = model.experts[0]
    two_experts = len(model.variant.experts) > 1
    lines = []
    for merge in recipe.model.merge_loras:
        files = find_merge_loras(merge, expert, recipe.model.experts) if two_experts else []
        lines.append("; ".join((f"merged LoRA: {merge.path} x {merge.scale:g}", *map(str, files))))
    if recipe.lora:
        files = []
        if recipe.lora.init_from and is_new and two_experts:  # a resumed run does not need the file
            files = find_run_loras(recipe.lora.init_from, "lora.init_from", expert, recipe.model.experts)
        start = f", initialized from {recipe.lora.init_from}" if recipe.lora.init_from else ""
        lines.append(
            f"LoRA of rank {recipe.lora.rank}, alpha {recipe.lora.scaled_alpha:g}, on {recipe.lora.targets}: "
            f"{model.num_trained / 1e6:,.1f} M parameters are trained{'; '.join((start, *map(str, files)))}"
        )
    elif model.num_trained != model.shape.num_params:
        lines.append(f"{model.num_trained / 1e6:,.1f} M parameters are trained, the others frozen")
    if recipe.uses_dropout:
        inputs = f", {recipe.lora.dropout:g} of the LoRA's inputs" if recipe.lora else ""
        lines.append(f"dropout: {recipe.model.dropout:g} of activations{inputs}")
    for expert in model.experts if len(model.variant.experts) > 1 else ():
        low, high = (1000 * sigma for sigma in expert.sigma_range)
        lines.append(f"trains the {expert.name}-noise expert ({expert.subfolder}), t {low:g} to {high:g}")
    if len(model.experts) == 2:
        lines.append(
            "both experts train on the clips of each step, one after the other: two updates per step, and two models in memory"
        )
    if recipe.ema:
        interval = f", every {recipe.ema.every} steps" if recipe.ema.every > 1 else ""
        warmup = ", warm-up" if recipe.ema.warmup else ""
        lines.append(f"ema decay {recipe.ema.decay:g}{warmup}{interval}, on {recipe.ema.device}")
    return lines


def _storage(recipe: Recipe) -> list[str]:
    """Return lines about the dtypes of weights, gradients and master weights, and the quantization of a LoRA's base model."""
    weights = recipe.precision.weights
    compute = recipe.precision.compute
    lines = [f"weights {weights}"]
    if weights == "bf16":
        lines = ["weights bf16 (linear layers, patches), fp32 (time embedding, modulation, norms, head)"]
        if not recipe.lora:
            lines.append(
                "masters fp32, initialized from the rounded weights; gradients computed in bf16, reduced in "
                f"{recipe.precision.reduce}"
            )
    elif recipe.precision.linears == "fp8":
        lines = ["weights fp32"]
    elif compute == "bf16":
        lines = ["weights fp32 (bf16 copies for matmuls)"]
    if recipe.precision.linears == "fp8":
        products = "" if recipe.precision.fp8_grad_weight == "fp8" else "; gradients of weights in bf16"
        lines.append(f"linear layers of the blocks multiply in fp8{products}")
    if recipe.lora and recipe.lora.quantize != "none":
        lines.append(
            f"base in {recipe.lora.quantize}: linear layers of the blocks; not embeddings, modulation, norms and head"
        )
    return lines


def _optimizer(ds_config: Mapping[str, Any], recipe: Recipe) -> str:
    schedule = f"{recipe.optim.schedule}, warm-up {recipe.optim.warmup:g}"
    if "scheduler" in ds_config:
        schedule = ds_config["scheduler"]["type"]
    lr = learning_rate(ds_config, recipe)
    clip = ds_config["gradient_clipping"]
    return f"{ds_config['optimizer']['type']} lr {lr:.2e} ({schedule}), clip {clip}"


def _checkpointing(model: ModelConfig) -> str:
    places = (("device", model.kept_on_device), ("host", model.kept_on_host))
    kept = [f"{', '.join(names)} on the {place}" for place, names in places if names]
    kept += [f"first {model.checkpoint_blocks} blocks"] if model.checkpoint_blocks != "auto" else []
    swapped = f", weights of {model.swap_blocks} blocks in host memory" if model.swap_blocks else ""
    return model.checkpointing + (f" ({'; '.join(kept)})" if kept else "") + swapped


def _memory_line(workload: Workload) -> str:
    memory = estimate_memory(workload)
    places = filter(None, (memory.device, memory.host))
    parts = [", ".join(f"{name} {to_gib(size)}" for name, size in place.items()) for place in places]
    return f"about {to_gib(memory.needed)} per rank: {'; on the host '.join(parts)}"
