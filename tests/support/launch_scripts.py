"""The launch scripts, with programs that stand in for SLURM and ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MULTINODE = ROOT / "scripts" / "launch_multinode.sh"
SLURM = ROOT / "scripts" / "launch_slurm.sh"

# Two nodes here: the options are written down, then the command runs once for each node.
SRUN = """
while [[ "$1" == -* ]]; do echo "$1" >>"$LOGS/srun"; shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" >"$LOGS/node$node" 2>&1 & nodes+=($!); done
code=0
for node in "${nodes[@]}"; do wait "$node" || code=$?; done
exit $code
"""
SCONTROL = 'if [ "$1" = show ]; then printf "127.0.0.1\\nnode1\\n"; else echo "$*" >>"$LOGS/scontrol"; fi'


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
