"""The block that a run prints before it starts: grid, batch arithmetic, data, kernels and memory."""

from __future__ import annotations

import numpy as np

from wands.config import ModelSection, Recipe
from wands.data.sources import describe_data
from wands.train.ds_config import learning_rate
from wands.train.engine import accelerator_type, ranks_per_node
from wands.train.job import Job
from wands.train.precision import describe_storage
from wands.variants import TEXT_LEN, DiTShape


def start_block(job: Job, start_step: int) -> str:
    """Describe a run.

    Args:
        job: the checked run.
        start_step: optimizer steps already made.
    """
    recipe, sampler, lens = job.recipe, job.sampler, job.seq_lens
    plan = sampler.epoch_plan(0)
    accumulation = recipe.train.bins_per_step // job.dp_size
    imbalance = float(np.mean([job.imbalance(bins) for bins in plan.steps[:64]]))
    flow = recipe.flow
    first, *further = describe_data(recipe.data, job.data)
    visited = np.array([i for bins in plan.steps for one in bins for i in one])
    tokens = f"{int(lens[visited].sum()):,} tokens"
    rows = [
        (
            "model",
            f"{job.variant.name}  {recipe.model.path} ({recipe.model.init}), {job.shape.num_params / 1e6:,.1f} M parameters",
        ),
        (
            "",
            f"{job.shape.num_layers} layers, {job.shape.num_heads} heads x {job.shape.head_dim}, ffn {job.shape.ffn_dim}",
        ),
        *(("", line) for line in _trained(job)),
        (
            "grid",
            f"{job.world_size} ranks = dp {job.dp_size} x ring {job.degrees.ring} x ulysses {job.degrees.ulysses}"
            + (f" (parallel.cp_size={recipe.parallel.cp_size})" if recipe.parallel.cp_size else "")
            + (", all-to-alls between nodes" if ranks_per_node() % job.degrees.ulysses else ""),
        ),
        (
            "engine",
            f"ZeRO-{job.zero_stage}, compute {recipe.precision.compute}, reduce {recipe.precision.reduce}, {_optimizer(job)}",
        ),
        *(("", line) for line in describe_storage(recipe)),
        ("attention", f"{_attention(job)}, checkpointing {_checkpointing(recipe.model)}"),
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
            f"{recipe.train.bins_per_step} bins = dp {job.dp_size} x accumulation {accumulation}, "
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
                f", first frame given {flow.i2v_ratio:.0%}" if "first_frame" in job.variant.conditions else ""
            ),
        ),
        ("memory", _memory_line(job)),
        ("output", str(job.output_dir)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _trained(job: Job) -> list[str]:
    """What is trained of the model, and how, where it is not all of it."""
    recipe, lines = job.recipe, []
    if recipe.model.merge_loras:
        lines.append(
            "merged: " + ", ".join(f"{one.path} x {one.scale:g}" for one in recipe.model.merge_loras)
        )
    if recipe.lora:
        start = f", going on from {recipe.lora.init_from}" if recipe.lora.init_from else ""
        lines.append(
            f"LoRA of rank {recipe.lora.rank}, alpha {recipe.lora.scaled_alpha:g}, on {recipe.lora.targets}: "
            f"{job.num_trained / 1e6:,.1f} M parameters are trained{start}"
        )
    elif job.num_trained != job.shape.num_params:
        lines.append(f"{job.num_trained / 1e6:,.1f} M parameters are trained, the others frozen")
    if recipe.drops:
        inputs = f", {recipe.lora.dropout:g} of the LoRA's inputs" if recipe.lora else ""
        lines.append(f"dropout: {recipe.model.dropout:g} of activations{inputs}")
    return lines + _experts(job) + _ema(job)


def _ema(job: Job) -> list[str]:
    section = job.recipe.ema
    if section is None:
        return []
    rest = f"{', warm-up' * section.warmup}{f', every {section.every} steps' if section.every > 1 else ''}, on {section.device}"
    return [f"ema decay {section.decay:g}{rest}"]


def _experts(job: Job) -> list[str]:
    """What is trained of a model of two experts, and how."""
    if len(job.variant.experts) == 1:
        return []
    ranges = {
        expert.name: f"{expert.name}-noise expert ({expert.part}), t from {1000 * expert.sigma_range[0]:g} to "
        f"{1000 * expert.sigma_range[1]:g}"
        for expert in job.experts
    }
    both = [
        "both learn from the clips of each step, one after the other: two updates a step, all states twice"
    ]
    return [f"trains the {text}" for text in ranges.values()] + (both if len(ranges) == 2 else [])


def _optimizer(job: Job) -> str:
    section, optim = job.ds_config["optimizer"], job.recipe.optim
    schedule = (
        job.ds_config["scheduler"]["type"]
        if "scheduler" in job.ds_config
        else f"{optim.schedule}, warm-up {optim.warmup:g}"
    )
    lr, clip = learning_rate(job.ds_config, job.recipe), job.ds_config["gradient_clipping"]
    return f"{section['type']} lr {lr:.2e} ({schedule}), clip {clip}"


def _attention(job: Job) -> str:
    import torch

    from wands.attention.varlen import choose_backend

    recipe, device = job.recipe, torch.device(accelerator_type())
    dtype = torch.bfloat16 if recipe.precision.compute == "bf16" else torch.float32
    return f"{choose_backend(recipe.attention.backend, device, dtype, job.shape.head_dim).name} kernels"


def _checkpointing(model: ModelSection) -> str:
    places = (("device", model.kept_on_device), ("host", model.kept_on_host))
    kept = [f"{', '.join(names)} on the {place}" for place, names in places if names]
    return model.checkpointing + (f" ({'; '.join(kept)})" if kept else "")


def _memory_line(job: Job) -> str:
    parts = estimate_memory(
        job.shape,
        job.recipe,
        zero_stage=job.zero_stage,
        world_size=job.world_size,
        zero=job.ds_config["zero_optimization"],
        ring_degree=job.degrees.ring,
        num_models=len(job.experts),
        num_trained=job.num_trained,
    )
    total = sum(parts.values())
    inner = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
    return f"about {_gb(total)} per rank: {inner}"


def _gb(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def estimate_memory(
    shape: DiTShape,
    recipe: Recipe,
    *,
    zero_stage: int,
    world_size: int,
    zero: dict[str, object],
    ring_degree: int = 1,
    num_models: int = 1,
    num_trained: int | None = None,
) -> dict[str, float]:
    """Bytes that one rank holds at the peak of a step, by component.

    DeepSpeed keeps the module's fp32 weights, fp32 master weights with two AdamW moments, and fp32 gradients; a stage divides the
    optimizer (1), the gradients (2) and the weights (3) by the world. What is offloaded to the host is left out.

    Args:
        shape: the DiT.
        recipe: bin size, ranks that share a bin, precision and checkpointing.
        zero_stage: 0 to 3.
        world_size: ranks that share the states.
        zero: the `zero_optimization` section, for offload and live parameters.
        ring_degree: ranks that share each sample's tokens.
        num_models: DiTs that are trained, one at a time; their states are all there, activations are those of one.
        num_trained: parameters of each that are trained; all by default.
    """
    params = num_models * shape.num_params
    trained = params if num_trained is None else num_models * num_trained
    share = {stage: world_size if zero_stage >= stage else 1 for stage in (1, 2, 3)}
    weights = 4.0 * params / share[3]
    optimizer = 12.0 * trained / share[1]
    gradients = 4.0 * trained / share[2]
    if zero.get("offload_optimizer"):
        optimizer = gradients = 0.0
    if zero.get("offload_param"):
        weights = 0.0
    tokens = recipe.packing.max_tokens / recipe.parallel.group_size
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    if zero_stage == 3:
        live = float(zero.get("stage3_max_live_parameters", 1e9))  # type: ignore[arg-type]
        parts["gathered weights"] = 4.0 * min(live, shape.num_params)
    parts["activations"] = _activation_bytes(shape, recipe, tokens)
    if ring_degree > 1:
        narrow = _narrow_bytes(recipe)
        # In backward: the block of keys and values that is here and the one that is coming; in fp32 the gradients of three blocks
        # (made here, on their way out, on their way in) and those of the queries.
        parts["ring buffers"] = tokens * shape.dim * (2 * 2 * narrow + 3 * 2 * 4 + 4)
    return parts


def _narrow_bytes(recipe: Recipe) -> int:
    return 2 if recipe.precision.compute == "bf16" else 4


def _activation_bytes(shape: DiTShape, recipe: Recipe, tokens: float) -> float:
    narrow = _narrow_bytes(recipe)
    # Kept for backward by one block, per token: fp32 residual stream, norms and modulated products (about 12 d), the narrow
    # inputs and outputs of the linears and of both attentions (about 14 d), and the feed-forward's two hidden states.
    block = tokens * (12 * 4 * shape.dim + 14 * narrow * shape.dim + 2 * narrow * shape.ffn_dim)
    text = TEXT_LEN * 4 * narrow * shape.dim
    inputs = tokens * 4 * shape.dim * shape.num_layers  # of every block: the fp32 residual stream
    attended = tokens * (narrow * shape.dim + 4 * shape.num_heads) * shape.num_layers  # and its log-sum-exp
    kept = {
        "none": block * shape.num_layers,
        "selective": inputs + attended + block,
        "full": inputs + block,
        "offload": 2 * inputs / shape.num_layers + block,
    }
    return float(kept[recipe.model.checkpointing] + text)
