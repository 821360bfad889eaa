"""Worker processes that encode captions and clips.

They are this process alone, subprocesses (`--workers N`), or the ranks of a launcher such as torchrun. Each gets a fixed share of
the captions and clips, and the GPUs of a node in turn. One process leads: it scans the source, assigns the shares, and writes the
index of the cache.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, Self

import torch
import torch.distributed as dist

from wands.data.clips.isolated import Crash, IsolatedWorker, run_in_threads
from wands.errors import CacheError, ConfigError, WandsError, one_line
from wands.plugin import plugin_importer
from wands.preprocess.encoding import Devices, Done, WorkerTimes
from wands.texts import log_to_stderr

_LAUNCHER_TIMEOUT = timedelta(days=7)  # ranks wait while rank 0 scans; launchers end all ranks when one fails
_SHARED_DISK_SECONDS = 120.0

Task = Callable[[Any, int, Devices, Sequence[Any]], Iterator[Any]]
"""Function of (settings, number of the worker, devices, captions or clips) that a worker runs. It yields events.

`settings.work` is the folder for the temporary files of the run.
"""


@dataclass(frozen=True)
class Lost:
    """Event that a worker ended before all its captions or clips were finished.

    Attributes:
        slot: number of the worker.
        reason: text for the report, which names the worker and the cause.
        error: error that ended the worker; None if its process died.
    """

    slot: int
    reason: str
    error: WandsError | None = None


Event = Done | WorkerTimes | Lost


class WorkerPool:
    """Workers of a run. Leaving the `with` block ends them.

    Attributes:
        size: number of workers.
        rank: rank of this process under a launcher, else 0. Rank 0 leads the run.
        launched: whether a launcher has started several processes.
        slots: numbers of the workers that have not failed, in ascending order. Only these get captions and clips.
    """

    def __init__(
        self,
        workers: int | None,
        device: str | None,
        text_device: str | None,
        imports: Sequence[str] = (),
    ) -> None:
        """Choose the workers and their devices. No process is started.

        A launcher is recognized by RANK, LOCAL_RANK and WORLD_SIZE. `workers` None means one worker per GPU if `device` is None
        or "cuda", else one: several workers on one device waste memory. `device`, of the VAE and of CLIP, is by default cuda if a
        GPU exists, else cpu. `text_device` is by default the same. `imports` are modules of outside code.

        Raises:
            ConfigError: if a device cannot be used, or `workers` is above 1 under a launcher.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if workers is None:
            num_gpus = torch.cuda.device_count() if device in (None, "cuda") and world_size == 1 else 0
            workers = max(1, num_gpus)
        if world_size > 1 and workers > 1:
            raise ConfigError(
                f"--workers {workers} starts processes, but a launcher has started {world_size} already. "
                "Remove --workers, or start wands without the launcher."
            )
        self.launched = world_size > 1
        self.size = world_size if self.launched else workers
        self.rank = int(os.environ.get("RANK", "0")) if self.launched else 0
        self._local_rank = int(os.environ.get("LOCAL_RANK", self.rank)) if self.launched else 0
        self._device = device
        self._text_device = text_device
        self._initialize = plugin_importer(imports)
        self.devices(self._local_rank)
        self.slots = list(range(self.size))
        self._processes: dict[int, IsolatedWorker] = {}
        self._ranks_wait = True

    def devices(self, number: int) -> Devices:
        """Return the devices of a worker, by its number on its node.

        Raises:
            ConfigError: if a device cannot be used.
        """
        default = "cuda" if torch.cuda.is_available() else "cpu"
        vae = pick_device("--device", self._device or default, number)
        text = self._text_device
        return Devices(vae, pick_device("--text-device", text, number) if text else vae)

    def limit(self, num_items: int) -> None:
        """Reduce the number of workers to at most `num_items`, unless a launcher has started them."""
        if not self.launched:
            self.size = max(1, min(self.size, num_items))
            self.slots = list(range(self.size))

    def run(self, task: Task, settings: Any, shares: Mapping[int, Sequence[Any]]) -> Iterator[Event]:
        """Run a task on the share of every worker, and yield the events that the workers report.

        Under a launcher, the events of ranks other than rank 0 are yielded at the end.

        Raises:
            WandsError: if there is only one worker and the task raises it. With several, a `Lost` event reports the error.
        """
        if self.launched:
            self._scatter([(task, settings, shares.get(rank, ())) for rank in range(self.size)])
            self._ranks_wait = False
            yield from self._run_own_share(task, settings, shares.get(0, ()))
            gathered: list[Any] = [None] * self.size
            dist.gather_object([], gathered)
            self._ranks_wait = True
            yield from chain.from_iterable(gathered)
        elif self.size == 1:
            yield from task(settings, 0, self.devices(0), shares[0])
        else:
            runs = []
            for slot, share in shares.items():
                worker = self._processes.setdefault(
                    slot, IsolatedWorker(method="spawn", initialize=self._initialize)
                )
                level = logging.getLogger("wands").getEffectiveLevel() if slot == 0 else logging.ERROR
                arguments = (level, self.size, task, settings, slot, self.devices(slot), share)
                runs.append(_with_losses(slot, worker.run(_run_in_subprocess, *arguments)))
            yield from run_in_threads(runs)

    def _run_own_share(self, task: Task, settings: Any, share: Sequence[Any]) -> Iterator[Event]:
        def events() -> Iterator[Event]:
            if share:
                _wait_for_shared_disk(self.rank, settings)
                yield from task(settings, self.rank, self.devices(self._local_rank), share)

        return _with_losses(self.rank, events())

    def follow(self) -> None:
        """On a rank other than rank 0, run the tasks that rank 0 sends, until rank 0 has finished.

        Raises:
            WandsError: if rank 0 ended with a WandsError, with the same message.
        """
        while (order := self._scatter(None)) is not None:
            if isinstance(order, WandsError):
                raise WandsError(str(order), agreed=True)
            dist.gather_object(list(self._run_own_share(*order)))

    def _scatter(self, orders: Sequence[Any] | None) -> Any:
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if orders is None else list(orders))
        return received[0]

    def __enter__(self) -> Self:
        if self.launched:
            dist.init_process_group("gloo", timeout=_LAUNCHER_TIMEOUT)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for process in self._processes.values():
            process.kill()
        if self.launched:
            if self.rank == 0 and self._ranks_wait:
                self._scatter([error if isinstance(error, WandsError) else None] * self.size)
            dist.destroy_process_group()


def _run_in_subprocess(
    level: int, num_workers: int, task: Task, settings: Any, slot: int, devices: Devices, share: Any
) -> Iterator[Event]:
    log_to_stderr()
    logging.getLogger("wands").setLevel(level)
    if devices.vae.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    yield from task(settings, slot, devices, share)


def _with_losses(slot: int, events: Iterator[Event]) -> Iterator[Event]:
    """Yield the events of a worker. If it crashes or raises a WandsError, yield a `Lost` event at the end."""
    try:
        yield from events
    except Crash as crash:
        yield Lost(slot, f"worker {slot} ended early ({crash})")
    except WandsError as error:
        yield Lost(slot, f"worker {slot} ended early ({str(error).rstrip('.')})", error)


def _wait_for_shared_disk(rank: int, settings: Any) -> None:
    """Wait until this process sees the work folder of rank 0, because network file systems show new files late."""
    began = time.monotonic()
    while not settings.work.is_dir():
        if time.monotonic() - began > _SHARED_DISK_SECONDS:
            raise CacheError(
                f"rank {rank} does not see {settings.work}. All nodes need the same --out on a shared file system. Without "
                "a shared file system, start wands preprocess on each node with a different part: --part 1/2, --part 2/2."
            )
        time.sleep(1.0)


def pick_device(option: str, name: str, number: int = 0) -> torch.device:
    """Return the device `name`. "cuda" without an index is the GPU of worker `number` of the node, in turn.

    Raises:
        ConfigError: if the device cannot be used; the message names the command-line option.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and torch.cuda.device_count():
            device = torch.device("cuda", number % torch.cuda.device_count())
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{option} {name} cannot be used ({one_line(error, 120)}). Use cpu, or cuda with an NVIDIA GPU."
        ) from None
