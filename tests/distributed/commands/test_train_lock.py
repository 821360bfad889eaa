"""One writer of a run folder: rank 0 has the lock before anything is touched, and every rank learns of a refusal."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.support.runs import BASE, Spy
from tests.support.world import WorldPool
from wands import lock
from wands.api import Trainer
from wands.checkpoint.step_folders import named_step
from wands.commands.train import run_train
from wands.config.options import TrainOptions
from wands.errors import WandsError
from wands.files import read_rows
from wands.lock import LOCK_NAME, WriterLock
from wands.train import trainer as module
from wands.train.jobs import FinishedStep
from wands.train.training import Training


class Started(Exception):
    """The run got as far as its process group."""


def begin(
    model: Path, out: Path, resume: str | None = None, dry_run: bool = False
) -> tuple[str, bool, list[str]]:
    """Start a run of two steps, but do not train. Returns its error, whether all ranks have it, and what was logged."""
    said: list[str] = []
    overrides = (*BASE, f"model.path={model}", f"output_dir={out}", "train.max_steps=2")
    with mock.patch.object(module, "init_process_group", side_effect=Started):
        try:
            run_train(
                TrainOptions(overrides=overrides, resume=resume, dry_run=dry_run, force=True), said.append
            )
        except WandsError as error:
            return str(error), error.agreed, said
        except Started:
            pass
    return "", False, said


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", [None, pytest.param("auto", marks=pytest.mark.slow)])
def test_a_second_run_is_refused_on_all_ranks_and_touches_nothing(
    resume: str | None, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    run = tmp_path / "run"
    for name in ("recipe.yaml", "save", "checkpoints/step_00000004.tmp/half", ".latest.7.tmp"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    with WriterLock(run / LOCK_NAME, f"output_dir={run}"):
        before = contents(run)
        errors = worlds[2].run(begin, tiny_pipeline, run, resume)
        after = contents(run)
    assert {**after, LOCK_NAME: b""} == {**before, LOCK_NAME: b""}
    text, agreed, _ = errors[0]
    assert (
        f"output_dir={run} is being written by another process (host {os.uname().nodename}, pid {os.getpid()}, since"
        in text
    )
    assert agreed
    assert errors[1][:2] == (text, True)


def test_a_request_to_an_earlier_run_does_not_stop_the_next(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "save_quit",
        ".recipe.7.tmp.yaml",
        "checkpoints/.latest.7.tmp",
    ):  # and what a killed run was writing
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert begin(tiny_pipeline, tmp_path, dry_run=True)[0] == ""
    assert (tmp_path / "save_quit").exists()
    _, _, said = begin(tiny_pipeline, tmp_path)
    assert f"deleted {tmp_path / 'save_quit'}, a request to an earlier run" in said
    assert sorted(contents(tmp_path)) == ["deepspeed.json", "recipe.yaml"]


def test_a_checkpoint_is_looked_for_after_the_lock_is_taken(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that ends between the two would have its last steps set aside."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    from wands.train import prepare

    held = []
    find = prepare.find_resume
    monkeypatch.setattr(
        prepare, "find_resume", lambda *args: held.append((tmp_path / LOCK_NAME).exists()) or find(*args)
    )
    begin(tiny_pipeline, tmp_path)
    assert held == [True]


OTHER = {"owner": "host b, pid 7, since today", "boot_id": "b"}


def train_in_a_folder_that_is_taken(model: Path, out: Path) -> tuple[str, int]:
    """Train up to 50 steps; from the second on, another host writes its record into the lock file again and again.

    A record that is written just before a heartbeat of this process is lost, as it is for two real hosts.
    """
    lock.BEAT_SECONDS = lock.SETTLE_SECONDS = 0.05

    def take(training: Training, step: FinishedStep) -> None:
        if step.number < 2:
            return
        if training.rank == 0:
            (out / LOCK_NAME).write_text(json.dumps(OTHER))
        time.sleep(0.2)

    overrides = (*BASE, f"model.path={model}", f"output_dir={out}", "train.max_steps=50")
    try:
        Trainer(None, overrides, jobs=[Spy(stepped=take)], log=lambda text: None).train()
    except WandsError as error:
        return str(error), error.exit_code
    return "", 0


@pytest.mark.slow
def test_a_run_whose_folder_is_taken_saves_and_ends(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    run = tmp_path / "run"
    (text, code), *others = worlds[2].run(train_in_a_folder_that_is_taken, tiny_pipeline, run)
    assert f"output_dir={run} was taken over by another process (host b, pid 7, since today)" in text
    assert code == 2  # not restarted
    assert others == [("", 0)]
    last = read_rows(run / "metrics.jsonl")[-1]["step"]
    assert 2 < last < 50
    saved = named_step(run / "checkpoints")
    assert saved
    assert saved.name == f"step_{last:08d}"
    assert read_rows(run / "events.jsonl")[-1]["event"] == "stop"
    assert json.loads((run / LOCK_NAME).read_text()) == OTHER


def train_with(model: Path, out: Path, name: str, at: int) -> str:
    """Train up to 50 steps, and after step `at` make a folder `save_quit` or a named pipe of another name. Step 0: before."""

    def make() -> None:
        out.mkdir(exist_ok=True)
        (os.mkdir if name == "save_quit" else os.mkfifo)(out / name)

    def after(training: Training, step: FinishedStep) -> None:
        if step.number == at:
            make()

    if at == 0:
        make()
    overrides = (*BASE, f"model.path={model}", f"output_dir={out}", "train.max_steps=50")
    try:
        Trainer(None, overrides, jobs=[Spy(stepped=after)], log=lambda text: None).train()
    except WandsError as error:
        return str(error)
    return ""


def test_a_folder_save_quit_stops_a_run(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    run = tmp_path / "run"
    assert worlds[1].run(train_with, tiny_pipeline, run, "save_quit", 2) == [""]
    saved = named_step(run / "checkpoints")
    assert saved
    assert saved.name == "step_00000003"
    assert not (run / "save_quit").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", LOCK_NAME])
def test_a_run_does_not_wait_for_a_named_pipe(
    name: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    run = tmp_path / "run"
    (text,) = worlds[1].run(train_with, tiny_pipeline, run, name, 0)
    assert text.startswith(f"{run / name} must be a regular file, and no link")


@pytest.mark.parametrize("force", [False, True])
def test_force_takes_over_the_folder_of_another_host(
    force: bool, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lock, "STALE_SECONDS", 1e6)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: None if seconds < 0.2 else pytest.fail("waits"))
    (tmp_path / LOCK_NAME).write_text(json.dumps(OTHER))
    trainer = Trainer(None, (*BASE, f"model.path={tiny_pipeline}", f"output_dir={tmp_path}"), force=force)
    with mock.patch.object(module, "init_process_group", side_effect=Started):
        with pytest.raises(Started if force else pytest.fail.Exception):
            trainer.train()
