"""Sizes of a run that determine its memory and step time: parameters, ranks and bins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from wands.config.recipe import Recipe
from wands.model.tensor_parallel import divided_dim
from wands.variants import TEXT_LEN, DiTShape


@dataclass(frozen=True)
class Weight:
    """One whole parameter of a DiT. `element_size` is in bytes."""

    name: str
    shape: tuple[int, ...]
    element_size: int
    trained: bool

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Workload:
    """Sizes of a training run that determine its memory and step time.

    Attributes:
        recipe: recipe with all defaults filled in.
        weights: parameters of the DiT, and of the LoRA if the run trains one.
        num_models: number of DiTs that a step trains one after the other. The states of all are in memory, but only one has
            activations at a time.
        device_type: "cuda" or "cpu".
        text_len: number of text tokens of the longest caption.
        ds_config: result of `build_ds_config`.
        micro_steps: number of forward passes on each rank in one optimizer step.
        max_tokens: largest number of tokens in a bin.
        max_samples: largest number of samples in a bin.
        video_tokens: number of tokens of the longest sample video; 0 without sample videos.
        cached_tokens: largest number of tokens whose keys and values causal sampling caches, over all predictions of a DiT.
        video_flops: FLOPs, summed over all ranks, to generate all sample videos once.
        forwards: (forward passes with gradient, without gradient) that the objective makes for one bin.
        pair_share: attention pairs of the clips / the pairs in which every token of a clip attends to all its tokens.
        vae_bytes: bytes of the weights of the VAE that decodes the sample videos.
        decoding_bytes: device bytes while the VAE decodes the largest sample video, including `vae_bytes`.
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
    video_tokens: int = 0
    cached_tokens: int = 0
    video_flops: int = 0
    forwards: tuple[int, int] = (1, 0)
    pair_share: float = 1.0
    vae_bytes: float = 0.0
    decoding_bytes: float = 0.0

    @property
    def cp_size(self) -> int:
        return self.ulysses_degree * self.ring_degree

    @property
    def tensor_degree(self) -> int:
        return self.recipe.parallel.tensor_degree

    @property
    def zero_size(self) -> int:
        """Number of ranks that have the same part of each weight, and among which ZeRO partitions this part."""
        return self.world_size // self.tensor_degree

    @cached_property
    def parts(self) -> Sequence[Weight]:
        """The weights of one DiT with the shapes that they have on one rank, before ZeRO partitions them."""
        if self.tensor_degree == 1:
            return self.weights
        return [_part_of(weight, self.tensor_degree) for weight in self.weights]

    @cached_property
    def parts_bytes(self) -> int:
        """Bytes of all `parts`, in their storage dtypes."""
        return sum(weight.numel * weight.element_size for weight in self.parts)

    @cached_property
    def trained_parts(self) -> int:
        """Number of values in the trained parameters of `parts`."""
        return sum(weight.numel for weight in self.parts if weight.trained)

    @property
    def compiled(self) -> bool:
        """Whether the run compiles the pointwise parts of the blocks (`model.compile`)."""
        setting = self.recipe.model.compile
        return self.device_type == "cuda" if setting == "auto" else setting

    @property
    def zero_stage(self) -> int:
        return int(self.ds_config["zero_optimization"].get("stage", 0))

    @cached_property
    def swapped(self) -> tuple[int, int]:
        """Bytes of a DiT's frozen weights in host memory (`model.swap_blocks`), and of their device buffers."""
        num_blocks = self.recipe.model.num_swapped(self.shape.num_layers)
        block = sum(
            weight.numel * weight.element_size
            for weight in self.weights
            if weight.name.startswith("blocks.0.") and not weight.trained
        )
        return num_blocks * block, min(2, num_blocks) * block

    @cached_property
    def trained(self) -> int:
        """Number of values in the trained parameters of one DiT."""
        return sum(weight.numel for weight in self.weights if weight.trained)


def _part_of(weight: Weight, degree: int) -> Weight:
    dim = divided_dim(weight.name)
    if dim is None:
        return weight
    shape = list(weight.shape)
    shape[dim] //= degree
    return replace(weight, shape=tuple(shape))
