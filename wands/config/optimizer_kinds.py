"""Optimizers that the recipe key `optim.name` can select: their DeepSpeed types, settings, and memory for their states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
# In bitsandbytes: number of values that share one fp32 scale, and size of the smallest tensor whose moments are quantized.
BLOCK_8BIT = 256
MIN_8BIT = 4096


class OptimizerKind(NamedTuple):
    """Optimizer that one value of `optim.name` selects.

    Attributes:
        type: name in a DeepSpeed JSON.
        keys: keys of the section `optim` that are settings of this optimizer.
        package: optional package that it needs.
    """

    type: str
    keys: tuple[str, ...] = ADAM_KEYS
    package: str | None = None


KINDS = {
    "adamw": OptimizerKind("AdamW"),
    "adamw8bit": OptimizerKind("AdamW8bit", package="bitsandbytes"),
    "adafactor": OptimizerKind("Adafactor", ("lr", "weight_decay")),
    "muon": OptimizerKind("Muon"),
}


def kind_of(type_name: str) -> str | None:
    """Return the value of `optim.name` for an optimizer type of a DeepSpeed JSON, such as "AdamW"; None if there is none."""
    return next((name for name, kind in KINDS.items() if kind.type.lower() == type_name.lower()), None)


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter: it updates only the weight matrices in the transformer blocks."""
    return name.startswith("blocks.") and len(shape) == 2


def is_norm_or_bias(name: str, shape: Sequence[int]) -> bool:
    """Return whether the parameter with this name and shape is a norm gain, a bias or a modulation table."""
    return len(shape) < 2 or name.endswith("scale_shift_table")


def state_bytes(name: str, parameters: Iterable[tuple[str, Sequence[int]]], zero_stage: int) -> float:
    """Return the bytes of an optimizer's states, without master weights, before the ranks partition them.

    `name` is a value of `optim.name`; `parameters` are (name, shape) pairs. The stage matters only for Muon.
    """
    total = 0.0
    for parameter, shape in parameters:
        numel = math.prod(shape)
        if name == "adamw8bit" and numel >= MIN_8BIT:
            total += 2 * (numel + 4 * numel / BLOCK_8BIT)  # two moments in one byte each, and fp32 scales
        elif name == "adafactor":
            total += 4 * numel * (1 / shape[-1] + 1 / shape[-2] if len(shape) > 1 else 1)
        elif name == "muon" and is_hidden_matrix(parameter, shape):
            # At stages 1 and 2, DeepSpeed keeps the old momentum in memory while it computes the new one.
            total += (8 if zero_stage in (1, 2) else 4) * numel
        else:
            total += 8 * numel
    return total
