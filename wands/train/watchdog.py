"""Watch a training process from a thread: its launcher and its signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from wands.texts import safe_lines
from wands.train.launcher import Ancestor

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ONE_REQUEST = 2.0
"""Seconds in which several signals count as one. Ctrl-C reaches a worker from the terminal and from the launcher."""

_TICK = 1.0


class Watchdog:
    """Thread that watches a training process, used in a `with` statement around the whole run.

    If the launcher ends, or SIGTERM, SIGINT (Ctrl-C) or SIGHUP (a closed terminal) arrives, the thread sets
    `stop_requested`, and the training loop saves a checkpoint and stops. Before the first step, there is nothing to save
    and the process exits at once. A second SIGINT, later than `ONE_REQUEST`, also exits at once. The thread can do both
    while the main thread waits for other ranks. A signal that was ignored at the start stays ignored.

    Args:
        launcher: processes from the parent of this process to its launcher. See `find_launcher`.

    Attributes:
        stop_requested: whether to save a checkpoint and stop.
        saved: newest complete checkpoint of the run, for messages.
    """

    def __init__(self, launcher: Sequence[Ancestor] = ()) -> None:
        self.stop_requested = False
        self.saved: Path | None = None
        self._launcher = launcher
        self._has_trained = False
        self._first_signal: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._main, self._pipe = socket.socketpair()

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

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        self._main.close()
        self._thread.join()
        self._pipe.close()

    def end_step(self) -> None:
        """Note that a step has ended: from now on, a checkpoint is saved before the run stops."""
        self._has_trained = True

    def _watch(self) -> None:
        while True:
            try:
                numbers = self._pipe.recv(64)
            except TimeoutError:
                gone = next((ancestor for ancestor in self._launcher if ancestor.is_gone()), None)
                if gone is not None and not self.stop_requested:
                    self._stop(f"the launcher {gone.name} (process {gone.pid}) has ended", 1)
                continue
            if not numbers:  # closed by __exit__
                return
            for number in set(numbers) & set(self._handlers):
                self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
        elif number is signal.SIGINT and now - self._first_signal > ONE_REQUEST:
            self._exit(f"stopped at once by a second SIGINT; {self._remains()}", 128 + number)
        if not self.stop_requested:
            self._stop(f"{number.name} received", 128 + number)

    def _stop(self, reason: str, exit_code: int) -> None:
        if not self._has_trained:
            self._exit(f"{reason} before the end of the first step; there is nothing new to save.", exit_code)
        self.stop_requested = True
        limit = ""
        if self._launcher and self._first_signal is not None:
            name = self._launcher[-1].name
            limit = (
                f" {name} may kill the run after 30 s; if the save has not ended by then, {self._remains()}"
            )
        _print(f"{reason}; saving a checkpoint after this step, then stopping.{limit}")

    def _remains(self) -> str:
        return (
            f"{self.saved} remains, and --resume continues from it."
            if self.saved
            else "no checkpoint remains."
        )

    def _exit(self, message: str, exit_code: int) -> NoReturn:
        _print(message)
        os._exit(exit_code)


def _print(message: str) -> None:
    """Write a line to stderr on the first rank of a node. Other ranks receive the same signals."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        return
    with contextlib.suppress(OSError):  # the terminal was closed
        os.write(2, f"{safe_lines(f'wands: {message}')}\n".encode())
