"""Numbers that describe a machine: memory, peak FLOP/s, bandwidths, and the fractions of the peak that kernels reach.

Peaks and memory sizes are from the vendors' data sheets. The bandwidth of a link is the bandwidth that collectives reach
for one GPU and one direction. The fractions of the peak are typical of large matmuls and attention kernels. Replace these
assumptions by measurements of your machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wands.errors import ConfigError

GB, TERA = 1e9, 1e12


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
    "RTX 4090": 165.2,
    "A6000": 155.0,
    "RTX 3090": 71.0,
}


@dataclass(frozen=True)
class Machine:
    """One GPU, its node and its links to other GPUs.

    Attributes:
        name: name of the GPU, printed in reports.
        memory: memory of one GPU in bytes.
        peak: highest dense bf16 FLOP/s of one GPU.
        node_bandwidth: bandwidth from one GPU to the other GPUs of its node, in bytes/s.
        network_bandwidth: bandwidth of one GPU's network card, in bytes/s.
        ranks_per_node: number of GPUs in a node.
        host_memory: host memory of a node in bytes.
        host_bandwidth: bandwidth between one GPU and the host in bytes/s, while all GPUs of the node copy.
        linear_efficiency: fraction of the peak that linear layers reach.
        attention_efficiency: fraction of the peak that attention reaches.
    """

    name: str = "H100 80 GB"
    memory: float = 80 * GB
    peak: float = PEAK_TFLOPS["H100"] * TERA
    node_bandwidth: float = 300 * GB
    network_bandwidth: float = 45 * GB
    ranks_per_node: int = 8
    host_memory: float = 1000 * GB
    host_bandwidth: float = 25 * GB
    linear_efficiency: float = 0.5
    attention_efficiency: float = 0.4

    def ring_bandwidth(self, cp: int) -> float:
        """Return the bandwidth of the slowest link in a ring of `cp` ranks, in bytes/s."""
        return self.node_bandwidth if cp <= self.ranks_per_node else self.network_bandwidth

    def world_bandwidth(self, gpus: int) -> float:
        """Return the bandwidth of each rank in an all-gather over all `gpus` ranks, in bytes/s.

        Between nodes, the all-gather uses all network cards of a node at once.
        """
        cards = self.ranks_per_node * self.network_bandwidth
        return self.node_bandwidth if gpus <= self.ranks_per_node else min(self.node_bandwidth, cards)


def peak_tflops(gpu: str) -> float | None:
    """Return the dense bf16 peak in TFLOP/s of the GPU with this name, or None if the peak is unknown."""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in gpu), None)


_A100 = {"node_bandwidth": 200e9, "network_bandwidth": 22e9}
_PCIE = {"node_bandwidth": 20e9, "network_bandwidth": 10e9, "host_memory": 256e9, "host_bandwidth": 12e9}
# Maps a name for --hardware to (GPU, memory in GB, numbers that differ from the defaults of Machine).
_GPUS: dict[str, tuple[str, int, dict[str, float]]] = {
    "h100": ("H100", 80, {}),
    "h200": ("H200", 141, {}),
    "b200": ("B200", 180, {"node_bandwidth": 600e9}),
    "a100-80gb": ("A100", 80, _A100),
    "a100-40gb": ("A100", 40, _A100),
    "l40s": ("L40S", 48, _PCIE),
    "a6000": ("RTX A6000", 48, _PCIE),
    "rtx5090": ("RTX 5090", 32, _PCIE),
    "rtx4090": ("RTX 4090", 24, _PCIE),
    "rtx3090": ("RTX 3090", 24, _PCIE),
}
MACHINES = {
    name: Machine(f"{gpu} {memory} GB", memory * GB, (peak_tflops(gpu) or 0.0) * TERA, **numbers)  # type: ignore[arg-type]
    for name, (gpu, memory, numbers) in _GPUS.items()
}
"""Maps each name that `wands plan --hardware` accepts to its machine."""


def machine_named(name: str, **own: float | None) -> Machine:
    """Return a machine of `MACHINES`, in which the user's numbers replace the machine's numbers.

    Args:
        name: name of the machine.
        own: the user's numbers: gpu_memory and host_memory in GB, node_bandwidth and network_bandwidth in GB/s, and
            gpus_per_node. None keeps the number of the machine.

    Raises:
        ConfigError: if `MACHINES` has no machine with this name.
    """
    machine = MACHINES.get(name.lower())
    if machine is None:
        raise ConfigError(
            f"--hardware {name} is not a known machine; use one of {', '.join(MACHINES)}. If only the memory of your GPU "
            "is different, also set --gpu-memory."
        )
    given = {key: value for key, value in own.items() if value is not None}
    scaled = ("host_memory", "node_bandwidth", "network_bandwidth")
    changes: dict[str, Any] = {key: given[key] * GB for key in scaled if key in given}
    if "gpu_memory" in given:
        kind = machine.name.rsplit(" ", 2)[0]  # "H100 80 GB"
        changes |= {"name": f"{kind} {given['gpu_memory']:g} GB", "memory": given["gpu_memory"] * GB}
    if "gpus_per_node" in given:
        changes["ranks_per_node"] = int(given["gpus_per_node"])
    return replace(machine, **changes)
