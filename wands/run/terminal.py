"""Show the progress of a run: a live line on a terminal, otherwise lines of text."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from wands.texts import Log, safe_lines

SILENCE = 30.0
"""Seconds without output after which the run prints a line with its current work."""


class Terminal:
    """Output of a run for the user. A call prints a text, so the object can be used as a `Log` function.

    On a terminal, the package rich keeps a live line at the bottom, with all other output of this process above it. A terminal
    that cannot move the cursor (TERM=dumb) gets no live line. `echo` is None on all ranks but 0, which print nothing.
    """

    def __init__(self, echo: Log | None) -> None:
        self._echo = echo
        self._last = time.monotonic()
        self._live = Live(console=Console(), auto_refresh=False, transient=True)
        if echo and sys.stdout.isatty() and self._live.console.is_interactive:
            self._live.start()
            for handler in logging.getLogger().handlers:
                if type(handler) is logging.StreamHandler:  # a FileHandler keeps its file
                    handler.setStream(sys.stderr)  # rich has replaced sys.stderr

    def __call__(self, text: str) -> None:
        self._last = time.monotonic()
        if self._live.is_started:
            with suppress(OSError):  # the terminal was closed
                self._live.console.print(Text(safe_lines(text)), soft_wrap=True)
        elif self._echo:
            self._echo(text)

    def show(self, text: str) -> bool:
        """Replace the text of the live line. Return False if this process has none."""
        if self._live.is_started:
            self._last = time.monotonic()
            with suppress(OSError):
                self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        return self._live.is_started

    def heartbeat(self, work: str, seconds: float) -> None:
        """Show the current work and its seconds so far, if nothing was printed for `SILENCE` seconds."""
        text = f"{work}: {seconds:.0f} s so far" if seconds >= 1 else f"{work} begins"
        if time.monotonic() - self._last > SILENCE and not self.show(text):
            self(text)

    def close(self) -> None:
        """Remove the live line."""
        with suppress(OSError):
            self._live.stop()
