"""Work in processes of its own: a decoder that crashes or hangs on a damaged file costs that file, not the run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from wands.errors import WandsError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Crash:
    """Stands for the result of an item that took its process down.

    Attributes:
        reason: what happened, in words, such as "the process ended by SIGSEGV".
    """

    reason: str


class Crashed(Exception):
    """The process that should have given a value ended, or was ended; the text says how, as in `Crash.reason`."""


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_isolated(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    num_workers: int | None = None,
    limit_seconds: float,
    preload: Sequence[str] = (),
) -> Iterator[tuple[int, Result | Crash]]:
    """Call a function on each item in worker processes; yields in the order in which they finish.

    Args:
        function: importable by name; it and the items are pickled.
        items: one call each.
        num_workers: processes; default: one per core that may be used.
        limit_seconds: a call that takes longer is ended, and its process with it.
        preload: modules to import once, for all workers.

    Yields:
        (index of the item, its result, or a `Crash` when its process died or was ended).

    Raises:
        RuntimeError: the function raised; the text holds the worker's traceback.
    """
    # Not fork: the caller may have threads, and libraries that do not survive one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    queue = iter(enumerate(items))
    busy: dict[Connection, _Worker] = {}
    try:
        for _ in range(min(num_workers or num_cores(), len(items))):
            worker = _Worker(context, function)
            busy[worker.pipe] = worker
            worker.give(next(queue))
        while busy:
            soonest = min(worker.started for worker in busy.values()) + limit_seconds
            ready = wait(list(busy), timeout=max(0.0, soonest - time.monotonic()))
            late = [worker for pipe, worker in busy.items() if pipe not in ready]
            late = [worker for worker in late if time.monotonic() - worker.started > limit_seconds]
            done: list[tuple[_Worker, Any]] = [(busy[pipe], busy[pipe].take()) for pipe in ready]  # type: ignore[index]
            done += [(worker, Crash(f"it took more than {limit_seconds:g} s")) for worker in late]
            for worker, result in done:
                index, reusable = worker.index, not isinstance(result, Crash)
                del busy[worker.pipe]
                if not reusable:
                    worker.stop()
                following = next(queue, None)
                if following is not None:
                    worker = worker if reusable else _Worker(context, function)
                    busy[worker.pipe] = worker
                    worker.give(following)
                elif reusable:
                    worker.stop()
                yield index, result
    finally:
        for worker in busy.values():
            worker.stop()


def iterate_isolated(
    function: Callable[..., Iterator[Result]],
    *arguments: Any,
    limit_seconds: float,
    preload: Sequence[str] = (),
) -> Iterator[Result]:
    """Go through the values of an iterator that a process of its own runs, one ahead of the caller.

    Args:
        function: importable by name, gives the iterator; arguments and values are pickled.
        arguments: of the function.
        limit_seconds: a value that takes longer ends the process; the first one may take its start longer.
        preload: modules to import once, for all such processes.

    Raises:
        Crashed: the process ended, or took too long.
        WandsError: the iterator raised it; MemoryError likewise.
        RuntimeError: the iterator raised anything else; the text holds its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve_values, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            if not pipe.poll(limit_seconds):
                raise Crashed(f"it took more than {limit_seconds:g} s")
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise Crashed(_how_it_ended(process)) from None
            if kind == "error":
                raise value
            if kind == "end":
                return
            if kind == "value":
                yield value
    finally:
        pipe.close()
        process.kill()
        process.join()


def _serve_values(
    pipe: Connection, function: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]
) -> None:
    import traceback

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(pipe,), daemon=True).start()
    with suppress(BrokenPipeError, ConnectionResetError):  # nobody wants more
        pipe.send(("ready", None))
        try:
            for value in function(*arguments):
                pipe.send(("value", value))
            pipe.send(("end", None))
        except (WandsError, MemoryError) as error:
            pipe.send(("error", error))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            pipe.send(("error", RuntimeError(traceback.format_exc())))


def _leave_with(pipe: Connection) -> None:
    """End this process when the caller's is gone: it may be in a decoder that never returns."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _how_it_ended(process: Any) -> str:
    process.join(10)
    code = process.exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the process ended {how}"


class _Worker(Generic[Item, Result]):
    """A process and what it is working on."""

    def __init__(self, context: Any, function: Callable[[Item], Result]) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()  # or its end would never be seen
        self.pipe.recv()  # it has started: from here on its time counts
        self.index, self.started = -1, 0.0

    def give(self, numbered: tuple[int, Item]) -> None:
        self.index, item = numbered
        self.started = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):  # it died before its first item: `take` says so
            self.pipe.send(item)

    def take(self) -> Result | Crash:
        try:
            error, result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return Crash(_how_it_ended(self.process))
        if error is not None:
            raise RuntimeError(error)
        return result

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    import traceback

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    pipe.send("ready")
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[str | None, Any]
        try:
            answer = (None, function(item))
        except Exception:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
