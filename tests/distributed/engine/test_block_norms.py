"""Gradient norm and relative update of each block: those of plain torch on one process, at every ZeRO stage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import Spy, losses, run_training, weights
from wands.plugin import Plugin
from wands.train.jobs import FinishedStep
from wands.train.training import Training

BOTH = ("grad_norm_blocks", "update_ratio_blocks")
STEPS = ("train.max_steps=2", "train.bins_per_step=4", "optim.grad_clip=0.01", "logging.blocks_every=1")


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


def plain(model: Path, out: Path, overrides: tuple[str, ...]) -> list[dict[str, dict[str, float]]]:
    """One process at ZeRO-0: read `.grad` of each parameter after the last backward pass, and the weights around the update."""
    found = []
    grads: dict[torch.nn.Parameter, torch.Tensor] = {}
    old: dict[torch.nn.Parameter, torch.Tensor] = {}

    def norm(values: list[torch.Tensor]) -> float:
        return math.sqrt(sum(float(value.double().square().sum()) for value in values))

    def keep_gradient(parameter: torch.nn.Parameter) -> None:
        grads[parameter] = parameter.grad.clone()

    def trained(engine: Any) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in engine.module.named_parameters() if p.requires_grad}

    def started(training: Training) -> None:
        for engine in training.engines.values():
            for parameter in trained(engine).values():
                parameter.register_post_accumulate_grad_hook(keep_gradient)
                old[parameter] = parameter.detach().clone()

    def stepped(training: Training, step: FinishedStep) -> None:
        for engine in training.engines.values():
            blocks: dict[str, list[torch.nn.Parameter]] = {}
            for name, parameter in trained(engine).items():
                key = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]
                blocks.setdefault(key, []).append(parameter)
            norms = {block: norm([grads[p] for p in own]) for block, own in blocks.items()}
            ratios = {
                block: norm([p.detach() - old[p] for p in own]) / norm([old[p] for p in own])
                for block, own in blocks.items()
            }
            found.append({"grad_norm_blocks": norms, "update_ratio_blocks": ratios})
            old.update((parameter, parameter.detach().clone()) for parameter in trained(engine).values())

    overrides = (*overrides, "logging.blocks_every=0")
    run_training(model, out, overrides, zero(0), plugin=Plugin(jobs=(Spy(started, stepped),)))
    return found


CPU = {"device": "cpu"}
TENSOR = ("parallel.tensor_degree=2",)
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
    "tensor parallel 0": (TENSOR, zero(0)),
    "tensor parallel 2": (TENSOR, zero(2)),
    "tensor parallel 3": ((*TENSOR, *LORA), zero(3)),
    "8 bits": (("optim.name=adamw8bit",), zero(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "stage 3" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_norms_are_those_of_plain_torch(name: str, tiny_pipeline: Path, tmp_path: Path, run_world):
    more, ds = CASES[name]
    alone = tuple(key for key in more if not key.startswith("parallel."))
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
    model = tiny_variant("wan2.2-t2v-a14b")
    steps = ("train.max_steps=3", "optim.grad_clip=0.01")
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
    ours = weights(out)
    theirs = weights(tmp_path / "without")
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
