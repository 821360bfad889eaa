"""Small gloo worlds for tests: n processes forked from one server that has imported the heavy packages already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "numpy",
    "deepspeed",
    "wands.train.loop",
    "torch.utils.tensorboard",
    "deepspeed.utils.zero_to_fp32",
    "deepspeed.runtime.zero.muon.original_muon",
]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _rank_main(
    rank: int, world_size: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], pipe: Connection
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        # Plain pickle: the pipe's own would pass tensors as file handles of a process that is about to end.
        pipe.send(("ok", pickle.dumps(fn(*args))))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()
    os._exit(0)  # a rank that waits for a dead peer's goodbye would hang the suite


def run_world(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """Run `fn(*args)` on every rank of a new world; the ranks' environment is what a launcher would set.

    Args:
        world_size: number of processes.
        fn: a module-level function; it finds its rank in the environment or in torch.distributed.
        timeout: seconds after which the world counts as hung.

    Returns:
        The results in rank order.

    Raises:
        AssertionError: with the tracebacks of every rank that failed, or which ranks hung.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    port = _free_port()
    ranks = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, world_size, port, fn, args, sender), daemon=True
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    results: list[Any] = []
    errors: list[str] = []
    for rank, (_, receiver) in enumerate(ranks):
        try:
            # One rank's failure usually hangs the others: once an error is known they get little time.
            if not receiver.poll(timeout if not errors else 5.0):
                errors.append(f"rank {rank} gave no answer within {timeout} s")
                continue
            status, value = receiver.recv()
        except EOFError:
            errors.append(f"rank {rank} died")
            continue
        if status == "ok":
            results.append(pickle.loads(value))
        else:
            errors.append(value)
    for process, _ in ranks:
        process.join(5)
        if process.is_alive():
            process.kill()
    assert not errors, "\n".join(errors)
    return results
