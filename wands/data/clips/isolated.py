"""Run functions in subprocesses, so that a crash or a hang loses one call and not the run.

`IsolatedWorker` streams the values of a generator function. concurrent.futures and pebble return one result per call, so that all
decoded windows of a long video would be in memory at once.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

from wands.errors import WandsError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Crash(Exception):
    """Error for a subprocess that died, was killed or took too long, with the reason."""


class Hang(Crash):
    """Error for a subprocess that was killed because it took longer than the time limit."""


def num_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class IsolatedWorker:
    """A subprocess that runs generator functions, one call at a time. A call after a crash starts a new one.

    While the caller uses a value, the subprocess computes the next. It exits when its parent exits, even by SIGKILL.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        method: Literal["forkserver", "spawn"] = "forkserver",
        initialize: Callable[[], object] | None = None,
    ) -> None:
        """Choose how the first call of `run` starts the subprocess.

        "forkserver" takes milliseconds, and imports `preload` once for all. "spawn" is slower, but allows subprocesses of the
        subprocess. `initialize` is pickled, and called before the first function.
        """
        # Never fork: this process may have threads, and torch does not survive a fork.
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([__name__, *preload])
        self._method = method
        self._initialize = initialize
        self._process: Any = None
        self._pipe: Connection | None = None
        self.killed = False

    def run(
        self, function: Callable[..., Iterator[Any]], *arguments: Any, limit_seconds: float | None = None
    ) -> Generator[Any, None, None]:
        """Run a generator function, importable by name, and yield its values. An early stop of the caller kills the subprocess.

        Arguments and values are pickled. `limit_seconds` is the longest time for one value.

        Raises:
            Crash: if the subprocess died or took too long, or `kill` was called.
            WandsError, MemoryError: if the function raised this error.
            RuntimeError: with the traceback, if the function raised any other exception.
        """
        if self._pipe is None:
            self._pipe, child_end = self._context.Pipe()
            daemon = self._method == "forkserver"  # a daemon could not start subprocesses itself
            process = self._context.Process(target=_serve, args=(child_end, self._initialize), daemon=daemon)
            process.start()
            self._process = process  # only now: `kill` of another thread needs a process that has started
            child_end.close()  # otherwise this process would not notice the end of the subprocess
            self._pipe.poll(None)  # until the subprocess is ready: the time limit counts from here on
        kind = ""
        try:
            if self.killed:
                raise Crash("the subprocess was killed")
            # If the subprocess died, `recv` below raises the error.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._pipe.send((function, arguments))
            while True:
                if not self._pipe.poll(limit_seconds):
                    raise Hang(f"the process took more than {limit_seconds:g} s")
                try:
                    kind, value = self._pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._process.join(10)
                    code = self._process.exitcode or 0
                    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    raise Crash(f"the process ended with {cause}") from None
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                if kind == "value":
                    yield value
        finally:
            if kind not in ("end", "error"):
                self.close()

    def kill(self) -> None:
        """Kill the subprocess. A running call of `run` and all later calls of `run` raise Crash. Any thread may call `kill`."""
        self.killed = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """Kill the subprocess and release its resources. A later call of `run` starts a new subprocess."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._pipe = self._process = None


def _serve(pipe: Connection, initialize: Callable[[], object] | None) -> None:
    """Run the functions that arrive through the pipe, and send back the values that they yield. Runs in the subprocess."""
    import traceback

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent handles it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed its end
        if initialize is not None:
            initialize()
        pipe.send(("ready", None))
        while True:
            function, arguments = pipe.recv()
            try:
                for value in function(*arguments):
                    pipe.send(("value", value))
                pipe.send(("end", None))
            except (WandsError, MemoryError) as error:
                pipe.send(("error", error))
            except Exception:  # if the pipe is broken, the next line ends the process
                pipe.send(("error", RuntimeError(traceback.format_exc())))


def _exit_with_parent() -> None:
    """End this process when its parent has ended, which a decoder in an endless loop would outlive."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def run_in_threads(
    iterators: Sequence[Iterator[Result]], num_waiting: int = 0
) -> Generator[Result, None, None]:
    """Run each iterator in a thread, yield all values as they are ready, and raise the first exception.

    The threads pause when `num_waiting` values are not taken yet; 0 sets no limit.
    """
    # A thread pool with one outstanding `next` per iterator would be shorter, but would not decode the next clip while the
    # encoder works: the end marker of a clip would take the only place.
    results: queue.Queue[tuple[bool, Any]] = queue.Queue(num_waiting)
    stopped = threading.Event()

    def put(ended: bool, value: Any) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                return results.put((ended, value), timeout=0.1)

    def run(iterator: Iterator[Result]) -> None:
        try:
            for value in iterator:
                put(False, value)
                if stopped.is_set():
                    return
            put(True, None)
        except BaseException as error:
            put(True, error)

    for iterator in iterators:
        threading.Thread(target=run, args=(iterator,), name="run_in_threads", daemon=True).start()
    num_running = len(iterators)
    try:
        while num_running:
            ended, value = results.get()
            num_running -= ended
            if not ended:
                yield value
            elif value is not None:
                raise value
    finally:
        stopped.set()


def map_isolated(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    num_workers: int | None = None,
    limit_seconds: float,
    preload: Sequence[str] = (),
    initialize: Callable[[], object] | None = None,
) -> Iterator[tuple[int, Result | Crash]]:
    """Call a function on each item in subprocesses, and yield (index, result) in the order in which the calls finish.

    The function, importable by name, may be a generator function, whose last value is its result. The result is a `Crash` if the
    subprocess died or exceeded `limit_seconds`, for the call or for one value of a generator. Default of `num_workers`: one per
    available core.

    Raises:
        WandsError, MemoryError: if the function raised this error.
        RuntimeError: with the traceback, if the function raised any other exception.
    """
    remaining = enumerate(items)  # shared by the threads: next() of an enumerate over a list is atomic

    def results(worker: IsolatedWorker) -> Iterator[tuple[int, Result | Crash]]:
        for index, item in remaining:
            try:
                *_, result = worker.run(_call, function, item, limit_seconds=limit_seconds)
            except Crash as crash:
                result = crash
            yield index, result

    number = min(num_workers or num_cores(), len(items))
    return run_in_workers(results, number, preload, initialize=initialize)


def run_in_workers(
    run: Callable[[IsolatedWorker], Iterator[Result]],
    num_workers: int,
    preload: Sequence[str],
    num_waiting: int = 0,
    initialize: Callable[[], object] | None = None,
) -> Generator[Result, None, None]:
    """Call the generator function `run` in a thread for each worker process, and yield all values as they are ready.

    To share the work, all calls must take their items from the same queue or iterator. `num_waiting` is as in `run_in_threads`.
    """
    workers = [IsolatedWorker(preload, initialize=initialize) for _ in range(num_workers)]
    try:
        yield from run_in_threads([run(worker) for worker in workers], num_waiting)
    finally:
        for worker in workers:
            worker.kill()


def _call(function: Callable[[Item], Any], item: Item) -> Iterator[Any]:
    result = function(item)
    yield from result if isinstance(result, Generator) else [result]
