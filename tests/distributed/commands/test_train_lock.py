"""One writer of a run folder: rank 0 has the lock before anything is touched, and every rank learns of a refusal."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from tests.support.runs import BASE
from tests.support.world import WorldPool
from wands.commands.train import run_train
from wands.config.options import TrainOptions
from wands.errors import WandsError
from wands.lock import LOCK_NAME, WriterLock
from wands.train import trainer as module


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
