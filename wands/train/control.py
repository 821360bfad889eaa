"""Receive requests to a running training process: save, stop, or compare the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from wands.train.watchdog import Watchdog

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


def poll_requests(output_dir: Path, watchdog: Watchdog, rank: int) -> ControlRequest:
    """Return the requests that this rank received since the last call: from the watchdog, and on rank 0 also from files.

    The user requests an action with a file named `save`, `save_quit` or `check` in the run folder. Rank 0 removes these
    files. A stop that the watchdog requests, for example after Ctrl-C, counts as `save_quit`.
    """
    names = {"save_quit"} if watchdog.stop_requested else set()
    for name in REQUESTS if rank == 0 else ():
        if (output_dir / name).exists():
            (output_dir / name).unlink(missing_ok=True)
            names.add(name)
    return ControlRequest(bool(names & {"save", "save_quit"}), "save_quit" in names, "check" in names)
