"""Optimizers by name: their DeepSpeed type, their settings, and the memory of their states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
# bitsandbytes: number of values that share an fp32 scale, and the smallest tensor whose moments are quantised.
_BLOCK_8BIT, _MIN_8BIT = 256, 4096


class OptimizerKind(NamedTuple):
    """One value of `optim.name`.

    Attributes:
        type: name in a DeepSpeed JSON.
        keys: settings in the recipe's optim section that apply to this optimizer.
        package: optional package that the optimizer needs.
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
    """Return the `optim.name` of a type in a DeepSpeed JSON, or None for a type that only DeepSpeed knows."""
    return next((name for name, kind in KINDS.items() if kind.type.lower() == type_name.lower()), None)


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter. Muon updates only the weights of linear layers in the blocks."""
    return name.startswith("blocks.") and len(shape) == 2


def state_bytes_per_param(
    name: str, parameters: Iterable[tuple[str, Sequence[int]]], zero_stage: int
) -> float:
    """Return the bytes of an optimizer's states over all ranks, divided by the number of parameters.

    Master weights are not included.

    Args:
        name: `optim.name`.
        parameters: names and shapes of the trained parameters.
        zero_stage: 0 to 3. From stage 1 on, the ranks share the states.
    """
    total, num_params = 0.0, 0
    for parameter, shape in parameters:
        numel = math.prod(shape)
        num_params += numel
        if name == "adamw8bit" and (zero_stage > 0 or numel >= _MIN_8BIT):
            total += 2 * (numel + 4 * numel / _BLOCK_8BIT)  # two moments of one byte, and fp32 scales
        elif name == "adafactor":
            total += 4 * numel * (1 / shape[-1] + 1 / shape[-2] if len(shape) > 1 else 1)
        elif name == "muon" and is_hidden_matrix(parameter, shape):
            # At stages 1 and 2 DeepSpeed writes the next momentum next to the last one.
            total += (8 if zero_stage in (1, 2) else 4) * numel
        else:
            total += 8 * numel
    return total / max(num_params, 1)
