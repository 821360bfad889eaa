"""A full disk and a deleted folder in the middle of a run: the run continues, all rows are there, the older checkpoint stays."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.runs import losses, run_training
from wands.checkpoint import save as checkpoint
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.errors import DiskError

ZERO2 = {"zero_optimization": {"stage": 2}}


def run_with_a_full_disk(model: Path, out: Path, full_from: int, full_to: int) -> Any:
    """Six steps. After the step `full_from`, no file may grow beyond 600 bytes, until the step `full_to` is through."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if line.startswith(f"step {full_from}/"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
            shutil.rmtree(out / "tensorboard", ignore_errors=True)  # both ranks come here
        if line.startswith(f"step {full_to}/"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    overrides = ("train.max_steps=6", "checkpoint.every=2", "train.log_samples=true")
    try:
        return run_training(model, out, overrides, ZERO2, log=log), lines
    except DiskError as error:
        return str(error), lines
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture(scope="module")
def undisturbed(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, run_world) -> list[float]:
    out = tmp_path_factory.mktemp("undisturbed")
    return losses(run_world(2, run_training, tiny_pipeline, out, ("train.max_steps=6",), ZERO2)[0])


@pytest.mark.slow
def test_the_run_goes_on(undisturbed: list[float], tiny_pipeline: Path, tmp_path: Path, run_world):
    rows, lines = run_world(2, run_with_a_full_disk, tiny_pipeline, tmp_path, 3, 5)[0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert losses(rows) == undisturbed
    of_samples = [
        json.loads(line)["step"]
        for path in tmp_path.glob("samples-rank*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert set(of_samples) == {1, 2, 3, 4, 5, 6}
    assert list((tmp_path / "tensorboard").glob("events.*"))
    skipped = [line for line in lines if "continues without a checkpoint of step 4" in line]
    assert len(skipped) == 1
    assert "file size limit" in skipped[0]
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert steps == ["step_00000002", "step_00000006"]


@pytest.mark.slow
def test_a_run_that_cannot_save_its_end_fails(tiny_pipeline: Path, tmp_path: Path, run_world):
    error, _ = run_world(2, run_with_a_full_disk, tiny_pipeline, tmp_path, 5, 99)[0]
    assert "file size limit" in error
    assert find_checkpoint(tmp_path).state.step == 4


def run_with_a_quota(model: Path, out: Path) -> list[str]:
    """Six steps. The file of rank 1 in the second checkpoint is over a quota, which shows only while it is written."""
    lines: list[str] = []
    write = checkpoint.write_safetensors

    def writing(path: Path, *args: Any) -> Any:
        digest = write(path, *args)
        if "step_00000004" in str(path) and dist.get_rank() == 1:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return digest

    with mock.patch.object(checkpoint, "write_safetensors", writing):
        run_training(model, out, ("train.max_steps=6", "checkpoint.every=2"), ZERO2, log=lines.append)
    return lines


def test_a_failed_write_on_one_rank_leaves_nothing_and_stops_nothing(
    tiny_pipeline: Path, tmp_path: Path, run_world
):
    lines, _ = run_world(2, run_with_a_quota, tiny_pipeline, tmp_path)
    failed = next(line for line in lines if "continues without a checkpoint of step 4" in line)
    assert "Disk quota exceeded" in failed
    assert lines[-1].endswith("step_00000006")
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert steps == ["step_00000002", "step_00000006"]


def listed_after_a_failure(model: Path, out: Path) -> list[str]:
    """The checkpoints folder right after a write that failed at the end of the run."""
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with (
        mock.patch.object(checkpoint, "_publish", full),
        pytest.raises(DiskError, match="No space left"),
    ):
        run_training(model, out, ("train.max_steps=1",), ZERO2)
    return [path.name for path in (out / "checkpoints").iterdir()]


def test_files_of_a_failed_checkpoint_are_deleted_at_once(tiny_pipeline: Path, tmp_path: Path, run_world):
    run_world(1, listed_after_a_failure, tiny_pipeline, tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []
