"""Requests to a running process: save, stop, or compare the ranks."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple


class ControlRequest(NamedTuple):
    """Pending requests since the last step.

    Attributes:
        save: write a checkpoint now.
        quit: stop after the checkpoint.
        check: compare plan and weights between the ranks.
    """

    save: bool = False
    quit: bool = False
    check: bool = False


class ControlRequests:
    """Listener for SIGTERM, and for a file `save`, `save_quit` or `check` in the run folder."""

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
        """Return the requests to this rank. Only rank 0 reads and removes the files."""
        names = {"save_quit"} if self._terminated else set()
        for name in ("save", "save_quit", "check") if rank == 0 else ():
            if (self._dir / name).exists():
                (self._dir / name).unlink(missing_ok=True)
                names.add(name)
        return ControlRequest(bool(names & {"save", "save_quit"}), "save_quit" in names, "check" in names)
