"""Bytes of the parameters of a model."""

from __future__ import annotations

import torch
from torch import nn


def stored_bytes(model: nn.Module) -> dict[torch.dtype, int]:
    """Return the size of a model's parameters in bytes, by dtype. The model may be on the meta device.

    8-bit codes are counted as int8, 4-bit codes as uint8, and the scales of both as fp32.
    """
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + size
    return sizes
