"""Merge the DeepSpeed JSON with the recipe.

The JSON may set ZeRO stage, offload, optimizer, scheduler, buckets and profiler. wands adds the batch sizes and the
precision. If the JSON does not set gradient clipping or a setting of the optimizer, such as the learning rate, wands uses
the value in the recipe. wands reports an error if a key of the JSON contradicts the recipe, is unknown to DeepSpeed, or has no
effect in wands. The error names the JSON and the recipe.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wands.config import deepspeed_rules as ds_rules
from wands.config.optimizer_kinds import ADAM_KEYS, KINDS, kind_of
from wands.config.recipe import OptimConfig, Recipe
from wands.errors import ConfigError, failed_rules
from wands.files import read_json_object

Names = tuple[str, str]
SHIPPED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
"""Folder of the shipped DeepSpeed JSONs, next to the package `wands` in a checkout and in an installation."""
REDUCE_BUCKET_SIZE = 500_000_000
"""Number of gradient values that are reduced together if the JSON does not set reduce_bucket_size. DeepSpeed has the same
default.
"""


def load_ds_config(path: str | Path | None) -> dict[str, Any]:
    """Read a DeepSpeed JSON, and return it as a dict.

    Args:
        path: a JSON file, or the name of a config that wands ships, such as "zero3". None means a config that only sets ZeRO-2.

    Raises:
        ConfigError: if the file is missing or is not a JSON object.
    """
    if path is None:
        return {"zero_optimization": {"stage": 2}}
    shipped = SHIPPED_CONFIGS / f"{path}.json"
    names = sorted(file.stem for file in SHIPPED_CONFIGS.glob("*.json"))
    file = shipped if shipped.is_file() and not Path(path).exists() else Path(path)
    fix = f"pass the path of a JSON file, or one of {', '.join(names)}."
    return read_json_object(file, label=f"--deepspeed {path}", fix=fix)


def build_ds_config(
    user: Mapping[str, Any],
    recipe: Recipe,
    *,
    world_size: int,
    device_type: str,
    names: Names = ("the DeepSpeed JSON", "the recipe"),
) -> dict[str, Any]:
    """Complete the user's DeepSpeed JSON with the settings of the recipe.

    A key of the recipe's `optim` section counts as unset if its value is the default, even if the recipe file states this
    value. The JSON may override only unset keys.

    Args:
        user: the JSON as read from the file. A key with the value "auto" counts as missing.
        recipe: the resolved recipe.
        world_size: number of ranks.
        device_type: "cuda" or "cpu".
        names: names of the JSON and of the recipe, for error messages.

    Returns:
        A config for `deepspeed.initialize`. It contains the optimizer and gradient clipping, and the scheduler if the
        JSON has a scheduler. With the same recipe and world size, the returned config is also valid as `user`, so that a
        resumed run may pass the config again.

    Raises:
        ConfigError: if the JSON contradicts the recipe, or contains a value of a wrong type or a key without effect.
            One error lists all problems.
    """
    config = copy.deepcopy(dict(user))
    problems = ds_rules.check_json(config, names[0])
    zero = config.get("zero_optimization", {})
    problems += _fill_batch(config, recipe, world_size, names)
    hpz = int(zero.get("zero_hpz_partition_size", 1))
    quantizes = any(map(zero.get, ds_rules.QUANTIZED_KEYS))
    rules: dict[str, object] = {
        f"{names[0]}: zero_optimization.zero_hpz_partition_size={hpz} must divide the number of processes ({world_size}); use "
        "the number of GPUs in a node.": hpz > 1 and world_size % min(hpz, world_size),
        f"{names[0]}: zero_optimization.zero_quantized_weights and zero_quantized_nontrainable_weights need a GPU, because "
        "DeepSpeed quantizes with a CUDA kernel; remove the keys.": device_type == "cpu" and quantizes,
    }
    rules |= ds_rules.weight_dtype_rules(recipe, zero) | ds_rules.fp8_rules(recipe)
    problems += failed_rules(rules | ds_rules.swap_rules(recipe, zero) | ds_rules.tensor_rules(recipe, zero))
    problems += _fill_precision(config, recipe, names)
    problems += _fill_optimizer(config, recipe.optim, names)
    problems += failed_rules(
        ds_rules.optimizer_rules(recipe, config) | ds_rules.tensor_optimizer_rules(recipe, config)
    )
    if "scheduler" in config:
        unused = {"schedule", "warmup", "min_lr_ratio", "lr", "scale_lr", "scale_lr_base"}
        problems += [
            f"{names[0]}: scheduler and {names[1]}: optim.{key} are both set; remove optim.{key}, or remove the scheduler (a "
            "scheduler in the JSON sets all learning rates)."
            for key in sorted(unused & recipe.optim.model_dump(exclude_defaults=True).keys())
        ]
    if problems:
        raise ConfigError(problems)
    zero = config.setdefault("zero_optimization", {"stage": 0})
    if recipe.optim.name == "muon" and zero.get("stage") == 3:
        zero["reduce_scatter"] = False  # DeepSpeed's Muon needs this value at ZeRO-3
    if recipe.lora or recipe.model.trainable or recipe.model.freeze:
        # In a leaf module whose input needs no gradient, DeepSpeed frees the weights before their backward pass.
        zero.pop("leaf_module", None)
    config.setdefault("steps_per_print", 2**31)  # a number that no run reaches: wands logs the steps
    _choose_adam(config, device_type)
    return config


def _fill_batch(config: dict[str, Any], recipe: Recipe, world_size: int, names: Names) -> list[str]:
    bins = recipe.train.bins_per_step
    dp_size = world_size // recipe.parallel.group_size
    accumulation = max(bins // dp_size, 1) if dp_size else 1
    # Without packing, the number of forward passes differs from step to step. wands then sets every accumulation boundary
    # itself, and gradient_accumulation_steps is 1, also in the JSON in the run folder.
    written = accumulation if recipe.packing.enabled else 1
    # DeepSpeed does not know about context parallelism, so it counts every rank that has other weights than its neighbours in
    # the tensor-parallel group as a data-parallel rank.
    num_data_parallel = world_size // recipe.parallel.tensor_degree
    totals = (accumulation * num_data_parallel, written * num_data_parallel)
    per_rank = (accumulation, written)
    legal_values = {
        "train_micro_batch_size_per_gpu": ((1,), "a micro batch is one bin"),
        "gradient_accumulation_steps": (per_rank, f"train.bins_per_step={bins} / dp_size={dp_size}"),
        "train_batch_size": (totals, "micro batch x accumulation x ranks"),
    }
    problems = [
        f"{names[0]}: {key}={config[key]} contradicts {names[1]}, which needs the value {legal[0]} ({why}); remove the key."
        for key, (legal, why) in legal_values.items()
        if key in config and config[key] not in legal
    ]
    config.pop("train_batch_size", None)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": written}
    return problems


def _fill_precision(config: dict[str, Any], recipe: Recipe, names: Names) -> list[str]:
    compute = recipe.precision.compute
    reduce = recipe.precision.reduce
    enabled = {key: config.pop(key, {}).get("enabled", "auto") for key in ("bf16", "fp16")}
    cast = [key for key, value in enabled.items() if value not in (False, "auto")]
    autocast = {"enabled": True, "dtype": "bfloat16"} if compute == "bf16" else {"enabled": False}
    user_autocast = config.pop("torch_autocast", autocast)
    data_type = "bf16" if reduce == "bf16" and compute == "fp32" else None
    rules: dict[str, object] = {
        f"{names[0]}: {' and '.join(cast)}.enabled would also cast the layers of Wan that must stay in fp32; remove the key "
        f"and use precision.compute of {names[1]}.": cast,
        f"{names[0]}: torch_autocast={user_autocast} contradicts {names[1]}: precision.compute={compute}; remove "
        "torch_autocast.": any(user_autocast.get(key, False) != value for key, value in autocast.items()),
        f"{names[0]}: communication_data_type has no effect in wands; remove the key and use precision.reduce of the "
        "recipe.": config.get("communication_data_type", data_type) != data_type,
    }
    problems = failed_rules(rules)
    if compute == "bf16":
        # Parameters of the listed classes are gathered and reduced in bf16. With an empty list, everything stays in fp32.
        linears = ["torch.nn.Linear"]
        if recipe.parallel.tensor_degree > 1:
            linears += [f"wands.model.tensor_parallel.{name}" for name in ("RowsLinear", "ColumnsLinear")]
        if recipe.precision.linears == "fp8":
            linears.append("wands.model.fp8.Fp8Linear")  # DeepSpeed compares classes exactly
        modules = linears if reduce == "bf16" else []
        config["torch_autocast"] = {**autocast, "lower_precision_safe_modules": modules}
    elif data_type:
        config["communication_data_type"] = data_type
    return problems


def _fill_optimizer(config: dict[str, Any], optim: OptimConfig, names: Names) -> list[str]:
    set_keys = {*optim.model_dump(exclude_defaults=True)}
    kind = KINDS[optim.name]
    problems = []
    section = config.setdefault("optimizer", {"type": kind.type, "params": {}})
    params = section.setdefault("params", {})
    name = kind_of(section["type"])  # None for a type that the recipe does not know
    if name != optim.name and (optim.name != "adamw" or name is not None):
        fix = f"set optim.name={name}" if name else "remove optimizer from the JSON"
        problems.append(
            f"{names[0]}: optimizer.type={section['type']} contradicts {names[1]}: optim.name={optim.name}; {fix}."
        )
    elif optim.name != "adamw":
        problems += [
            f"{names[0]}: optimizer.params.{key} is not a setting of optim.name={optim.name}; remove the key."
            for key in params.keys() - set(kind.keys)
        ]
        problems += [
            f"{names[1]}: optim.{key} has no effect with optim.name={optim.name}; remove the key."
            for key in set_keys.intersection(ADAM_KEYS).difference(kind.keys)
        ]
    for key in kind.keys:
        value = getattr(optim, key)
        json_value = params.get(key, "auto")
        value = list(value) if isinstance(value, tuple) else value
        if json_value == "auto":
            params.pop(key, None)
            if key == "lr" or section["type"].lower() in ds_rules.ADAM_TYPES or name or key in set_keys:
                params[key] = value
        elif key in set_keys and json_value != value:
            problems.append(
                f"{names[0]}: optimizer.params.{key}={json_value} contradicts {names[1]}: optim.{key}={value}; remove one key."
            )
    clip = config.setdefault("gradient_clipping", optim.grad_clip)
    if "grad_clip" in set_keys and clip != optim.grad_clip:
        problems.append(
            f"{names[0]}: gradient_clipping={clip} contradicts {names[1]}: optim.grad_clip={optim.grad_clip}; remove one key."
        )
    return problems


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Return whether a DeepSpeed config offloads the optimizer states to the host or to NVMe. The host runs the optimizer
    step of offloaded states.
    """
    return ds_rules.offload_device(config["zero_optimization"]) != "none"


def uses_adam(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer in a DeepSpeed config is Adam or AdamW. Both torch's and DeepSpeed's versions count."""
    return config["optimizer"]["type"].lower() in ds_rules.ADAM_TYPES


def _choose_adam(config: dict[str, Any], device_type: str) -> None:
    """Set in `config` whether Adam and AdamW come from torch or from DeepSpeed. Keys of `config` that the user set are kept.

    If a run on GPUs offloads the optimizer states to the host, DeepSpeed's Adam is used. torch's Adam would be several
    times slower on the host. DeepSpeed's Adam is also used if the user sets `bias_correction`, which torch's Adam lacks. In
    all other cases, torch's Adam is used, because DeepSpeed's Adam needs a CUDA toolkit.
    """
    params = config["optimizer"]["params"]
    offloads = offloads_optimizer(config)
    # Only DeepSpeed's Adam has bias_correction, so a user who sets this key wants DeepSpeed's Adam.
    if uses_adam(config) and "bias_correction" not in params and not (offloads and device_type == "cuda"):
        params.setdefault("torch_adam", True)
        if params["torch_adam"] and device_type == "cuda" and "foreach" not in params:
            params.setdefault("fused", True)
    if offloads and (device_type == "cpu" or params.get("torch_adam")):
        config.setdefault("zero_force_ds_cpu_optimizer", False)


def learning_rate(config: Mapping[str, Any], recipe: Recipe) -> float:
    """Return the learning rate with which a run creates its optimizer.

    If `config` has no scheduler section, the result is the peak of the recipe's learning rate schedule. This peak is the
    learning rate in the optimizer section of `config`, multiplied by a factor. The factor depends on the recipe key
    `optim.scale_lr` and on the batch size (see `optim.scale_lr_base`).

    If `config` has a scheduler section, the result is the unchanged learning rate in the optimizer section. DeepSpeed's
    scheduler then sets all learning rates.

    Args:
        config: result of `build_ds_config`.
        recipe: the resolved recipe.
    """
    lr = float(config["optimizer"]["params"]["lr"])
    if "scheduler" in config:
        return lr
    ratio = recipe.train.bins_per_step / recipe.optim.scale_lr_base
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[recipe.optim.scale_lr]
