"""Watch a training process for requests to stop, for steps that do not end, and for lost connections to other ranks.

If a step does not end or a connection breaks, each rank writes its Python stacks to a file in the run folder, and waits for those
of the others. A rank without a file does not answer. This works even if the network is down or a process is suspended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from wands.distributed.consistency import group_ranks, name_ranks
from wands.errors import RankError, WandsError, one_line
from wands.own_files import open_own_file
from wands.texts import safe_lines
from wands.watch.launcher import PATIENT_LAUNCHER, Ancestor

_log = logging.getLogger(__name__)
_warn_once = cache(_log.warning)

REQUESTS = ("save", "save_quit", "check")
"""Names of the files in a run folder with which the user requests an action."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ONE_REQUEST = 2.0
"""Seconds in which several signals count as one request. A worker receives Ctrl-C from the terminal and from the launcher."""

STEP_FACTOR = 10.0
STEP_FLOOR = 300.0
"""Without `train.step_timeout`, the limit of a step is STEP_FACTOR times the longest of the last 50 steps, and at least
STEP_FLOOR seconds.
"""

_TICK = 1.0
_HANG_WAIT = 15.0
_LOSS_WAIT = 3.0
"""Seconds that a rank waits for the stack traces of the other ranks: after work that does not end in time, and after a lost
connection. The second is short, because launchers soon kill the remaining ranks.
"""


class Watchdog:
    """Thread that watches a training process, used in a `with` statement around the whole run.

    The end of the launcher, SIGTERM, SIGINT (Ctrl-C) and SIGHUP (a closed terminal) request a stop. Signals within `ONE_REQUEST`
    seconds of the first count as one request. A later SIGINT ends the process at once. A signal that was ignored at the start of
    the process stays ignored.

    Args:
        launcher: result of `find_launcher`.
        heartbeat: function that is called about once a second with the name of the current work and its seconds so far.

    Attributes:
        stop_requested: whether to save a checkpoint and stop.
        failure: error of this rank for which it asked to stop, see `stop_for`.
        saved: newest complete checkpoint of the run, for messages.
    """

    def __init__(
        self,
        launcher: Sequence[Ancestor] = (),
        heartbeat: Callable[[str, float], None] = lambda work, seconds: None,
    ) -> None:
        self.stop_requested = False
        self.failure: WandsError | None = None
        self.saved: Path | None = None
        self._launcher = launcher
        self._heartbeat = heartbeat
        self._ends_hang = False
        self._first_signal: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._main, self._pipe = socket.socketpair()
        self._folder: Path | None = None
        self._step_timeout: float | None = None
        self._timeout = float("inf")
        self._allowed: tuple[str, float] = "the start", float("inf")
        self._durations: deque[float] = deque(maxlen=50)

    def __enter__(self) -> Watchdog:
        # Python runs handlers only between the operations of the main thread, but writes to this socket at once.
        self._main.setblocking(False)
        self._pipe.settimeout(_TICK)
        self._previous = signal.set_wakeup_fd(self._main.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, lambda number, frame: None)
        self._thread = threading.Thread(target=self._watch, name="wands-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        work, _ = self._allowed
        self.begin_work("the end", float("inf"))
        try:
            self._raise_lost_connection(error, work)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._previous)
            self._main.close()
            self._thread.join()  # ends the process if a step did not end in time
            self._pipe.close()

    def watch_run(self, output_dir: Path, step_timeout: float | None, timeout: float) -> None:
        """Begin to enforce the limits of a step and of other work, such as the start of the run with its first step, in seconds.

        Without `step_timeout`, the limit of a step is computed from the durations of the last steps.
        """
        self._folder = output_dir / "stacks"
        self._step_timeout = step_timeout
        self._timeout = timeout
        with contextlib.suppress(OSError):  # the file of an earlier run
            answer_file(self._folder, int(os.environ.get("RANK", "0"))).unlink()
        self.begin_work("the start")

    def begin_step(self, step: int) -> None:
        """Limit the time that an optimizer step may take. The first step is part of the start of the run."""
        limit = max(STEP_FACTOR * max(self._durations), STEP_FLOOR)
        self.begin_work(f"step {step}", self._step_timeout or limit)

    def end_step(self, step: int, seconds: float) -> None:
        """Inform the watchdog that a step has ended. From the first call on, there is something to save."""
        self._durations.append(seconds)
        self.begin_work(f"the work after step {step}")

    def begin_work(self, work: str, limit: float | None = None) -> None:
        """Limit the time of work that begins now, by default to the `timeout` of `watch_run`. The previous limit ends."""
        # A new tuple, also if its values are equal.
        self._allowed = (work, self._timeout if limit is None else limit)

    def stop_for(self, error: WandsError) -> None:
        """Request a stop for an error after which this rank can finish the current step, such as a failed read of later data."""
        self.failure = self.failure or error
        self.stop_requested = True
        _print("a read failed; saving a checkpoint after this step, then stopping.", all_ranks=True)

    def _watch(self) -> None:
        last = time.monotonic()
        allowed = self._allowed
        elapsed = 0.0
        while True:
            # Only time in which this process runs counts: a job that was suspended as a whole continues.
            passed = min(time.monotonic() - last, 2 * _TICK)
            last = time.monotonic()
            elapsed = elapsed + passed if allowed is self._allowed else 0.0
            allowed = self._allowed
            if elapsed > allowed[1]:
                self._end_hang(*allowed)
            self._heartbeat(allowed[0], elapsed)
            try:
                numbers = self._pipe.recv(64)
            except TimeoutError:
                gone = next((ancestor for ancestor in self._launcher if ancestor.is_gone()), None)
                if gone is not None:
                    self.request_stop(f"the launcher {gone.name} has ended", 1)
                continue
            if not numbers:  # closed by __exit__
                return
            for number in set(numbers) & set(self._handlers):
                self._receive(signal.Signals(number))

    def _end_hang(self, work: str, limit: float) -> NoReturn:
        self._ends_hang = True
        faulthandler.dump_traceback_later(60 + _HANG_WAIT, exit=True)  # the run folder may hang too
        assert self._folder is not None
        text, is_lowest = call_roll(self._folder, _HANG_WAIT)
        key = "train.step_timeout" if work.startswith("step") else "DEEPSPEED_TIMEOUT (environment, minutes)"
        if is_lowest:
            ending = f"Continue the run with --resume; if more time is needed, raise {key}."
            _print(f"{work} did not end within {limit:.0f} s: {text}. {ending}", all_ranks=True)
        dump_collectives(self._folder)
        os._exit(RankError.exit_code)

    def _raise_lost_connection(self, error: BaseException | None, work: str) -> None:
        # gloo raises a plain RuntimeError, whose text contains the path of gloo's source file.
        is_lost = isinstance(error, RuntimeError) and re.search("gloo|^Dist", repr(error))
        # After a step that did not end, the connection breaks because the other rank has ended. The stacks of the hang must stay.
        if error is None or not is_lost or self._ends_hang:
            return
        reason = re.sub(r"\[\S*/gloo/\S*\] ", "", one_line(error)).partition(". ")[0]
        text = "check MASTER_ADDR and MASTER_PORT"
        if self._folder is not None:
            text, _ = call_roll(self._folder, _LOSS_WAIT, error)
        raise RankError(
            f"{work}: the connection to another rank failed ({reason}): {text}. Read the last lines that the other ranks "
            "printed, then continue with --resume."
        ) from error

    def _receive(self, number: signal.Signals) -> None:
        if self._first_signal is None:
            self._first_signal = time.monotonic()
        elif number is signal.SIGINT and time.monotonic() - self._first_signal > ONE_REQUEST:
            _print(f"stopped at once by a second SIGINT; {self._remains()}")
            os._exit(128 + number)
        self.request_stop(f"{number.name} received", 128 + number)

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Make the training loop save a checkpoint and stop. Before the end of the first step, exit at once with `exit_code`."""
        if self.stop_requested:
            return
        if not self._durations:
            _print(f"{reason} before the end of the first step; there is nothing new to save.")
            os._exit(exit_code)
        self.stop_requested = True
        limit = ""
        name = self._launcher[-1].name if self._launcher else None
        if name not in (None, PATIENT_LAUNCHER) and self._first_signal is not None:
            limit = f" {name} may kill the run after 30 s; then {self._remains()}"
        _print(f"{reason}; saving a checkpoint after this step, then stopping.{limit}")

    def _remains(self) -> str:
        text = f"{self.saved} remains, and --resume continues from it."
        return text if self.saved else "no checkpoint remains."


def _print(message: str, *, all_ranks: bool = False) -> None:
    """Write a line to stderr. By default, only the first rank of each node writes it, because all ranks get the same signals."""
    if all_ranks or os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        with contextlib.suppress(OSError):  # the terminal was closed
            os.write(2, f"{safe_lines(f'wands: {message}')}\n".encode())


def answer_file(folder: Path, rank: int) -> Path:
    """Return the file to which a rank writes its stack traces, and by which it answers."""
    return folder / f"rank-{rank}.txt"


def call_roll(folder: Path, seconds: float, error: BaseException | None = None) -> tuple[str, bool]:
    """Write the stack traces of this rank to a folder, and wait some seconds for those of the other ranks.

    `error` is the exception that has ended the training of this rank; None if the main thread still runs. Return a text with the
    ranks that do not answer and the current function of each rank that does, and a flag that is True only on the lowest rank that
    answers, so that one rank prints the text.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    files = [answer_file(folder, number) for number in range(world_size)]
    with contextlib.suppress(OSError, WandsError):  # the disk may be full
        folder.mkdir(parents=True, exist_ok=True)
        with open(files[rank], "w", encoding="utf-8", opener=open_own_file) as file:
            file.write(f"{_place(error)}\n\n")
            file.writelines(traceback.format_exception(error) if error else ())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    time.sleep(seconds)
    answers = [file.read_text("utf-8").partition("\n")[0] if file.is_file() else "" for file in files]
    groups = {answers[ranks[0]]: name_ranks(ranks) for ranks in group_ranks(answers)}
    missing = groups.pop("", None)  # the cause: named first
    clauses = [f"no answer within {seconds:.0f} s from {missing}"] if missing else []
    clauses += [f"{ranks} in {place}" for place, ranks in groups.items()]
    return f"{'; '.join(clauses)}. The stacks are in {folder}", not any(answers[:rank])


def dump_collectives(folder: Path) -> None:
    """Write a JSON file with the last collective operations of this rank from PyTorch's flight recorder."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError):
        library: Any = torch._C._distributed_c10d
        dump = getattr(library, "_dump_nccl_trace_json", None) or library._dump_fr_trace_json
        file = answer_file(folder, int(os.environ.get("RANK", "0"))).with_suffix(".collectives.json")
        file.unlink(missing_ok=True)  # a link would be followed
        file.write_bytes(dump())


def _place(error: BaseException | None) -> str:
    """Return the innermost function of wands in which `error` was raised, or which the main thread is running."""
    stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
    frames = stack if error is None else reversed([*traceback.walk_tb(error.__traceback__)])
    for frame, line in frames:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("wands."):
            return f"{frame.f_code.co_name} (line {line} of {name})"
    return "code outside wands"


def take_requests(output_dir: Path) -> set[str]:
    """Return the names of the user's requests, which are files in the run folder, and remove the files.

    A request that cannot be removed would come again after every step, so it does not count.
    """
    names = set()
    for path in (output_dir / name for name in REQUESTS):
        if os.path.lexists(path):
            try:
                (os.rmdir if path.is_dir() and not path.is_symlink() else os.unlink)(path)
                names.add(path.name)
            except OSError as error:
                _warn_once(f"the request {path} is ignored, because it cannot be removed ({one_line(error)})")
    return names
