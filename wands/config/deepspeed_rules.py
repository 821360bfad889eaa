"""Checks of the user's DeepSpeed JSON, alone and with the recipe. One report can list every problem.

A check returns messages, or rules for `failed_rules`: a dict from error message to whether the rule is broken.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from wands.config.base import invalid_reason
from wands.config.optimizer_kinds import ADAM_KEYS, KINDS
from wands.config.recipe import Recipe
from wands.errors import failed_rules, suggest

# Keys that wands passes to DeepSpeed 0.19, grouped by the type of their value. DeepSpeed would ignore a misspelt key.
_KEYS: dict[str, tuple[Any, str]] = {
    "an object": (
        dict,
        "zero_optimization optimizer scheduler bf16 fp16 torch_autocast aio timers flops_profiler comms_logger",
    ),
    "true or false": (
        bool,
        "wall_clock_breakdown memory_breakdown dump_state prescale_gradients disable_python_gc "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    ),
    "a whole number": (
        int,
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print",
    ),
    "a number": (int | float, "gradient_clipping gradient_predivide_factor"),
    "a string": (str, "log_level communication_data_type"),
}
KNOWN_KEYS = {key: (name, kind) for name, (kind, keys) in _KEYS.items() for key in keys.split()}
"""(name of the type in messages, type) of each key that a DeepSpeed JSON may contain."""
# Keys that DeepSpeed accepts, but that have no effect or a wrong effect in wands, and keys of removed DeepSpeed features.
_UNUSED = {
    "use model.checkpointing of the recipe": "activation_checkpointing",
    "use precision.reduce of the recipe": "seq_parallel_communication_data_type",
    "use the recipe's parallel section": "sequence_parallel_size data_parallel_size mesh_param tensor_parallel",
    "remove the key, because wands sets the accumulation boundary": "managed_gradient_accumulation",
    "remove the key, because wands always averages gradients": "gradient_allreduce_op",
    "use the recipe's checkpoint section": "checkpoint",
    "use logging.trackers of the recipe, which also get the loss": "tensorboard wandb csv_monitor comet",
    "remove the key, because wands does not use this part of DeepSpeed": "autotuning compile compression_training "
    "expert_parallel hybrid_engine pipeline quantize_training use_data_before_expert_parallelism "
    "weight_quantization",
    "remove the key, because wands plans the data": "dataloader_drop_last data_efficiency curriculum_learning",
    "use precision.compute and precision.reduce of the recipe": "amp bfloat16 data_types",
    "remove the key, because DeepSpeed dropped this feature": "elasticity eigenvalue graph_harvesting nebula "
    "progressive_layer_drop sparse_attention sparse_gradients disable_allgather",
}
UNUSED_KEYS = {key: fix for fix, keys in _UNUSED.items() for key in keys.split()}
"""Keys of DeepSpeed that wands refuses, because they have no useful effect in wands, with the fix."""
ADAM_TYPES = ("adam", "adamw")
QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
ZERO_PLUS_PLUS = ("zero_hpz_partition_size", *QUANTIZED_KEYS, "zero_quantized_gradients")
"""Keys of `zero_optimization` that switch on parts of ZeRO++. DeepSpeed reads these keys only at stage 3."""
_ADAM_PARAMS = (
    *ADAM_KEYS,
    *("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fp32_optimizer_states", "set_grad_none"),
    *("fused", "foreach", "maximize", "capturable", "differentiable"),  # only in torch's Adam
)


def offload_device(zero: Mapping[str, Any], key: str = "offload_optimizer") -> str:
    """Return the device to which a section of `zero_optimization` offloads: "none", "cpu" or "nvme"."""
    if key == "offload_optimizer" and zero.get("cpu_offload"):
        return "cpu"
    return str((zero.get(key) or {}).get("device", "none"))


def check_json(config: dict[str, Any], name: str) -> list[str]:
    """Check a DeepSpeed JSON, called `name` in messages, without the recipe, and return one message for each problem.

    Invalid sections and top-level keys, and keys with the value "auto", are removed from `config` for later checks.
    """
    problems = []
    for key, value in list(config.items()):
        type_name, kind = KNOWN_KEYS.get(key, (None, None))
        if value == "auto":
            pass
        elif key in UNUSED_KEYS:
            problems.append(f"{name}: {key} is not supported by wands; {UNUSED_KEYS[key]}.")
        elif type_name is None:
            problems.append(f"{name}: {key} is not a key of a DeepSpeed config; {suggest(key, KNOWN_KEYS)}")
        elif not _has_type(value, kind):
            problems.append(f"{name}: {key}={json.dumps(value)} must be {type_name}; fix the value.")
        else:
            continue
        del config[key]
    for key, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        section = config.get(key, {"type": example})
        if not isinstance(section.get("type"), str):
            problems.append(f"{name}: {key}.type must be a name; set {key}.type, for example to {example}.")
        elif not isinstance(params := section.get("params", {}), dict):
            problems.append(f"{name}: {key}.params={json.dumps(params)} must be an object; fix the value.")
        else:
            continue
        del config[key]
    optimizer = config.get("optimizer", {})
    scheduler = config.get("scheduler", {})
    problems += [
        f"{name}: scheduler.params.{key}=auto is not supported by wands; replace auto by a value."
        for key, value in scheduler.get("params", {}).items()
        if value == "auto"
    ]
    for key, value in optimizer.get("params", {}).items():
        if optimizer["type"].lower() in ADAM_TYPES and key not in _ADAM_PARAMS:
            fix = suggest(key, _ADAM_PARAMS)
            problems.append(f"{name}: optimizer.params.{key} is not a key of {optimizer['type']}; {fix}")
        elif key == "lr" and value != "auto" and not _has_type(value, int | float):
            problems.append(
                f"{name}: optimizer.params.lr={json.dumps(value)} must be a number; fix the value."
            )
    return problems + _check_zero(config, name)


def _has_type(value: Any, kind: Any) -> bool:
    # Python counts bool as int.
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


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
            is_unknown = item["type"] == "extra_forbidden"
            rule = "unknown key of a DeepSpeed config" if is_unknown else invalid_reason(item)
            problems.append(f"{name}: {key}: {rule}; correct or remove the key.")
        return problems
    config["zero_optimization"] = zero
    stage = int(zero.get("stage", 0))
    round_robin = zero.get("round_robin_gradients")
    plus = [key for key in ZERO_PLUS_PLUS if int(zero.get(key, 0)) > (key == "zero_hpz_partition_size")]
    rules: dict[str, object] = {
        f"{name}: zero_optimization.offload_param has no effect at ZeRO stage {stage}; use stage 3, or remove the "
        "key.": stage < 3 and offload_device(zero, "offload_param") != "none",
        f"{name}: zero_optimization.offload_optimizer has no effect at ZeRO stage {stage}; use stage 1 or higher, or remove "
        "the key.": stage < 1 and offload_device(zero) != "none",
        f"{name}: zero_optimization.round_robin_gradients=true stores parameters in an order that wands does not expect, so "
        "a resumed run would load values into wrong parameters; remove the key.": round_robin,
        f"{name}: zero_optimization.compute_grad_norm=false leaves out the norm by which wands judges every update; remove the "
        "key.": not zero.get("compute_grad_norm", True),
        f"{name}: zero_optimization.{' and '.join(plus)} has no effect at ZeRO stage {stage}; use stage 3, or remove the "
        "key.": stage < 3 and plus,
        f"{name}: zero_optimization.zero_quantized_gradients=true reads gradients as fp16, but wands has fp32 or bf16 gradients, "
        "so a run on several nodes would train on wrong numbers; remove the key. To send fewer bytes, set "
        "precision.reduce=bf16.": zero.get("zero_quantized_gradients"),
    }
    return failed_rules(rules)


def optimizer_rules(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, object]:
    """Return the rules that `optim.name` imposes on other keys and on a `config` with optimizer and gradient clipping."""
    name = recipe.optim.name
    reduce = recipe.precision.reduce
    clip = config["gradient_clipping"]
    package = KINDS[name].package
    zero = config.get("zero_optimization", {})
    is_missing = package and importlib.util.find_spec(package) is None
    stage = int(zero.get("stage", 0))
    offload = offload_device(zero)
    is_muon = name == "muon"
    is_sharded_muon = is_muon and stage == 3
    return {
        f"optim.name={name} needs {package}, which is not installed; run pip install -e '.[8bit]'.": is_missing,
        f"optim.name=adafactor needs whole weight matrices, but ZeRO-{stage} cuts the matrices into flat partitions; use "
        "zero_optimization.stage=0 (Adafactor's states are small), or "
        "optim.name=adamw8bit.": name == "adafactor" and stage > 0,
        "zero_optimization.offload_optimizer.device=nvme keeps the fp32 master weights in files that wands cannot read for a "
        "checkpoint; use device=cpu.": offload == "nvme",
        "optim.name=muon works only for full finetunes, but the recipe has a lora section; use optim.name=adamw or "
        "adamw8bit.": is_muon and recipe.lora,
        "optim.name=muon multiplies whole matrices in each step, which is too slow on the host; remove "
        "zero_optimization.offload_optimizer, or use optim.name=adamw.": is_muon and offload != "none",
        f"optim.grad_clip={clip} would clip Muon's update at ZeRO-{stage}, where DeepSpeed computes the norm after "
        "orthogonalization; set optim.grad_clip=0 (large gradients do not make Muon's update larger), or use "
        "zero_optimization.stage=0.": is_muon and stage > 0 and clip > 0,
        "optim.name=muon needs zero_optimization.reduce_scatter=false at ZeRO-3; set "
        "reduce_scatter=false.": is_sharded_muon and zero.get("reduce_scatter"),
        "optim.name=muon needs a learning rate for each shape of matrix, but a scheduler in the JSON sets one learning rate "
        "for all; remove the scheduler and use optim.schedule.": is_muon and "scheduler" in config,
        f"precision.reduce={reduce} would keep Muon's momentum in {reduce} at ZeRO-3; use precision.reduce=fp32, or "
        "zero_optimization.stage=2.": is_sharded_muon and config.get("communication_data_type"),
    }


def fp8_rules(recipe: Recipe) -> dict[str, object]:
    """Return the rules that fp8 imposes on other recipe keys."""
    precision = recipe.precision
    quantize = recipe.lora.quantize if recipe.lora else "none"
    multiplies = precision.linears == "fp8"
    key = "precision.linears=fp8" if multiplies else "lora.quantize=fp8"
    has_weight_gradients = multiplies and recipe.lora is None
    return {
        f"{key} multiplies in fp8, but precision.compute=fp32 asks for products in fp32; set precision.compute=bf16, or remove "
        f"{key.partition('=')[0]}.": precision.compute == "fp32" and (multiplies or quantize == "fp8"),
        f"precision.linears=fp8 cannot multiply the codes of lora.quantize={quantize}; set lora.quantize to fp8 or none, or "
        "precision.linears=bf16.": multiplies and quantize in ("int8", "nf4"),
        "precision.fp8_grad_weight=bf16 has no effect without a full finetune with precision.linears=fp8; remove the "
        "key.": precision.fp8_grad_weight == "bf16" and not has_weight_gradients,
    }


def swap_rules(recipe: Recipe, zero: Mapping[str, Any]) -> dict[str, object]:
    """Return the rules of `model.swap_blocks`. `zero` is the section `zero_optimization` of the DeepSpeed JSON."""
    model = recipe.model
    if not model.swap_blocks:
        return {}
    key = f"model.swap_blocks={model.swap_blocks}"
    stage = int(zero.get("stage", 0))
    most = model.checkpoint_blocks
    too_many = isinstance(most, int) and isinstance(model.swap_blocks, int) and model.swap_blocks > most
    return {
        f"{key} needs frozen weights, but a full finetune trains them; add a lora section, or set "
        "model.swap_blocks=0.": recipe.lora is None,
        f"{key} needs blocks that the backward pass runs again, but model.checkpointing=none; set model.checkpointing=full, "
        "selective or offload.": model.checkpointing == "none",
        f"{key} swaps blocks that the backward pass does not run again, because model.checkpoint_blocks={most}; raise "
        "model.checkpoint_blocks, or lower model.swap_blocks.": too_many,
        f"{key} has no effect on weights that ZeRO-3 divides among the GPUs; use zero_optimization.stage=2, or set "
        "model.swap_blocks=0.": stage == 3,
        f"{key} is not tested with parallel.tensor_degree={recipe.parallel.tensor_degree}; remove one of the two "
        "keys.": recipe.parallel.tensor_degree > 1,
    }


def tensor_rules(recipe: Recipe, zero: Mapping[str, Any]) -> dict[str, object]:
    """Return the rules that tensor parallelism imposes on other settings. `zero` is as in `swap_rules`."""
    degree = recipe.parallel.tensor_degree
    key = f"parallel.tensor_degree={degree}"
    quantize = recipe.lora.quantize if recipe.lora else "none"
    offloads = [
        name for name in ("offload_optimizer", "offload_param") if offload_device(zero, name) != "none"
    ]
    plus = [name for name in ZERO_PLUS_PLUS if int(zero.get(name, 0)) > (name == "zero_hpz_partition_size")]
    rules: dict[str, object] = {
        f"{key} does not divide layers that multiply in fp8; set precision.linears=bf16, or use parallel.cp_size instead of "
        "tensor_degree.": recipe.precision.linears == "fp8",
        f"{key} does not divide the codes of lora.quantize={quantize}; set lora.quantize=none, or use parallel.cp_size instead "
        "of tensor_degree.": quantize != "none",
        f"{key} divides the channels whose dropout masks are computed from the whole layer; set model.dropout=0 and "
        "lora.dropout=0, or use parallel.cp_size instead of tensor_degree.": recipe.uses_dropout,
        f"{key} is not tested with zero_optimization.{' and '.join(offloads)}; remove the key, or use parallel.cp_size instead "
        "of tensor_degree.": offloads,
        f"{key} is not tested with zero_optimization.{' and '.join(plus)}; remove the key, or use parallel.cp_size instead of "
        "tensor_degree.": plus,
    }
    return rules if degree > 1 else {}


def tensor_optimizer_rules(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, object]:
    """Return the rule that tensor parallelism imposes on the optimizer of a DeepSpeed config."""
    degree = recipe.parallel.tensor_degree
    name = config["optimizer"]["type"]
    return {
        f"parallel.tensor_degree={degree} gives each rank a part of a matrix, but the optimizer {name} may need whole matrices; "
        "use optim.name=adamw, or parallel.cp_size instead of "
        "tensor_degree.": degree > 1 and name.lower() not in ADAM_TYPES
    }


def weight_dtype_rules(recipe: Recipe, zero: Mapping[str, Any]) -> dict[str, object]:
    """Return the rules that `precision.weights` and `lora.quantize` impose on other settings. `zero` is as in `swap_rules`."""
    bf16 = recipe.precision.weights == "bf16"
    quantize = recipe.lora.quantize if recipe.lora else "none"
    stage = int(zero.get("stage", 0))
    key = "precision.weights=bf16"
    narrow = key if bf16 else f"lora.quantize={quantize}" if quantize != "none" else ""
    requantizes = quantize != "none" and any(map(zero.get, QUANTIZED_KEYS))
    full = bf16 and recipe.lora is None  # the trained weights of a LoRA run are fp32
    return {
        f"lora.quantize={quantize} stores quantized weights, which ZeRO++ would quantize again; set lora.quantize=none, or "
        "remove zero_optimization.zero_quantized_weights and zero_quantized_nontrainable_weights.": requantizes,
        f"{narrow} weights cannot be swapped to NVMe, because DeepSpeed's buffers have a single dtype; use "
        "zero_optimization.offload_param.device=cpu, or remove "
        "offload_param.": narrow and offload_device(zero, "offload_param") == "nvme",
        f"{key} would round weights that precision.compute=fp32 multiplies in fp32; set precision.compute=bf16, or "
        "precision.weights=fp32.": bf16 and recipe.precision.compute == "fp32",
        f"{key} has no fp32 master weights at ZeRO-0, so small updates would be lost; use zero_optimization.stage=1 or 2, or "
        "precision.weights=fp32.": full and stage == 0,
        f"{key} needs more memory than fp32 in a full finetune at ZeRO-3, where fp32 weights need no separate master "
        "weights; use precision.weights=fp32 (precision.reduce=bf16 halves the bytes of gathered weights), or "
        "zero_optimization.stage=1 or 2.": full and stage == 3,
        f"{key} would sum the gradients of micro batches in bf16 on the host at ZeRO-2; use zero_optimization.stage=1, "
        "remove zero_optimization.offload_optimizer, or use "
        "precision.weights=fp32.": full and stage == 2 and offload_device(zero) != "none",
        f"{key} cannot be used with optim.name=muon, because DeepSpeed's Muon updates all weights in a single dtype; use "
        "precision.weights=fp32 or optim.name=adamw.": full and recipe.optim.name == "muon",
    }
