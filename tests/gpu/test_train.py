"""Runs on one GPU, compared with the same runs on the CPU: every path of the trainer with special code for CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import losses, run_training, weights
from tests.support.steps import zero
from tests.support.world import World
from wands.distributed.bootstrap import accelerator_type

pytestmark = pytest.mark.gpu

FP32 = 1e-4
BF16 = 3e-2
"""Largest difference of a step's loss, in parts of it. bf16 rounds at other places in other kernels."""
STEPS = ("train.max_steps=5", "optim.warmup=2")
PLAIN = "model.compile=false"
"""Compiling takes most of a minute, so that only the cases in `COMPILED` compile."""
COMPILED = ("zero 3 in bf16", "attention kept", "lora", "dropout")
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PARAMS = {"offload_param": {"device": "cpu", "pin_memory": True}}

Case = tuple[float, tuple[str, ...], dict[str, Any]]
CASES: dict[str, Case] = {
    **{f"zero {stage}": (FP32, (), zero(stage)) for stage in range(4)},
    "zero 3 in bf16": (BF16, ("precision.compute=bf16",), zero(3)),
    "bf16 reduced in bf16": (BF16, ("precision.compute=bf16", "precision.reduce=bf16"), zero(2)),
    "bf16 weights": (BF16, ("precision.compute=bf16", "precision.weights=bf16"), zero(1)),
    "one sample at a time": (FP32, ("packing.enabled=false",), zero(2)),
    "states on the host": (FP32, (), {"zero_optimization": {"stage": 2, **OFFLOAD}}),
    "all on the host": (FP32, (), {"zero_optimization": {"stage": 3, **OFFLOAD, **PARAMS}}),
    "recomputed": (FP32, ("model.checkpointing=full",), zero(3)),
    "attention kept": (FP32, ("model.checkpointing=selective",), zero(3)),
    "activations on the host": (FP32, ("model.checkpointing=offload",), zero(3)),
    "dropout": (FP32, ("model.dropout=0.1",), zero(2)),
    "average on the GPU": (FP32, ("ema={device: gpu}",), zero(3)),
    "average on the host": (FP32, ("ema={device: cpu}",), zero(3)),
    "lora": (FP32, ("lora.rank=4",), zero(2)),
    "lora on int8": (BF16, ("lora={rank: 4, quantize: int8}",), zero(2)),
    "lora on nf4": (BF16, ("lora={rank: 4, quantize: nf4}",), zero(3)),
    "adamw8bit": (1e-2, ("optim.name=adamw8bit",), zero(2)),
    "muon": (1e-2, ("optim.name=muon", "optim.grad_clip=0"), zero(2)),
    "adafactor": (1e-3, ("optim.name=adafactor",), zero(0)),
}


@pytest.fixture(scope="module")
def worlds_of() -> Iterator[dict[str, World]]:
    """A process on each device."""
    found = {name: World(1, accelerator=name) for name in ("cpu", "cuda")}
    yield found
    for world in found.values():
        world.close()


def device_of_ranks() -> str:
    return accelerator_type()


def test_the_ranks_are_where_they_should_be(worlds_of: dict[str, World]):
    for name, world in worlds_of.items():
        assert world.run(device_of_ranks) == [name]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head dim that flash kernels take; that of the other tests' pipelines is none."""
    from make_tiny_pipeline import build_tiny_pipeline

    folder = tmp_path_factory.mktemp("pipeline") / "demo"
    build_tiny_pipeline(folder, size="demo", vae_dir="random")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_trains_as_a_cpu_does(name: str, worlds_of: dict[str, World], pipeline: Path, tmp_path: Path):
    bound, settings, ds = CASES[name]
    series = {}
    ends = {}
    settings = (*STEPS, *settings, *(() if name in COMPILED else (PLAIN,)))
    for device, world in worlds_of.items():
        out = tmp_path / device
        series[device] = losses(world.run(run_training, pipeline, out, settings, ds)[0])
        ends[device] = weights(out)
    assert len(set(series["cpu"])) == 5
    assert series["cuda"] == pytest.approx(series["cpu"], rel=bound)
    assert ends["cuda"].keys() == ends["cpu"].keys()
    # Adam divides by how large gradients are: where they are next to nothing, rounding decides its direction.
    moved = max((ends["cpu"][key] - ends["cuda"][key]).abs().mean().item() for key in ends["cpu"])
    assert moved < 2e-4


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gpu_goes_on_where_it_stopped(
    stage: int, worlds_of: dict[str, World], pipeline: Path, tmp_path: Path
):
    """Not bit for bit as on a CPU: atomic additions come in any order."""
    run = (pipeline, tmp_path / "twice")
    gpu = worlds_of["cuda"]
    steps = (*STEPS, PLAIN)
    whole = losses(gpu.run(run_training, pipeline, tmp_path / "whole", steps, zero(stage))[0])
    gpu.run(run_training, *run, ("train.max_steps=3", "optim.warmup=2", PLAIN), zero(stage))
    assert losses(gpu.run(run_training, *run, steps, zero(stage), True)[0]) == pytest.approx(whole, rel=1e-5)


def test_a_gpu_can_go_on_from_a_cpu(worlds_of: dict[str, World], pipeline: Path, tmp_path: Path):
    run = (pipeline, tmp_path / "twice")
    settings = ("train.max_steps=3", "optim.warmup=2", PLAIN)
    steps = (*STEPS, PLAIN)
    whole = losses(worlds_of["cpu"].run(run_training, pipeline, tmp_path / "whole", steps, zero(2))[0])
    worlds_of["cpu"].run(run_training, *run, settings, zero(2))
    gone_on = losses(worlds_of["cuda"].run(run_training, *run, steps, zero(2), True)[0])
    assert gone_on == pytest.approx(whole, rel=FP32)
    assert all(torch.isfinite(one).all() for one in weights(tmp_path / "twice").values())


def test_a_profile_of_compiled_and_recomputed_steps(
    worlds_of: dict[str, World], pipeline: Path, tmp_path: Path
):
    """PyTorch 2.11 fails in such a step if it records the stacks of freed memory."""
    settings = ("model.checkpointing=selective", "model.compile=true", "profile={start: 3, steps: 2}")
    worlds_of["cuda"].run(run_training, pipeline, tmp_path, (*STEPS, *settings), zero(2))
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {f"rank0_step_000003.{ending}" for ending in ("json.gz", "pickle", "txt")}
