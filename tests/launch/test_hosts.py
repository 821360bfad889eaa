"""One run on two hosts: network namespaces with their own host names, /tmp and /dev/shm, and one shared folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.test_restart import ENDED, events, last_line
from tests.launch.test_stop import LAUNCHERS, ROOT, Job
from tests.support.runs import losses, run_training
from tests.support.world import WorldPool

ADDRESS = "10.77.0.{}"
SETTINGS = (
    "data.mock={num_samples: 16, shapes: [[4,16,16],[4,16,12],[3,16,16],[2,16,16]], text_lens: [5,9,3]}",
    *("packing.max_tokens=512", "train.bins_per_step=4", "optim.lr=1e-4", "checkpoint.every=4"),
    "checkpoint.asynchronous=true",
)
# The folders that the hosts share lie below /tmp on most machines.
ENTER = """
hostname "$1" && mount --bind /tmp /mnt && mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm || exit
shift
while [ "$1" != -- ]; do
  case "$1" in /tmp/*) mkdir -p "$1" && mount --bind "/mnt/${1#/tmp/}" "$1" || exit ;; esac
  shift
done
shift
exec "$@"
"""


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


class Host:
    """Network namespace with one interface."""

    def __init__(self, number: int, shared: Path) -> None:
        self.name = f"wands-{os.getpid()}-{number}"
        ip(f"netns add {self.name}")
        enter = ["ip", "netns", "exec", self.name, "unshare", "-um", "bash", "-c", ENTER, "bash", self.name]
        self.enter = [*enter, str(ROOT), sys.prefix, str(shared), "--"]

    def connect(self, number: int) -> None:
        ip(f"-n {self.name} addr add {ADDRESS.format(number)}/24 dev eth0")
        for interface in ("lo", "eth0"):
            ip(f"-n {self.name} link set {interface} up")

    def kill(self) -> None:
        """End all processes at once, as a loss of power does."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        for pid in pids.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    shared = tmp_path_factory.getbasetemp()
    made = []
    try:
        made += [Host(number, shared) for number in (1, 2)]
        ip(f"link add eth0 netns {made[0].name} type veth peer name eth0 netns {made[1].name}")
        for number, host in enumerate(made, start=1):
            host.connect(number)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not allowed here, so there is no second host")
    else:
        yield made
    finally:
        for host in made:
            host.kill()
            ip(f"netns del {host.name}")


@pytest.mark.kill
def test_a_run_goes_on_without_a_host_and_with_it_again(
    hosts: list[Host],
    tiny_pipeline: Path,
    tmp_path: Path,
    worlds: WorldPool,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two processes on each host: 4, then 2, then 4. The losses are those of one process that was never disturbed."""
    script = ["bash", str(ROOT / "scripts" / "launch_multinode.sh"), "--nnodes", "1:2", "--interface", "eth0"]
    jobs: list[Job] = []

    def start(number: int) -> Job:
        node = ["--node-rank", str(number), "--master-addr", ADDRESS.format(1), "--nproc-per-node", "2", "--"]
        monkeypatch.setitem(LAUNCHERS, "script", lambda: [*hosts[number].enter, *script, *node])
        log = f"host{len(jobs)}"
        jobs.append(Job("script", tiny_pipeline, tmp_path / "run", 100_000, *SETTINGS, log=log))
        return jobs[-1]

    def worlds_of(job: Job) -> list[object]:
        return [row["world_size"] for row in events(job, "start", "restart")]

    first = start(0)
    try:
        start(1)
        first.wait_for(lambda: len(first.rows()) >= 10, 240)
        hosts[1].kill()
        first.wait_for(lambda: worlds_of(first)[-1] == 2, 240)
        alone = len(first.rows())
        first.wait_for(lambda: len(first.rows()) >= alone + 6, 240)
        start(1)
        first.wait_for(lambda: len(worlds_of(first)) >= 3 and worlds_of(first)[-1] == 4, 240)
        together = len(first.rows())
        first.wait_for(lambda: len(first.rows()) >= together + 6, 240)
        (first.run / "save_quit").touch()
        assert last_line(first) == f"{ENDED}0"
        assert last_line(jobs[2]) == f"{ENDED}0"
    finally:
        for job in jobs:
            job.close()
    moved = [row["loss"] for row in first.rows()]
    calm = (*SETTINGS, f"train.max_steps={len(moved)}")
    stayed = losses(worlds[1].run(run_training, tiny_pipeline, tmp_path / "calm", calm)[0])
    assert [row["step"] for row in first.rows()] == list(range(1, len(moved) + 1))
    assert worlds_of(first) == [4, 2, 4]
    assert moved == pytest.approx(stayed, rel=2e-6)
