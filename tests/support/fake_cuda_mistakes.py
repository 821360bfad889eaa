"""Objectives that make mistakes which only a GPU would show: a tensor in the wrong place, a wait for the device."""

from __future__ import annotations

from typing import Any

MISTAKES: dict[str, Any] = {
    "a tensor of the host": lambda errors: errors + on_host(errors),
    "a number asked for": lambda errors: errors * errors.sum().item(),
    "a choice by value": lambda errors: errors[errors > 0],
    "a copy to the host": lambda errors: errors + errors.cpu().sum(),
    "a copy that waits": lambda errors: errors + on_host(errors).to("cuda"),
    "a pageable copy": lambda errors: errors + on_host(errors).to("cuda", non_blocking=True),
}


def on_host(errors: Any) -> Any:
    import torch

    return torch.zeros(len(errors))


def objective_with(mistake: str | None) -> Any:
    """Return the objective of training, which makes a mistake if one is named."""
    import torch

    from wands.objectives.flow_matching import FlowMatching

    class Mistaken(FlowMatching):
        def token_errors(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            errors = super().token_errors(prediction, target)
            return errors if mistake is None else MISTAKES[mistake](errors)

    return Mistaken()
