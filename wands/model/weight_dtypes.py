"""Dtypes of a DiT's weights in training (fp32, bf16 or quantized) and in diffusers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wands.config.recipe import Recipe
from wands.model.quantize import CODECS, QuantizedLinear
from wands.model.transformer import PatchLinear


@dataclass(frozen=True)
class WeightDtypePolicy:
    """Storage dtypes of a DiT's weights.

    Attributes:
        weights: "fp32": all weights in fp32. "bf16": the linear layers and the patch embedding in bf16. Autocast rounds
            the weights of these layers to bf16 before the matmul anyway. Time embedding, modulation, norms and head
            compute in fp32 and stay in fp32.
        quantize: "none", or the name of a codec ("int8" or "nf4") for the linear layers of the blocks. These layers
            must be frozen.
    """

    weights: str = "fp32"
    quantize: str = "none"

    @classmethod
    def of(cls, recipe: Recipe) -> WeightDtypePolicy:
        """Return the policy that the sections `precision` and `lora` of a recipe choose."""
        return cls(recipe.precision.weights, recipe.lora.quantize if recipe.lora else "none")

    def apply(self, model: nn.Module) -> None:
        """Convert the parameters of a model on the meta device to the dtypes of the policy, in place."""
        if self.weights == "bf16":
            for module in model.modules():
                if type(module) in (nn.Linear, PatchLinear):  # subclasses compute in fp32
                    module.to(torch.bfloat16)
        if self.quantize != "none":
            for module in model.get_submodule("blocks").modules():
                if type(module) is nn.Linear:
                    QuantizedLinear.convert(module, CODECS[self.quantize])


def stock_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that parameter `name` has after diffusers loads a DiT in `dtype`. Some layers stay in fp32."""
    keeps_fp32 = set(WanTransformer3DModel._keep_in_fp32_modules) & set(name.split("."))
    return torch.float32 if keeps_fp32 else dtype
