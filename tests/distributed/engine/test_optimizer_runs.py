"""Every optimizer in a run: resume, losses, start block, refusals."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import Spy, losses, make_run, run_training, weights
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.resume import check_resumable
from wands.engine.optimizers import build_optimizer
from wands.errors import CheckpointError, ConfigError
from wands.plugin import Plugin
from wands.train.jobs import FinishedStep
from wands.train.summary import start_block
from wands.train.training import Training

# ---- whole runs


def run_eagerly(*args: Any) -> list[dict[str, Any]]:
    """As `run_training`, in a process that compiles again afterwards. Writes the dtypes of the weights to a file."""

    def write_dtypes(training: Training, step: FinishedStep) -> None:
        engines = training.engines.values()
        found = {str(weight.dtype) for engine in engines for weight in engine.module.parameters()}
        (training.output_dir / "dtypes.json").write_text(json.dumps(sorted(found)))

    try:
        return run_training(*args, plugin=Plugin(jobs=(Spy(stepped=write_dtypes),)))
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "more"),
    [
        ("adamw8bit", 3, ()),
        pytest.param("adamw", 2, ("optim.decay_norms=false",), marks=pytest.mark.slow),
        pytest.param("adamw8bit", 3, ("optim.decay_norms=false", "optim.lr=1e-3"), marks=pytest.mark.slow),
        pytest.param(
            "adamw",
            2,
            ("optim.decay_norms=false", "precision.weights=bf16", "precision.compute=bf16"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "adamw8bit", 2, ("precision.weights=bf16", "precision.compute=bf16"), marks=pytest.mark.slow
        ),
        pytest.param("adafactor", 0, (), marks=pytest.mark.slow),
        pytest.param("muon", 1, ("optim.grad_clip=0",), marks=pytest.mark.slow),
        pytest.param("muon", 3, ("optim.grad_clip=0",), marks=pytest.mark.slow),
    ],
)
def test_resume_is_bitwise(
    name: str, stage: int, more: tuple[str, ...], tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (
        f"optim.name={name}",
        "train.max_steps=4",
        "optim.schedule=cosine",
        "checkpoint.every=2",
        *more,
    )
    offload = {"offload_optimizer": {"device": "cpu"}} if (name, stage) == ("adamw8bit", 3) else {}
    ds = zero(stage, **offload)
    straight = worlds[2].run(run_eagerly, tiny_pipeline, tmp_path / "run", settings, ds)[0]
    last = weights(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000004").rename(tmp_path / "set aside")
    resumed = worlds[2].run(run_eagerly, tiny_pipeline, tmp_path / "run", settings, ds, True)[0]
    assert losses(resumed) == losses(straight)
    again = weights(tmp_path / "run")
    assert all(torch.equal(again[key], value) for key, value in last.items())
    if (
        "precision.weights=bf16" in more
    ):  # the optimizer's groups were parted by dtype, or all weights would be fp32 by now
        dtypes = json.loads((tmp_path / "run" / "dtypes.json").read_text())
        assert dtypes == ["torch.bfloat16", "torch.float32"]
    if stage == 1:
        with pytest.raises(
            CheckpointError, match=r"optim\.name=adamw must equal the checkpoint's value muon"
        ):
            _check_resume(find_checkpoint(tmp_path / "run")[1], tiny_pipeline, tmp_path)


def _check_resume(state: Any, model: Path, out: Path) -> None:
    training_run = make_run(model, out, ("train.max_steps=4",), zero(1), world_size=2)
    check_resumable(state, training_run.state, "run")


@pytest.mark.parametrize(
    "steps", [pytest.param(40, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.full)]
)
def test_the_losses_of_8_bits_stay_in_their_band(
    steps: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """A loss is within 0.2 % of that of 32 bits, 0.02 % on average, and their mean within 0.005 %."""
    series = {
        name: losses(
            worlds[1].run(
                run_training,
                tiny_pipeline,
                tmp_path / name,
                (f"optim.name={name}", f"train.max_steps={steps}", "train.bins_per_step=1", "optim.lr=3e-3"),
                zero(2),
            )[0]
        )
        for name in ("adamw", "adamw8bit")
    }
    full = torch.tensor(series["adamw"])
    eight = torch.tensor(series["adamw8bit"])
    assert full.shape == eight.shape == (steps,)
    assert float(full[-10:].mean()) < 0.95 * float(full[:10].mean())  # it learns
    assert not torch.equal(full, eight)
    off = (eight / full - 1).abs()
    assert float(off.max()) <= 0.002
    assert float(off.mean()) <= 0.0002
    assert abs(float(eight.mean() / full.mean()) - 1) <= 0.00005


def test_the_start_block_names_it(tiny_pipeline: Path, tmp_path: Path):
    training_run = make_run(tiny_pipeline, tmp_path, ("optim.name=adamw8bit",), zero(2), world_size=1)
    assert "AdamW8bit lr 1.00e-03" in start_block(training_run)
    written = make_run(
        tiny_pipeline, tmp_path, ("optim.name=adamw8bit",), training_run.ds_config, world_size=1
    )
    assert written.ds_config == training_run.ds_config  # a run's own deepspeed.json is a legal one


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "ds", "said"),
    [
        (("optim.name=adafactor",), zero(2), "optim.name=adafactor needs whole weight matrices"),
        (("optim.name=adafactor", "optim.betas=[0.8,0.9]"), zero(0), "optim.betas has no effect"),
        (("optim.name=adafactor", "optim.eps=1e-6"), zero(0), "optim.eps has no effect"),
        (("optim.name=muon",), zero(2), "optim.grad_clip=1.0 would clip Muon's update at ZeRO-2"),
        (
            ("optim.name=muon", "lora.rank=4"),
            zero(0),
            "works only for full finetunes, but the recipe has a lora",
        ),
        (("optim.name=muon",), zero(0, offload_optimizer={"device": "cpu"}), "too slow on the host"),
        (
            ("optim.name=muon", "optim.grad_clip=0"),
            zero(3, reduce_scatter=True),
            "reduce_scatter=false at ZeRO-3",
        ),
        (
            ("optim.name=muon", "optim.grad_clip=0"),
            {**zero(2), "scheduler": {"type": "WarmupLR", "params": {}}},
            "a learning rate for each shape of matrix",
        ),
        (
            ("optim.name=muon", "optim.grad_clip=0", "precision.reduce=bf16"),
            zero(3),
            "would keep Muon's momentum in bf16",
        ),
        (
            ("optim.name=adamw8bit",),
            zero(3, offload_optimizer={"device": "nvme"}),
            "device=nvme keeps the fp32 master",
        ),
        (
            ("optim.name=adamw8bit",),
            {**zero(2), "optimizer": {"type": "SGD"}},
            "optimizer.type=SGD contradicts recipe.yaml: optim.name=adamw8bit; remove optimizer from the JSON",
        ),
        ((), {**zero(2), "optimizer": {"type": "Muon"}}, "set optim.name=muon"),
        (
            ("optim.name=adamw8bit",),
            {**zero(2), "optimizer": {"type": "AdamW8bit", "params": {"fused": True}}},
            "optimizer.params.fused is not a setting of optim.name=adamw8bit",
        ),
    ],
)
def test_refusals(
    settings: tuple[str, ...], ds: dict[str, Any], said: str, tiny_pipeline: Path, tmp_path: Path
):
    with pytest.raises(ConfigError) as refused:
        make_run(tiny_pipeline, tmp_path, settings, ds, world_size=1)
    assert said in str(refused.value)


def test_a_missing_library_is_named(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    with pytest.raises(
        ConfigError, match=r"bitsandbytes, which is not installed; run pip install -e '\.\[8bit\]'"
    ):
        make_run(tiny_pipeline, tmp_path, ("optim.name=adamw8bit",), zero(2), world_size=1)


def test_a_broken_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "wands.engine.adamw8bit", raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match="bitsandbytes cannot be loaded on this machine"):
        build_optimizer([], {"type": "AdamW8bit", "params": {}}, fused=False)
