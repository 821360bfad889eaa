"""Receive requests to a running training process: save, stop, or compare the ranks."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

REQUESTS = ("save", "save_quit", "check")
"""Names of the request files in a run folder."""


class ControlRequest(NamedTuple):
    """Actions that were requested from a training run since its last step.

    Attributes:
        save: whether to write a checkpoint now.
        quit: whether to stop after the checkpoint is written.
        check: whether to compare the packing plan and the weights between the ranks.
    """

    save: bool = False
    quit: bool = False
    check: bool = False


class ControlRequests:
    """Listener for requests to a run, used in a `with` statement.

    A request is a file named `save`, `save_quit` or `check` in the run folder. The signal SIGTERM has the same effect
    as `save_quit`.
    """

    def __init__(self, output_dir: Path) -> None:
        self._dir = output_dir
        self._terminated = False
        self._previous: Any = None

    def __enter__(self) -> ControlRequests:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_term)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_term(self, signum: int, frame: object) -> None:
        self._terminated = True

    def poll(self, rank: int) -> ControlRequest:
        """Return the requests that this rank received: from SIGTERM, and on rank 0 also from the request files.

        Rank 0 removes the request files.
        """
        names = {"save_quit"} if self._terminated else set()
        for name in REQUESTS if rank == 0 else ():
            if (self._dir / name).exists():
                (self._dir / name).unlink(missing_ok=True)
                names.add(name)
        return ControlRequest(bool(names & {"save", "save_quit"}), "save_quit" in names, "check" in names)
