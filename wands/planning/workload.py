"""Sizes of a run that determine its memory and step time: stored parameters, ranks and bins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from wands.config.recipe import Recipe
from wands.variants import TEXT_LEN, DiTShape


@dataclass(frozen=True)
class Weight:
    """Stored parameter of a DiT.

    Attributes:
        name: parameter name in the model.
        shape: shape of the whole parameter.
        element_size: bytes per element.
        trained: whether the parameter has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    element_size: int
    trained: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Workload:
    """Training run as the estimates of memory and step time see it.

    Attributes:
        recipe: the resolved recipe.
        shape: sizes of the DiT.
        weights: parameters of the DiT, including a LoRA's.
        num_models: number of DiTs trained one after the other: memory has the states of all DiTs and the activations of one DiT.
        world_size: number of ranks, which share the optimizer states.
        device_type: "cuda" or "cpu".
        text_len: tokens of the longest caption.
        ds_config: result of `build_ds_config`.
        ulysses_degree: number of ranks that share attention heads.
        ring_degree: number of ranks that share the tokens of each sample.
        micro_steps: forwards per rank and optimizer step.
        max_tokens: tokens of the fullest bin.
        max_samples: largest number of clips in a bin.
    """

    recipe: Recipe
    shape: DiTShape
    weights: Sequence[Weight]
    num_models: int
    world_size: int
    device_type: str = "cuda"
    text_len: int = TEXT_LEN
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    ulysses_degree: int = 1
    ring_degree: int = 1
    micro_steps: int = 1
    max_tokens: int = 1
    max_samples: int = 1

    @property
    def cp_size(self) -> int:
        """Number of ranks that share a bin."""
        return self.ulysses_degree * self.ring_degree

    @property
    def tokens(self) -> float:
        """Tokens of one rank."""
        return self.max_tokens / self.cp_size

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the DeepSpeed config."""
        return int(self.ds_config["zero_optimization"].get("stage", 0))

    @cached_property
    def stored(self) -> int:
        """Bytes of one DiT's parameters."""
        return sum(weight.numel * weight.element_size for weight in self.weights)

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters of one DiT."""
        return sum(weight.numel for weight in self.weights if weight.trained)
