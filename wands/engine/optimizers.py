"""Build the optimizers that wands itself passes to DeepSpeed: 8-bit AdamW, Adafactor and Muon. DeepSpeed builds all others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from wands.config.optimizer_kinds import is_hidden_matrix, is_norm_or_bias, kind_of
from wands.errors import ConfigError, one_line

_MUON_MOMENTUM = 0.95  # the value of Muon's author and of all later work


def build_optimizer(named: Sequence[tuple[str, Any]], section: Mapping[str, Any], *, fused: bool) -> Any:
    """Return the torch optimizer for `deepspeed.initialize`, or None if DeepSpeed builds it from `section`.

    `named` has the (name, parameter) pairs of the trained parameters, which ZeRO-3 may have partitioned, in the model's order.
    `fused` selects torch's fused AdamW for parameters that Muon does not update.

    Raises:
        ConfigError: if the optimizer's library cannot be loaded, or Muon finds no matrix to train.
    """
    name = kind_of(section["type"])
    params = section["params"]
    if name == "adamw8bit":
        try:
            from wands.engine.adamw8bit import FragmentAdamW8bit
        except Exception as error:  # a build for another torch or CUDA raises errors of many classes
            raise ConfigError(
                f"optim.name=adamw8bit: bitsandbytes cannot be loaded on this machine ({one_line(error, 300)}); "
                "run pip install --upgrade bitsandbytes."
            ) from error
        return FragmentAdamW8bit([parameter for _, parameter in named], **params)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        # Adafactor's own schedule and its rates relative to the weights would change the meaning of optim.lr.
        fixed = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
        return Adafactor([parameter for _, parameter in named], **params, **fixed)
    return _build_muon(named, params, fused) if name == "muon" else None


def muon_ratio(rows: int, columns: int) -> float:
    """Return Muon's learning rate for a matrix / AdamW's learning rate, so that both updates have the same RMS.

    The RMS of AdamW's update is about 0.2. Muon's update is an orthogonal matrix with RMS 1 / sqrt(max(rows, columns)), which
    DeepSpeed multiplies by sqrt(max(1, rows / columns)), so the ratio is divided by this factor.

    Source: Liu et al. 2025, Muon is Scalable for LLM Training, eq. 4 (arXiv:2502.16982).
    """
    return 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns))


def split_by_decay(groups: Iterable[Mapping[str, Any]], named: Iterable[tuple[str, Any]]) -> list[Any]:
    """Split parameter groups so that norm gains, biases and modulation tables are in groups with `weight_decay` 0."""
    kept = {id(parameter) for name, parameter in named if is_norm_or_bias(name, _whole_shape(parameter))}
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in kept) == bool(other)], **other}
        for group in groups
        for other in ({}, {"weight_decay": 0.0})
    ]
    return [group for group in split if group["params"]]


def split_by_dtype(
    groups: Sequence[Mapping[str, Any]], zero: Mapping[str, Any], reduce: str
) -> list[dict[str, Any]]:
    """Split parameter groups so that each group has one dtype, because DeepSpeed flattens each group into one tensor.

    The order of the groups decides the dtype in which DeepSpeed sums the gradients of micro steps. All are summed in fp32 if the
    fp32 groups come first at ZeRO-2, and the bf16 groups at ZeRO-1. With `reduce` "fp32", bf16 parameters are marked so that
    DeepSpeed also reduces their gradients in fp32. `zero` is the section `zero_optimization` for ZeRO stage 1 or 2.

    Raises:
        ConfigError: at ZeRO-2, if no trained parameter is fp32, or `reduce` is "fp32" and a bf16 matrix does not fit into a
            gradient bucket.
    """
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    def of_dtype(dtype: torch.dtype) -> list[dict[str, Any]]:
        chosen = [{**group, "params": [p for p in group["params"] if p.dtype == dtype]} for group in groups]
        return [group for group in chosen if group["params"]]

    narrow = of_dtype(torch.bfloat16)
    wide = of_dtype(torch.float32)
    stage = zero["stage"]
    bucket = zero["reduce_bucket_size"]
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
            "precision.weights=bf16: model.trainable and model.freeze leave no fp32 parameter to train. ZeRO-2 sums gradients in "
            "fp32 only if a trained parameter is fp32, otherwise in bf16, which is inexact. Also train a norm gain (which stays "
            "fp32), use precision.weights=fp32, or set zero_optimization.stage=1 in the DeepSpeed JSON.",
            agreed=True,
        )
    for group in narrow if reduce == "fp32" else ():
        for parameter in group["params"]:
            setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, torch.float32)
    return wide + narrow if stage == 2 else narrow + wide


def _whole_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3, parameters are partitioned


def _build_muon(named: Sequence[tuple[str, Any]], params: Mapping[str, Any], fused: bool) -> Any:
    from deepspeed.runtime.zero.muon import original_muon
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    shapes: dict[tuple[int, ...], list[Any]] = {}
    others: list[Any] = []
    for name, parameter in named:
        shape = _whole_shape(parameter)
        parameter.use_muon = is_hidden_matrix(name, shape)
        (shapes.setdefault(shape, []) if parameter.use_muon else others).append(parameter)
    if not shapes:
        raise ConfigError(
            "optim.name=muon needs a trained weight matrix in a transformer block, but model.trainable and model.freeze leave "
            "none; use optim.name=adamw.",
            agreed=True,
        )
    # First, because the loop logs the learning rate of the first group.
    groups: list[dict[str, Any]] = [{"params": others, "use_muon": False, **params}] if others else []
    for shape, matrices in shapes.items():
        ratio = muon_ratio(*shape)
        # The optimizer multiplies weight_decay by the learning rate.
        rates = {"lr": params["lr"] * ratio, "weight_decay": params["weight_decay"] / ratio}
        groups.append({"params": matrices, "use_muon": True, **rates, "momentum": _MUON_MOMENTUM})
    if not fused:
        # DeepSpeed compiles Muon's update, which takes longer on a CPU than any run there. Use the plain functions.
        for name, function in list(vars(original_muon).items()):
            setattr(original_muon, name, getattr(function, "_torchdynamo_orig_callable", function))
    return MuonWithAuxAdam(
        groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True} if fused else None
    )
