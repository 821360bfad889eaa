"""Second processes on a run, a cache and an export: real commands, stopped and killed in the middle of their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runs import BASE, run_training
from tests.support.world import WorldPool
from wands.files import read_rows
from wands.lock import LOCK_NAME

pytestmark = pytest.mark.slow
Process = subprocess.Popen[str]


@pytest.fixture
def wands() -> Iterator[Callable[..., Process]]:
    """`wands(arguments)` starts the command; what is left of it at the end dies."""
    started: list[Process] = []

    def start(*arguments: object) -> Process:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "wands", *map(str, arguments)]
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        started.append(Process(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(process: Process, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop_when_locked(process: Process, lock: Path) -> None:
    wait_for(process, lambda: lock.exists() and lock.stat().st_size > 0)
    process.send_signal(signal.SIGSTOP)


def end(process: Process, code: int = 0) -> str:
    text = process.communicate(timeout=300)[0]
    assert process.returncode == code, text
    assert "Traceback" not in text
    return text


def assert_refused(process: Process, label: str, holder: Process) -> None:
    refusal = f"wands: {label} is being written by another process (host {os.uname().nodename}, pid {holder.pid}, since"
    assert refusal in end(process, code=2)


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME
    }


def test_a_run_has_one_writer(wands, tiny_pipeline: Path, tmp_path: Path):
    run = tmp_path / "run"
    values = [*BASE, f"model.path={tiny_pipeline}", f"output_dir={run}", "checkpoint.every=2"]
    settings = [part for value in values for part in ("--set", value)]

    def train(steps: int, *more: str) -> Process:
        return wands("train", *settings, "--set", f"train.max_steps={steps}", *more)

    first = train(12)
    stop_when_locked(first, run / LOCK_NAME)
    assert_refused(train(12), f"output_dir={run}", first)  # two fresh starts
    first.send_signal(signal.SIGCONT)
    wait_for(first, (run / "checkpoints" / "step_00000004").exists)
    first.send_signal(signal.SIGSTOP)
    before = contents(run)
    assert_refused(train(12, "--resume"), f"output_dir={run}", first)  # a resume of a live run
    assert contents(run) == before
    first.send_signal(signal.SIGCONT)
    end(first)
    assert not (run / LOCK_NAME).exists()

    killed = train(400, "--resume")
    wait_for(killed, (run / "checkpoints" / "step_00000016").exists)
    killed.kill()
    killed.communicate()
    (run / "save_quit").touch()  # of the killed run: it must not stop the next after one step
    both = [train(60, "--resume"), train(60, "--resume")]
    texts = [process.communicate(timeout=300)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], texts
    winner = texts[[process.returncode for process in both].index(0)]
    assert (
        f"output_dir={run}: took over the lock of an ended process (host {os.uname().nodename}, pid {killed.pid}"
        in winner
    )
    assert "a request to an earlier run" in winner
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, 61))
    assert not [path.name for path in (run / "checkpoints").iterdir() if "." in path.name]  # .tmp, .abandoned


def test_an_export_has_one_writer(wands, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    run = tmp_path / "run"
    worlds[1].run(run_training, tiny_pipeline, run, ("train.max_steps=1",))
    lock = tmp_path / ".out.lock"
    exporting = wands("export", run, "--out", tmp_path / "out")
    stop_when_locked(exporting, lock)
    assert_refused(wands("export", run, "--out", tmp_path / "out"), f"--out {tmp_path / 'out'}", exporting)
    exporting.kill()
    exporting.communicate()
    assert lock.exists()
    end(wands("export", run, "--out", tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_a_cache_has_one_writer(wands, tiny_pipeline: Path, clips_dir: Path, tmp_path: Path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "bikes.mp4").symlink_to(clips_dir / "bikes.mp4")
    (tmp_path / "clips" / "bikes.txt").write_text("Cyclists.")
    cache = tmp_path / "cache"
    arguments = (
        "preprocess",
        tmp_path / "clips",
        "--out",
        cache,
        "--model",
        tiny_pipeline,
        "--max-pixels",
        64 * 96,
    )
    first = wands(*arguments)
    stop_when_locked(first, cache / LOCK_NAME)
    assert_refused(wands(*arguments), f"cache={cache}", first)
    first.send_signal(signal.SIGCONT)
    end(first)
    assert not list(cache.glob(".*"))
