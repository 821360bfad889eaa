"""The processes of `wands preprocess`: alone, started by this one, or by a launcher; one of them leads.

Nobody waits for a process that may be dead: what a worker has in hand is a lock that the system lifts at its end
(`wands/commands/preprocess/claims.py`), and a launcher's store carries one message, the leader's, when the work is there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from wands.commands.preprocess.encoding import encode_share
from wands.commands.preprocess.work_folder import WorkerStats
from wands.errors import CacheError, ConfigError, WandsError

log = logging.getLogger(__name__)

_MESSAGE = "wands preprocess"
_PATIENCE = timedelta(days=7)  # the leader scans the source first; launchers end all ranks when one fails
_SECONDS_FOR_FILE = 120.0


@dataclass(frozen=True)
class Crew:
    """The processes that share the work.

    Attributes:
        size: how many encode.
        rank: of this one; 0 leads.
        launched: whether a launcher started them; otherwise the leader starts those it needs.
        device: where the VAE shall run; None lets each worker have its own GPU, or the CPU.
        text_device: where UMT5 shall run; None is `device`.
    """

    size: int
    rank: int
    launched: bool
    device: str | None
    text_device: str | None

    @classmethod
    def find(cls, workers: int, device: str | None, text_device: str | None) -> Crew:
        """From the launcher's variables RANK and WORLD_SIZE, or `workers` without them.

        Raises:
            ConfigError: a device that cannot be used, or both ways of having several.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if workers < 1:
            raise ConfigError(f"workers={workers} must be at least 1; leave it out for one process.")
        if world_size > 1 and workers > 1:
            raise ConfigError(
                f"workers={workers} starts processes, but a launcher has started {world_size}; drop one."
            )
        launched = world_size > 1
        rank = int(os.environ.get("RANK", "0")) if launched else 0
        crew = cls(world_size if launched else workers, rank, launched, device, text_device)
        crew.devices(int(os.environ.get("LOCAL_RANK", "0")) if launched else 0)
        return crew

    def devices(self, number: int) -> tuple[torch.device, torch.device]:
        """Where the VAE and UMT5 of a worker run.

        Args:
            number: of the worker on its node.

        Raises:
            ConfigError: a device that cannot be used.
        """
        own = _device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"), number)
        return own, _device(self.text_device, number) if self.text_device else own


def work_share(work: Path, slot: int, token: str, devices: tuple[torch.device, torch.device]) -> None:
    """Do a worker's share; its own mistakes end it alone, and are left in worker-`slot`.json for the leader.

    Args:
        work: folder in which the workers meet.
        slot: number of the worker.
        token: of the run.
        devices: of the VAE and of UMT5.
    """
    try:
        encode_share(work, slot, token, *devices)
    except WandsError as error:
        log.error("worker %d: %s", slot, error)
        WorkerStats(error=str(error)).write(work, slot)


@dataclass(frozen=True)
class Ended:
    """A worker that did not end as it should.

    Attributes:
        told: what happened, in words.
        by_force: a signal ended it, as when a decoder crashes.
    """

    told: str
    by_force: bool


def start_workers(work: Path, token: str, crew: Crew, size: int) -> list[Ended]:
    """Start processes and wait until each has ended; when this one ends, however it ends, so do they.

    Args:
        work: folder in which the workers meet.
        token: of the run.
        crew: names the devices.
        size: how many to start.

    Returns:
        Those that did not end as they should.
    """
    # A forked copy of a process in which torch has run may hang.
    context = multiprocessing.get_context("spawn")
    ours: list[Connection] = []
    processes = []
    try:
        for slot in range(size):
            theirs, end = context.Pipe(duplex=False)
            args = (work, slot, token, crew, size, theirs, log.getEffectiveLevel())
            processes.append(context.Process(target=_work, args=args, name=f"worker-{slot}"))
            ours.append(end)
            processes[-1].start()
            theirs.close()
        for process in processes:
            process.join()
    finally:
        for end in ours:
            end.close()
        for process in processes:
            process.join()
    return [
        Ended(
            f"worker {slot} was ended by signal {-code}"
            if code < 0
            else f"worker {slot} failed with code {code}",
            by_force=code < 0,
        )
        for slot, code in enumerate(process.exitcode for process in processes)
        if code
    ]


def _work(work: Path, slot: int, token: str, crew: Crew, size: int, alive: Connection, level: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the leader tells when to end
    threading.Thread(target=_leave_with, args=(alive,), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("wands").setLevel(level if slot == 0 else logging.ERROR)
    devices = crew.devices(slot)
    if devices[0].type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    work_share(work, slot, token, devices)


def _leave_with(alive: Connection) -> None:
    """End this process when the other end of the pipe is gone: nothing is lost, and no orphan goes on writing."""
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)


# ---- under a launcher


@contextmanager
def tell_followers(crew: Crew) -> Iterator[Callable[[str], None]]:
    """Give the leader a function to call with the run's token when the work is handed out.

    Leaving the block without it tells the other ranks to end: with the leader's mistake, or because there is nothing to do.
    """
    if not crew.launched:
        yield lambda token: None
        return
    store = _store()
    told = False

    def tell(**message: str) -> None:
        nonlocal told
        if not told:
            told = True
            store.set(_MESSAGE, json.dumps(message))

    try:
        yield lambda token: tell(token=token)
    except WandsError as error:
        tell(error=str(error))
        raise
    finally:
        tell()


def follow_leader(work: Path, crew: Crew) -> None:
    """Do the share of a launcher's rank other than the first.

    Args:
        work: folder in which the workers meet, on a file system that all nodes share.
        crew: this rank's place.

    Raises:
        ConfigError: the leader's mistake, or its folder cannot be seen from here.
    """
    message = json.loads(_store().get(_MESSAGE))
    if "error" in message:
        raise ConfigError(message["error"], agreed=True)
    if "token" not in message:
        return
    local_rank = int(os.environ.get("LOCAL_RANK", crew.rank))
    began = time.monotonic()
    while not work.is_dir():
        if time.monotonic() - began > _SECONDS_FOR_FILE:
            log.error("rank %d does not see %s; the other ranks go on without it", crew.rank, work)
            return
        time.sleep(1.0)  # a network file system tells of new files after a while
    work_share(work, crew.rank, message["token"], crew.devices(local_rank))


def _store() -> torch.distributed.Store:
    return next(torch.distributed.rendezvous("env://", timeout=_PATIENCE))[0]


# ---- one run at a time


def lock_work(work: Path, seconds: float = 60.0) -> int:
    """Wait until no worker of an earlier run is left; returns the lock, shared with the workers of this run.

    Raises:
        CacheError: there are some still, or the file system has no locks.
    """
    lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_SH)
            return lock
        except BlockingIOError:
            if time.monotonic() - began > seconds:
                os.close(lock)
                raise CacheError(
                    f"cache={work.parent} is being written by workers of another run; wait for it or end them."
                ) from None
            time.sleep(0.2)
        except OSError as error:
            os.close(lock)
            raise CacheError(
                f"cache={work.parent} lies on a file system without locks ({error.strerror}); choose an --out on another."
            ) from None


def _device(name: str, number: int) -> torch.device:
    """A device by name; of GPUs without an index each worker takes one, in turn."""
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and torch.cuda.device_count():
            device = torch.device("cuda", number % torch.cuda.device_count())
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"device={name} cannot be used ({reason}); use cpu, or cuda with an NVIDIA GPU."
        ) from None
