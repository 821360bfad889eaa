"""Support weights that are stored in two dtypes, fp32 and bf16, in one DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wands.config.recipe import Recipe
from wands.errors import ConfigError
from wands.model.weight_dtypes import WeightDtypePolicy


def weight_dtype_policy(recipe: Recipe) -> WeightDtypePolicy:
    """Return the policy that chooses the dtype in which each weight is stored, from the recipe's `precision` and `lora`
    sections.
    """
    return WeightDtypePolicy(recipe.precision.weights, recipe.lora.quantize if recipe.lora else "none")


def split_by_dtype(
    groups: Iterable[Mapping[str, Any]], zero: Mapping[str, Any], reduce: str
) -> list[dict[str, Any]]:
    """Split parameter groups so that each group has one dtype, because DeepSpeed flattens each group into one tensor.

    The first group decides how DeepSpeed sums gradients. At ZeRO-2 the gradient buckets get the dtype of the first
    group, so fp32 groups come first. At ZeRO-1 bf16 groups come first. With the opposite order, DeepSpeed would sum the
    gradients of micro steps in the dtype of the parameters.

    Args:
        groups: parameter groups of an optimizer.
        zero: `zero_optimization` section for ZeRO stage 1 or 2, with the key `reduce_bucket_size`.
        reduce: `precision.reduce` of the recipe. With "fp32", bf16 parameters are marked so that DeepSpeed reduces
            their gradients in fp32 instead of bf16.

    Raises:
        ConfigError: at ZeRO-2, if no trained parameter is fp32, or if `reduce` is "fp32" and a matrix does not fit into
            a gradient bucket.
    """
    import torch
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    split: dict[Any, list[dict[str, Any]]] = {torch.bfloat16: [], torch.float32: []}
    for group in groups:
        for dtype, groups_of_dtype in split.items():
            params = [parameter for parameter in group["params"] if parameter.dtype == dtype]
            if params:
                groups_of_dtype.append({**group, "params": params})
    narrow, wide = split.values()
    stage, bucket = zero["stage"], zero["reduce_bucket_size"]
    largest = max((parameter.numel() for group in narrow for parameter in group["params"]), default=0)
    if stage == 2 and reduce == "fp32" and largest > bucket:
        raise ConfigError(
            f"zero_optimization.reduce_bucket_size={bucket} is smaller than the largest matrix ({largest} values), so ZeRO-2 "
            f"would keep the gradient of this matrix in bf16; set the key to {largest} or more, or remove the key.",
            agreed=True,
        )
    if stage == 2 and not wide:
        raise ConfigError(
            "precision.weights=bf16 would sum gradients in bf16 at ZeRO-2, because model.trainable and model.freeze train only "
            "bf16 parameters; use zero_optimization.stage=1, or precision.weights=fp32.",
            agreed=True,
        )
    for parameter in (parameter for group in narrow if reduce == "fp32" for parameter in group["params"]):
        setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, torch.float32)
    return wide + narrow if stage == 2 else narrow + wide
