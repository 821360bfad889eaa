"""Settings of PyTorch's allocator, CUDA and NCCL, which must be in place before these libraries start."""

from __future__ import annotations

import os
import sys

GPU_SETTINGS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""Environment variables of PyTorch, CUDA and NCCL that wands sets if the user has not set them.

PYTORCH_ALLOC_CONF lets the segments of PyTorch's allocator grow, so that bins of different lengths leave fewer gaps in GPU
memory. CUDA_DEVICE_MAX_CONNECTIONS is the number of CUDA's hardware queues, by default 8. ZeRO, Ulysses, the ring and the ring's
gradients use separate CUDA streams, and streams that share a queue wait for each other. NCCL_LAUNCH_ORDER_IMPLICIT makes NCCL
start the kernels of different communicators in the order of the program; two ranks with different orders would hang.
"""


def set_gpu_settings() -> None:
    """Set the variables of `GPU_SETTINGS`, for this process and its children, that the user has not set.

    `init_process_group` calls this function. A program that starts CUDA or NCCL before wands calls it first.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # the earlier name; PyTorch reads the later name first
        os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ["PYTORCH_CUDA_ALLOC_CONF"])
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        _set_allocator(GPU_SETTINGS["PYTORCH_ALLOC_CONF"])
    for name, value in GPU_SETTINGS.items():
        os.environ.setdefault(name, value)


def _set_allocator(settings: str) -> None:
    """Change the settings of PyTorch's allocator, unless the program has changed them."""
    # PyTorch reads the environment once, at the latest with the first allocation. This may have happened.
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # Older versions of PyTorch lack the functions of torch._C, later versions deprecate the other one.
    current = getattr(torch._C, "_accelerator_getAllocatorSettings", str)()
    older = torch.cuda.memory._set_allocator_settings
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", older)
    if not current:
        change(settings)
