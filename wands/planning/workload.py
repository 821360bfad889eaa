"""Sizes of a run that determine its memory: stored parameters, ranks and bins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
class RankWorkload:
    """Sizes that determine the memory of a rank, in addition to recipe and DeepSpeed config.

    Attributes:
        shape: sizes of the DiT.
        weights: parameters of the DiT, including a LoRA's.
        num_models: number of DiTs trained one after the other: memory has the states of all DiTs and the activations of one DiT.
        world_size: number of ranks, which share the optimizer states.
        ulysses_degree: number of ranks that share attention heads.
        ring_degree: number of ranks that share the tokens of each sample.
        micro_steps: forwards per rank and optimizer step.
        max_tokens: tokens of the fullest bin.
        max_samples: largest number of clips in a bin.
        device_type: "cuda" or "cpu".
        text_len: tokens of the longest caption.
    """

    shape: DiTShape
    weights: Sequence[Weight]
    num_models: int
    world_size: int
    ulysses_degree: int
    ring_degree: int
    micro_steps: int
    max_tokens: int
    max_samples: int
    device_type: str
    text_len: int = TEXT_LEN

    @property
    def tokens(self) -> float:
        """Tokens of one rank."""
        return self.max_tokens / (self.ulysses_degree * self.ring_degree)

    @cached_property
    def stored(self) -> int:
        """Bytes of one DiT's parameters."""
        return sum(weight.numel * weight.element_size for weight in self.weights)

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters of one DiT."""
        return sum(weight.numel for weight in self.weights if weight.trained)
