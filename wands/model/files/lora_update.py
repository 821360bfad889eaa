"""Contents of a LoRA for one DiT: pairs of matrices, and full differences of parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor, nn

from wands.errors import ConfigError


@dataclass(frozen=True)
class LoraPair:
    """LoRA of one module: two matrices, which add `scale * lora_B @ lora_A` to the module's weight.

    Attributes:
        lora_A: [rank, in_features].
        lora_B: [out_features, rank].
        scale: alpha / rank (rsLoRA: alpha / sqrt(rank)), or 1 without alpha.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float = 1.0

    def folded(self) -> LoraPair:
        """Return an equivalent pair with scale 1, readable without alpha; exact if the scale is a power of two."""
        return LoraPair(self.lora_A, (self.lora_B.double() * self.scale).to(self.lora_B.dtype))

    def delta(self) -> Tensor:
        """Return the matrix that the LoRA adds to the module's weight, float64 [out_features, in_features]."""
        return self.scale * (self.lora_B.double() @ self.lora_A.double())


@dataclass(frozen=True)
class LoraUpdate:
    """All that a LoRA file adds to the weights of one DiT.

    Attributes:
        pairs: LoRA by diffusers name of the linear layer.
        differences: full difference by diffusers name of the parameter.
    """

    pairs: dict[str, LoraPair] = field(default_factory=dict)
    differences: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each parameter that the LoRA changes."""
        matrices = [(f"{name}.weight", (len(p.lora_B), p.lora_A.shape[1])) for name, p in self.pairs.items()]
        return [*matrices, *((name, tuple(value.shape)) for name, value in self.differences.items())]

    def merge(self, name: str, weight: Tensor, scale: float) -> Tensor:
        """Return `weight` plus `scale` times its update, in float64; `weight` itself if the LoRA does not change it."""
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in self.pairs:
            weight = weight + scale * self.pairs[module].delta()
        return weight + scale * self.differences[name].double() if name in self.differences else weight

    def find_missing(self, model: nn.Module, where: str) -> list[str]:
        """Return the names of the parameters that the LoRA changes and the model lacks.

        Raises:
            ConfigError: if a parameter has different shapes in the LoRA and in the model.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, shape in self.shapes:
            if shapes.get(name, shape) != shape:
                raise ConfigError(
                    f"{where}: the LoRA changes a parameter {name} of shape {[*shape]}, but this parameter has shape "
                    f"{[*shapes[name]]} in the model. Use a LoRA for this model."
                )
        return [name for name, _ in self.shapes if name not in shapes]

    def without(self, names: Collection[str]) -> LoraUpdate:
        """Return a copy of this LoRA update without its changes of the named parameters."""
        return LoraUpdate(
            {name: pair for name, pair in self.pairs.items() if f"{name}.weight" not in names},
            {name: value for name, value in self.differences.items() if name not in names},
        )
