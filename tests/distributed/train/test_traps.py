"""Mistakes that other trainers made in the loop. Each test also puts the mistake in and shows that its check then fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.runs import Spy, engine_of, losses, make_run, model_of, run_training, train_run
from wands.checkpoint.checkpoint_files import find_checkpoint, load_state
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import release_engine
from wands.errors import CheckpointError
from wands.flow import rng as keys
from wands.plugin import Plugin
from wands.train.step import train_step
from wands.train.training import Training

ZERO2: dict[str, Any] = {"zero_optimization": {"stage": 2}}


# ---- resume restarts the step, the learning rate or the data


def run_with_a_resume_bug(
    model: Path, out: Path, overrides: tuple[str, ...], bug: str
) -> list[dict[str, Any]]:
    """Resume with one thing forgotten."""

    def forget(training: Training) -> None:
        for engine in training.engines.values():
            if bug == "optimizer":
                for state in engine.optimizer.optimizer.state.values():
                    state["exp_avg"].zero_()
            elif bug == "schedule":
                engine.lr_scheduler.last_epoch = 0

    run = make_run(
        model,
        out,
        overrides,
        ZERO2,
        checkpoint=find_checkpoint(out),
        plugin=Plugin(jobs=(Spy(started=forget),)),
    )
    if bug == "data":
        plans = run.schedule.sampler.iterate
        run.schedule.sampler.iterate = lambda start_step: plans(0)
    return train_run(run)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.slow) for bug in ("none", "optimizer", "data", "schedule")]
)
def test_resume_restarts_nothing(bug: str, tiny_pipeline: Path, tmp_path: Path, run_world):
    settings = (
        "train.max_steps=6",
        "checkpoint.every=3",
        "checkpoint.keep=5",
        "optim.schedule=linear",
        "optim.warmup=4",
    )
    straight = run_world(2, run_training, tiny_pipeline, tmp_path, settings, ZERO2)[0]
    newest = tmp_path / "checkpoints" / "step_00000006"
    newest.rename(tmp_path / "set_aside")
    resumed = run_world(2, run_with_a_resume_bug, tiny_pipeline, tmp_path, settings, bug)[0]

    same = [row["loss"] for row in resumed] == losses(straight) and [row["lr"] for row in resumed] == [
        row["lr"] for row in straight
    ]
    assert same == (bug == "none")


# ---- `latest` missing or of zero bytes


def test_a_latest_of_zero_bytes(
    tiny_pipeline: Path, tmp_path: Path, run_world, monkeypatch: pytest.MonkeyPatch
):
    run_world(
        1,
        run_training,
        tiny_pipeline,
        tmp_path,
        ("train.max_steps=2", "checkpoint.every=1", "checkpoint.keep=2"),
        ZERO2,
    )
    latest = tmp_path / "checkpoints" / "latest"

    def check() -> None:
        latest.write_text("")
        assert find_checkpoint(tmp_path)[1].step == 2
        latest.unlink()
        assert find_checkpoint(tmp_path)[1].step == 2

    check()

    def believing(where: Path) -> Any:  # what trusts the file
        folder = where / "checkpoints"
        return folder, load_state(folder / (folder / "latest").read_text())

    monkeypatch.setitem(globals(), "find_checkpoint", believing)
    with pytest.raises((CheckpointError, OSError)):
        check()


# ---- gradients clipped in every micro step, or not at all


def clipped_update(model: Path, out: Path, bug: str) -> tuple[float, float]:
    """One SGD step of rate 1 over three micro steps: the norm of the update, and the norm that DeepSpeed reports."""
    clip = 0.01
    overrides = (
        "train.bins_per_step=3",
        "train.max_steps=1",
        "optim.lr=1.0",
        f"optim.grad_clip={0 if bug == 'none at all' else clip}",
    )
    ds = {**ZERO2, "optimizer": {"type": "SGD", "params": {}}, "zero_allow_untested_optimizer": True}
    run = make_run(model, out, overrides, ds)
    _, _, device = init_process_group()
    groups = ProcessGroups(run.grid(0))
    module = model_of(run, groups, device)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    engine = engine_of(run, module)
    plan = run.schedule.sampler.step_plan(0)
    assert all(plan.bins)
    [batches] = run.reader(groups.dims).micro_batches(plan)
    denominator = run.schedule.denominator(plan)
    if bug == "every micro step":
        for part, prepared in batches:
            engine.set_gradient_accumulation_boundary(True)
            loss, _ = run.objective.loss(engine, part, prepared)
            engine.backward(loss / denominator, scale_wrt_gas=False)
            engine.step()
    else:
        train_step(engine, batches, run.objective, groups=groups, device=device, denominator=denominator)
    moved = sum(
        float((value.detach() - before[name]).square().sum())
        for name, value in engine.module.named_parameters()
    )
    norm = float(engine.get_global_grad_norm())
    release_engine(engine)
    return moved**0.5 / clip, norm / clip


@pytest.mark.parametrize("bug", ["no bug", "every micro step", "none at all"])
def test_the_whole_gradient_is_clipped_once(bug: str, tiny_pipeline: Path, tmp_path: Path, run_world):
    moved, norm = run_world(1, clipped_update, tiny_pipeline, tmp_path, bug)[0]
    assert norm > 2  # there is something to clip
    assert (moved == pytest.approx(1.0, rel=1e-3)) == (bug == "no bug")


# ---- one random number for two purposes


def generators_of_a_step(model: Path, out: Path) -> list[tuple[Any, ...]]:
    """Keys of all random generators that one optimizer step draws from."""
    asked: list[tuple[Any, ...]] = []

    def recording(*parts: int | str) -> np.random.Generator:
        asked.append(parts)
        return philox(*parts)

    philox = keys.philox
    with mock.patch.object(keys, "philox", recording):
        run = make_run(model, out, ("flow.cfg_dropout=0.5", "model.dropout=0.1"), world_size=1)
        asked.clear()  # those of the plan
        plan = run.schedule.sampler.step_plan(0)
        run.reader(run.grid(0)).micro_batches(plan)
    return asked


def test_no_generator_is_drawn_from_twice(tiny_pipeline: Path, tmp_path: Path):
    """Noise level, noise and dropped captions that came from one generator would go together."""
    asked = generators_of_a_step(tiny_pipeline, tmp_path)
    clips = {parts[1:-1] for parts in asked}
    assert len(clips) > 2
    assert sorted(asked) == sorted(
        (0, *clip, purpose) for clip in clips for purpose in ("cfg_dropout", "dropout", "noise", "sigma")
    )
