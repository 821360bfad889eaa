"""Dtypes of a DiT's weights: in training, and after diffusers loads the DiT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wands.config.recipe import Recipe
from wands.errors import ConfigError
from wands.model.fp8 import MULTIPLE, Fp8Linear
from wands.model.quantized import CODECS, QuantizedLinear, StoredFp8Linear
from wands.model.transformer import PatchLinear


@dataclass(frozen=True)
class WeightDtypePolicy:
    """Dtypes in which a DiT stores its weights, and in which the linear layers of its blocks multiply.

    Attributes:
        weights: dtype of the weights that are not quantized. "bf16" is for the linear layers and the patch embedding, whose
            weights autocast rounds to bf16 anyway; time embedding, modulation, norms and head compute and stay in fp32.
        quantize: "none", or a codec of `CODECS` for the linear layers of the blocks, which must be frozen.
        linears: "bf16", or "fp8" for the linear layers of the blocks that are not quantized.
        fp8_grad_weight: dtype of the product for the gradient of a weight in these layers, "fp8" or "bf16".
    """

    weights: str = "fp32"
    quantize: str = "none"
    linears: str = "bf16"
    fp8_grad_weight: str = "fp8"

    @classmethod
    def of(cls, recipe: Recipe) -> WeightDtypePolicy:
        """Return the policy that the sections `precision` and `lora` of a recipe choose."""
        return cls(
            weights=recipe.precision.weights,
            quantize=recipe.lora.quantize if recipe.lora else "none",
            linears=recipe.precision.linears,
            fp8_grad_weight=recipe.precision.fp8_grad_weight,
        )

    def apply(self, model: nn.Module) -> None:
        """Convert a DiT on the meta device in place; raise ConfigError if 16 does not divide a dimension of an fp8 layer."""
        if self.weights == "bf16":
            for module in model.modules():
                if type(module) in (nn.Linear, PatchLinear):  # subclasses compute in fp32
                    module.to(torch.bfloat16)
        for name, module in model.get_submodule("blocks").named_modules():
            if type(module) is not nn.Linear:
                continue
            if "fp8" in (self.quantize, self.linears):
                _check_multiples(f"blocks.{name}", module)
            if self.quantize == "fp8":
                StoredFp8Linear.convert(module, CODECS["fp8"])
            elif self.quantize != "none":
                QuantizedLinear.convert(module, CODECS[self.quantize])
            elif self.linears == "fp8":
                module.__class__ = Fp8Linear
                assert isinstance(module, Fp8Linear)
                module.bf16_grad_weight = self.fp8_grad_weight == "bf16"


def _check_multiples(name: str, linear: nn.Linear) -> None:
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        raise ConfigError(
            f"{name} has {linear.in_features} in features and {linear.out_features} out features, but fp8 needs multiples of "
            f"{MULTIPLE}; set precision.linears=bf16, and lora.quantize=int8 or none."
        )


def stock_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that parameter `name` has after diffusers loads a DiT in `dtype`. Some layers stay in fp32."""
    keeps_fp32 = set(WanTransformer3DModel._keep_in_fp32_modules) & set(name.split("."))
    return torch.float32 if keeps_fp32 else dtype
