"""In what the weights of a DiT are kept between their uses: fp32, bf16 where nothing is lost by it, or codes of a frozen base."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from wands.model.quantize import CODECS, QuantizedLinear
from wands.model.transformer import PatchLinear


@dataclass(frozen=True)
class WeightDtypePolicy:
    """What is asked of the weights.

    Attributes:
        weights: "fp32", or "bf16" for those that autocast rounds to bf16 before it multiplies: of the linear layers and the
            patch embedding. Time embedding, modulation, norms and head compute in fp32 and stay so.
        quantize: "none", or the name of a codec for the linear layers of the blocks, which must be frozen.
    """

    weights: str = "fp32"
    quantize: str = "none"

    @property
    def is_plain(self) -> bool:
        """Whether every parameter is fp32."""
        return self == WeightDtypePolicy()

    def apply(self, model: nn.Module) -> None:
        """Give a model on the meta device the parameters that are to be filled: their dtypes, and codes in place of weights."""
        if self.weights == "bf16":
            for module in model.modules():
                if type(module) in (
                    nn.Linear,
                    PatchLinear,
                ):  # not what is derived from them to compute in fp32
                    module.to(torch.bfloat16)
        if self.quantize != "none":
            for module in model.get_submodule("blocks").modules():
                if type(module) is nn.Linear:
                    QuantizedLinear.convert(module, CODECS[self.quantize])


def stored_bytes(model: nn.Module) -> dict[torch.dtype, int]:
    """Bytes of a model's parameters by their dtype; works on the meta device.

    Codes of 8 bits are int8, those of 4 bits uint8, and their scales are among the fp32.
    """
    found: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        found[parameter.dtype] = found.get(parameter.dtype, 0) + size
    return found
