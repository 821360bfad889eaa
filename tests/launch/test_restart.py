"""Runs that restart by themselves, with real launchers and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.test_kills import final
from tests.launch.test_stop import LAUNCHERS, ROOT, Job, ends_with_a_checkpoint, kill
from tests.support.world import free_port
from wands.files import read_rows

SCRIPT = ROOT / "scripts" / "launch_multinode.sh"
ENDED = "exit code of the command: "
SAVES = ("checkpoint.every=10", "ema.decay=0.9", "--resume")


def script(node: int = 0, num_nodes: object = 1, port: str = "") -> list[str]:
    """The command of a node with two processes, or of several nodes with one process each."""
    processes = 2 if num_nodes == 1 else 1
    words = f"--nnodes {num_nodes} --node-rank {node} --nproc-per-node {processes} --master-addr 127.0.0.1"
    return ["bash", str(SCRIPT), *words.split(), "--master-port", port or free_port(), "--"]


@pytest.fixture
def start(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """`start(command, folder, steps, *settings)` starts a run. The script adds the words `wands train` itself."""
    jobs: list[Job] = []

    def run(command: list[str], name: str, steps: int, *settings: str, log: str = "") -> Job:
        monkeypatch.setitem(LAUNCHERS, "script", lambda: command)
        jobs.append(Job("script", tiny_pipeline, tmp_path / name, steps, *settings, log=log))
        return jobs[-1]

    yield run
    for job in jobs:
        job.close()


def events(job: Job, *names: str) -> list[dict[str, object]]:
    return [row for row in read_rows(job.run / "events.jsonl") if row["event"] in names]


def last_line(job: Job) -> str:
    """Wait until the command has ended; the shell around it prints its exit code."""
    job.wait_for(lambda: ENDED in job.output(), 240)
    return job.output().strip().splitlines()[-1]


@pytest.mark.kill
def test_a_killed_worker_is_restarted_and_the_run_is_the_same(start: Callable[..., Job]):
    calm = start(script(), "calm", 120, *SAVES)
    assert last_line(calm) == f"{ENDED}0"
    killed = start(script(), "killed", 120, *SAVES)
    for rows, rank in ((35, 1), (70, 0)):  # each after the save of step 10, 20 ...
        killed.wait_for(lambda rows=rows: len(killed.rows()) >= rows, 200)
        os.kill(killed.worker(rank), signal.SIGKILL)
        killed.wait_for(lambda rows=rows: len(events(killed, "restart")) == (2 if rows == 70 else 1), 200)
    assert last_line(killed) == f"{ENDED}0"
    assert final(killed.run) == final(calm.run)
    restarts = events(killed, "restart")
    assert [row["number"] for row in restarts] == [1, 2]
    assert all(row["checkpoint"] == f"step_{row['step']:08d}" for row in restarts)
    assert all(row["last_step"] >= row["step"] >= 30 for row in restarts)


@pytest.mark.kill
def test_a_run_without_progress_ends_after_three_restarts(start: Callable[..., Job]):
    job = start(script(), "run", 100_000)
    for _ in range(4):
        job.wait_for(lambda: len(job.rows()) >= 2, 200)
        worker = job.worker(1)
        os.kill(worker, signal.SIGKILL)
        job.wait_for(lambda worker=worker: worker not in job.processes(), 60)
        (job.run / "metrics.jsonl").unlink()  # the next start writes it again
    assert last_line(job) == f"{ENDED}2"
    assert job.output().count("restarted 3 times without a new checkpoint and is not restarted again") == 1
    assert len(events(job, "start")) == 1
    assert len(events(job, "restart")) == 3


@pytest.mark.kill
def test_an_error_of_the_user_and_a_request_to_stop_are_not_restarted(start: Callable[..., Job]):
    wrong = start(script(), "wrong", 10, "parallel.ulysses_degree=3")
    assert last_line(wrong) == f"{ENDED}2"
    assert wrong.output().count("parallel.ulysses_degree=3") == 1
    assert "restarting" not in wrong.output()
    stopped = start(script(), "stopped", 100_000)
    stopped.wait_for(lambda: len(stopped.rows()) >= 3, 200)
    (stopped.run / "save_quit").touch()
    assert last_line(stopped) == f"{ENDED}0"
    assert [row["event"] for row in events(stopped, "start", "restart", "stop", "end")] == ["start", "stop"]


@pytest.mark.kill
def test_ctrl_c_is_not_restarted(start: Callable[..., Job]):
    job = start(script(), "run", 100_000)
    job.wait_for(lambda: len(job.rows()) >= 3, 200)
    os.write(job.terminal, b"\x03")
    assert last_line(job) != f"{ENDED}0"
    assert [row["event"] for row in events(job, "start", "restart", "stop")] == ["start", "stop"]


@pytest.mark.kill
def test_workers_whose_agent_is_killed_save_and_leave(start: Callable[..., Job]):
    job = start(script(), "run", 100_000)
    job.wait_for(lambda: len(job.rows()) >= 3, 200)
    kill("wands.watch.restart")(job)
    ends_with_a_checkpoint(job)


@pytest.mark.kill
def test_two_nodes_restart_together(start: Callable[..., Job]):
    """A worker of each node dies in turn. Both nodes meet again, and the run equals a run on one node."""
    calm = start(script(), "calm", 100, *SAVES)
    assert last_line(calm) == f"{ENDED}0"
    port = free_port()
    nodes = [start(script(node, 2, port), "run", 100, *SAVES, log=f"node{node}") for node in (0, 1)]
    for count, rank in ((1, 1), (2, 0)):
        nodes[0].wait_for(lambda count=count: len(nodes[0].rows()) >= 30 * count, 200)
        os.kill(nodes[0].worker(rank), signal.SIGKILL)
        nodes[0].wait_for(lambda count=count: len(events(nodes[0], "restart")) == count, 200)
    assert [last_line(node) for node in nodes] == [f"{ENDED}0"] * 2
    assert final(nodes[0].run) == final(calm.run)
    assert [row["num_nodes"] for row in events(nodes[0], "start", "restart")] == [2, 2, 2]


@pytest.mark.kill
def test_the_run_continues_without_a_node_and_with_it_again(tmp_path: Path):
    """Two agents whose workers write down their world and their options: one agent is killed, and started again later."""
    (tmp_path / "wands_worker.sh").write_text(
        'echo "$RANK of $WORLD_SIZE ${*: -1}" >>calls\ntrap "exit 0" TERM\n'
        "until [ -e end ]; do\n"
        "  kill -0 $PPID || exit\n"  # wands notices that its launcher was killed
        "  [ $NODE = 0 ] && [ -e lost ] && rm lost && exit 3\n"  # the connection to the other rank
        "  sleep 0.1\n"
        "done\n"
    )
    calls = tmp_path / "calls"
    port = free_port()

    def agent(node: int) -> subprocess.Popen[str]:
        options = f"--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --no-python"
        conf = f"is_host={1 - node},last_call_timeout=3,keep_alive_interval=1"
        command = [sys.executable, "-m", "wands.watch.restart", *options.split(), "--rdzv-conf", conf]
        worker = ["bash", "wands_worker.sh", "train", "--set", f"output_dir={tmp_path}/run", "--force"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "NODE": str(node)}
        return subprocess.Popen([*command, *worker], cwd=tmp_path, env=env, text=True, start_new_session=True)

    def wait_for(*lines: str) -> None:
        """Wait until the newest calls are these."""
        deadline = time.monotonic() + 120
        while not calls.exists() or sorted(calls.read_text().splitlines()[-len(lines) :]) != sorted(lines):
            assert time.monotonic() < deadline, calls.read_text()
            time.sleep(0.1)

    nodes = [agent(0), agent(1)]
    try:
        wait_for("0 of 2 --force", "1 of 2 --force")
        os.killpg(nodes[1].pid, signal.SIGKILL)
        (tmp_path / "lost").touch()
        wait_for("0 of 1 --resume")
        nodes.append(agent(1))
        wait_for("0 of 2 --resume", "1 of 2 --resume")
        (tmp_path / "end").touch()
        assert [nodes[0].wait(60), nodes[2].wait(60)] == [0, 0]
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
