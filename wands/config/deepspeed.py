"""Merge the DeepSpeed JSON with the recipe.

The JSON may set ZeRO stage, offload, optimizer, scheduler, buckets and profiler. wands adds batch sizes and precision, and the
recipe's gradient clipping and optimizer settings where the JSON has none. A key of the JSON that contradicts the recipe, is
unknown to DeepSpeed, or has no effect in wands is an error.
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
"""Number of gradient values that are reduced together if the JSON does not set reduce_bucket_size: DeepSpeed's own default."""


def load_ds_config(path: str | Path | None) -> dict[str, Any]:
    """Return a DeepSpeed JSON, given by its path or by the name of a shipped config, such as "zero3"; None sets only ZeRO-2.

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
    """Complete the user's DeepSpeed JSON with the settings of the recipe, for `deepspeed.initialize`.

    The JSON may override only unset keys of `optim`; a key with its default value counts as unset, even if the recipe file states
    it. In the JSON, "auto" counts as missing. With the same recipe and world size, the result is also valid as `user`, so a
    resumed run may pass it again. `device_type` is "cuda" or "cpu"; `names` are the names of JSON and recipe in messages.

    Raises:
        ConfigError: one error for all contradictions to the recipe, values of a wrong type, and keys without effect.
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
    """Return whether a DeepSpeed config offloads the optimizer states, so that the host runs the optimizer step."""
    return ds_rules.offload_device(config["zero_optimization"]) != "none"


def uses_adam(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer in a DeepSpeed config is Adam or AdamW, of torch or of DeepSpeed."""
    return config["optimizer"]["type"].lower() in ds_rules.ADAM_TYPES


def _choose_adam(config: dict[str, Any], device_type: str) -> None:
    """Set in `config` whether Adam and AdamW come from torch or from DeepSpeed. Keys that the user set are kept.

    On the host, torch's Adam is several times slower, so a run on GPUs that offloads the optimizer states uses DeepSpeed's. So
    does a run with `bias_correction`, which torch's Adam lacks. All others use torch's, because DeepSpeed's needs a CUDA toolkit.
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
    """Return the learning rate with which a run creates its optimizer, from the result of `build_ds_config`.

    It is the peak of the recipe's schedule: the optimizer's learning rate, scaled with the batch size as `optim.scale_lr` says. A
    scheduler in `config` sets all learning rates itself; then nothing is scaled.
    """
    lr = float(config["optimizer"]["params"]["lr"])
    if "scheduler" in config:
        return lr
    ratio = recipe.train.bins_per_step / recipe.optim.scale_lr_base
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[recipe.optim.scale_lr]
