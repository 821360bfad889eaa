"""Run the base model of a LoRA run, as the reference of an objective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Switch the LoRA of a DiT or its engine off in a `with` block; raise ValueError if it has none.

    PEFT's own switches also change `requires_grad`, which breaks the engine. No gradients are computed, because activation
    checkpointing would recompute with the LoRA on.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    if not layers:
        raise ValueError("adapter_off needs a model with a LoRA; set the recipe's section lora.")
    were_off = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, was_off in zip(layers, were_off, strict=True):
            layer._disable_adapters = was_off
