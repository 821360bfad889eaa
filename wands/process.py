"""Environment of a `wands` process, and the ways in which the process exits."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

from wands.errors import WandsError

GPU_SETTINGS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""Environment variables of PyTorch, CUDA and NCCL that `wands` sets if the user has not set them.

PYTORCH_ALLOC_CONF lets the segments of PyTorch's allocator grow. Packed sequences of different lengths then leave fewer gaps in
GPU memory. CUDA_DEVICE_MAX_CONNECTIONS is the number of CUDA's hardware queues, by default 8. ZeRO, Ulysses, the ring and
the ring's gradients use separate CUDA streams, and streams that share a queue wait for each other.
NCCL_LAUNCH_ORDER_IMPLICIT makes NCCL start the kernels of different communicators in the order of the program. If two ranks
started these kernels in different orders, both would hang.
"""


def set_environment(local_rank: int | None) -> None:
    """Set the environment variables of this process and its child processes.

    Variables that the user has set keep their values, except PYTHONSAFEPATH.

    Args:
        local_rank: value of the option --local_rank, with which some launchers pass the rank of a process on its node. None
            means that the launcher passed no such option.
    """
    # Child processes must not import modules from the current folder: every decoder would import a file numpy.py there.
    os.environ["PYTHONSAFEPATH"] = "1"
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # the earlier name; PyTorch reads the later name first
        os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ["PYTORCH_CUDA_ALLOC_CONF"])
    for name, value in GPU_SETTINGS.items():
        os.environ.setdefault(name, value)
        logging.getLogger(__name__).debug("%s=%s", name, os.environ[name])


def exit_with_error(error: WandsError, print_line: Callable[[str], object]) -> None:
    """Print an error, and exit with the error's `exit_code`.

    If all ranks of a node or of the process group raise the same error, only one of these ranks prints it.

    Args:
        error: error that ended the command.
        print_line: function that prints a line to stderr.
    """
    formed = _process_group_formed()
    # Before the process group exists, all ranks of a node raise the same error. Later a single rank may fail.
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    printing_rank = os.environ.get("RANK", "0") if formed else local_rank
    if printing_rank == "0" or (formed and not error.agreed):
        rank = os.environ.get("RANK")
        origin = f" [rank {rank}]" if rank not in (None, "0") else ""
        print_line(f"wands{origin}: {error}")
    if printing_rank != "0":
        # A launcher stops all ranks when one exits: let the printing rank finish first.
        time.sleep(1.0)
    exit_rank(error.exit_code)


def exit_rank(code: int = 0) -> None:
    """Exit this process with an exit code. If the code is 0 and the run is not distributed, return.

    A process with a process group exits without the shutdown of the Python interpreter. During this shutdown, threads of the
    communication library gloo can abort a process that has finished its work. After an error, the other ranks may wait in a
    collective, so the process group cannot be destroyed.
    """
    if _process_group_formed() and (code or os.environ.get("WORLD_SIZE", "1") != "1"):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _process_group_formed() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
