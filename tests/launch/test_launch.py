"""The launch scripts: what they start with fake launchers in their place, and whole runs on two "nodes" of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.world import free_port
from wands.checkpoint.checkpoint_files import find_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MULTINODE = ROOT / "scripts" / "launch_multinode.sh"
SLURM = ROOT / "scripts" / "launch_slurm.sh"
AGENT = "-m wands.watch.restart"

# Two nodes here: the options are written down, then the command runs once for each node.
SRUN = """
while [[ "$1" == -* ]]; do echo "$1" >>"$LOGS/srun"; shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" >"$LOGS/node$node" 2>&1 & nodes+=($!); done
code=0
for node in "${nodes[@]}"; do wait "$node" || code=$?; done
exit $code
"""
SCONTROL = 'if [ "$1" = show ]; then printf "127.0.0.1\\nnode1\\n"; else echo "$*" >>"$LOGS/scontrol"; fi'
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


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`fake(name=body, ...)` puts bash scripts of these names before all other commands; returns the environment."""

    def make(real: bool = False, **commands: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        logs = tmp_path / "logs"
        folder.mkdir(exist_ok=True)
        logs.mkdir(exist_ok=True)
        for name, body in commands.items():
            (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (folder / name).chmod(0o755)
        path = [folder, *([BIN] if real else []), "/usr/bin", "/bin"]
        return {"PATH": ":".join(map(str, path)), "LOGS": str(logs)}

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start(script, arguments, environment)` starts a launch with its output in one pipe; what is left of it at the end dies."""
    started: list[subprocess.Popen[str]] = []

    def run(script: Path, arguments: list[object], env: dict[str, str]) -> subprocess.Popen[str]:
        ours = (
            "NNODES",
            "NODE_RANK",
            "MASTER_",
            "NPROC_PER_NODE",
            "SLURM_",
            "NCCL_",
            "GLOO_",
            "RANK",
            "WORLD_SIZE",
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        started.append(
            subprocess.Popen(
                ["bash", str(script), *map(str, arguments)],
                env={**kept, **env},
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def slurm(**more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "123457",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        **more,
    }


def say(process: subprocess.Popen[str], seconds: float = 60) -> list[str]:
    """The lines of a launch that ends well."""
    text = process.communicate(timeout=seconds)[0]
    assert process.returncode == 0, text
    return text.splitlines()


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
        """How often the job was queued again up to now."""
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


# ---- two nodes on loopback


@pytest.mark.slow
def test_two_nodes_share_a_bin_stop_resume_and_equal_one_process(
    fake, start, tiny_pipeline: Path, tmp_path: Path, run_world
):
    """Ulysses inside each node of two ranks, the ring across: first in a SLURM job that ends too early, then with DeepSpeed."""
    run = tmp_path / "run"
    port = free_port()

    def arguments(steps: int) -> list[str]:
        values = (
            *runs.BASE, f"model.path={tiny_pipeline}", f"output_dir={run}", "train.log_every=1", f"train.max_steps={steps}",
            "parallel.cp_size=4",
        )  # fmt: skip
        return [part for value in values for part in ("--set", value)]

    env = {
        **fake(real=True, srun=SRUN, scontrol=SCONTROL),
        **slurm(MASTER_PORT=port),
        "PYTHONUNBUFFERED": "1",
    }
    job = start(SLURM, arguments(500), env)
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").read_text(), job)
    job.send_signal(signal.SIGTERM)
    assert say(job, 240) == []
    first, second = ((tmp_path / "logs" / f"node{node}").read_text() for node in (0, 1))
    assert "4 ranks = dp 1 x ring 2 x ulysses 2 (parallel.cp_size=4)" in first
    for text in (
        "4 ranks =",
        "1/500  loss",
        "as requested; use --resume to continue the run",
    ):  # one rank speaks for both nodes
        assert first.count(text) == 1
        assert text not in second
    steps = find_checkpoint(run)[1].step
    assert 0 < steps < 500
    assert (tmp_path / "logs" / "scontrol").read_text() == "requeue 123457\n"

    # it goes on under the other launcher
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\nnode1 slots=2\n")
    options = ["--hostfile", tmp_path / "hosts", "--master-port", free_port()]
    nodes = [
        start(MULTINODE, [*options, "--node-rank", node, "--", *arguments(steps + 2), "--resume"], env)
        for node in (0, 1)
    ]
    first, second = ("\n".join(say(node, 240)) for node in nodes)
    for text in (
        "4 ranks = dp 1 x ring 2 x ulysses 2",
        f"resumed from {run}",
        f"{steps + 2}/{steps + 2}  loss",
    ):
        assert first.count(text) == 1
        assert text not in second
    assert find_checkpoint(run)[1].step == steps + 2

    alone = run_world(
        1, runs.run_training, tiny_pipeline, tmp_path / "alone", (f"train.max_steps={steps + 2}",)
    )[0]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 3))
    assert runs.losses(rows) == pytest.approx(runs.losses(alone), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mistaken", [pytest.param((0, 1), marks=pytest.mark.full), (1,)])
def test_a_mistake_ends_both_nodes_with_its_sentence(
    fake, start, tiny_pipeline: Path, tmp_path: Path, mistaken: tuple[int, ...]
):
    """Also one that a single node has, whose ranks the other node would wait for half an hour."""
    options = [
        "--nnodes",
        2,
        "--nproc-per-node",
        2,
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        free_port(),
    ]
    right = [*runs.BASE, "train.bins_per_step=4", f"model.path={tiny_pipeline}", f"output_dir={tmp_path}/run"]
    nodes = []
    for node in (0, 1):
        values = [*right, "parallel.ulysses_degree=3"] if node in mistaken else right
        arguments = [part for value in values for part in ("--set", value)]
        nodes.append(start(MULTINODE, [*options, "--node-rank", node, "--", *arguments], fake(real=True)))
    texts = [node.communicate(timeout=120)[0] for node in nodes]
    for node, text in zip(nodes, texts, strict=True):
        assert node.returncode == 2
        assert re.search(r"exitcode\s+: 2 ", text)
    sentence = "parallel.ulysses_degree=3: 3 ranks share each packed sequence, but world_size=4 is not"
    assert "".join(texts).count(sentence) == 1
    assert not (tmp_path / "run" / "checkpoints").exists()
