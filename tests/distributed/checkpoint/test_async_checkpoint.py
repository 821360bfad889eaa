"""Checkpoints that are written while the training continues have the same bits, and a failure costs one checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.runs import losses, make_run, run_training
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.checkpoint import save as checkpoint
from wands.checkpoint.buffers import HostBuffers
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.resume import check_resumable
from wands.checkpoint.step_folders import STATE_FILE
from wands.errors import CheckpointError
from wands.planning.memory import estimate_memory

ASYNC = "checkpoint.asynchronous=true"
EVERY = ("train.max_steps=8", "checkpoint.every=2", "checkpoint.keep=9", "ema.decay=0.9")


def slow_training(*args: Any, seconds: float = 0.5) -> tuple[list[float], list[str]]:
    """Train with a slow disk. Return the losses and what the run printed."""
    write = checkpoint.write_safetensors
    said = []

    def write_slowly(*file: Any) -> str:
        time.sleep(seconds)
        return write(*file)

    with mock.patch.object(checkpoint, "write_safetensors", write_slowly):
        return losses(run_training(*args, log=said.append)), said


def files_of(step: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(step)): path.read_bytes() for path in step.rglob("*") if path.is_file()}
    state = json.loads(files.pop(STATE_FILE))
    for key in ("hash_of_this_file", "recipe"):
        del state[key]
    return {**files, STATE_FILE: json.dumps(state).encode()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(1, 2), *(pytest.param(2, stage, marks=pytest.mark.slow) for stage in (0, 2, 3))],
)
def test_the_checkpoints_are_those_of_a_run_that_waits(
    world_size: int, stage: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Each file is written after later steps have changed the weights, and has the bits of the step of its checkpoint."""
    waits, said = worlds[world_size].run(
        slow_training, tiny_pipeline, tmp_path / "waits", EVERY, zero(stage)
    )[0]
    runs, said_async = worlds[world_size].run(
        slow_training, tiny_pipeline, tmp_path / "runs", (*EVERY, ASYNC), zero(stage)
    )[0]
    assert runs == waits
    steps = sorted((tmp_path / "waits" / "checkpoints").glob("step_*"))
    assert len(steps) == 4
    for step in steps:
        assert files_of(tmp_path / "runs" / "checkpoints" / step.name) == files_of(step)
    saved = [i for i, line in enumerate(said_async) if line.startswith("saved")]
    assert len(saved) == 4
    assert said_async[saved[0] - 1].startswith("step 3/8") or said_async[saved[0] - 1].startswith("step 4/8")
    assert said[[line.startswith("saved") for line in said].index(True) - 1].startswith("step 2/8")


def one_fails(
    model: Path, out: Path, overrides: tuple[str, ...], failing: str
) -> tuple[list[float], list[str]]:
    write = checkpoint.write_safetensors
    said = []

    def write_or_fail(path: Path, *rest: Any) -> str:
        if failing in str(path):
            raise OSError(28, "No space left on device")
        return write(path, *rest)

    with mock.patch.object(checkpoint, "write_safetensors", write_or_fail):
        return losses(run_training(model, out, overrides, zero(2), log=said.append)), said


@pytest.mark.slow
def test_a_save_that_fails_costs_one_checkpoint(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    failing = "step_00000004.tmp/transformer/state_rank_00001"
    overrides = (*EVERY, ASYNC)
    series, said = worlds[2].run(one_fails, tiny_pipeline, tmp_path / "run", overrides, failing)[0]
    assert len(series) == 8
    assert (
        sum("No space left on device" in line and "without a checkpoint of step 4" in line for line in said)
        == 1
    )
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert names == ["step_00000002", "step_00000006", "step_00000008"]
    with pytest.raises(AssertionError, match=r"step_00000008 could not be written .* free disk space"):
        worlds[2].run(one_fails, tiny_pipeline, tmp_path / "last", overrides, "step_00000008")


def bytes_of_copies(model: Path, out: Path, overrides: tuple[str, ...], stage: int) -> tuple[float, float]:
    """Train one step. Return the bytes of this rank's copy, and the bytes that the planner expects."""
    made: list[HostBuffers] = []

    class Watched(HostBuffers):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    with mock.patch.object(checkpoint, "HostBuffers", Watched):
        run_training(model, out, (*overrides, "train.max_steps=1"), zero(stage))
    expected = estimate_memory(make_run(model, out, overrides, zero(stage)).workload("cpu")).host
    return sum(map(len, made[0]._buffers)), expected["checkpoint copy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, ("ema.decay=0.9",)),
        pytest.param(0, (), marks=pytest.mark.slow),
        pytest.param(3, ("checkpoint.weights_only=true",), marks=pytest.mark.slow),
        pytest.param(2, ("lora.rank=4",), marks=pytest.mark.slow),
        pytest.param(1, ("model.trainable=['blocks.*.attn*']",), marks=pytest.mark.slow),
    ],
)
def test_the_planner_counts_the_copy(
    stage: int, more: tuple[str, ...], tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    copies = worlds[2].run(bytes_of_copies, tiny_pipeline, tmp_path, (ASYNC, *more), stage)
    assert max(size for size, _ in copies) == pytest.approx(copies[0][1], rel=0.02)


def test_kept_and_timed_checkpoints(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    overrides = ("train.max_steps=8", "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4")
    worlds[1].run(run_training, tiny_pipeline, tmp_path / "kept", overrides, zero(2))
    names = sorted(path.name for path in (tmp_path / "kept" / "checkpoints").glob("step_*"))
    assert names == ["step_00000004", "step_00000008"]
    timed = ("train.max_steps=3", "checkpoint.every=0", "checkpoint.every_minutes=1e-6", "checkpoint.keep=9")
    worlds[1].run(run_training, tiny_pipeline, tmp_path / "timed", timed, zero(2))
    assert len(list((tmp_path / "timed" / "checkpoints").glob("step_*"))) == 3


def test_a_checkpoint_of_weights_only(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    overrides = ("train.max_steps=2", "ema.decay=0.9")
    for name, more in (("all", ()), ("weights", ("checkpoint.weights_only=true",))):
        worlds[2].run(run_training, tiny_pipeline, tmp_path / name, (*overrides, *more), zero(2))
    whole, weights = (find_checkpoint(tmp_path / name) for name in ("all", "weights"))
    sizes = [sum(checkpoint.state.files.values()) for checkpoint in (whole, weights)]
    assert sizes[1] < 0.6 * sizes[0]
    from wands.checkpoint.checkpoint_files import load_exported_state

    theirs = load_exported_state(whole.folder)
    for name, value in load_exported_state(weights.folder).items():
        assert torch.equal(value, theirs[name])
    with pytest.raises(CheckpointError, match="contains no optimizer states"):
        check_resumable(weights.state, weights.state, "--resume x")
