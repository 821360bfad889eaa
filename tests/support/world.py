"""Small gloo worlds for tests: ranks forked from one server that has imported the heavy packages already.

A `World` keeps its ranks, their process group and what they have cached from one function to the next: many small cases then
cost neither processes nor groups. What a function puts in place of something in a module of wands, the environment and the
working folder are put back behind it. `run_world` starts a world for one function: for those that begin or end with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import forkserver
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
    "wands.commands.check.check",
]


def start_forkserver() -> None:
    """Start the server that all later processes are forked from, so that no rank imports torch again.

    A process has one such server, and the first one who asks for it decides what it has imported: `wands check`, without this.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NUMBERS = count(os.getpid())


def free_port() -> str:
    """Return a TCP port that is still free when a rank listens on it, seconds later.

    Systems give the ports from 32,768 on to outgoing connections. Below these, each worker of pytest-xdist has 1,000 ports.
    """
    while True:
        port = 10_000 + 1000 * _WORKER + next(_NUMBERS) % 1000
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return str(port)


@contextmanager
def _put_back() -> Iterator[None]:
    """Undo what a test has put in place of names of wands' modules, and leave its folder and environment."""
    modules = {
        name: dict(vars(module))
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "wands" and module is not None
    }
    folder = os.getcwd()
    environment = dict(os.environ)
    yield
    for name, before in modules.items():
        found = vars(sys.modules[name])
        found.update({key: value for key, value in before.items() if found.get(key) is not value})
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def _rank_main(
    rank: int, world_size: int, port: str, pipe: Connection, accelerator: str | None = None
) -> None:
    if accelerator is not None:  # before anything imports DeepSpeed
        os.environ["DS_ACCELERATOR"] = accelerator
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    import torch
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        # On CPUs with fp16 instructions DeepSpeed refuses float64 models under ZeRO-3 and runs Muon in fp16.
        type(get_accelerator()).is_fp16_supported = lambda self: False
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: looking through it for cycles takes a second
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # a rank that waits for a dead peer's goodbye would hang the suite
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            fn, args = pickle.loads(job)
            # Plain pickle: the pipe's own would pass tensors as file handles of a process that is about to end.
            with _put_back():
                answer = ("ok", pickle.dumps(fn(*args)))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)


class World:
    """Ranks that take one function after another, each in the state in which the last one left the process.

    They start at the first `run`. A function that fails or hangs on any rank ends them all; the next one gets new ranks.

    Args:
        world_size: number of processes.
        accelerator: what DeepSpeed runs on there, "cpu" or "cuda"; as in this process by default. With one the ranks are
            spawned: CUDA does not outlive a fork.
    """

    def __init__(self, world_size: int, accelerator: str | None = None) -> None:
        self.world_size = world_size
        self.accelerator = accelerator
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Run `fn(*args)` on every rank; the ranks' environment is what a launcher would set.

        Args:
            fn: a module-level function; it finds its rank in the environment or in torch.distributed.
            timeout: seconds after which the world counts as hung.

        Returns:
            The results in rank order.

        Raises:
            AssertionError: with the tracebacks of every rank that failed, or which ranks hung.
        """
        if not self._ranks:
            self._start()
        job = pickle.dumps((fn, args))
        results: list[Any] = []
        errors: list[str] = []
        for _, pipe in self._ranks:
            try:
                pipe.send_bytes(job)
            except BrokenPipeError:
                continue  # reported below, where it gives no answer
        deadline = time.monotonic() + timeout
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                # One rank's failure usually hangs the others: once an error is known they get little time.
                if not pipe.poll(5.0 if errors else max(deadline - time.monotonic(), 0.0)):
                    errors.append(f"rank {rank} gave no answer within {timeout} s")
                    continue
                status, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                errors.append(f"rank {rank} died")
                continue
            if status == "ok":
                results.append(pickle.loads(value))
            else:
                errors.append(value)
        if errors:
            self.close(patience=0.0)
        assert not errors, "\n".join(errors)
        return results

    def close(self, patience: float = 5.0) -> None:
        """End the ranks; those that do not go within `patience` seconds are killed."""
        for _, pipe in self._ranks:
            pipe.close()
        deadline = time.monotonic() + patience
        for process, _ in self._ranks:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []

    def _start(self) -> None:
        if self.accelerator is None:
            context: Any = multiprocessing.get_context("forkserver")
            start_forkserver()
        else:
            context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, self.world_size, port, theirs, self.accelerator),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


class WorldPool:
    """One lasting world of each size, made when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __getitem__(self, world_size: int) -> World:
        return self._worlds.setdefault(world_size, World(world_size))

    def close(self) -> None:
        """End all of them."""
        for world in self._worlds.values():
            world.close()


def run_world(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """Run `fn(*args)` on every rank of a new world; see `World.run`."""
    world = World(world_size)
    try:
        return world.run(fn, *args, timeout=timeout)
    finally:
        world.close()
