"""Process group start-up: the accelerator, the number of ranks per node, and errors that all ranks raise together."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from wands.distributed.gpu_settings import set_gpu_settings
from wands.errors import ConfigError, RankError, WandsError

T = TypeVar("T")


def accelerator_type() -> str:
    """Return "cuda" if DeepSpeed's accelerator is a CUDA GPU, else "cpu". DS_ACCELERATOR overrides the detection."""
    from deepspeed.accelerator import get_accelerator

    return "cuda" if get_accelerator().device_name() == "cuda" else "cpu"


def ranks_per_node() -> int:
    """Return the number of processes per node, equal on all ranks: the mean, rounded down, if nodes differ."""
    # The context-parallel degrees depend on this number. If each rank counted the processes of its node, ranks on nodes of
    # different sizes would choose different degrees and hang.
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for nodes in ("GROUP_WORLD_SIZE", "CROSS_SIZE"):  # torchrun's and DeepSpeed's number of nodes
        if nodes in os.environ:
            return max(world_size // int(os.environ[nodes]), 1)
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def init_process_group() -> tuple[int, int, torch.device]:
    """Join the process group of the launcher, or create one of a single process. Return (rank, world size, current device).

    `set_gpu_settings` is called before CUDA and NCCL start.
    """
    _set_gpu_settings()
    import deepspeed

    # On CPUs, DeepSpeed would compile an all-reduce for inference that wands never calls. The compiler takes half a minute, a
    # killed compiler leaves a lock that hangs the next run, and each rank leaves 66 MiB in /dev/shm, where Docker gives 64.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    if "RANK" not in os.environ:  # plain `wands train`
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    is_alone = os.environ.get("WORLD_SIZE") == "1" and "MASTER_PORT" not in os.environ
    if is_alone:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ["MASTER_PORT"] = str(get_free_port())
    if accelerator_type() == "cuda":
        backend = "nccl"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        backend = "gloo"
        device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            # Ranks that each start a thread per core compete for the cores and run a hundred times slower.
            torch.set_num_threads(max((os.cpu_count() or 1) // ranks_per_node(), 1))
    deepspeed.init_distributed(dist_backend=backend, timeout=group_timeout(), verbose=False)
    if is_alone:  # a `wands train` that a notebook starts now must get another port
        del os.environ["MASTER_PORT"]
    return dist.get_rank(), dist.get_world_size(), device


def _set_gpu_settings() -> None:
    """Call `set_gpu_settings`. Log a warning if the program has made a process group of NCCL without what prevents hangs."""
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    is_late = name not in os.environ and dist.is_initialized() and "nccl" in dist.get_backend()
    set_gpu_settings()
    if is_late:
        logging.getLogger(__name__).warning(
            "The process group was made without %s=%s, and ring and Ulysses attention can then hang. Set the variable before "
            "the program starts, or call wands.distributed.gpu_settings.set_gpu_settings before the process group is made.",
            name,
            os.environ[name],
        )


def group_timeout() -> timedelta:
    """Return the time that a rank waits for other ranks: DEEPSPEED_TIMEOUT minutes, by default one hour."""
    # DeepSpeed's default of 10 minutes is too short for ranks that wait while the first rank writes a large checkpoint.
    return timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "60")))


def check_gpus() -> None:
    """Raise a ConfigError if the launcher started more processes on this node than it has GPUs."""
    if accelerator_type() != "cuda":
        return
    # torchrun sets LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE.
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    if num_processes > (num_gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"{num_processes} processes were started on a node with {num_gpus} GPUs, and each process needs a GPU. "
            f"Start at most {num_gpus} processes per node (deepspeed --num_gpus, torchrun --nproc-per-node)."
        )


@contextlib.contextmanager
def start_together() -> Iterator[None]:
    """Run a `with` block on every rank, then exchange the errors, so that an error on one rank is raised on all ranks.

    Otherwise other nodes would wait for the failed rank, or the launcher would stop ranks before they print their errors. The
    block runs before the process group exists; every rank joins it for the exchange, also after an error. Without a launcher,
    there is no exchange.

    Raises:
        Exception: again on its rank, if it is not a WandsError.
        WandsError: on all other ranks, the WandsError of the lowest rank that failed, or a RankError about its other exception.
    """
    _set_gpu_settings()  # the block may start CUDA
    if os.environ.get("WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in os.environ:  # no launcher
        yield
        return
    check_gpus()  # a rank without a GPU cannot join the exchange
    failure: WandsError | None = None
    crash: Exception | None = None
    try:
        yield
    except WandsError as error:
        failure = error
    except Exception as error:
        crash = error
        failure = RankError(f"{type(error).__name__}: {error}")
    init_process_group()
    messages = gather_objects((type(failure), str(failure)) if failure else None)
    if crash:
        raise crash
    for rank, message in enumerate(messages):
        if message:
            error_class, text = message
            prefix = "" if rank == 0 else f"[rank {rank}] "
            raise error_class(prefix + text, agreed=True) from failure


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks in order; one value without a process group. Every rank must call this function.

    The values are sent as pickles, which is safe, because only ranks of this run send them.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
