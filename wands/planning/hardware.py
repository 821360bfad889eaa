"""Numbers that describe a machine: memory, peak FLOP/s, bandwidths, and the speeds of kernels.

Peaks and memory sizes are from the vendors' data sheets. Link bandwidths are those that collectives reach for one GPU and one
direction. Kernel speeds are typical fractions of the data sheet, or measured by `wands tools calibrate`, whose file
`with_measurements` reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wands.errors import ConfigError
from wands.files import read_json_object

GB = 1e9
TERA = 1e12


# Dense bf16 peak of one GPU in TFLOP/s. The first key that the name of a GPU contains applies.
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "B300": 2500.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "RTX 6000 Ada": 364.0,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 4070 Ti": 80.2,
    "RTX 4070": 58.3,
    "A6000": 155.0,
    "RTX 3090": 71.0,
    "RTX 3060": 25.5,
}


@dataclass(frozen=True)
class Machine:
    """One GPU, its node and its links to other GPUs. Memory is in bytes, bandwidths are in bytes/s.

    Attributes:
        name: name of the GPU, printed in reports.
        peak: highest dense bf16 FLOP/s of one GPU.
        node_bandwidth: bandwidth from one GPU to the other GPUs of its node.
        network_bandwidth: bandwidth of one GPU's network card.
        host_memory: host memory of a node.
        host_bandwidth: bandwidth between one GPU and the host, while all GPUs of the node copy.
        linear_flops: FLOP/s of large matrix products in bf16.
        attention_flops: maps each attention kernel to (FLOP/s of its forward pass, FLOP/s of its backward pass).
        copy_bandwidth: bandwidth of the GPU in its own memory, where a copy of n bytes counts as 2 n.
        launch_seconds: seconds that the host needs to start one kernel.
        source: "the data sheet", or the file with the measured speeds.
    """

    name: str = "H100 80 GB"
    memory: float = 80 * GB
    peak: float = PEAK_TFLOPS["H100"] * TERA
    node_bandwidth: float = 300 * GB
    network_bandwidth: float = 45 * GB
    ranks_per_node: int = 8
    host_memory: float = 1000 * GB
    host_bandwidth: float = 25 * GB
    linear_flops: float = 640 * TERA
    attention_flops: Mapping[str, Sequence[float]] = field(
        default_factory=lambda: {"cudnn": (610 * TERA, 520 * TERA)}
    )
    copy_bandwidth: float = 2400 * GB
    launch_seconds: float = 4e-6
    source: str = "the data sheet"

    def attention_speeds(self, backend: str = "auto") -> Sequence[float]:
        """Return the FLOP/s of both passes of an attention kernel; of the fastest one for an unknown name, such as "auto"."""
        fastest = min(self.attention_flops.values(), key=lambda speeds: 1 / speeds[0] + 2.5 / speeds[1])
        return self.attention_flops.get(backend, fastest)

    def ring_bandwidth(self, cp: int) -> float:
        """Return the bandwidth of the slowest link in a ring of `cp` ranks, in bytes/s."""
        return self.node_bandwidth if cp <= self.ranks_per_node else self.network_bandwidth

    def world_bandwidth(self, gpus: int, num_groups: int = 1) -> float:
        """Return the bandwidth of each rank in an all-gather over all `gpus` ranks, in bytes/s.

        Between nodes, the network cards of a node share the transfers, and `num_groups` groups with ranks on every node gather
        different data at the same time.
        """
        cards = max(self.ranks_per_node / num_groups, 1) * self.network_bandwidth
        return self.node_bandwidth if gpus <= self.ranks_per_node else min(self.node_bandwidth, cards)


def peak_tflops(gpu: str) -> float | None:
    """Return the dense bf16 peak in TFLOP/s of the GPU with this name, or None if it is unknown."""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in gpu), None)


def has_fp8(gpu: str) -> bool:
    """Return whether the GPU with this name multiplies in fp8 (compute capability 8.9 or higher)."""
    kind = next((key for key in PEAK_TFLOPS if key in gpu), "")
    return kind not in ("A100", "A800", "A6000", "RTX 3090", "RTX 3060")


_A100 = {"node_bandwidth": 200e9, "network_bandwidth": 22e9}
_PCIE = {"node_bandwidth": 20e9, "network_bandwidth": 10e9, "host_memory": 256e9, "host_bandwidth": 12e9}
# Fractions of the peak that the forward and the backward pass of attention kernels reach: GPUs before Hopper and consumer
# GPUs, Hopper, Blackwell for data centers. A kernel without an entry counts as the fastest kernel.
_EARLIER = {"torch": (0.6, 0.5)}
_HOPPER = {"torch": (0.38, 0.3), "flash2": (0.38, 0.3), "cudnn": (0.62, 0.53), "flash3": (0.62, 0.53)}
_BLACKWELL = {name: fractions for name, fractions in _HOPPER.items() if name != "flash3"}


def _machine(gpu: str, memory: int, bandwidth: int, fractions: dict[str, Any], **numbers: Any) -> Machine:
    """Return a machine with the numbers of a data sheet.

    `memory` is in GB, `bandwidth` (of this memory) in GB/s. `fractions` are the parts of the peak that both passes of each
    attention kernel reach. The name must contain a key of `PEAK_TFLOPS`, such as "A6000" in "RTX A6000".
    """
    peak = (peak_tflops(gpu) or 0.0) * TERA
    attention = {name: (forward * peak, backward * peak) for name, (forward, backward) in fractions.items()}
    numbers |= {"linear_flops": 0.65 * peak, "copy_bandwidth": 0.72 * bandwidth * GB}
    return Machine(f"{gpu} {memory} GB", memory * GB, peak, attention_flops=attention, **numbers)


MACHINES = {
    "h100": _machine("H100", 80, 3350, _HOPPER),
    "h200": _machine("H200", 141, 4800, _HOPPER),
    "b200": _machine("B200", 180, 8000, _BLACKWELL, node_bandwidth=600e9),
    "a100-80gb": _machine("A100", 80, 2039, _EARLIER, **_A100),
    "a100-40gb": _machine("A100", 40, 1555, _EARLIER, **_A100),
    "l40s": _machine("L40S", 48, 864, _EARLIER, **_PCIE),
    "a6000": _machine("RTX A6000", 48, 768, _EARLIER, **_PCIE),
    "rtx5090": _machine("RTX 5090", 32, 1792, _EARLIER, **_PCIE),
    "rtx4090": _machine("RTX 4090", 24, 1008, _EARLIER, **_PCIE),
    "rtx3090": _machine("RTX 3090", 24, 936, _EARLIER, **_PCIE),
    "rtx4080": _machine("RTX 4080", 16, 717, _EARLIER, **_PCIE),
    "rtx5080": _machine("RTX 5080", 16, 960, _EARLIER, **_PCIE),
    "rtx4070": _machine("RTX 4070", 12, 504, _EARLIER, **_PCIE),
    "rtx3060": _machine("RTX 3060", 12, 360, _EARLIER, **_PCIE),
}
"""Maps each name that `wands plan --hardware` accepts to its machine. Of GPUs with equal memory, the first stands for a GPU whose
name is not given."""


def machine_named(
    name: str, *, gpu_memory: float | None, gpus_per_node: int | None, **own: float | None
) -> Machine:
    """Return a copy of a machine in `MACHINES` with the user's numbers in GB and GB/s. None keeps the machine's number.

    Raises:
        ConfigError: if `MACHINES` has no machine with this name.
    """
    machine = MACHINES.get(name.lower())
    if machine is None:
        raise ConfigError(
            f"--hardware {name} is not a known GPU. The known GPUs are {', '.join(MACHINES)}; use the name of a similar one, and "
            "set --gpu-memory to the memory of yours in GB."
        )
    changes: dict[str, Any] = {key: value * GB for key, value in own.items() if value is not None}
    if gpu_memory is not None:
        kind = machine.name.rsplit(" ", 2)[0]  # "H100 80 GB"
        changes |= {"name": f"{kind} {gpu_memory:g} GB", "memory": gpu_memory * GB}
    return replace(machine, ranks_per_node=gpus_per_node or machine.ranks_per_node, **changes)


def measurement_file(device: str) -> Path:
    """Return the path of the file with a device's measured speeds, in the user's cache folder.

    All names of one GPU type, such as "NVIDIA H200" and "H200 141 GB", have the same file.
    """
    kind = next((key for key in PEAK_TFLOPS if key in device), device)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wands" / "hardware"
    return folder / f"{kind.lower().replace(' ', '-')}.json"


def with_measurements(machine: Machine, path: Path | None) -> Machine:
    """Return the machine with the speeds that `wands tools calibrate` measured instead of those of the data sheet.

    Without a path, use `measurement_file`, and return the machine unchanged if this file does not exist.

    Raises:
        ConfigError: if the file cannot be read, or was measured on another kind of GPU.
    """
    file = path or measurement_file(machine.name)
    if path is None and not file.exists():
        return machine
    label = f"{'--hardware-file ' if path else ''}{file}"
    fix = "run wands tools calibrate to write the file again."
    values = read_json_object(file, label=label, fix=fix)
    device = values.pop("device", "an unknown device")
    if peak_tflops(device) != machine.peak / TERA:
        raise ConfigError(
            f"{label} was measured on {device}, not on {machine.name}; set --hardware to the measured GPU, or run wands "
            f"calibrate on {machine.name}."
        )
    try:
        return replace(machine, source=str(file), **values)
    except TypeError:
        raise ConfigError(f"{label} has keys that are not from wands tools calibrate; {fix}") from None
