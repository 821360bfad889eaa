"""Stored weights of two dtypes under one DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wands.config.recipe import Recipe
from wands.errors import ConfigError
from wands.model.weight_dtypes import WeightDtypePolicy


def weight_dtype_policy(recipe: Recipe) -> WeightDtypePolicy:
    """Return the storage dtypes of the weights for a recipe."""
    return WeightDtypePolicy(recipe.precision.weights, recipe.lora.quantize if recipe.lora else "none")


def split_by_dtype(
    groups: Iterable[Mapping[str, Any]], zero: Mapping[str, Any], reduce: str
) -> list[dict[str, Any]]:
    """Split parameter groups by dtype, because DeepSpeed flattens a group into one tensor.

    The first group decides how DeepSpeed sums gradients. At ZeRO-2 the buckets get the dtype of this group, so fp32
    comes first. At ZeRO-1 the first group must be bf16, or DeepSpeed sums gradients of micro batches in the parameters' dtype.

    Args:
        groups: parameter groups of an optimizer.
        zero: the `zero_optimization` section, of stage 1 or 2, with `reduce_bucket_size`.
        reduce: `precision.reduce`. With "fp32", bf16 parameters are marked to reduce their gradients in fp32; DeepSpeed would
            use the parameters' dtype.

    Raises:
        ConfigError: at ZeRO-2, if every trained parameter is bf16, or if a matrix does not fit into a bucket.
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
            f"zero_optimization.reduce_bucket_size={bucket} is less than the {largest} values of the largest matrix, so ZeRO-2 "
            f"would round its reduced gradient to bf16 (precision.weights); set it to {largest} or more, or remove the key.",
            agreed=True,
        )
    if stage == 2 and not wide:
        raise ConfigError(
            "precision.weights=bf16 would sum gradients in bf16 at ZeRO-2, because model.trainable and model.freeze leave no "
            "fp32 parameter; use zero_optimization.stage=1, or precision.weights=fp32.",
            agreed=True,
        )
    for parameter in (parameter for group in narrow if reduce == "fp32" for parameter in group["params"]):
        setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, torch.float32)
    return wide + narrow if stage == 2 else narrow + wide
