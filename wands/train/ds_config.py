"""Whose key is whose between the user's DeepSpeed JSON and the recipe.

The JSON is the user's: ZeRO stage, offload, optimizer, scheduler, buckets, profiler are honoured as they stand. wands fills in
the batch arithmetic, the precision and whatever of optimizer, scheduler and clipping the JSON leaves out. A key that
contradicts the recipe, that DeepSpeed does not know, or that would do nothing here, is an error naming both files.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from wands.config.recipe import OptimConfig, Recipe
from wands.errors import ConfigError
from wands.train.optimizers import ADAM_KEYS, KINDS, check_optimizer, kind_of
from wands.train.precision import check_storage

# What wands hands through to DeepSpeed 0.19, and the JSON type of each; DeepSpeed itself ignores a misspelt key.
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
_KNOWN = {key: types for types, keys in _TYPES.items() for key in keys.split()}
_TYPE_NAMES: dict[tuple[type, ...], str] = {
    (dict,): "an object",
    (bool,): "true or false",
    (int,): "a whole number",
    (str,): "a string",
}
# Keys that DeepSpeed would accept and that change nothing, or the wrong thing, in this trainer; or that it has dropped.
_NOT_HERE = {
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
        ("expert_parallel", "use_data_before_expert_parallelism"), "this Wan has no experts to spread"
    ),
    **dict.fromkeys(
        (
            *("elasticity", "eigenvalue", "graph_harvesting", "nebula", "progressive_layer_drop"),
            *("sparse_attention", "sparse_gradients"),
        ),
        "DeepSpeed has dropped it",
    ),
}
_ADAM = ("adam", "adamw")
_ADAM_KEYS = (
    *ADAM_KEYS,
    *("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fp32_optimizer_states", "set_grad_none"),
    *("fused", "foreach", "maximize", "capturable", "differentiable"),  # torch's
)
Names = tuple[str, str]
REDUCE_BUCKET_SIZE = 500_000_000
"""Gradients in a bucket where the JSON does not say: DeepSpeed's own default."""


def load_ds_config(path: str | Path | None) -> dict[str, Any]:
    """Read a DeepSpeed JSON; None is ZeRO-2 with everything left to wands.

    Args:
        path: a file, or the name of one in ds_configs/ such as ``zero3``.

    Raises:
        ConfigError: the file is missing or not a JSON object.
    """
    if path is None:
        return {"zero_optimization": {"stage": 2}}
    shipped = resources.files("wands").joinpath("ds_configs", f"{path}.json")
    file = shipped if shipped.is_file() and not Path(path).exists() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--deepspeed {path} cannot be read ({error.strerror}); give the path of a JSON file, or the name of one in "
            "ds_configs/ such as zero3."
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
    names: Names = ("the DeepSpeed JSON", "the recipe"),
) -> dict[str, Any]:
    """Complete the user's JSON with what wands owns.

    A recipe key counts as asked for when its value is not the default. A run's own recipe.yaml spells every default out, so
    "written down" cannot be the test; the price is that the JSON silently wins over a default written down on purpose.

    Args:
        user: the JSON as read; the value "auto" is as good as no key.
        recipe: the resolved recipe.
        world_size: all ranks.
        device_type: "cuda" or "cpu".
        names: what to call the two files in an error.

    Returns:
        A config for `deepspeed.initialize`, optimizer and clipping included, scheduler as the user wrote it. It is a legal
        `user` for the same recipe and world.

    Raises:
        ConfigError: every contradiction, every wrong type and every key without effect, in one report.
    """
    config = {key: value for key, value in copy.deepcopy(dict(user)).items() if value != "auto"}
    problems = _check_keys(config, names[0])
    problems += _check_sections(config, names[0])
    problems += _fill_batch(config, recipe, world_size, names)
    problems += _fill_precision(config, recipe, names)
    problems += _fill_optimizer(config, recipe.optim, names)
    problems += check_optimizer(
        recipe.optim.name,
        config.get("zero_optimization", {}),
        lora=recipe.lora is not None,
        clip=config["gradient_clipping"],
        scheduled="scheduler" in config,
        reduced_in=recipe.precision.reduce if "communication_data_type" in config else None,
    )
    if "scheduler" in config:
        idle = {"schedule", "warmup", "min_lr_ratio", "lr", "scale_lr", "scale_lr_base"}
        problems += [
            f"{names[0]}: scheduler and {names[1]}: optim.{key} are both set; keep one (beside a scheduler the learning "
            "rate belongs in the JSON)."
            for key in sorted(_asked(recipe.optim) & idle)
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    config.setdefault("zero_optimization", {"stage": 0})
    if recipe.optim.name == "muon" and config["zero_optimization"].get("stage") == 3:
        config["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed refuses Muon beside it
    config.setdefault("steps_per_print", 2**31)  # wands prints its own line per step
    _choose_adam(config, device_type)
    return config


def _asked(optim: OptimConfig) -> set[str]:
    return {key for key, field in OptimConfig.model_fields.items() if getattr(optim, key) != field.default}


def _check_keys(config: dict[str, Any], name: str) -> list[str]:
    """Refuse keys that have no place or the wrong type, and take them out so that the other checks can go on."""
    problems = []
    for key in list(config):
        value = config[key]
        if key in _NOT_HERE:
            problems.append(f"{name}: {key} would do nothing here; {_NOT_HERE[key]}.")
        elif key not in _KNOWN:
            near = difflib.get_close_matches(key, _KNOWN, n=1)
            cure = f"did you mean {near[0]}?" if near else "remove it."
            problems.append(f"{name}: {key} is no key of a DeepSpeed config; {cure}")
        elif not isinstance(value, _KNOWN[key]) or (isinstance(value, bool) and bool not in _KNOWN[key]):
            wanted = _TYPE_NAMES.get(_KNOWN[key], "a number")
            problems.append(f"{name}: {key}={json.dumps(value)} must be {wanted}; mend it.")
        else:
            continue
        del config[key]
    return problems


def _check_sections(config: dict[str, Any], name: str) -> list[str]:
    """Hold the sections that wands or DeepSpeed read without looking against what they must contain."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    problems = []
    for key, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if key not in config:
            continue
        section = config[key]
        if not isinstance(section.get("type"), str):
            problems.append(f"{name}: {key}.type must name one, for example {example}; add it.")
            del config[key]
        elif not isinstance(section.get("params", {}), dict):
            problems.append(
                f"{name}: {key}.params={json.dumps(section['params'])} must be an object; mend it."
            )
            del config[key]
    for key, value in config.get("scheduler", {}).get("params", {}).items():
        if value == "auto":
            problems.append(
                f"{name}: scheduler.params.{key}=auto is filled in by nobody here; give it a value."
            )
    section = config.get("optimizer", {})
    for key in section.get("params", {}) if section.get("type", "").lower() in _ADAM else ():
        if key not in _ADAM_KEYS:
            near = difflib.get_close_matches(key, _ADAM_KEYS, n=1)
            cure = f"did you mean {near[0]}?" if near else f"known are {', '.join(_ADAM_KEYS)}."
            problems.append(f"{name}: optimizer.params.{key} is no key of {section['type']}; {cure}")
    lr = config.get("optimizer", {}).get("params", {}).get("lr", "auto")
    if lr != "auto" and (isinstance(lr, bool) or not isinstance(lr, int | float)):
        problems.append(f"{name}: optimizer.params.lr={json.dumps(lr)} must be a number; mend it.")
    if "zero_optimization" in config:
        section = config["zero_optimization"]
        config["zero_optimization"] = zero = {key: value for key, value in section.items() if value != "auto"}
        try:
            DeepSpeedZeroConfig(**zero)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                key = ".".join(["zero_optimization", *map(str, one["loc"])])
                rule = "is no key of a DeepSpeed config" if one["type"] == "extra_forbidden" else one["msg"]
                problems.append(f"{name}: {key}: {rule}; mend it.")
            del config["zero_optimization"]
        else:
            problems += _check_zero(zero, name)
    return problems


def _check_zero(zero: Mapping[str, Any], name: str) -> list[str]:
    """Keys that DeepSpeed takes and that would do nothing at this stage, or something else than they say."""
    stage, problems = int(zero.get("stage", 0)), []
    for key, least in (("offload_param", 3), ("offload_optimizer", 1)):
        if (zero.get(key) or {}).get("device", "none") != "none" and stage < least:
            problems.append(
                f"{name}: zero_optimization.{key} would do nothing at stage {stage}; use stage {least} or higher, or leave it "
                "out."
            )
    if zero.get("round_robin_gradients"):
        problems.append(
            f"{name}: zero_optimization.round_robin_gradients=true stores parameters in an order that checkpoints and ema do not "
            "know of, so that they would come back to other places; leave it out."
        )
    return problems


def _fill_batch(config: dict[str, Any], recipe: Recipe, world_size: int, names: Names) -> list[str]:
    bins, dp_size = recipe.train.bins_per_step, world_size // recipe.parallel.group_size
    accumulation = max(bins // dp_size, 1)
    # Without packing a bin is several forwards, and how many differs from step to step: wands sets every boundary
    # itself and DeepSpeed is told 1, which is also what the run folder's JSON then says.
    told = accumulation if recipe.packing.enabled else 1
    wanted = {
        "train_micro_batch_size_per_gpu": ((1,), "a micro batch is one bin"),
        "gradient_accumulation_steps": (
            (accumulation, told),
            f"train.bins_per_step={bins} / dp_size={dp_size}",
        ),
        # DeepSpeed counts every rank as data parallel: it is told nothing of context parallelism.
        "train_batch_size": (
            (accumulation * world_size, told * world_size),
            "micro batch x accumulation x ranks",
        ),
    }
    problems = [
        f"{names[0]}: {key}={config[key]} contradicts {names[1]}, which makes it {legal[0]} ({why}); leave it out of the JSON."
        for key, (legal, why) in wanted.items()
        if key in config and config[key] not in legal
    ]
    config.pop("train_batch_size", None)
    config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = told
    return problems


def _fill_precision(config: dict[str, Any], recipe: Recipe, names: Names) -> list[str]:
    precision = recipe.precision
    problems = check_storage(recipe, config.get("zero_optimization", {}))
    for key in ("bf16", "fp16"):
        if config.pop(key, {}).get("enabled", "auto") not in (False, "auto"):
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
    reduce = "bf16" if precision.reduce == "bf16" and not autocast else None
    if config.get("communication_data_type", reduce) != reduce:
        problems.append(
            f"{names[0]}: communication_data_type would do nothing here; use precision.reduce of the recipe."
        )
    if autocast:
        # The listed classes are gathered and reduced in bf16; none listed means exact fp32 traffic.
        modules = ["torch.nn.Linear"] if precision.reduce == "bf16" else []
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": modules,
        }
    elif reduce:
        config["communication_data_type"] = reduce
    return problems


def _fill_optimizer(config: dict[str, Any], optim: OptimConfig, names: Names) -> list[str]:
    asked, kind = _asked(optim), KINDS[optim.name]
    problems = []
    section = config.setdefault("optimizer", {"type": kind.type, "params": {}})
    params = section.setdefault("params", {})
    by_name = kind_of(section["type"])  # DeepSpeed's own types are the JSON's alone
    if by_name != optim.name and (optim.name != "adamw" or by_name is not None):
        cure = f"set optim.name={by_name}" if by_name else "leave optimizer out of the JSON"
        problems.append(
            f"{names[0]}: optimizer.type={section['type']} contradicts {names[1]}: optim.name={optim.name}; {cure}."
        )
    elif optim.name != "adamw":
        problems += [
            f"{names[0]}: optimizer.params.{key} is no setting of optim.name={optim.name}; remove it."
            for key in params.keys() - set(kind.keys)
        ]
        problems += [
            f"{names[1]}: optim.{key} would do nothing, optim.name={optim.name} has none; leave it out."
            for key in ADAM_KEYS
            if key in asked and key not in kind.keys
        ]
    for key in kind.keys:
        ours, theirs = getattr(optim, key), params.get(key, "auto")
        ours = list(ours) if isinstance(ours, tuple) else ours
        if theirs == "auto":
            params.pop(key, None)
            if key == "lr" or section["type"].lower() in _ADAM or by_name or key in asked:
                params[key] = ours
        elif key in asked and theirs != ours:
            problems.append(
                f"{names[0]}: optimizer.params.{key}={theirs} contradicts {names[1]}: optim.{key}={ours}; keep one."
            )
    clip = config.setdefault("gradient_clipping", optim.grad_clip)
    if "grad_clip" in asked and clip != optim.grad_clip:
        problems.append(
            f"{names[0]}: gradient_clipping={clip} contradicts {names[1]}: optim.grad_clip={optim.grad_clip}; keep one."
        )
    return problems


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer's states, and so its step, are on the host."""
    zero = config["zero_optimization"]
    return (
        bool(zero.get("cpu_offload")) or (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    )


def uses_adam(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer is Adam or AdamW, whosever."""
    return config["optimizer"]["type"].lower() in _ADAM


def _choose_adam(config: dict[str, Any], device_type: str) -> None:
    """Take torch's Adam, which is there already, for DeepSpeed's, which is compiled on first use and needs a CUDA toolkit.

    Only a GPU run whose states are on the host keeps DeepSpeed's: there torch's is several times slower.
    """
    params, offloads = config["optimizer"]["params"], offloads_optimizer(config)
    # bias_correction is a switch that only DeepSpeed's own Adam has: who sets it has chosen.
    if uses_adam(config) and "bias_correction" not in params and not (offloads and device_type == "cuda"):
        params.setdefault("torch_adam", True)
        if params["torch_adam"] and device_type == "cuda" and "foreach" not in params:
            params.setdefault("fused", True)
    if offloads and (device_type == "cpu" or params.get("torch_adam")):
        config.setdefault("zero_force_ds_cpu_optimizer", False)


def learning_rate(config: Mapping[str, Any], recipe: Recipe) -> float:
    """Peak learning rate: the optimizer's own, scaled by the batch as the recipe asks.

    A scheduler of the JSON sets absolute rates or scales the optimizer's own, so nothing is scaled beside it.
    """
    lr = float(config["optimizer"]["params"]["lr"])
    if "scheduler" in config:
        return lr
    optim = recipe.optim
    ratio = recipe.train.bins_per_step / optim.scale_lr_base
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.scale_lr]
