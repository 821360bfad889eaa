"""The GPUs for which settings are chosen: those that the user names, else those of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wands.planning.hardware import GB, MACHINES, Machine, machine_named
from wands.planning.search import machine_here


@dataclass(frozen=True)
class Cluster:
    """Number and kind of the GPUs, and a text that says where the kind comes from."""

    gpus: int
    machine: Machine
    reason: str


def choose_cluster(
    hardware: str | None,
    gpus: int | None,
    *,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    **bandwidths: float | None,
) -> Cluster:
    """Return the GPUs that the options of a command describe. Memory is in GB, bandwidths are in GB/s.

    Without `hardware`, the GPU is the known one whose memory is closest to `gpu_memory`; without both, the GPU of this machine,
    or an H100 if it has none. Without `gpus`, their number is that of this machine, else 8, or 1 for a card of a workstation.

    Raises:
        ConfigError: if the hardware is unknown.
    """
    here = torch.cuda.device_count()
    if hardware:
        name = hardware
        reason = "--hardware"
    elif gpu_memory:
        name = closest_machine(gpu_memory)
        reason = f"the known GPU closest to --gpu-memory {gpu_memory:g}; name yours with --hardware"
    elif here:
        found = machine_here("cuda", here)
        name = _kind_of(found)
        reason = f"this machine, with {found.name}"
        gpu_memory = round(found.memory / GB, 1)
        host_memory = host_memory or found.host_memory / GB
        gpus_per_node = gpus_per_node or here
    else:
        name = "h100"
        reason = "assumed, because this machine has no GPU; name yours with --hardware or --gpu-memory"
    numbers = {"gpu_memory": gpu_memory, "host_memory": host_memory, **bandwidths}
    machine = machine_named(name, gpus_per_node=gpus_per_node, **numbers)
    usual = 1 if "RTX" in machine.name else 8
    return Cluster(gpus=gpus or here or usual, machine=machine, reason=reason)


def closest_machine(gpu_memory: float) -> str:
    """Return the name of the known GPU whose memory is closest to a number of GB."""
    return min(MACHINES, key=lambda key: abs(MACHINES[key].memory / GB - gpu_memory))


def _kind_of(found: Machine) -> str:
    """Return the name of the known GPU that a machine has, or else of the one with the closest memory."""
    name = found.name.replace(" ", "").lower()
    known = (key for key in MACHINES if key.partition("-")[0] in name)
    return next(known, None) or closest_machine(found.memory / GB)
