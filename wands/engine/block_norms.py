"""Gradient norm and relative update of each transformer block, at all ZeRO stages.

The relative update is the norm of the change of a block's fp32 master weights in a step, divided by their norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wands.checkpoint.ema import own_fragments
from wands.checkpoint.engine_state import Fragment
from wands.distributed.engine_protocol import TrainingEngine


@torch.no_grad()
def measure_blocks(engine: TrainingEngine) -> Callable[[], dict[str, dict[str, float]]]:
    """Measure the gradient norm of each block, before clipping, between the backward pass and the update.

    Return a function to call after the update, which returns "grad_norm_blocks" and "update_ratio_blocks" by names such as
    "blocks.0", or "proj_out" outside the blocks. Every rank must call both. Until then, each rank keeps a copy of its part of the
    fp32 master weights in host memory.
    """
    parameters = dict(engine.module.named_parameters())
    fragments = [fragment for fragment in own_fragments(engine) if not fragment.is_copy]
    names = [*dict.fromkeys(_block(name) for name, value in parameters.items() if value.requires_grad)]
    squares = torch.zeros(len(names), 3, dtype=torch.float64, device=engine.device)

    def add(fragment: Fragment, kind: int, values: Tensor) -> None:
        norm = torch.linalg.vector_norm(values, dtype=torch.float32).to(squares.device)
        squares[names.index(_block(fragment.name)), kind] += norm.double() ** 2

    if engine.device.type == "cuda":
        torch.cuda.synchronize()  # offloaded gradients are copied to the host without a wait
    for fragment in fragments:
        add(fragment, 0, _gradient(parameters[fragment.name], fragment))
    masters = [fragment.read().to("cpu", copy=True) for fragment in fragments]

    @torch.no_grad()
    def finish() -> dict[str, dict[str, float]]:
        for fragment, master in zip(fragments, masters, strict=True):
            old = master.to(fragment.read().device)
            add(fragment, 1, fragment.read() - old)
            add(fragment, 2, old)
        dist.all_reduce(squares)
        gradients, updates, weights = squares.sqrt().unbind(1)
        norms = {"grad_norm_blocks": gradients, "update_ratio_blocks": updates / weights}
        return {key: dict(zip(names, values.tolist(), strict=True)) for key, values in norms.items()}

    return finish


def _block(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "blocks" else 1])


def _gradient(parameter: Any, fragment: Fragment) -> Tensor:
    """Return the gradient of a fragment as a vector, at any ZeRO stage."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_grad

        return safe_get_local_grad(parameter).view(-1)[: fragment.numel]  # without the last rank's padding
    if hasattr(parameter, "_hp_mapping"):
        return parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return parameter.grad.reshape(-1)[fragment.offset : fragment.offset + fragment.numel]
