"""Killed launchers and workers, Ctrl-C and closed terminals, with real launchers and processes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runs import BASE
from tests.support.world import free_port
from wands.checkpoint.checkpoint_files import find_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": lambda: [
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        free_port(),
        "--module",
        "wands",
        "train",
    ],
    "torchrun": lambda: [
        "torchrun",
        "--nproc-per-node",
        "2",
        "--master-port",
        free_port(),
        "-m",
        "wands",
        "train",
    ],
    "wands": lambda: ["wands", "train"],
}


class Job:
    """A launched run in a new terminal. Its processes are those whose command line contains the run folder."""

    def __init__(
        self, name: str, model: Path, run: Path, steps: int = 100_000, *overrides: str, log: str = ""
    ) -> None:
        self.run = run
        values = (*BASE, f"model.path={model}", f"output_dir={run}", f"train.max_steps={steps}", *overrides)
        settings = [
            word for value in values for word in ((value,) if value.startswith("--") else ("--set", value))
        ]
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        # A shell that continues after Ctrl-C, as a prompt does. Without one, the end of the launcher would close the terminal.
        command = [
            "bash",
            "-c",
            'trap : INT; "$@"; echo "exit code of the command: $?"; read -r',
            "bash",
            *LAUNCHERS[name](),
            *settings,
        ]
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execvpe(command[0], command, env)
        self.text = run.with_name(f"{log or run.name}.txt").open("wb")
        self.reader = subprocess.Popen(
            ["cat"], stdin=self.terminal, stdout=self.text, stderr=subprocess.DEVNULL
        )

    def processes(self, word: str = "") -> list[int]:
        """Return the processes of the run that have not ended, if their command line contains the word."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if (
                folder.name != str(self.pid)
                and f"output_dir={self.run}" in words
                and word in " ".join(words)
                and not ended
            ):
                found.append(int(folder.name))
        return found

    def worker(self, rank: int) -> int:
        """Return the process of a rank."""
        return next(
            pid
            for pid in self.processes()
            if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        )

    def rows(self) -> list[dict[str, float]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition: Callable[[], object], seconds: float = 120) -> float:
        start = time.monotonic()
        while not condition():
            assert time.monotonic() < start + seconds, self.output()
            time.sleep(0.05)
        return time.monotonic() - start

    def output(self) -> str:
        """The last lines, without the codes with which rich redraws the progress."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", Path(self.text.name).read_text(errors="replace"))[-6000:]

    def hang_up(self) -> None:
        """Close the terminal, as a lost SSH connection does."""
        self.reader.kill()
        self.reader.wait()
        os.close(self.terminal)
        self.terminal = -1

    def close(self) -> None:
        for pid in (*self.processes(), self.pid):
            os.kill(pid, signal.SIGKILL)
        if self.terminal >= 0:
            self.hang_up()
        os.waitpid(self.pid, 0)


@pytest.fixture
def start(tiny_pipeline: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start(launcher)` starts a run and waits for its first steps."""
    jobs = []

    def run(name: str, *options: object) -> Job:
        jobs.append(Job(name, tiny_pipeline, tmp_path / "run", *options))
        jobs[-1].wait_for(lambda: len(jobs[-1].rows()) >= 3)
        return jobs[-1]

    yield run
    for job in jobs:
        job.close()


def ends_with_a_checkpoint(job: Job) -> None:
    """Check that all processes of the run leave, and that no step is lost."""
    job.wait_for(lambda: not job.processes(), seconds=40)
    assert find_checkpoint(job.run)[1].step == len(job.rows()) > 0, job.output()
    assert not list(job.run.rglob("*.tmp"))


def kill(*words: str, number: int = signal.SIGKILL) -> Callable[[Job], None]:
    """Send a signal to the processes of the run whose command line contains one of the words."""

    def attack(job: Job) -> None:
        for word in words:
            for pid in job.processes(word):
                os.kill(pid, number)

    return attack


RUNNER = "bin/deepspeed"
MIDDLE = "deepspeed.launcher.launch"
TORCHRUN = "bin/torchrun"
ATTACKS = {
    "KILL of deepspeed": ("deepspeed", kill(RUNNER)),
    "KILL of deepspeed and of its child": ("deepspeed", kill(RUNNER, MIDDLE)),
    "KILL of deepspeed's child": ("deepspeed", kill(MIDDLE)),
    "TERM of deepspeed": ("deepspeed", kill(RUNNER, number=signal.SIGTERM)),
    "INT of deepspeed": ("deepspeed", kill(RUNNER, number=signal.SIGINT)),
    "TERM of deepspeed's child": ("deepspeed", kill(MIDDLE, number=signal.SIGTERM)),
    "TERM of a worker": ("deepspeed", lambda job: os.kill(job.worker(1), signal.SIGTERM)),
    "HUP of deepspeed": ("deepspeed", kill(RUNNER, number=signal.SIGHUP)),
    "KILL of torchrun": ("torchrun", kill(TORCHRUN)),
    "TERM of torchrun": ("torchrun", kill(TORCHRUN, number=signal.SIGTERM)),
    "Ctrl-C under deepspeed": ("deepspeed", lambda job: os.write(job.terminal, b"\x03")),
    "Ctrl-C under torchrun": ("torchrun", lambda job: os.write(job.terminal, b"\x03")),
    "Ctrl-C without a launcher": ("wands", lambda job: os.write(job.terminal, b"\x03")),
    "closed terminal under deepspeed": ("deepspeed", Job.hang_up),
    "closed terminal under torchrun": ("torchrun", Job.hang_up),
    "closed terminal without a launcher": ("wands", Job.hang_up),
}


@pytest.mark.kill
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_no_orphans_of_a_launcher_that_was_killed_in_the_start(
    launcher: str, tiny_pipeline: Path, tmp_path: Path
):
    """At moments from the first process to the first step."""
    for moment in (0.5, 2.0, 4.0, 6.0, 9.0):
        job = Job(launcher, tiny_pipeline, tmp_path / f"run-{moment}", 100_000)
        try:
            job.wait_for(job.processes)
            time.sleep(moment)
            kill(RUNNER, TORCHRUN)(job)
            job.wait_for(lambda job=job: not job.processes(), seconds=60)
        finally:
            job.close()


@pytest.mark.kill
@pytest.mark.parametrize(("launcher", "words"), [("deepspeed", (RUNNER, MIDDLE)), ("torchrun", (TORCHRUN,))])
def test_no_orphans_of_a_launcher_that_was_killed_when_the_first_worker_appeared(
    launcher: str, words: tuple[str, ...], tiny_pipeline: Path, tmp_path: Path
):
    """The worker has had no time to look for its launcher."""
    job = Job(launcher, tiny_pipeline, tmp_path / "run", 100_000)
    try:
        job.wait_for(lambda: len(job.processes()) > len(words))
        kill(*words)(job)
        job.wait_for(lambda: not job.processes(), seconds=60)
    finally:
        job.close()


@pytest.mark.kill
def test_a_save_that_the_launcher_kills_leaves_the_older_step(start: Callable[..., Job]):
    """A worker that is stopped, so that no save ends, and Ctrl-C: after 30 s, deepspeed kills the workers."""
    job = start("deepspeed", 100_000, "checkpoint.every=2")
    job.wait_for(lambda: "saved " in job.output())
    os.kill(job.worker(1), signal.SIGSTOP)
    os.write(job.terminal, b"\x03")
    job.wait_for(lambda: "SIGINT received" in job.output(), seconds=5)
    assert job.wait_for(lambda: not job.processes(), seconds=90) > 25
    latest = find_checkpoint(job.run)[0]
    assert f"may kill the run after 30 s; then {latest} remains" in job.output()


@pytest.mark.kill
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_workers_save_and_leave(attack: str, start: Callable[..., Job]):
    launcher, act = ATTACKS[attack]
    job = start(launcher)
    act(job)
    ends_with_a_checkpoint(job)


@pytest.mark.kill
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_worker_that_dies_is_one_sentence(launcher: str, start: Callable[..., Job]):
    job = start(launcher)
    os.kill(job.worker(1), signal.SIGKILL)
    job.wait_for(lambda: not job.processes(), seconds=60)
    assert job.output().count("wands: step ") == 1, job.output()
    assert re.search(
        r"the connection to another rank failed \(.*no answer within 3 s from rank 1;", job.output()
    )
    assert "RuntimeError" not in job.output()


@pytest.mark.kill
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_stops_is_named(launcher: str, rank: int, start: Callable[..., Job]):
    """On commit 2950222, the other workers wait for an hour."""
    job = start(launcher, 100_000, "train.step_timeout=5")
    os.kill(job.worker(rank), signal.SIGSTOP)
    job.wait_for(lambda: not job.processes(), seconds=100)
    assert f"did not end within 5 s: no answer within 15 s from rank {rank};" in job.output(), job.output()
