"""Gradient norm and relative update of each block: those of plain torch on one process, at every ZeRO stage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.runs import losses, run_training, weights
from wands.train import step as step_module

BOTH = ("grad_norm_blocks", "update_ratio_blocks")
STEPS = ("train.max_steps=2", "train.bins_per_step=4", "optim.grad_clip=0.01", "logging.blocks_every=1")


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


def plain(model: Path, out: Path, overrides: tuple[str, ...]) -> list[dict[str, dict[str, float]]]:
    """One process at ZeRO-0: read `.grad` and the weights of each parameter around the update."""
    found = []
    update = step_module._step

    def norm(values: list[torch.Tensor]) -> float:
        return math.sqrt(sum(float(value.double().square().sum()) for value in values))

    def stepping(engine: Any, *args: Any) -> Any:
        trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        old = {name: p.detach().clone() for name, p in trained.items()}
        grads = {name: p.grad.clone() for name, p in trained.items()}
        result = update(engine, *args)
        blocks: dict[str, list[str]] = {}
        for name in trained:
            key = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]
            blocks.setdefault(key, []).append(name)
        found.append(
            {
                "grad_norm_blocks": {b: norm([grads[n] for n in names]) for b, names in blocks.items()},
                "update_ratio_blocks": {
                    b: norm([trained[n].detach() - old[n] for n in names]) / norm([old[n] for n in names])
                    for b, names in blocks.items()
                },
            }
        )
        return result

    with mock.patch.object(step_module, "_step", stepping):
        run_training(model, out, (*overrides, "logging.blocks_every=0"), zero(0))
    return found


CPU = {"device": "cpu"}
LORA = ("lora.rank=4", "lora.targets=attention+ffn")
CASES = {
    "stage 0": ((), zero(0)),
    "stage 1": ((), zero(1)),
    "stage 2": ((), zero(2)),
    "stage 3": ((), zero(3)),
    "offload 1": ((), zero(1, offload_optimizer=CPU)),
    "offload 2": ((), zero(2, offload_optimizer=CPU)),
    "offload 3": ((), zero(3, offload_optimizer=CPU, offload_param=CPU)),
    "LoRA 2": (LORA, zero(2)),
    "LoRA 3": (LORA, zero(3)),
    "context parallel": (("parallel.ulysses_degree=2",), zero(2)),
    "8 bits": (("optim.name=adamw8bit",), zero(2)),
}


@pytest.mark.parametrize(
    "name", [name if name == "stage 3" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_norms_are_those_of_plain_torch(name: str, tiny_pipeline: Path, tmp_path: Path, run_world):
    more, ds = CASES[name]
    alone = () if name == "context parallel" else more
    expected = run_world(1, plain, tiny_pipeline, tmp_path / "plain", (*STEPS, *alone))[0]
    rows = run_world(2, run_training, tiny_pipeline, tmp_path / "run", (*STEPS, *more), ds)[0]
    assert len(rows) == len(expected) == 2
    for row, reference in zip(rows, expected, strict=True):
        assert {"blocks.0", "blocks.1"} <= reference["grad_norm_blocks"].keys()
        for key in BOTH:
            assert row[key] == pytest.approx(reference[key], rel=1e-3), key
        total = math.sqrt(sum(value**2 for value in row["grad_norm_blocks"].values()))
        assert total == pytest.approx(row["grad_norm"], rel=1e-5)
        assert row["grad_norm"] > 0.01, "nothing is clipped"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_experts_and_other_steps(stage: int, tiny_variant: Any, tmp_path: Path, run_world):
    """Each expert has its own blocks, only every second step is measured, and no bit of the training changes."""
    model, steps = tiny_variant("wan2.2-t2v-a14b"), ("train.max_steps=3", "optim.grad_clip=0.01")
    expected = run_world(1, plain, model, tmp_path / "plain", steps)[0]
    out = tmp_path / "run"
    rows = run_world(2, run_training, model, out, (*steps, "logging.blocks_every=2"), zero(stage))[0]
    assert [key in row for row in rows for key in BOTH] == [False, False, True, True, False, False]
    for key in BOTH:
        experts = zip(("high", "low"), expected[2:4], strict=True)
        reference = {f"{expert}.{b}": value for expert, item in experts for b, value in item[key].items()}
        assert rows[1][key] == pytest.approx(reference, rel=1e-3), key
    without = run_world(2, run_training, model, tmp_path / "without", steps, zero(stage))[0]
    assert losses(without) == losses(rows)
    ours, theirs = weights(out), weights(tmp_path / "without")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_bf16_weights_are_measured_by_their_masters(
    stage: int, tiny_pipeline: Path, tmp_path: Path, run_world
):
    """The updates are smaller than the last place of bf16."""
    bf16 = ("precision.weights=bf16", "precision.compute=bf16", "optim.lr=1e-5", "optim.warmup=0")
    run = (tiny_pipeline, tmp_path, (*STEPS, *bf16), zero(stage))
    (row, _) = run_world(2, run_training, *run)[0]
    ratios = row["update_ratio_blocks"].values()
    assert all(1e-7 < ratio < 1e-2 for ratio in ratios)
    total = math.sqrt(sum(value**2 for value in row["grad_norm_blocks"].values()))
    assert total == pytest.approx(row["grad_norm"], rel=1e-3)
