"""The launch scripts: what they start with fake launchers in their place, and whole runs on two "nodes" of this machine."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.launch_scripts import (
    BIN,
    MULTINODE,
    SCONTROL,
    SLURM,
    SRUN,
    fake,
    say,
    slurm,
    start,
    wait_for,
)

__all__ = ["fake", "start"]  # fixtures


AGENT = "-m wands.watch.restart"
TELL = (
    'printf "%s\\n" "$@" OMP=${OMP_NUM_THREADS:-} NCCL=${NCCL_SOCKET_IFNAME:-} GLOO=${GLOO_SOCKET_IFNAME:-}'
)
# The part of `wands train` that a SLURM job sees: it takes the file away and stops. ENDS: it ends without having looked.
TRAIN = f"""{TELL}
until [ -e "$RUN/save_quit" ] || [ -e "$LOGS/over" ]; do sleep 0.05; done
touch "$LOGS/over"
[ -n "${{ENDS:-}}" ] || rm -f "$RUN/save_quit"
exit ${{CODE:-0}}
"""


# ---- what is started


def test_torchrun_on_each_node(fake, start):
    env = fake(python=TELL)
    four = ["--nnodes", 4, "--nproc-per-node", 8, "--master-addr", "a0"]
    lines = say(start(MULTINODE, [*four, "--node-rank", 3, "--", "my recipe", "--set", "a.b={c: 1}"], env))
    told = f"{AGENT} --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint a0:29500"
    told += " --rdzv-conf read_timeout=600,is_host=0 -m wands train"
    assert lines == [*told.split(), "my recipe", "--set", "a.b={c: 1}", "OMP=1", "NCCL=", "GLOO="]

    by_environment = {
        "NNODES": "1:2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "b",
        "MASTER_PORT": "7",
        "NPROC_PER_NODE": "1",
    }
    lines = say(
        start(MULTINODE, ["--interface", "ib0", "--"], {**env, **by_environment, "OMP_NUM_THREADS": "5"})
    )
    told = f"{AGENT} --nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint b:7"
    told += " --rdzv-conf read_timeout=600,is_host=1 --local-addr b -m wands train"
    assert lines == [*told.split(), "OMP=5", "NCCL=ib0", "GLOO=ib0"]

    lines = say(start(MULTINODE, ["--nnodes", 1, "--nproc-per-node", 2, "--", "r"], env))
    told = f"{AGENT} --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29500"
    told += " --rdzv-conf read_timeout=600,is_host=1 --local-addr 127.0.0.1 -m wands train r"
    assert lines[: len(told.split())] == told.split()


def test_each_rank_gets_its_share_of_the_cores(fake, start):
    """torchrun alone would give an offloaded Adam one thread."""
    env = fake(python=TELL, nproc="echo 64")
    env["OMP_NUM_THREADS"] = ""
    lines = say(
        start(
            MULTINODE,
            ["--nnodes", 1, "--node-rank", 0, "--nproc-per-node", 8, "--master-addr", "a", "--"],
            env,
        )
    )
    assert "OMP=8" in lines


def test_deepspeed_on_each_node(fake, start, tmp_path: Path):
    env = fake(deepspeed=TELL)
    (tmp_path / "hosts").write_text("# ours\nn0 slots=2\nn1 slots=4\n")
    lines = say(start(MULTINODE, ["--hostfile", tmp_path / "hosts", "--node-rank", 1, "--", "r"], env))
    told = f"--hostfile {tmp_path}/hosts --master_port 29500 --no_ssh --node_rank 1 --master_addr n0 --module wands train r"
    assert lines == [*told.split(), "OMP=1", "NCCL=", "GLOO="]


@pytest.mark.slow
def test_deepspeed_over_ssh_brings_every_argument_and_variable_to_the_nodes(fake, start, tmp_path: Path):
    """The real deepspeed; pdsh runs its line in a shell here, with the start of Python replaced by something that tells."""
    python = re.search(r"/\S+/python[\d.]*", (BIN / "deepspeed").read_text())[
        0
    ]  # may be another name of ours
    pdsh = f"""
    while [[ "$1" == -* ]]; do case "$1" in -S) shift ;; *) shift 2 ;; esac; done
    if [ "$1" = true ]; then exit; fi
    line="$*"
    line="${{line/"{python} -u -m deepspeed.launcher.launch"/printf "'%s\\n'"}}"
    line+="; echo NCCL=\\$NCCL_SOCKET_IFNAME MORE=\\$MORE QUEUES=\\$CUDA_DEVICE_MAX_CONNECTIONS ALLOC=\\$PYTORCH_ALLOC_CONF"
    own=(-u NCCL_SOCKET_IFNAME -u CUDA_DEVICE_MAX_CONNECTIONS -u PYTORCH_ALLOC_CONF)
    for node in 0 1; do env "${{own[@]}}" bash -c "${{line//%n/$node}}"; done
    """
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "backend:native"}
    env = {**fake(real=True, pdsh=pdsh), "HOME": str(tmp_path), **own}
    (tmp_path / "hosts").write_text("n0 slots=2\nn1 slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("\nMORE=of mine")
    hard = ["a.b={c: [1,2], d: 'x y'}", "{e,f}", "$HOME", 'say "hi"', "tab\there", "*"]
    options = ["--hostfile", tmp_path / "hosts", "--master-addr", "n0", "--interface", "ib0", "--"]
    lines = say(start(MULTINODE, [*options, "r", *hard], env))
    starts = [number for number, line in enumerate(lines) if line.startswith("--node_rank=")]
    assert [lines[number] for number in starts] == ["--node_rank=0", "--node_rank=1"]
    for number in starts:
        node = lines[number : number + 20]
        assert "--master_addr=n0" in node
        told = node[node.index("--module") :]
        assert told[told.index("wands") :][: len(hard) + 4] == [
            "wands",
            "train",
            "r",
            *hard,
            "NCCL=ib0 MORE=of mine QUEUES=8 ALLOC=backend:native",
        ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--nnodes 2 train", "train is not an option"),
        ("--nnodes 2", "-- is missing"),
        ("--nnodes -- r", "--nnodes needs a value"),
        ("-- r", "--nnodes is missing"),
        ("--nnodes two -- r", "--nnodes=two is not a whole number from 1 on"),
        ("--nnodes 2 -- r", "--node-rank is missing"),
        ("--nnodes 2 --node-rank 2 --master-addr a -- r", "--node-rank=2 must be less than --nnodes=2"),
        ("--nnodes 3:2 --node-rank 0 -- r", "--nnodes=2 is not a whole number from 3 on"),
        ("--nnodes 2 --node-rank 1 -- r", "--master-addr is missing"),
        ("--nnodes 2 --node-rank 1 --master-addr a --nproc-per-node 0 -- r", "--nproc-per-node=0 is not"),
        ("--hostfile {hosts}.none -- r", "hosts.none does not exist"),
        ("--hostfile {empty} -- r", "empty names no node"),
        ("--hostfile {hosts} -- r", "pdsh is not on PATH"),
        ("--hostfile {hosts} --node-rank 2 -- r", "--node-rank=2 must be less than the 2 nodes"),
    ],
)
def test_what_is_missing_is_said_in_one_line(fake, start, tmp_path: Path, arguments: str, sentence: str):
    (tmp_path / "hosts").write_text("n0 slots=2\nn1 slots=2\n")
    (tmp_path / "empty").write_text("# n0 slots=2\n")
    options = [part.format(hosts=tmp_path / "hosts", empty=tmp_path / "empty") for part in arguments.split()]
    process = start(MULTINODE, options, fake(python=TELL, deepspeed=TELL))
    text = process.communicate(timeout=30)[0]
    assert process.returncode == 2
    assert text.startswith("launch_multinode: ")
    assert sentence in text
    assert text.count("\n") == 1


def test_no_environment_and_no_answer_are_said_in_one_line(fake, start, tmp_path: Path):
    process = start(MULTINODE, ["--nnodes", 1, "--"], fake())
    assert "python is not on PATH; activate the environment" in process.communicate(timeout=30)[0]
    (tmp_path / "hosts").write_text("n0 slots=2\nn1 slots=2\n")
    env = fake(deepspeed=TELL, pdsh="echo n1: Permission denied; echo more; exit 255")
    process = start(MULTINODE, ["--hostfile", tmp_path / "hosts", "--"], env)
    assert "answers ssh without a password (n1: Permission denied)" in process.communicate(timeout=30)[0]
    assert process.returncode == 2


# ---- SLURM


def test_slurm_starts_one_torchrun_a_node_saves_before_the_limit_and_queues_again(
    fake, start, tmp_path: Path
):
    env = {
        **fake(srun=SRUN, scontrol=SCONTROL, python=TRAIN),
        **slurm(SLURM_CPUS_PER_TASK="12", RUN=str(tmp_path / "run")),
    }
    process = start(SLURM, ["rec", "--set", f"output_dir={tmp_path}/run", "--set", "a=b c"], env)
    logs = tmp_path / "logs"
    wait_for(
        lambda: all((logs / f"node{i}").is_file() and (logs / f"node{i}").read_text() for i in (0, 1)),
        process,
    )
    process.send_signal(signal.SIGTERM)
    assert say(process) == []
    assert (logs / "srun").read_text().split() == [
        "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=60", "--cpu-bind=none", "--cpus-per-task=12",
    ]  # fmt: skip
    for node in (0, 1):
        told = f"{AGENT} --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:23457"
        told += f" --rdzv-conf read_timeout=600,is_host={1 - node}{'' if node else ' --local-addr 127.0.0.1'} -m wands train"
        lines = (logs / f"node{node}").read_text().splitlines()
        assert lines[:-3] == [*told.split(), "rec", "--set", f"output_dir={tmp_path}/run", "--set", "a=b c"]
    assert (logs / "scontrol").read_text() == "requeue 123457\n"


@pytest.mark.parametrize(("ends", "code"), [("1", 0), ("1", 3), ("", 3)])
def test_slurm_leaves_a_run_that_is_over(fake, start, tmp_path: Path, ends: str, code: int):
    """Asked to save as it ended: nothing is queued, and the file does not stop the next run. A failure keeps its code."""
    env = {**fake(srun=SRUN, scontrol=SCONTROL, python=TRAIN), **slurm(SLURM_RESTART_COUNT="1")}
    env.update(RUN=str(tmp_path / "run"), ENDS=ends, CODE=str(code))
    process = start(SLURM, [f"--set=output_dir={tmp_path}/run"], env)
    node = tmp_path / "logs" / "node1"
    wait_for(lambda: node.is_file() and node.read_text(), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert (tmp_path / "run").is_dir()
    assert not list((tmp_path / "run").iterdir())
    assert not (tmp_path / "logs" / "scontrol").exists()
    assert node.read_text().splitlines()[-4] == "--resume"  # it had been queued again


@pytest.mark.parametrize(("code", "is_requeued"), [(1, True), (137, True), (2, False)])
def test_slurm_queues_a_run_again_that_has_crashed(fake, start, tmp_path: Path, code: int, is_requeued: bool):
    """After an error of the user (2), and after three crashes at one checkpoint, the job ends. A new checkpoint or a new job is a
    new start."""
    env = {**fake(srun=SRUN, scontrol=SCONTROL, python=f"exit {code}"), **slurm()}
    run = tmp_path / "run"
    requests = tmp_path / "logs" / "scontrol"

    def crash(**more: str) -> int:
        """Start the job, let it fail, and return how often it has been queued again so far."""
        before = requests.read_text().count("requeue") if requests.exists() else 0
        process = start(SLURM, [f"--set=output_dir={run}"], {**env, **more})
        text = process.communicate(timeout=30)[0]
        assert process.returncode == code, text
        count = requests.read_text().count("requeue") if requests.exists() else 0
        assert ("3 times without a new checkpoint" in text) == (is_requeued and count == before)
        return count

    if not is_requeued:
        assert crash() == 0
        return
    assert [crash(), crash(), crash(), crash(), crash()] == [1, 2, 3, 3, 3]
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step_00000010")
    assert [crash(), crash()] == [4, 5]
    assert crash(SLURM_JOB_ID="7") == 6
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert rows[-1] == {"event": "requeue", "job": "7", "checkpoint": "step_00000010"}


def test_a_job_that_slurm_does_not_queue_again_keeps_its_code(fake, start, tmp_path: Path):
    env = {**fake(srun=SRUN, scontrol="[ $1 = show ] && echo 127.0.0.1", python="exit 5"), **slurm()}
    process = start(SLURM, [f"--set=output_dir={tmp_path}/run"], env)
    assert "SLURM does not queue the job again" in process.communicate(timeout=30)[0]
    assert process.returncode == 5


def test_slurm_does_not_queue_a_run_again_that_nobody_stopped(fake, start, tmp_path: Path):
    env = {**fake(srun=SRUN, scontrol=SCONTROL, python=TELL), **slurm()}
    assert say(start(SLURM, ["--set", f"output_dir={tmp_path}/run"], env)) == []
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["node0", "node1", "srun"]


@pytest.mark.parametrize(
    ("more", "arguments", "sentence"),
    [
        ({"SLURM_JOB_ID": ""}, [], "not inside a SLURM job"),
        ({"SLURM_SUBMIT_DIR": "/"}, [], "call sbatch in the repository's folder"),
        ({}, ["rec"], "add --set output_dir=FOLDER"),
    ],
)
def test_slurm_says_what_is_missing(fake, start, more: dict[str, str], arguments: list[str], sentence: str):
    process = start(SLURM, list(arguments), {**fake(), **slurm(**more)})
    text = process.communicate(timeout=30)[0]
    assert process.returncode == 2
    assert sentence in text
    assert text.count("\n") == 1
