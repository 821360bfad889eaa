"""Run decoders in subprocesses, so that a crash or hang rejects one file and not the run."""

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
    """Result of an item whose process died.

    Attributes:
        reason: the cause, such as "the process ended by SIGSEGV".
    """

    reason: str


class Crashed(Exception):
    """The subprocess died or was stopped; the text is the cause, as in `Crash.reason`."""


def num_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_isolated(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    num_workers: int | None = None,
    limit_seconds: float,
    preload: Sequence[str] = (),
) -> Iterator[tuple[int, Result | Crash]]:
    """Call a function on each item in worker processes. Yield results in the order in which they finish.

    Args:
        function: function that can be imported by name; it and the items are pickled.
        items: arguments, one call each.
        num_workers: number of processes. Default: one per usable core.
        limit_seconds: time limit of a call; the process of a longer call is stopped.
        preload: modules to import once for all workers.

    Yields:
        (index of the item, its result, or a `Crash` if its process died or was stopped).

    Raises:
        RuntimeError: if the function raises; the text contains the worker's traceback.
    """
    # Not fork: the caller may have threads, and libraries that do not survive a fork.
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
    """Yield the values of an iterator that runs in a subprocess, one value ahead of the caller.

    Args:
        function: function that can be imported by name and returns the iterator; arguments and values are pickled.
        arguments: arguments of the function.
        limit_seconds: time limit of a value; the start of the process has the same limit again.
        preload: modules to import once for all such processes.

    Raises:
        Crashed: if the process died or exceeded the limit.
        WandsError: if the iterator raises it. MemoryError is passed on, too.
        RuntimeError: if the iterator raises anything else; the text contains its traceback.
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
                raise Crashed(_cause_of_death(process)) from None
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
    threading.Thread(target=_exit_with_caller, args=(pipe,), daemon=True).start()
    with suppress(BrokenPipeError, ConnectionResetError):  # the caller wants no more values
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


def _exit_with_caller(pipe: Connection) -> None:
    """Exit when the caller's process is gone: the main thread may be in a decoder that never returns."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _cause_of_death(process: Any) -> str:
    process.join(10)
    code = process.exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the process ended {how}"


class _Worker(Generic[Item, Result]):
    """A worker process and its current item."""

    def __init__(self, context: Any, function: Callable[[Item], Result]) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()  # otherwise the end of the process would not be noticed
        self.pipe.recv()  # the process has started: its time limit counts from now
        self.index, self.started = -1, 0.0

    def give(self, numbered: tuple[int, Item]) -> None:
        self.index, item = numbered
        self.started = time.monotonic()
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the process died before its first item: `take` reports it
            self.pipe.send(item)

    def take(self) -> Result | Crash:
        try:
            error, result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return Crash(_cause_of_death(self.process))
        if error is not None:
            raise RuntimeError(error)
        return result

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    import traceback

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
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
