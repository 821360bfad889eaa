"""A rank that computes more slowly than the others is named; a rank with more tokens, or whose data comes late, is not."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import Hooked, Spy, run_training
from wands.files import read_rows
from wands.plugin import Plugin
from wands.run.append_log import marked_steps
from wands.train.training import Training
from wands.watch import stragglers

STEPS = ("train.max_steps=10", "model.checkpointing=none")
UNEQUAL = ("data.mock={num_samples: 2, shapes: [[4,4,6],[1,2,2]], text_lens: [5]}",)
"""A clip of 24 tokens, which is always on rank 0, and a clip of 1 token."""


def train_with_delays(
    model: Path, out: Path, overrides: tuple[str, ...], ds: dict[str, Any], delays: list[float], kind: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """Train with a delay in every linear layer of the feed-forwards. Return the lines on rank 0, and the rows of the metrics.

    Args:
        delays: seconds for each rank.
        kind: "sleep" or "work" (busy) in each layer, "tokens": sleep this long for each token, "data": sleep before a step.
    """
    delay = delays[int(os.environ["RANK"])]
    lines = []
    stragglers.WINDOW = 5

    def wait(num_tokens: int) -> None:
        if kind == "work":
            until = time.perf_counter() + delay
            while time.perf_counter() < until:
                pass
        elif kind != "data":
            time.sleep(delay * (num_tokens if kind == "tokens" else 1))

    def slow_down(linear: torch.nn.Linear) -> None:
        forward = linear.forward

        def slow_forward(x: torch.Tensor) -> torch.Tensor:
            wait(len(x))
            return forward(x)

        linear.forward = slow_forward

    def slow_down_all(training: Training) -> None:
        for name, module in training.engines["transformer"].module.named_modules():
            if ".ffn." in name and isinstance(module, torch.nn.Linear):
                slow_down(module)

    def wait_for_data(step: int) -> None:
        if kind == "data":
            time.sleep(delay)

    plugin = Plugin(objective=Hooked(before=wait_for_data), jobs=(Spy(started=slow_down_all),))
    run_training(model, out, (*STEPS, *overrides), ds, log=lines.append, plugin=plugin)
    return [line for line in lines if "slow ranks" in line], read_rows(out / "metrics.jsonl")


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


@pytest.mark.parametrize(
    ("stage", "world_size", "overrides", "kind"),
    [
        (0, 2, (), "sleep"),
        pytest.param(3, 2, (), "work", marks=pytest.mark.slow),
        pytest.param(2, 2, ("parallel.ring_degree=2", "parallel.cp_size=2"), "sleep", marks=pytest.mark.slow),
        pytest.param(2, 2, (), "work", marks=pytest.mark.slow),
        pytest.param(3, 2, ("parallel.ring_degree=2", "parallel.cp_size=2"), "sleep", marks=pytest.mark.slow),
        pytest.param(2, 2, ("parallel.ulysses_degree=2",), "sleep", marks=pytest.mark.slow),
        pytest.param(3, 4, ("train.bins_per_step=4",), "sleep", marks=pytest.mark.slow),
        pytest.param(2, 2, ("lora.rank=4", "lora.targets=all-linear"), "sleep", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named(
    stage: int, world_size: int, overrides: tuple[str, ...], kind: str, run_world, tiny_pipeline, tmp_path
):
    delays = [0.005, 0.025, 0.005, 0.005][:world_size]  # large compared with delays of a busy machine
    args = (tiny_pipeline, tmp_path, overrides, zero(stage), delays, kind)
    lines, rows = run_world(world_size, train_with_delays, *args)[0]
    ratios = [
        re.match(
            rf"step {step}: slow ranks [^:]*: rank 1 on {socket.gethostname()} \((\d+\.\d\d)\)\. All ranks",
            line,
        )
        for step, line in zip((5, 10), lines, strict=True)
    ]
    assert all(ratio and float(ratio[1]) > 1.2 for ratio in ratios), lines
    assert [row["step"] for row in rows if row["own_seconds"]] == [5, 10]
    events = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "slow rank"]
    assert [(row["step"], row["rank"], row["host"]) for row in events] == [
        (step, 1, socket.gethostname()) for step in (5, 10)
    ]
    assert [f"{row['ratio']:.2f}" for row in events] == [ratio[1] for ratio in ratios if ratio]
    assert marked_steps(tmp_path, 7)["slow-rank report"] == [5]
    for row in rows[4::5]:
        assert len(row["own_seconds"]) == world_size
        # The clock of a step would not show it: all ranks wait for rank 1.
        assert max(row["own_seconds"]) == row["own_seconds"][1] < row["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "delays", "kind"),
    [
        (UNEQUAL, [0.001, 0.001], "tokens"),
        pytest.param((), [0.0, 0.02], "data", marks=pytest.mark.slow),
    ],
    ids=["more tokens", "late data"],
)
def test_other_ranks_are_not_named(overrides, delays, kind, run_world, tiny_pipeline, tmp_path):
    args = (tiny_pipeline, tmp_path, overrides, zero(2), delays, kind)
    lines, rows = run_world(2, train_with_delays, *args)[0]
    if kind == "tokens":
        assert lines == []
        assert all(row["own_seconds"][0] > 2 * row["own_seconds"][1] for row in rows[4::5])
    else:  # without a delay in the layers, microseconds are compared: other work of the machine may slow down a rank
        assert all(max(row["own_seconds"]) < 0.02 < row["seconds"] for row in rows[4::5])
