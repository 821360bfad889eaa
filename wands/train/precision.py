"""Stored weights of two dtypes under one DeepSpeed engine, what the start block says of them, and what DeepSpeed cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wands.config.recipe import Recipe
from wands.errors import ConfigError
from wands.model.quantize import load_library
from wands.model.weight_dtypes import WeightDtypePolicy

FP32_PARTS = "time embedding, modulation, norms, head"


def weight_dtype_policy(recipe: Recipe) -> WeightDtypePolicy:
    """How a run keeps the weights of its DiT."""
    return WeightDtypePolicy(recipe.precision.weights, recipe.lora.quantize if recipe.lora else "none")


def check_storage(recipe: Recipe, zero: Mapping[str, Any]) -> list[str]:
    """What keeps stored weights from being right here, each in a sentence with its cure.

    Args:
        recipe: the resolved recipe.
        zero: the `zero_optimization` section.
    """
    problems, asked = [], "precision.weights=bf16"
    if recipe.lora and recipe.lora.quantize != "none":
        try:
            load_library()
        except ConfigError as error:
            problems.append(str(error))
        if zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights"):
            problems.append(
                f"lora.quantize={recipe.lora.quantize} keeps codes, which ZeRO++ would quantise again; remove "
                "zero_optimization.zero_quantized_weights and zero_quantized_nontrainable_weights, or set lora.quantize=none."
            )
    if not weight_dtype_policy(recipe).is_plain and (zero.get("offload_param") or {}).get("device") == "nvme":
        key = asked if recipe.precision.weights == "bf16" else "lora.quantize"
        problems.append(
            f"{key} cannot be swapped to NVMe, DeepSpeed's buffers have one dtype for all weights; use "
            "zero_optimization.offload_param.device=cpu, or leave it out."
        )
    if recipe.precision.weights == "fp32":
        return problems
    if recipe.precision.compute == "fp32":
        problems.append(
            f"{asked} would round weights that precision.compute=fp32 multiplies in fp32; set precision.compute=bf16, or "
            "precision.weights=fp32."
        )
    if recipe.lora:
        return problems  # all that is trained is fp32
    stage = int(zero.get("stage", 0))
    if not stage:
        problems.append(
            f"{asked} has no fp32 masters at ZeRO-0, where small updates would be lost; use zero_optimization.stage=1 or 2, "
            "or precision.weights=fp32."
        )
    if stage == 3:
        problems.append(
            f"{asked} would cost memory in a full finetune at ZeRO-3, whose fp32 weights are their own masters; leave it out "
            "(precision.reduce=bf16 halves what is gathered), or use zero_optimization.stage=1 or 2."
        )
    offload = zero.get("cpu_offload") or (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if stage == 2 and offload:
        problems.append(
            f"{asked} would add the gradients of micro batches up in bf16 on the host at ZeRO-2; use zero_optimization.stage=1, "
            "remove zero_optimization.offload_optimizer, or use precision.weights=fp32."
        )
    if recipe.optim.name == "muon":
        problems.append(
            f"{asked} is not for optim.name=muon, which DeepSpeed steps in one dtype; use precision.weights=fp32 or "
            "optim.name=adamw."
        )
    return problems


def split_by_dtype(
    groups: Iterable[Mapping[str, Any]], zero: Mapping[str, Any], reduce: str
) -> list[dict[str, Any]]:
    """Parameter groups of one dtype each, which DeepSpeed needs: it flattens a group into one tensor.

    From the first group it takes how gradients are added up. At ZeRO-2 their buckets get its dtype, so fp32 comes first. At
    ZeRO-1 it must be bf16, or those of micro batches are summed in the parameters' own dtype.

    Args:
        groups: an optimizer's.
        zero: the `zero_optimization` section, of stage 1 or 2, with its `reduce_bucket_size`.
        reduce: `precision.reduce`. For fp32, bf16 parameters are told to reduce their gradients so: DeepSpeed would take their
            own dtype.

    Raises:
        ConfigError: at ZeRO-2, all that is trained is bf16, or a matrix does not fit into a bucket.
    """
    import torch
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    split: dict[Any, list[dict[str, Any]]] = {torch.bfloat16: [], torch.float32: []}
    for group in groups:
        for dtype, found in split.items():
            params = [parameter for parameter in group["params"] if parameter.dtype == dtype]
            if params:
                found.append({**group, "params": params})
    narrow, wide = split.values()
    stage, bucket = zero["stage"], zero["reduce_bucket_size"]
    largest = max((parameter.numel() for group in narrow for parameter in group["params"]), default=0)
    if stage == 2 and reduce == "fp32" and largest > bucket:
        raise ConfigError(
            f"zero_optimization.reduce_bucket_size={bucket} is less than the {largest} values of the largest matrix, whose "
            f"reduced gradient ZeRO-2 then rounds to its bf16 (precision.weights); set it to {largest} or more, or leave it out.",
            agreed=True,
        )
    if stage == 2 and not wide:
        raise ConfigError(
            "precision.weights=bf16 would add gradients up in bf16 at ZeRO-2, where model.trainable and model.freeze leave no "
            "fp32 parameter; use zero_optimization.stage=1, or precision.weights=fp32.",
            agreed=True,
        )
    for parameter in (parameter for group in narrow if reduce == "fp32" for parameter in group["params"]):
        setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, torch.float32)
    return wide + narrow if stage == 2 else narrow + wide


def describe_storage(recipe: Recipe) -> list[str]:
    """Lines of the start block: in what the weights are kept, what stays fp32, and in what gradients are made."""
    storage = weight_dtype_policy(recipe)
    lines = [
        f"weights fp32 ({recipe.precision.compute} copies are made to multiply)"
        if storage.weights == "fp32" and recipe.precision.compute == "bf16"
        else f"weights {storage.weights}"
    ]
    if storage.weights == "bf16":
        lines[0] = f"weights bf16 (linear layers, patches), fp32 ({FP32_PARTS})"
        if not recipe.lora:
            lines.append(
                f"masters fp32, from the rounded weights; gradients made in bf16, reduced in {recipe.precision.reduce}"
            )
    if storage.quantize != "none":
        lines.append(
            f"base in {storage.quantize}: the linear layers of the blocks; embeddings, modulation, norms and head are not"
        )
    return lines
