"""The terminal of a run: a sign of life after 30 s of silence, on the first rank alone."""

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from wands.cli import main
from wands.run import terminal
from wands.run.terminal import Terminal
from wands.watch import watchdog
from wands.watch.watchdog import Watchdog


def test_a_sign_of_life(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    lines = list[str]()
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = Terminal(lines.append)
    silent = Terminal(None)
    shown("begin")
    for seconds in range(1, 80):
        now[0] += 1
        shown.heartbeat("saving the checkpoint of step 3", seconds)
        silent.heartbeat("the start", seconds)
        silent("nothing")
    assert lines == [
        "begin",
        "saving the checkpoint of step 3: 31 s so far",
        "saving the checkpoint of step 3: 62 s so far",
    ]
    for _ in range(14):  # silent for 31 s, but the work has just begun
        now[0] += 1
        shown.heartbeat("step 4", 0.0)
    assert lines[-1] == "step 4 begins"
    assert not shown.show("no live line in a pipe")
    shown.close()


class TerminalOutput(io.StringIO):
    """A standard output that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "live"), [("xterm", True), ("dumb", False)])
def test_a_live_line_needs_a_terminal_that_moves_the_cursor(
    kind: str, live: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdout", TerminalOutput())
    monkeypatch.setenv("TERM", kind)
    output = Terminal([].append)
    try:
        assert output.show("step 1/4") == live
    finally:
        output.close()


def test_the_watchdog_names_the_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "_TICK", 0.02)
    beats: list[tuple[str, float]] = []
    with Watchdog((), lambda work, seconds: beats.append((work, seconds))) as watched:
        watched.begin_work("building")
        time.sleep(0.15)
    own = [seconds for work, seconds in beats if work == "building"]
    assert len(own) > 2
    assert own == sorted(own)
    assert own[-1] > 0.05


@pytest.mark.parametrize("verbose", [False, True])
def test_other_packages_are_quiet(verbose: bool, monkeypatch: pytest.MonkeyPatch):
    deepspeed = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(deepspeed, "filters", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CliRunner().invoke(main, ["-v", "recipes"] if verbose else ["recipes"])
        warnings.warn("a warning of torch", UserWarning, stacklevel=1)
    assert bool(caught) == verbose
    for level, passes in ((logging.WARNING, verbose), (logging.ERROR, True)):
        record = logging.LogRecord("DeepSpeed", level, "", 0, "", None, None)
        assert bool(deepspeed.filter(record)) == passes
