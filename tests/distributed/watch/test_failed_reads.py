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
from wands.checkpoint.step_folders import list_steps, step_name
from wands.data.collate import RankSlice, Sample
from wands.data.datasets import MockDataset
from wands.disk_errors import unreadable
from wands.errors import CacheError, WandsError
from wands.files import read_rows
from wands.train import evaluation
from wands.train.evaluation import Evaluator

ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
SETTINGS = ("train.max_steps=6", "train.bins_per_step=2")


def interrupted(model: Path, out: Path, error: WandsError, first: int, more: tuple[str, ...]) -> Any:
    """Train, but the reads of rank 1 fail after `first`. Returns as `outcome`."""
    read = MockDataset.read
    count = [0]

    def reading(data: MockDataset, index: int, *args: Any) -> Sample:
        count[0] += 1
        if dist.get_rank() == 1 and count[0] > first:
            raise error
        return read(data, index, *args)

    with mock.patch.object(MockDataset, "read", reading):
        return outcome(model, out, more)


def outcome(model: Path, out: Path, more: tuple[str, ...]) -> Any:
    """Train. Returns the class, text, agreement and code of the error."""
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


EVALUATED = ("eval.every=2", "data.holdout=0.3", "data.prefetch=0")


def without_evaluation(model: Path, out: Path, error: WandsError, failed_step: int) -> Any:
    """Train, but rank 1 cannot read the clips of the evaluation of `failed_step`. Returns as `interrupted`."""
    evaluate = Evaluator.evaluate
    read = evaluation.read_rows_of_bin
    evaluated = [-1]

    def evaluating(evaluator: Evaluator, step: int) -> Any:
        evaluated[0] = step
        return evaluate(evaluator, step)

    def reading(*args: Any, **options: Any) -> RankSlice:
        if dist.get_rank() == 1 and evaluated[0] == failed_step:
            raise error
        return read(*args, **options)

    with (
        mock.patch.object(Evaluator, "evaluate", evaluating),
        mock.patch.object(evaluation, "read_rows_of_bin", reading),
    ):
        return outcome(model, out, EVALUATED)


@pytest.mark.slow
@pytest.mark.parametrize("failed_step", [0, 2])
def test_an_evaluation_that_cannot_be_read_saves_the_run(
    failed_step: int, tiny_pipeline: Path, tmp_path: Path, run_world
):
    """Before the first step there is nothing to save; the restarted run then begins anew."""
    error, (kind, code) = CASES["disk"]
    run = tmp_path / "run"
    ranks = run_world(2, without_evaluation, tiny_pipeline, run, error, failed_step)
    assert ranks[0] == ranks[1] == (kind, str(error), True, code)
    saved = [folder.name for folder in list_steps(run / "checkpoints")]
    assert saved == ([step_name(failed_step)] if failed_step else [])
    assert [row["step"] for row in read_rows(run / "evaluations.jsonl")] == ([0] if failed_step else [])
    settings = (*SETTINGS, *EVALUATED)
    rows = run_world(2, run_training, tiny_pipeline, run, settings, ZERO3, failed_step > 0)[0]
    undisturbed = run_world(2, run_training, tiny_pipeline, tmp_path / "other", settings, ZERO3)[0]
    assert losses(rows) == losses(undisturbed)
    assert held_out(run) == held_out(tmp_path / "other")
    assert list(held_out(run)) == [0, 2, 4, 6]


def held_out(run: Path) -> dict[int, float]:
    return {row["step"]: row["held_out"] for row in read_rows(run / "evaluations.jsonl")}
