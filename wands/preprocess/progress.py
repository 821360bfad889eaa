"""Progress of a long command: a progress bar on a terminal, otherwise a log line every 10 seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)
LOG_SECONDS = 10.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show the progress of a loop over `total` items. The loop calls the yielded function after each item."""
    if sys.stderr.isatty() and (console := Console(stderr=True)).is_interactive:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(label, total=total)
            yield lambda: bar.advance(task)
        return
    started = last = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if done == total or now - last >= LOG_SECONDS:
            last = now
            left = (now - started) / done * (total - done)
            log.info("%s: %d of %d, %.0f s passed, %.0f s left", label, done, total, now - started, left)

    yield advance
