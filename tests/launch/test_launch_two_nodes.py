"""Two nodes on one machine, under the launch scripts."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.launch_scripts import MULTINODE, SCONTROL, SLURM, SRUN, fake, say, slurm, start, wait_for
from tests.support.world import free_port
from wands.checkpoint.checkpoint_files import find_checkpoint

__all__ = ["fake", "start"]  # fixtures


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

    # the run continues under the other launcher
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
