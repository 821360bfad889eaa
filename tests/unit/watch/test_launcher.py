"""Processes above a worker: which of them are its launcher, and whether they still run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from wands.watch import launcher
from wands.watch.launcher import Ancestor, find_launcher

ROOT = Path(__file__).resolve().parents[3]
TELL = "import json; from wands.watch.launcher import find_launcher; print(json.dumps([a.name for a in find_launcher()]))"
CHILD = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
PYTHON = sys.executable


@pytest.fixture
def ancestors_in(tmp_path: Path):
    """`ancestors_in(line)` runs a shell line and returns the launcher of the worker that it starts as `$WORKER`."""
    for name in ("torchrun", "deepspeed", "trainer"):
        (tmp_path / name).write_text(f"#!{PYTHON}\n{CHILD}")
        (tmp_path / name).chmod(0o755)
    module = tmp_path / "modules" / "deepspeed" / "launcher"
    module.mkdir(parents=True)
    for file in (module / "launch.py", module / "__init__.py", module.parent / "__init__.py"):
        file.write_text(CHILD if file.stem == "launch" else "")
    (tmp_path / "worker.py").write_text(TELL)

    def run(line: str, **more_env: str) -> list[str]:
        env = {
            **os.environ,
            "RANK": "0",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": f"{tmp_path / 'modules'}:{ROOT}",
            "LAUNCH": f"{PYTHON} -u -m deepspeed.launcher.launch",
            "WORKER": f"{PYTHON} {tmp_path / 'worker.py'}",
            **more_env,
        }
        done = subprocess.run(["bash", "-c", f"{line}\ntrue"], env=env, capture_output=True, text=True)
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("deepspeed $LAUNCH $WORKER", ["deepspeed.launcher.launch", "deepspeed"]),
        ("$LAUNCH $WORKER", ["deepspeed.launcher.launch"]),  # on the nodes that deepspeed reaches over ssh
        pytest.param("setsid nohup torchrun $WORKER", ["torchrun"], marks=pytest.mark.slow),
        ("torchrun bash -c '$WORKER; true'", ["bash", "torchrun"]),
        ("$WORKER", []),
        pytest.param("trainer $WORKER", [], marks=pytest.mark.slow),
        ("bash -c '$WORKER; true' torchrun", []),
    ],
)
def test_only_launchers_and_what_is_below_them(ancestors_in, line: str, names: list[str]):
    assert ancestors_in(line) == names


def test_a_worker_without_a_rank_has_no_launcher(ancestors_in, monkeypatch: pytest.MonkeyPatch):
    """A plain `wands train` in a shell that SLURM started ends with its step, not with its shell."""
    assert ancestors_in("unset RANK; torchrun $WORKER") == []


def test_an_ancestor_that_was_killed_is_gone():
    child = subprocess.Popen(["sleep", "60"])
    ancestor = Ancestor(psutil.Process(child.pid), "sleep")
    assert not ancestor.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ancestor.is_gone()  # although its number is still taken
    child.wait()
    assert ancestor.is_gone()


def test_a_number_that_another_process_has_taken_is_gone():
    ancestor = Ancestor(psutil.Process(), "")
    assert not ancestor.is_gone()
    ancestor.process._ident = (os.getpid(), ancestor.process.create_time() - 1)
    assert ancestor.is_gone()


@pytest.mark.parametrize(
    ("names", "variable", "is_gone"),
    [
        (["deepspeed.launcher.launch", "init"], "CROSS_RANK", True),
        (["deepspeed.launcher.launch", "deepspeed", "init"], "CROSS_RANK", False),
        (["deepspeed.launcher.launch", "deepspeed"], "CROSS_RANK", False),  # process 1 of a container
        (["deepspeed.launcher.launch", "sshd", "init"], "CROSS_RANK", False),
        (["torchrun", "init"], "TORCHELASTIC_RUN_ID", False),
        (["torchrun"], "TORCHELASTIC_RUN_ID", False),
        (["init"], "TORCHELASTIC_RUN_ID", True),
        (["init"], "CROSS_RANK", True),
        (["init"], "TERM", False),  # a container whose first process starts the worker
        (["trainer", "init"], "TORCHELASTIC_RUN_ID", False),
    ],
)
def test_a_launcher_that_was_killed_before_the_worker_looked(
    names: list[str], variable: str, is_gone: bool, monkeypatch: pytest.MonkeyPatch
):
    """KILL of `deepspeed` in the seconds in which its child imports; KILL of a launcher in those in which its workers start."""
    for name in ("CROSS_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "0")
    # number -> name, down to process 1
    processes = dict(zip(range(len(names), 0, -1), names, strict=True))
    chain = None
    for pid in reversed(processes):
        running = {"is_running": lambda: True, "status": lambda: "sleeping"}
        chain = SimpleNamespace(pid=pid, parent=lambda above=chain: above, **running)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(psutil.Process, "parent", lambda self: chain)
    monkeypatch.setattr(launcher, "_program", lambda process: processes[process.pid])
    assert any(ancestor.is_gone() for ancestor in find_launcher()) == is_gone


def test_hidden_ancestors_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    """A cluster may hide the processes of other users (`hidepid` of /proc), such as those above the launcher."""

    def hidden() -> None:
        raise psutil.AccessDenied(1)

    torchrun = SimpleNamespace(pid=9, parent=hidden)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(psutil.Process, "parent", lambda self: torchrun)
    monkeypatch.setattr(launcher, "_program", lambda process: "torchrun")
    assert [ancestor.name for ancestor in find_launcher()] == ["torchrun"]


def test_no_process_below_the_first_one(monkeypatch: pytest.MonkeyPatch):
    """In a container, the parent can be process 1, or none that is visible."""
    monkeypatch.setenv("RANK", "0")
    for parent in (0, 1):
        monkeypatch.setattr(psutil.Process, "ppid", lambda self, parent=parent: parent)
        assert find_launcher() == ()
