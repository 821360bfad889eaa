"""A rank that cannot read its clips: all ranks finish the step, save, and end so that the run can be restarted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.runs import losses, run_training
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.data.collate import Sample
from wands.data.datasets import MockDataset
from wands.disk_errors import unreadable
from wands.errors import CacheError, WandsError
from wands.files import read_rows

ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
SETTINGS = ("train.max_steps=6", "train.bins_per_step=2")


def interrupted(
    model: Path, out: Path, error: WandsError, first: int, more: tuple[str, ...], times: int = 99
) -> Any:
    """Train, but `times` reads of rank 1 fail after `first`. Returns the class, text, agreement and code of the error."""
    read = MockDataset.read
    count = [0]

    def reading(data: MockDataset, index: int, *args: Any) -> Sample:
        count[0] += 1
        if dist.get_rank() == 1 and first < count[0] <= first + times:
            raise error
        return read(data, index, *args)

    with mock.patch.object(MockDataset, "read", reading):
        try:
            run_training(model, out, (*SETTINGS, *more), ZERO3)
        except WandsError as raised:
            return type(raised).__name__, str(raised), raised.agreed, raised.exit_code
    return None


CASES = {
    "disk": (unreadable("shard", OSError(errno.EIO, os.strerror(errno.EIO))), ("DiskError", 3)),
    "damage": (CacheError("the shard is damaged."), ("CacheError", 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["disk", pytest.param("damage", marks=pytest.mark.slow)])
def test_all_ranks_save_and_stop_when_one_cannot_read(
    case: str, prefetch: int, tiny_pipeline: Path, tmp_path: Path, run_world
):
    error, (kind, code) = CASES[case]
    more = (f"data.prefetch={prefetch}",)
    ranks = run_world(2, interrupted, tiny_pipeline, tmp_path / "run", error, 5, more)
    assert ranks[0] == ranks[1] == (kind, str(error), True, code)
    step = find_checkpoint(tmp_path / "run").state.step
    assert 0 < step < 6
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == step
    assert read_rows(tmp_path / "run" / "events.jsonl")[-1]["reason"] == str(error)
    rows = run_world(2, run_training, tiny_pipeline, tmp_path / "run", SETTINGS, ZERO3, True)[0]
    undisturbed = run_world(2, run_training, tiny_pipeline, tmp_path / "other", SETTINGS, ZERO3)[0]
    assert losses(rows) == losses(undisturbed)


@pytest.mark.slow
def test_an_evaluation_that_cannot_be_read_saves_the_run(tiny_pipeline: Path, tmp_path: Path, run_world):
    """The first read of rank 1 is for the evaluation of step 0; the reads of the training succeed."""
    error, (kind, code) = CASES["disk"]
    more = ("eval.every=2", "data.holdout=0.3", "data.prefetch=0")
    ranks = run_world(2, interrupted, tiny_pipeline, tmp_path, error, 0, more, 1)
    assert ranks[0] == ranks[1] == (kind, str(error), True, code)
    assert find_checkpoint(tmp_path).state.step == 1
    assert read_rows(tmp_path / "evaluations.jsonl") == []
