"""Checks of the user's DeepSpeed JSON, alone and together with the recipe.

Each check returns messages and raises nothing, so that one report lists every problem.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from wands.config.optimizer_kinds import ADAM_KEYS, KINDS
from wands.config.recipe import Recipe
from wands.errors import suggest

# Keys that wands passes to DeepSpeed 0.19, by their JSON type. DeepSpeed itself ignores a misspelt key.
_TYPES: dict[tuple[type, ...], str] = {
    (
        dict,
    ): "zero_optimization optimizer scheduler bf16 fp16 torch_autocast aio timers flops_profiler comms_logger "
    "tensorboard wandb csv_monitor comet",
    (bool,): "wall_clock_breakdown memory_breakdown dump_state prescale_gradients disable_python_gc "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    (int,): "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print",
    (int, float): "gradient_clipping gradient_predivide_factor",
    (str,): "log_level communication_data_type",
}
KNOWN_KEYS = {key: types for types, keys in _TYPES.items() for key in keys.split()}
_TYPE_NAMES: dict[tuple[type, ...], str] = {
    (dict,): "an object",
    (bool,): "true or false",
    (int,): "a whole number",
    (int, float): "a number",
    (str,): "a string",
}
# Keys that DeepSpeed accepts but that have no effect, or a wrong one, in this trainer; and keys that DeepSpeed dropped.
UNUSED_KEYS = {
    "activation_checkpointing": "use model.checkpointing of the recipe",
    "seq_parallel_communication_data_type": "use precision.reduce of the recipe",
    "sequence_parallel_size": "use parallel.ulysses_degree and parallel.ring_degree of the recipe",
    "data_parallel_size": "it follows from the world size and the recipe's parallel section",
    "mesh_param": "use the recipe's parallel section",
    "tensor_parallel": "wands shards sequences, not tensors",
    "managed_gradient_accumulation": "wands sets the accumulation boundary itself",
    "gradient_allreduce_op": "wands averages gradients",
    "disable_allgather": "DeepSpeed no longer reads it",
    "checkpoint": "use the recipe's checkpoint section",
    "compile": "wands does not compile the engine",
    "hybrid_engine": "wands does not generate while it trains",
    "pipeline": "wands has no pipeline stages",
    "autotuning": "wands train does not run DeepSpeed's tuner",
    **dict.fromkeys(
        ("dataloader_drop_last", "data_efficiency", "curriculum_learning"), "wands plans the data itself"
    ),
    **dict.fromkeys(
        ("amp", "bfloat16", "data_types"), "use precision.compute and precision.reduce of the recipe"
    ),
    **dict.fromkeys(
        ("compression_training", "weight_quantization", "quantize_training"), "wands trains full weights"
    ),
    **dict.fromkeys(
        ("expert_parallel", "use_data_before_expert_parallelism"), "Wan has no mixture-of-experts layers"
    ),
    **dict.fromkeys(
        (
            *("elasticity", "eigenvalue", "graph_harvesting", "nebula", "progressive_layer_drop"),
            *("sparse_attention", "sparse_gradients"),
        ),
        "DeepSpeed dropped this feature",
    ),
}
ADAM_TYPES = ("adam", "adamw")
_ADAM_PARAMS = (
    *ADAM_KEYS,
    *("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fp32_optimizer_states", "set_grad_none"),
    *("fused", "foreach", "maximize", "capturable", "differentiable"),  # torch's
)


def offload_device(zero: Mapping[str, Any], key: str = "offload_optimizer") -> str:
    """Return "none", "cpu" or "nvme" for a section of `zero_optimization`: offload_optimizer or offload_param."""
    if key == "offload_optimizer" and zero.get("cpu_offload"):
        return "cpu"
    return str((zero.get(key) or {}).get("device", "none"))


def _broken(*rules: tuple[Any, str]) -> list[str]:
    """Return the messages of (is broken, message) pairs that are broken."""
    return [message for is_broken, message in rules if is_broken]


def check_json(config: dict[str, Any], name: str) -> list[str]:
    """Check a DeepSpeed JSON alone. Remove invalid keys and "auto", so that the other checks can read the rest.

    Args:
        config: the JSON; changed in place.
        name: file name for the messages.
    """
    problems = []
    for key, value in list(config.items()):
        types = KNOWN_KEYS.get(key, ())
        if value == "auto":
            pass
        elif key in UNUSED_KEYS:
            problems.append(f"{name}: {key} would do nothing here; {UNUSED_KEYS[key]}.")
        elif not types:
            problems.append(f"{name}: {key} is not a key of a DeepSpeed config; {suggest(key, KNOWN_KEYS)}")
        elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            problems.append(f"{name}: {key}={json.dumps(value)} must be {_TYPE_NAMES[types]}; fix the value.")
        else:
            continue
        del config[key]
    for key, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if key not in config:
            continue
        kind, params = config[key].get("type"), config[key].get("params", {})
        if not isinstance(kind, str):
            problems.append(f"{name}: {key}.type is missing; name one, for example {example}.")
            del config[key]
        elif not isinstance(params, dict):
            problems.append(f"{name}: {key}.params={json.dumps(params)} must be an object; fix the value.")
            del config[key]
    optimizer, scheduler = config.get("optimizer", {}), config.get("scheduler", {})
    params = optimizer.get("params", {})
    problems += [
        f"{name}: scheduler.params.{key}=auto is not supported here; give a value."
        for key, value in scheduler.get("params", {}).items()
        if value == "auto"
    ]
    problems += [
        f"{name}: optimizer.params.{key} is not a key of {optimizer['type']}; {suggest(key, _ADAM_PARAMS)}"
        for key in params
        if optimizer["type"].lower() in ADAM_TYPES and key not in _ADAM_PARAMS
    ]
    lr = params.get("lr", "auto")
    if lr != "auto" and (isinstance(lr, bool) or not isinstance(lr, int | float)):
        problems.append(f"{name}: optimizer.params.lr={json.dumps(lr)} must be a number; fix the value.")
    return problems + _check_zero(config, name)


def _check_zero(config: dict[str, Any], name: str) -> list[str]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    if "zero_optimization" not in config:
        return []
    zero = {key: value for key, value in config.pop("zero_optimization").items() if value != "auto"}
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            key = ".".join(["zero_optimization", *map(str, item["loc"])])
            rule = "is not a key of a DeepSpeed config" if item["type"] == "extra_forbidden" else item["msg"]
            problems.append(f"{name}: {key}: {rule}; fix the key.")
        return problems
    config["zero_optimization"] = zero
    stage = int(zero.get("stage", 0))
    problems = [
        f"{name}: zero_optimization.{key} would do nothing at stage {stage}; use stage {least} or higher, or remove the key."
        for key, least in (("offload_param", 3), ("offload_optimizer", 1))
        if (zero.get(key) or {}).get("device", "none") != "none" and stage < least
    ]
    return problems + _broken(
        (
            zero.get("round_robin_gradients"),
            f"{name}: zero_optimization.round_robin_gradients=true stores parameters in an order that checkpoints and ema do "
            "not know, so they would be restored to wrong places; remove the key.",
        )
    )


def check_optimizer(recipe: Recipe, config: Mapping[str, Any]) -> list[str]:
    """Check whether `optim.name` works with the rest of the recipe and with the merged DeepSpeed config."""
    name, zero = recipe.optim.name, config.get("zero_optimization", {})
    stage, package, offload = int(zero.get("stage", 0)), KINDS[name].package, offload_device(zero)
    clip, reduced_in = config["gradient_clipping"], config.get("communication_data_type")
    muon = name == "muon"
    return _broken(
        (
            package and importlib.util.find_spec(package) is None,
            f"optim.name={name} needs {package}, which is not installed; pip install 'wands[8bit]'.",
        ),
        (
            name == "adafactor" and stage > 0,
            f"optim.name=adafactor keeps the rows and columns of whole matrices, and ZeRO-{stage} cuts matrices into flat "
            "partitions; use zero_optimization.stage=0 (Adafactor's states are small), or optim.name=adamw8bit.",
        ),
        (
            name == "adamw8bit" and offload == "nvme",
            "optim.name=adamw8bit has states that DeepSpeed cannot swap to NVMe; use offload_optimizer.device=cpu.",
        ),
        (
            muon and recipe.lora is not None,
            "optim.name=muon updates the matrices of a full finetune, but a LoRA trains their factors; use optim.name=adamw "
            "or adamw8bit.",
        ),
        (
            muon and offload != "none",
            "optim.name=muon multiplies whole matrices in its step, which belongs on the device; remove "
            "zero_optimization.offload_optimizer, or use optim.name=adamw.",
        ),
        (
            muon and stage > 0 and clip > 0,
            f"optim.grad_clip={clip} would clip Muon's update at ZeRO-{stage}, where DeepSpeed computes the norm after "
            "orthogonalisation; set optim.grad_clip=0 (the size of Muon's update does not depend on the gradient's), or use "
            "zero_optimization.stage=0.",
        ),
        (
            muon and stage == 3 and zero.get("reduce_scatter"),
            "optim.name=muon needs zero_optimization.reduce_scatter=false at ZeRO-3; remove the key.",
        ),
        (
            muon and "scheduler" in config,
            "optim.name=muon uses a learning rate for each shape of matrix, and the JSON's scheduler sets a single one; remove "
            "the scheduler and use optim.schedule.",
        ),
        (
            muon and stage == 3 and reduced_in,
            f"precision.reduce={recipe.precision.reduce} would keep Muon's momentum in {recipe.precision.reduce} at ZeRO-3; "
            "use precision.reduce=fp32, or zero_optimization.stage=2.",
        ),
    )


def check_weight_dtypes(recipe: Recipe, zero: Mapping[str, Any]) -> list[str]:
    """Check whether `precision.weights` and `lora.quantize` work with the `zero_optimization` section."""
    stage, key = int(zero.get("stage", 0)), "precision.weights=bf16"
    bf16, quantize = recipe.precision.weights == "bf16", recipe.lora.quantize if recipe.lora else "none"
    full = bf16 and recipe.lora is None  # the trained weights of a LoRA run are fp32
    return _broken(
        (
            quantize != "none"
            and (zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights")),
            f"lora.quantize={quantize} keeps codes, which ZeRO++ would quantise again; remove "
            "zero_optimization.zero_quantized_weights and zero_quantized_nontrainable_weights, or set lora.quantize=none.",
        ),
        (
            (bf16 or quantize != "none") and offload_device(zero, "offload_param") == "nvme",
            f"{key if bf16 else f'lora.quantize={quantize}'} cannot be swapped to NVMe, because DeepSpeed's buffers have a "
            "single dtype; use zero_optimization.offload_param.device=cpu, or remove offload_param.",
        ),
        (
            bf16 and recipe.precision.compute == "fp32",
            f"{key} would round weights that precision.compute=fp32 multiplies in fp32; set precision.compute=bf16, or "
            "precision.weights=fp32.",
        ),
        (
            full and stage == 0,
            f"{key} has no fp32 masters at ZeRO-0, so small updates would be lost; use zero_optimization.stage=1 or 2, or "
            "precision.weights=fp32.",
        ),
        (
            full and stage == 3,
            f"{key} would cost memory in a full finetune at ZeRO-3, whose fp32 weights are their own masters; use "
            "precision.weights=fp32 (precision.reduce=bf16 halves the gathered bytes), or zero_optimization.stage=1 or 2.",
        ),
        (
            full and stage == 2 and offload_device(zero) != "none",
            f"{key} would sum the gradients of micro batches in bf16 on the host at ZeRO-2; use zero_optimization.stage=1, "
            "remove zero_optimization.offload_optimizer, or use precision.weights=fp32.",
        ),
        (
            full and recipe.optim.name == "muon",
            f"{key} is not for optim.name=muon, which DeepSpeed steps in a single dtype; use precision.weights=fp32 or "
            "optim.name=adamw.",
        ),
    )


def check_ema(recipe: Recipe, zero: Mapping[str, Any]) -> list[str]:
    """Check whether `ema` can read the optimizer's master weights."""
    return _broken(
        (
            recipe.ema is not None and offload_device(zero) == "nvme",
            "ema cannot be used with zero_optimization.offload_optimizer.device=nvme, because reading the weights back from "
            "disk would cost as much as the step; use device=cpu, or remove ema.",
        )
    )
