"""Signals and a launcher that ends, as a training process sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from wands.watch.launcher import Ancestor
from wands.watch.watchdog import SIGNALS, Watchdog

ROOT = Path(__file__).resolve().parents[3]


def wait_for_stop(watchdog: Watchdog) -> None:
    deadline = time.monotonic() + 10
    while not watchdog.stop_requested and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watchdog.stop_requested


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_requests_a_stop(number: signal.Signals, capfd: pytest.CaptureFixture[str]):
    before = [signal.getsignal(number) for number in SIGNALS]
    with Watchdog() as watchdog:
        watchdog.end_step(1, 0.1)
        assert not watchdog.stop_requested
        os.kill(os.getpid(), number)
        wait_for_stop(watchdog)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    sentence = f"wands: {number.name} received; saving a checkpoint after this step, then stopping.\n"
    assert capfd.readouterr().err == sentence


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Watchdog() as watchdog:
            watchdog.end_step(1, 0.1)
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert not watchdog.stop_requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_launcher_that_ends_requests_a_stop(monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setattr("wands.watch.watchdog._TICK", 0.05)
    child = subprocess.Popen(["sleep", "60"])
    with Watchdog([Ancestor(psutil.Process(child.pid), "torchrun")]) as watchdog:
        watchdog.end_step(1, 0.1)
        time.sleep(0.2)
        assert not watchdog.stop_requested
        child.kill()
        wait_for_stop(watchdog)
        child.wait()
    assert "the launcher torchrun has ended; saving" in capfd.readouterr().err


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    head = """
import ctypes, os, psutil, signal, sys, threading, time
from pathlib import Path
from wands.watch import watchdog as module
from wands.watch.launcher import Ancestor
module._TICK, module.ONE_REQUEST = 0.05, 0.3

def send(number, delay=0.0):
    threading.Timer(delay, os.kill, (os.getpid(), number)).start()

def block():  # as a collective that never ends: in C, and no signal interrupts it
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
    command = [sys.executable, "-c", head + code]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once():
    """Signals of one moment count once. The main thread waits for other ranks all the time."""
    done = run_alone("""
with module.Watchdog() as watchdog:
    watchdog.end_step(1, 0.1)
    watchdog.saved = Path("run/checkpoints/step_00000500")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        send(number)
    time.sleep(0.1)
    print("counted once", flush=True)
    send(signal.SIGTERM, 0.4)  # a launcher repeats this signal
    send(signal.SIGINT, 0.5)
    block()
""")
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == "counted once\n"
    first, second = done.stderr.splitlines()
    assert "received; saving a checkpoint after this step" in first
    assert (
        second
        == "wands: stopped at once by a second SIGINT; run/checkpoints/step_00000500 remains, and --resume continues from it."
    )


@pytest.mark.parametrize(
    ("attack", "code", "reason"),
    [
        ("send(signal.SIGHUP)", 128 + signal.SIGHUP, "SIGHUP received"),
        pytest.param(
            "launcher.append(Ancestor(None, 'torchrun'))",
            1,
            "the launcher torchrun has ended",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_before_the_first_step_there_is_nothing_to_save(attack: str, code: int, reason: str):
    done = run_alone(f"""
launcher = []
with module.Watchdog(launcher):
    {attack}
    block()
""")
    assert done.returncode == code
    assert done.stderr == f"wands: {reason} before the end of the first step; there is nothing new to save.\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["deepspeed", pytest.param("wands.watch.restart", marks=pytest.mark.slow)]
)
def test_the_message_names_what_remains_if_the_launcher_kills_the_run(launcher: str):
    done = run_alone(f"""
with module.Watchdog([Ancestor(psutil.Process(), "{launcher}")]) as watchdog:
    watchdog.end_step(1, 0.1)
    watchdog.saved = Path("run/checkpoints/step_00000500")
    send(signal.SIGINT)
    while not watchdog.stop_requested:
        time.sleep(0.01)
""")
    sentence = "deepspeed may kill the run after 30 s; then run/checkpoints/step_00000500 remains"
    assert (sentence in done.stderr) == (launcher == "deepspeed")
    assert "saving a checkpoint after this step, then stopping." in done.stderr


@pytest.mark.slow
def test_a_closed_terminal_does_not_end_the_thread():
    done = run_alone("""
os.close(2)
with module.Watchdog() as watchdog:
    watchdog.end_step(1, 0.1)
    send(signal.SIGHUP)
    while not watchdog.stop_requested:
        time.sleep(0.01)
    send(signal.SIGINT, 0.6)
    block()
""")
    assert done.returncode == 128 + signal.SIGINT


def test_the_limit_of_a_step_follows_the_last_steps(tmp_path: Path):
    watchdog = Watchdog()
    hour = 3600.0
    watchdog.watch_run(tmp_path, None, hour)
    assert watchdog._allowed == ("the start", 3600.0)
    for seconds, limit in ((2.0, 300.0), (100.0, 1000.0), (50.0, 1000.0)):
        watchdog.end_step(7, seconds)
        assert watchdog._allowed == ("the work after step 7", 3600.0)
        watchdog.begin_work("sampling at step 7")
        assert watchdog._allowed == ("sampling at step 7", 3600.0)
        watchdog.begin_step(8)
        assert watchdog._allowed == ("step 8", limit)
    for _ in range(50):
        watchdog.end_step(7, 40.0)
    watchdog.begin_step(8)
    assert watchdog._allowed == ("step 8", 400.0)
    watchdog.watch_run(tmp_path, 20.0, hour)
    watchdog.begin_step(8)
    assert watchdog._allowed == ("step 8", 20.0)


@pytest.mark.slow
def test_a_job_that_was_suspended_as_a_whole_continues():
    """Ctrl-Z, or a scheduler: the time in which this process does not run counts for no limit."""
    done = run_alone("""
suspended = 0.0
class Clock:
    monotonic = staticmethod(lambda: time.monotonic() + suspended)
module.time = Clock
with module.Watchdog() as watchdog:
    watchdog._end_hang = lambda work, limit: os._exit(int(work[-1]))
    watchdog.begin_work("step 2", 10.0)
    time.sleep(0.2)
    suspended = 100.0
    time.sleep(0.2)
    watchdog.begin_work("step 3", 0.2)
    block()
""")
    assert done.returncode == 3  # in step 3, not in step 2
