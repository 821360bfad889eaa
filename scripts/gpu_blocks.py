"""Stage `block` of gpu_stages.py: one transformer block on packed clips."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_clock
import torch
from bench_record import Results, Rows
from gpu_sizes import PACKS, TEXT_TOKENS, TINY, VARIANT_NAMES
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wands.variants import VARIANTS

PRODUCTS = ("mm", "linear", "conv", "attention", "ring")  # operators whose bytes are not counted
FREE = ("prim", "sym_", "is_contiguous", "detach", "empty")  # operators that move no bytes


def overrides_of(
    device: str, variant: str, shapes: Sequence[Sequence[int]], folder: Path, num_layers: int | None
) -> list[str]:
    """Return recipe overrides for a run with random weights, on random clips that are packed into one sequence (bin).

    Args:
        device: "cuda" or "cpu". On a CPU the model is tiny.
        variant: name of the model.
        shapes: latent shape (frames, rows, columns) of each clip.
        folder: folder for the run, and for the config of a model that differs from the published model.
        num_layers: number of blocks; None for the number of blocks in the published model.
    """
    config = VARIANTS[variant].dit.to_config()
    shape = VARIANTS[variant].dit
    model = variant
    changes = {"num_layers": num_layers} if num_layers else {}
    if changes := changes | (TINY if device == "cpu" else {}):
        (folder / "transformer").mkdir(parents=True, exist_ok=True)
        text = json.dumps({"_class_name": "WanTransformer3DModel", **config, **changes})
        (folder / "transformer" / "config.json").write_text(text)
        model = str(folder)
    tokens = sum(f * h * w for f, h, w in shapes) // shape.patch_size[1] // shape.patch_size[2]
    mock = {"num_samples": len(shapes), "shapes": [list(size) for size in shapes], "text_lens": [TEXT_TOKENS]}
    return [
        *(f"model.path={model}", "model.init=random", "model.checkpointing=selective"),
        *(f"data.mock={json.dumps(mock)}", f"packing.max_tokens={tokens}", f"output_dir={folder / 'run'}"),
        *(f"precision.compute={'fp32' if device == 'cpu' else 'bf16'}", "logging.trackers=[]"),
        *("train.max_steps=6", "optim.warmup=0"),
    ]


class Counter(TorchDispatchMode):
    """Count operators that compute or copy, and the bytes of their inputs and outputs.

    Matmuls, convolutions and attention are counted as operators, but their bytes are not counted.
    """

    operators = bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not any(name in str(func) for name in FREE):
            self.operators += 1
            if not any(name in str(func) for name in PRODUCTS):
                tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
                self.bytes += sum(x.nbytes for x in tensors)
        return result


def block_call(device: str, overrides: Sequence[str]) -> tuple[Callable[[], None], int, int]:
    """Build a model of one block as a training run does. Return a function that runs the block on one bin.

    Returns:
        (function that runs the block's forward and backward pass on one bin, number of tokens of the bin, width of the
        model).
    """
    from wands.distributed.dims import ProcessGroups
    from wands.engine.engine import attention_backend, build_model
    from wands.train.batches import read_rows_of_bin
    from wands.train.prepare import load_run
    from wands.transfer import to_device

    options: dict[str, Any] = {"world_size": 1, "device_type": device, "encoders": lambda path: {}}
    run = load_run(None, None, overrides, ignore_output_dir=True, **options)
    model = build_model(
        run.recipe,
        run.ds_config,
        run.model.experts[0],
        groups=ProcessGroups(run.grid(0)),
        device=torch.device(device),
        backend=attention_backend(run.recipe, run.model.shape.head_dim, torch.device(device)),
    ).to(device)
    samples = [(run.data, i) for i in range(len(run.data.keys))]
    batch = read_rows_of_bin(run.collator, samples, [0] * len(samples), 0, run.grid(0))
    batch = to_device(batch, device)
    torch.set_autocast_cache_enabled(False)  # as the trainer does
    autocast = torch.autocast(device, torch.bfloat16, enabled=run.recipe.precision.compute == "bf16")
    inputs: list[Any] = []
    block = model.blocks[0]
    hook = block.register_forward_pre_hook(lambda _, given: inputs.extend(given))
    timesteps = torch.linspace(20, 980, len(samples), device=device)
    with autocast:
        model(**batch.model_inputs(batch.tokens, timesteps))
    hook.remove()
    inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    call = model._gradient_checkpointing_func if model.gradient_checkpointing else lambda f, *x: f(*x)
    gradient = torch.randn_like(inputs[0])

    def both() -> None:
        with autocast:
            result = call(block, *inputs)
        result.backward(gradient)

    return both, len(batch.tokens), run.model.shape.dim


def block(args: argparse.Namespace, variant: str, shapes: Sequence[Sequence[int]]) -> Rows:
    """Measure one transformer block on packed clips. Return two rows of totals, and a row for each of the 25 slowest kernels."""
    device = args.device
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*overrides_of(device, variant, shapes, Path(folder), 1), *args.overrides]
        both, tokens, dim = block_call(device, overrides)
    _, seconds = gpu_clock.time_calls(both, device)
    with Counter() as counter:
        both()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    with profile(activities=activities) as recorded:
        both()
        gpu_clock.wait(device)
    on_cpu = device == "cpu"
    kind = DeviceType.CPU if on_cpu else DeviceType.CUDA
    kernels = [
        {"kernel": event.key[:90], "calls": event.count, "ms": time_us / 1e3}
        for event in recorded.key_averages()
        if event.device_type == kind
        and (time_us := event.self_cpu_time_total if on_cpu else event.self_device_time_total)
    ]
    kernels.sort(key=lambda row: -row["ms"])
    total = {
        "kernel": "the block",
        "calls": sum(row["calls"] for row in kernels),
        "ms": seconds * 1e3,
        "operators": counter.operators,
        "GB": counter.bytes / 1e9,
        "U": counter.bytes / (tokens * dim),
    }
    return [total, {"kernel": "all kernels", "ms": sum(row["ms"] for row in kernels)}, *kernels[:25]]


def block_stage(args: argparse.Namespace, results: Results) -> None:
    """Measure one transformer block of each model size, for one clip and for many clips (stage `block`)."""
    for variant in VARIANT_NAMES if args.device == "cuda" else VARIANT_NAMES[:1]:
        for name, shapes in PACKS[args.device].items():
            results.run(f"{variant}, {name}", lambda v=variant, s=shapes: block(args, v, s))
