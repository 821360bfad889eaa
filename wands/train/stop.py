"""Ways to ask a running job to save or to stop."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any


class StopRequests:
    """Ways to ask a running job to save: SIGTERM to a worker, or a file `save` / `save_quit` in the run folder."""

    def __init__(self, output_dir: Path) -> None:
        self._dir = output_dir
        self._terminated = False
        self._previous: Any = None

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_term)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_term(self, signum: int, frame: object) -> None:
        self._terminated = True

    def poll(self, rank: int) -> tuple[bool, bool]:
        """(save, quit) as this rank sees it; only rank 0 looks at the files and takes them away."""
        save = quit_ = self._terminated
        if rank == 0:
            for name, quits in (("save", False), ("save_quit", True)):
                if (self._dir / name).exists():
                    (self._dir / name).unlink(missing_ok=True)
                    save, quit_ = True, quit_ or quits
        return save, quit_
