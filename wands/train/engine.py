"""The DeepSpeed engine: whose key is whose, and one engine that knows nothing of context parallelism.

The JSON is the user's: ZeRO stage, offload, optimizer, scheduler, buckets, profiler are honoured as they stand. wands fills in
the batch arithmetic, the precision and whatever of optimizer, scheduler and clipping the JSON leaves out. A key that
contradicts the recipe, or that would do nothing here, is an error naming both files.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from wands.config import OptimSection, Recipe
from wands.errors import ConfigError

# Keys that DeepSpeed would accept and that change nothing, or the wrong thing, in this trainer.
_NOT_HERE = {
    "activation_checkpointing": "use model.checkpointing of the recipe",
    "amp": "use precision.compute of the recipe",
    "communication_data_type": "use precision.reduce of the recipe",
    "seq_parallel_communication_data_type": "use precision.reduce of the recipe",
    "sequence_parallel_size": "use parallel.ulysses_degree and parallel.ring_degree of the recipe",
    "data_parallel_size": "it follows from the world size and the recipe's parallel section",
    "mesh_param": "use the recipe's parallel section",
    "tensor_parallel": "wands shards sequences, not tensors",
    "dataloader_drop_last": "wands plans the data itself",
    "data_efficiency": "wands plans the data itself",
    "curriculum_learning": "wands plans the data itself",
    "pipeline": "wands has no pipeline stages",
    "sparse_attention": "Wan attends to everything",
    "progressive_layer_drop": "Wan has no such layers",
    "compression_training": "wands does not compress",
    "managed_gradient_accumulation": "wands sets the accumulation boundary itself",
}
_ADAM_DEFAULTS = {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}


def load_ds_config(path: str | Path | None) -> dict[str, Any]:
    """Read a DeepSpeed JSON; None is ZeRO-2 with everything left to wands.

    Raises:
        ConfigError: the file is missing or not a JSON object.
    """
    if path is None:
        return {"zero_optimization": {"stage": 2}}
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--deepspeed {path} cannot be read ({error.strerror}); give the path of a JSON file."
        ) from None
    except ValueError as error:
        raise ConfigError(f"--deepspeed {path} is not JSON ({error}); mend the file.") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"--deepspeed {path} must hold a JSON object, not {type(config).__name__}; mend the file."
        )
    return config


def build_ds_config(
    user: Mapping[str, Any],
    recipe: Recipe,
    *,
    world_size: int,
    device_type: str,
    names: tuple[str, str] = ("the DeepSpeed JSON", "the recipe"),
) -> dict[str, Any]:
    """Complete the user's JSON with what wands owns.

    Args:
        user: the JSON as read.
        recipe: the resolved recipe; a key counts as asked for when its file or ``--set`` names it.
        world_size: all ranks.
        device_type: "cuda" or "cpu".
        names: what to call the two files in an error.

    Returns:
        A config for `deepspeed.initialize`, optimizer and clipping included, scheduler as the user wrote it.

    Raises:
        ConfigError: every contradiction and every key without effect, in one report.
    """
    config = {key: value for key, value in copy.deepcopy(dict(user)).items() if value != "auto"}
    problems = [
        f"{names[0]}: {key} would do nothing here; {cure}."
        for key, cure in _NOT_HERE.items()
        if key in config
    ]
    problems += _fill_batch(config, recipe, world_size, names)
    problems += _fill_precision(config, recipe, names)
    problems += _fill_optimizer(config, recipe.optim, names)
    if "scheduler" in config:
        asked = recipe.optim.model_fields_set & {"schedule", "warmup", "min_lr_ratio"}
        problems += [
            f"{names[0]}: scheduler and {names[1]}: optim.{key} are both set; keep one."
            for key in sorted(asked)
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    if device_type == "cpu":
        _use_torch_optimizer(config)
    config.setdefault("zero_optimization", {"stage": 0})
    config.setdefault("steps_per_print", 2**31)  # wands prints its own line per step
    return config


def _fill_batch(config: dict[str, Any], recipe: Recipe, world_size: int, names: tuple[str, str]) -> list[str]:
    dp_size = world_size // recipe.parallel.cp_size
    accumulation = max(recipe.train.bins_per_step // dp_size, 1) if recipe.packing.enabled else 1
    wanted = {
        "train_micro_batch_size_per_gpu": (1, "a micro batch is one bin"),
        "gradient_accumulation_steps": (
            accumulation,
            f"train.bins_per_step={recipe.train.bins_per_step} / dp_size={dp_size}",
        ),
        # DeepSpeed counts every rank as data parallel: it is told nothing of context parallelism.
        "train_batch_size": (accumulation * world_size, "micro batch x accumulation x ranks"),
    }
    problems = [
        f"{names[0]}: {key}={config[key]} contradicts {names[1]}, which makes it {value} ({why}); leave it out of the JSON."
        for key, (value, why) in wanted.items()
        if key in config and config[key] != value
    ]
    config.pop("train_batch_size", None)
    config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = accumulation
    return problems


def _fill_precision(config: dict[str, Any], recipe: Recipe, names: tuple[str, str]) -> list[str]:
    precision = recipe.precision
    problems = []
    for key in ("bf16", "fp16"):
        if config.pop(key, {}).get("enabled"):
            problems.append(
                f"{names[0]}: {key}.enabled would cast the fp32 parts of Wan too; remove it and use "
                f"precision.compute of {names[1]}."
            )
    autocast = precision.compute == "bf16"
    theirs = config.pop("torch_autocast", None)
    if theirs is not None and (
        bool(theirs.get("enabled")) != autocast or (autocast and theirs.get("dtype") != "bfloat16")
    ):
        problems.append(
            f"{names[0]}: torch_autocast={theirs} contradicts {names[1]}: precision.compute={precision.compute}; keep one."
        )
    if autocast:
        # The listed classes are gathered and reduced in bf16; none listed means exact fp32 traffic.
        modules = ["torch.nn.Linear"] if precision.reduce == "bf16" else []
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": modules,
        }
    elif precision.reduce == "bf16":
        config["communication_data_type"] = "bf16"
    return problems


def _fill_optimizer(config: dict[str, Any], optim: OptimSection, names: tuple[str, str]) -> list[str]:
    asked = optim.model_fields_set
    problems = []
    section = config.setdefault("optimizer", {"type": "AdamW", "params": {}})
    params = section.setdefault("params", {})
    for key, field in _ADAM_DEFAULTS.items():
        ours, theirs = getattr(optim, field), params.get(key, "auto")
        ours = list(ours) if isinstance(ours, tuple) else ours
        if theirs == "auto":
            if key == "lr" or section["type"].lower() in ("adam", "adamw") or field in asked:
                params[key] = ours
        elif field in asked and theirs != ours:
            problems.append(
                f"{names[0]}: optimizer.params.{key}={theirs} contradicts {names[1]}: optim.{field}={ours}; keep one."
            )
    clip = config.setdefault("gradient_clipping", optim.grad_clip)
    if "grad_clip" in asked and clip != optim.grad_clip:
        problems.append(
            f"{names[0]}: gradient_clipping={clip} contradicts {names[1]}: optim.grad_clip={optim.grad_clip}; keep one."
        )
    return problems


def _use_torch_optimizer(config: dict[str, Any]) -> None:
    """On a CPU the fused and the offloaded Adam would be compiled on first use; torch's is exact and there already."""
    if config["optimizer"]["type"].lower() in ("adam", "adamw"):
        config["optimizer"]["params"].setdefault("torch_adam", True)
    if config.get("zero_optimization", {}).get("offload_optimizer"):
        config.setdefault("zero_force_ds_cpu_optimizer", False)


def learning_rate(config: Mapping[str, Any], recipe: Recipe) -> float:
    """Peak learning rate: the optimizer's own, scaled by the batch as the recipe asks."""
    optim = recipe.optim
    ratio = recipe.train.bins_per_step / optim.scale_lr_base
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.scale_lr]
    return float(config["optimizer"]["params"]["lr"]) * scale


def build_schedule(optim: OptimSection, total_steps: int) -> Callable[[int], float]:
    """Multiplier of the peak learning rate as a function of the optimizer steps already made.

    Args:
        optim: schedule, warm-up (steps, or a fraction of `total_steps`) and floor.
        total_steps: optimizer steps of the whole run.
    """
    warmup = round(optim.warmup * total_steps) if optim.warmup < 1 else round(optim.warmup)

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        if optim.schedule == "constant":
            return 1.0
        falling = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
        return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * falling

    return multiplier


def accelerator_type() -> str:
    """What DeepSpeed sees on this machine, "cuda" or "cpu" (DS_ACCELERATOR overrides)."""
    from deepspeed.accelerator import get_accelerator

    return "cuda" if get_accelerator().device_name() == "cuda" else "cpu"


def init_process_group() -> tuple[int, int, torch.device]:
    """Join the world that the launcher describes (one process when there is none).

    Returns:
        rank, world size, and this rank's device, already current.
    """
    import os

    import deepspeed

    if "RANK" not in os.environ:  # plain `wands train`
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    device_type = accelerator_type()
    device = (
        torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
        if device_type == "cuda"
        else torch.device("cpu")
    )
    if device_type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        # Ranks that each start a thread per core spin against each other and slow down a hundredfold.
        torch.set_num_threads(
            max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])), 1)
        )
    deepspeed.init_distributed(dist_backend="nccl" if device_type == "cuda" else "gloo", verbose=False)
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), device


def _free_port() -> int:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def build_engine(
    model: torch.nn.Module, ds_config: Mapping[str, Any], recipe: Recipe, total_steps: int
) -> Any:
    """Wrap the model in a DeepSpeed engine with the recipe's learning rate schedule, unless the JSON has its own.

    Args:
        model: already built; under ZeRO-3 inside `deepspeed.zero.Init`.
        ds_config: what `build_ds_config` returned.
        recipe: for the schedule.
        total_steps: optimizer steps of the whole run.
    """
    import deepspeed

    config = copy.deepcopy(dict(ds_config))
    config["optimizer"]["params"]["lr"] = learning_rate(ds_config, recipe)
    schedule = None
    if "scheduler" not in config:
        multiplier = build_schedule(recipe.optim, total_steps)

        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, multiplier)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, config=config, lr_scheduler=schedule, dist_init_required=False
    )
    return engine
