"""Support weights that are stored in two dtypes, fp32 and bf16, in one DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wands.config.recipe import Recipe
from wands.errors import ConfigError
from wands.model.weight_dtypes import WeightDtypePolicy


def weight_dtype_policy(recipe: Recipe) -> WeightDtypePolicy:
    """Return the policy that chooses the storage dtype of each weight.

    The policy follows the sections `precision` and `lora` of the recipe.
    """
    return WeightDtypePolicy(recipe.precision.weights, recipe.lora.quantize if recipe.lora else "none")


def split_by_dtype(
    groups: Iterable[Mapping[str, Any]], zero: Mapping[str, Any], reduce: str
) -> list[dict[str, Any]]:
    """Split parameter groups so that each group has one dtype, because DeepSpeed flattens each group into one tensor.

    The order of the groups decides the dtype in which DeepSpeed sums the gradients of micro steps. With the order of this
    function, DeepSpeed sums all gradients in fp32: the fp32 groups come first at ZeRO-2, and the bf16 groups come first at
    ZeRO-1. With the opposite order, DeepSpeed would sum the gradients of bf16 parameters in bf16.

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
            f"would keep the gradient of this matrix in bf16; in the DeepSpeed JSON, set the key to {largest} or more, or "
            "remove the key.",
            agreed=True,
        )
    if stage == 2 and not wide:
        raise ConfigError(
            "precision.weights=bf16: model.trainable and model.freeze leave no fp32 parameter to train, so ZeRO-2 would sum "
            "gradients in bf16, which is inexact. Use precision.weights=fp32, or zero_optimization.stage=1 in the DeepSpeed "
            "JSON.",
            agreed=True,
        )
    for parameter in (parameter for group in narrow if reduce == "fp32" for parameter in group["params"]):
        setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, torch.float32)
    return wide + narrow if stage == 2 else narrow + wide
