"""Build the optimizers that wands itself passes to DeepSpeed: 8-bit AdamW, Adafactor and Muon.

Other optimizers, such as AdamW, are built by DeepSpeed from the DeepSpeed config.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wands.config.optimizer_kinds import is_hidden_matrix, is_norm_or_bias, kind_of
from wands.errors import ConfigError, one_line

_MUON_MOMENTUM = 0.95  # the value of Muon's author and of all later work


def build_optimizer(
    named_parameters: Iterable[tuple[str, Any]], section: Mapping[str, Any], *, fused: bool
) -> Any:
    """Build the optimizer for `deepspeed.initialize`.

    Args:
        named_parameters: (name, parameter) of each trained parameter, in the model's order. Under ZeRO-3 the parameters
            may be partitioned.
        section: `optimizer` section of the result of `build_ds_config`.
        fused: whether AdamW uses torch's fused kernel. Only Muon uses this argument, because it trains biases and similar
            parameters with AdamW.

    Returns:
        A torch optimizer, or None if DeepSpeed builds the optimizer from `section`.

    Raises:
        ConfigError: if the optimizer's library cannot be loaded, or Muon finds no matrix to train.
    """
    name, params = kind_of(section["type"]), section["params"]
    named = list(named_parameters)
    if name == "adamw8bit":
        return _adamw8bit()([parameter for _, parameter in named], **params)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        # Adafactor's own schedule and its rates relative to the weights would change the meaning of optim.lr.
        fixed = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
        return Adafactor([parameter for _, parameter in named], **params, **fixed)
    return _build_muon(named, params, fused) if name == "muon" else None


def _adamw8bit() -> Any:
    try:
        from wands.train.adamw8bit import FragmentAdamW8bit
    except Exception as error:  # a build for another torch or CUDA raises errors of many classes
        raise ConfigError(
            f"optim.name=adamw8bit: bitsandbytes cannot be loaded on this machine ({one_line(error, 300)}); "
            "run pip install --upgrade bitsandbytes."
        ) from error
    return FragmentAdamW8bit


def muon_ratio(rows: int, columns: int) -> float:
    """Return Muon's learning rate for a matrix, divided by AdamW's learning rate.

    With this ratio, the updates of both optimizers have the same root mean square. The root mean square of an
    orthogonal matrix is 1 / sqrt(max(rows, columns)). The root mean square of AdamW's update is about 0.2. DeepSpeed
    already multiplies Muon's update by sqrt(max(1, rows / columns)).

    Source: Liu et al. 2025, Muon is Scalable for LLM Training, eq. 4 (arXiv:2502.16982).
    """
    return 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns))


def split_by_decay(groups: Iterable[Mapping[str, Any]], named: Iterable[tuple[str, Any]]) -> list[Any]:
    """Split parameter groups so that norm gains, biases and modulation tables are in groups without weight decay.

    Args:
        groups: parameter groups of an optimizer.
        named: (name, parameter) of each trained parameter.
    """
    kept = {id(parameter) for name, parameter in named if is_norm_or_bias(name, _whole_shape(parameter))}
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in kept) == bool(other)], **other}
        for group in groups
        for other in ({}, {"weight_decay": 0.0})
    ]
    return [group for group in split if group["params"]]


def _whole_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3, parameters are partitioned


def _build_muon(named: Sequence[tuple[str, Any]], params: Mapping[str, Any], fused: bool) -> Any:
    import torch
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
    groups: list[dict[str, Any]] = []
    if others:  # first, because the loop logs the learning rate of the first group
        groups.append({"params": others, "use_muon": False, **params})
    for (rows, columns), matrices in shapes.items():
        ratio = muon_ratio(rows, columns)
        groups.append(
            {
                "params": matrices,
                "use_muon": True,
                "lr": params["lr"] * ratio,
                # The optimizer multiplies weight_decay by the learning rate.
                "weight_decay": params["weight_decay"] / ratio,
                "momentum": _MUON_MOMENTUM,
            }
        )
    if not fused:
        # DeepSpeed compiles Muon's update, which takes longer on a CPU than any run there. Use the plain functions.
        for name, function in list(vars(original_muon).items()):
            setattr(original_muon, name, getattr(function, "_torchdynamo_orig_callable", function))
    return MuonWithAuxAdam(
        groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True} if fused else None
    )
