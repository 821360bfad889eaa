"""Sections of the user's DeepSpeed JSON that wands hands through do what DeepSpeed says they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import losses, run_training

STEPS = ("train.max_steps=4",)


def zero(stage: int = 2, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **sections}


def test_scheduler(tiny_pipeline: Path, tmp_path: Path, run_world):
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2, "warmup_type": "linear"}
    ds = zero(scheduler={"type": "WarmupLR", "params": params})
    # The helper's recipe sets optim.lr, which is refused with a scheduler in the JSON; its default is not.
    rows = run_world(2, run_training, tiny_pipeline, tmp_path, (*STEPS, "optim.lr=1e-5"), ds)[0]
    assert [row["lr"] for row in rows] == [0.0, 0.0, 5e-4, 1e-3]
    assert rows[0]["lr"] < 1e-3


@pytest.mark.slow
def test_optimizer(tiny_pipeline: Path, tmp_path: Path, run_world):
    adamw = losses(run_world(2, run_training, tiny_pipeline, tmp_path / "adamw", STEPS, zero())[0])
    sgd = zero(optimizer={"type": "SGD", "params": {"momentum": 0.9}}, zero_allow_untested_optimizer=True)
    other = losses(run_world(2, run_training, tiny_pipeline, tmp_path / "sgd", STEPS, sgd)[0])
    assert other[0] == pytest.approx(adamw[0], rel=1e-6)
    assert other[1:] != adamw[1:]


def test_clipping(tiny_pipeline: Path, tmp_path: Path, run_world):
    ours = ("train.max_steps=3", "optim.grad_clip=0.05")
    recipe = losses(run_world(2, run_training, tiny_pipeline, tmp_path / "a", ours, zero())[0])
    theirs = zero(gradient_clipping=0.05)
    json_ = losses(
        run_world(2, run_training, tiny_pipeline, tmp_path / "b", ("train.max_steps=3",), theirs)[0]
    )
    assert recipe == json_


@pytest.mark.slow
def test_profiler(tiny_pipeline: Path, tmp_path: Path, run_world):
    report = tmp_path / "flops.txt"
    ds = zero(
        3,
        flops_profiler={"enabled": True, "profile_step": 2, "output_file": str(report), "detailed": False},
    )
    series = losses(run_world(2, run_training, tiny_pipeline, tmp_path / "run", STEPS, ds)[0])
    plain = losses(run_world(2, run_training, tiny_pipeline, tmp_path / "plain", STEPS, zero(3))[0])
    assert series == pytest.approx(plain, rel=1e-6)
    assert "params" in report.read_text()


@pytest.mark.slow
def test_offload(tiny_pipeline: Path, tmp_path: Path, run_world):
    plain = losses(run_world(2, run_training, tiny_pipeline, tmp_path / "plain", STEPS, zero(3))[0])
    section = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    series = losses(
        run_world(2, run_training, tiny_pipeline, tmp_path / "off", STEPS, {"zero_optimization": section})[0]
    )
    assert series == pytest.approx(plain, rel=1e-6)
