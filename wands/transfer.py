"""Copy tensors from the host to a device. The host does not wait for the copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def to_device(value: Any, device: torch.device | str) -> Any:
    """Copy the tensors in a tensor, dataclass, list or tuple to a device. The host does not wait for the copies.

    CUDA copies without waiting only from pinned host memory, so other tensors are pinned first.
    """
    target = torch.device(device)

    def copy(tensor: Tensor) -> Tensor:
        if target.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(target, non_blocking=True)

    return map_tensors(value, copy)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value` with `change(tensor)` in place of every tensor, also in dataclasses, lists and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        make = getattr(value, "_make", type(value))  # of a named tuple
        return make(map_tensors(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: map_tensors(item, change) for name, item in vars(value).items()})
    return value
