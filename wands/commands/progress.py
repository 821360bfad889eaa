"""How far a long command is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
LOG_SECONDS = 10.0


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Give a function to call after each of `total` pieces of work.

    Args:
        what: the pieces, such as "clips".
        total: how many there are.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total)
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
            log.info("%s: %d of %d, %.0f s passed, %.0f s left", what, done, total, now - started, left)

    yield advance
