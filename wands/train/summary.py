"""Start block: the text about grid, batch size, data, kernels and memory that a run prints before it starts."""

from __future__ import annotations

import numpy as np

from wands.config.deepspeed import learning_rate
from wands.config.recipe import ModelConfig
from wands.data.datasets import describe_data
from wands.distributed.bootstrap import accelerator_type, ranks_per_node
from wands.planning.memory import estimate_memory, to_gib
from wands.train.precision import describe_storage
from wands.train.run import TrainingRun


def start_block(run: TrainingRun) -> str:
    """Describe a run in lines of text.

    Args:
        run: the checked run.
    """
    recipe, sampler, lens = run.recipe, run.sampler, run.seq_lens
    start_step = run.checkpoint.state.step if run.checkpoint else 0
    plan = sampler.epoch_plan(0)
    accumulation = recipe.train.bins_per_step // run.dp_size
    imbalance = float(np.mean([run.imbalance(bins) for bins in plan.steps[:64]]))
    flow = recipe.flow
    first, *further = describe_data(recipe.data, run.data)
    visited = np.array([i for bins in plan.steps for one in bins for i in one])
    tokens = f"{int(lens[visited].sum()):,} tokens"
    rows = [
        (
            "model",
            f"{run.variant.name}  {recipe.model.path} ({recipe.model.init}), {run.shape.num_params / 1e6:,.1f} M parameters",
        ),
        (
            "",
            f"{run.shape.num_layers} layers, {run.shape.num_heads} heads x {run.shape.head_dim}, ffn {run.shape.ffn_dim}",
        ),
        *(("", line) for line in _trained(run)),
        (
            "grid",
            f"{run.world_size} ranks = dp {run.dp_size} x ring {run.degrees.ring} x ulysses {run.degrees.ulysses}"
            + (f" (parallel.cp_size={recipe.parallel.cp_size})" if recipe.parallel.cp_size else "")
            + (", all-to-alls cross nodes" if ranks_per_node() % run.degrees.ulysses else ""),
        ),
        (
            "engine",
            f"ZeRO-{run.zero_stage}, compute {recipe.precision.compute}, reduce {recipe.precision.reduce}, {_optimizer(run)}",
        ),
        *(("", line) for line in describe_storage(recipe)),
        ("attention", f"{_attention(run)}, checkpointing {_checkpointing(recipe.model)}"),
        ("data", f"{first}, {tokens}" if not further else first),
        *(("", line) for line in further),
        *([("", f"epoch 0: {len(visited):,} samples, {tokens}")] if further else []),
        ("", f"tokens per clip: min {lens.min():,}, median {int(np.median(lens)):,}, max {lens.max():,}"),
        (
            "packing",
            f"{'on' if recipe.packing.enabled else 'off (one clip per forward)'}, bins of {recipe.packing.max_tokens:,} tokens",
        ),
        (
            "",
            f"epoch 0: {sum(1 for s in plan.steps for b in s if b)} bins, fill {plan.fill:.1%}, imbalance {imbalance:.2f}",
        ),
        (
            "step",
            f"{recipe.train.bins_per_step} bins = dp {run.dp_size} x accumulation {accumulation}, "
            f"loss per {recipe.loss.reduction}",
        ),
        (
            "steps",
            f"{sampler.total_steps:,} in all, {plan.num_steps:,} per epoch, starting at {start_step:,}",
        ),
        (
            "flow",
            f"{flow.preset}: {flow.timestep_sampling}, shift {flow.flow_shift}, uniform share {flow.mix_uniform}, "
            f"weighting {flow.weighting}, caption dropout {flow.cfg_dropout}"
            + (
                f", first frame given {flow.i2v_ratio:.0%}" if "first_frame" in run.variant.conditions else ""
            ),
        ),
        ("memory", _memory_line(run)),
        ("output", str(run.output_dir)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _trained(run: TrainingRun) -> list[str]:
    """Describe LoRA, frozen parameters, dropout, experts and moving average."""
    recipe, lines = run.recipe, []
    if recipe.model.merge_loras:
        lines.append(
            "merged: " + ", ".join(f"{one.path} x {one.scale:g}" for one in recipe.model.merge_loras)
        )
    if recipe.lora:
        start = f", initialised from {recipe.lora.init_from}" if recipe.lora.init_from else ""
        lines.append(
            f"LoRA of rank {recipe.lora.rank}, alpha {recipe.lora.scaled_alpha:g}, on {recipe.lora.targets}: "
            f"{run.num_trained / 1e6:,.1f} M parameters are trained{start}"
        )
    elif run.num_trained != run.shape.num_params:
        lines.append(f"{run.num_trained / 1e6:,.1f} M parameters are trained, the others frozen")
    if recipe.uses_dropout:
        inputs = f", {recipe.lora.dropout:g} of the LoRA's inputs" if recipe.lora else ""
        lines.append(f"dropout: {recipe.model.dropout:g} of activations{inputs}")
    return lines + _experts(run) + _ema(run)


def _ema(run: TrainingRun) -> list[str]:
    section = run.recipe.ema
    if section is None:
        return []
    rest = f"{', warm-up' * section.warmup}{f', every {section.every} steps' if section.every > 1 else ''}, on {section.device}"
    return [f"ema decay {section.decay:g}{rest}"]


def _experts(run: TrainingRun) -> list[str]:
    """Describe the trained experts of a model with two experts."""
    if len(run.variant.experts) == 1:
        return []
    ranges = {
        expert.name: f"{expert.name}-noise expert ({expert.subfolder}), t from {1000 * expert.sigma_range[0]:g} to "
        f"{1000 * expert.sigma_range[1]:g}"
        for expert in run.experts
    }
    both = [
        "both experts train on the clips of each step, one after the other: two updates per step, and all states twice"
    ]
    return [f"trains the {text}" for text in ranges.values()] + (both if len(ranges) == 2 else [])


def _optimizer(run: TrainingRun) -> str:
    section, optim = run.ds_config["optimizer"], run.recipe.optim
    schedule = (
        run.ds_config["scheduler"]["type"]
        if "scheduler" in run.ds_config
        else f"{optim.schedule}, warm-up {optim.warmup:g}"
    )
    lr, clip = learning_rate(run.ds_config, run.recipe), run.ds_config["gradient_clipping"]
    return f"{section['type']} lr {lr:.2e} ({schedule}), clip {clip}"


def _attention(run: TrainingRun) -> str:
    import torch

    from wands.attention.varlen import choose_backend

    recipe, device = run.recipe, torch.device(accelerator_type())
    dtype = torch.bfloat16 if recipe.precision.compute == "bf16" else torch.float32
    return f"{choose_backend(recipe.attention.backend, device, dtype, run.shape.head_dim).name} kernels"


def _checkpointing(model: ModelConfig) -> str:
    places = (("device", model.kept_on_device), ("host", model.kept_on_host))
    kept = [f"{', '.join(names)} on the {place}" for place, names in places if names]
    return model.checkpointing + (f" ({'; '.join(kept)})" if kept else "")


def _memory_line(run: TrainingRun) -> str:
    memory = estimate_memory(run.workload(accelerator_type()), run.recipe, run.ds_config)
    inner = ", ".join(f"{name} {to_gib(size)}" for name, size in memory.device.items())
    host = ", ".join(f"{name} {to_gib(size)}" for name, size in memory.host.items())
    return f"about {to_gib(memory.needed)} per rank: {inner}" + (f"; on the host {host}" if host else "")
