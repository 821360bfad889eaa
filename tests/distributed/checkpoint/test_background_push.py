"""`wands push RUN`, and `hub:` in the recipe: checkpoints are pushed while the training continues."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from huggingface_hub import constants

from tests.support.commands import push
from tests.support.fake_hub import FakeHub
from tests.support.runs import run_training
from tests.support.world import WorldPool
from wands.checkpoint import save as background_push
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.old_steps import PUSH_MARK
from wands.checkpoint.step_folders import list_steps, step_name
from wands.config.recipe import HubConfig
from wands.distributed.bootstrap import init_process_group

TOKEN = "hf_SecretOfAlice0123456789"
LORA = ("lora.rank=2", "train.max_steps=4", "checkpoint.every=1")
# In the place of `wands push STEP REPO`: slower than several steps; fails if the checkpoint is gone by then.
SLOW = """
import pathlib, sys, time
step, *repo = sys.argv[1:]
time.sleep(0.25)
whole = pathlib.Path(step, "wands_state.json").exists()
with open(pathlib.Path(step).parents[1] / "pushed.txt", "a") as file:
    print(pathlib.Path(step).name, *repo, whole, file=file)
"""
WAITS = SLOW.replace(  # the first push lasts until the training is three checkpoints ahead
    "time.sleep(0.25)",
    "time.sleep(0.25)\nwhile step.endswith('1') and not list(pathlib.Path(step).parent.glob('*[4-6]')): time.sleep(0.01)",
)
FAILS = "import sys; sys.exit('warning: first line\\nwands: No Hub token was found')"


def train_and_push(
    model: Path, out: Path, script: str | None, overrides: tuple[str, ...] = (), resume: bool = False
) -> list[str]:
    said: list[str] = []
    command = background_push._COMMAND if script is None else (sys.executable, "-c", script)
    with mock.patch.object(background_push, "_COMMAND", command):
        run_training(model, out, (*LORA, "hub.repo=alice/lora", *overrides), resume=resume, log=said.append)
    return said


def pushes(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "push"]


@pytest.mark.slow
def test_a_slow_push_keeps_its_checkpoint_and_the_newest_comes_next(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = ("checkpoint.keep=1", "train.max_steps=6", "hub.public=true")
    said = worlds[2].run(train_and_push, tiny_pipeline, tmp_path, WAITS, overrides)[0]
    lines = (tmp_path / "pushed.txt").read_text().splitlines()
    assert lines[0] == "step_00000001 alice/lora --public True"  # keep=1 would have deleted it
    assert lines[-1] == "step_00000006 alice/lora --public True"
    assert 2 <= len(lines) < 6  # older checkpoints that waited were replaced
    assert [(row["checkpoint"], row["error"]) for row in pushes(tmp_path)] == [
        (line.split()[0], None) for line in lines
    ]
    assert not list(tmp_path.rglob(PUSH_MARK))
    assert any("for the upload of the last checkpoint" in line for line in said)


def push_out_of_order(out: Path) -> list[list[str]]:
    """Three pushes of which the last one runs first. Return what has been pushed after it, and in the end."""
    waiting: list[Callable[[], None]] = []
    pushed: list[str] = []

    def thread(target: Any = None, args: Any = (), daemon: Any = None) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: waiting.append(lambda: target(*args)))

    init_process_group()
    command = (sys.executable, "-c", SLOW)
    with (
        mock.patch.object(background_push, "Thread", thread),
        mock.patch.object(background_push, "_COMMAND", command),
    ):
        push = background_push.BackgroundPush(
            config=HubConfig(repo="alice/lora", every=1),
            output_dir=out,
            total_steps=3,
            events=SimpleNamespace(write=lambda event, checkpoint, error: pushed.append(checkpoint)),
            log=print,
        )
        for step in (1, 2, 3):
            folder = out / "checkpoints" / step_name(step)
            folder.mkdir(parents=True)
            push.add(folder)
        waiting[2]()
        after_the_newest = list(pushed)
        assert not list(out.rglob(PUSH_MARK))
        waiting[1]()
        waiting[0]()
    return [after_the_newest, pushed]


def test_an_older_checkpoint_is_never_pushed_after_a_newer_one(tmp_path: Path, worlds: WorldPool):
    """Threads that wait for a lock get it in any order. The process may end before the last of them has it."""
    assert worlds[1].run(push_out_of_order, tmp_path)[0] == [["step_00000003"], ["step_00000003"]]


def test_a_failed_push_is_a_warning_and_not_the_end(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    said = worlds[2].run(train_and_push, tiny_pipeline, tmp_path, FAILS, ("hub.every=3",))[0]
    assert find_checkpoint(tmp_path)[1].step == 4
    names = [row["checkpoint"] for row in pushes(tmp_path)]
    assert set(names) <= {"step_00000003", "step_00000004"}
    assert names[-1] == "step_00000004"  # the last one, whatever `every` says
    assert {row["error"] for row in pushes(tmp_path)} == {"wands: No Hub token was found"}
    warning = "was not pushed (wands: No Hub token was found); the training continues"
    assert sum(line.endswith(warning) for line in said) == len(names)


@pytest.mark.slow
def test_a_resumed_run_pushes_what_a_killed_run_left(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    worlds[2].run(train_and_push, tiny_pipeline, tmp_path, SLOW, ("hub=null", "checkpoint.keep=4"))
    assert not (tmp_path / "pushed.txt").exists()
    steps = list_steps(tmp_path / "checkpoints")
    for step in steps[1:3]:  # as if two pushes had been killed
        (step / PUSH_MARK).touch()
    more = ("train.max_steps=5", "hub.every=2", "checkpoint.keep=9")
    worlds[2].run(train_and_push, tiny_pipeline, tmp_path, SLOW, more, True)
    names = [line.split()[0] for line in (tmp_path / "pushed.txt").read_text().splitlines()]
    assert names[-1] == "step_00000005"
    assert set(names) <= {"step_00000002", "step_00000005"}
    assert not list(tmp_path.rglob(PUSH_MARK))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with FakeHub({TOKEN: "alice"}) as server:
        yield server


@pytest.mark.parametrize("where", ["", pytest.param("checkpoints/step_00000003", marks=pytest.mark.slow)])
def test_a_run_is_exported_and_pushed_in_one_go(
    where: str, tiny_pipeline: Path, tmp_path: Path, hub: FakeHub, worlds: WorldPool
):
    worlds[2].run(run_training, tiny_pipeline, tmp_path, (*LORA, "checkpoint.keep=4"))
    before = sorted(tmp_path.rglob("*"))
    url = push(tmp_path / where, "alice/lora", token=TOKEN, endpoint=hub.url)
    assert url == f"{hub.url}/alice/lora"
    assert sorted(tmp_path.rglob("*")) == before  # the export was temporary
    files = hub.files("alice/lora")
    assert {"README.md", "wands_export.json", "pytorch_lora_weights.safetensors"} <= files.keys()
    assert json.loads(files["wands_export.json"])["step"] == (3 if where else 4)


def train_with_hub(model: Path, out: Path, url: str) -> None:
    environment = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    with mock.patch.dict(os.environ, environment):
        train_and_push(model, out, None, ("checkpoint.every=2",))


@pytest.mark.slow
def test_the_hub_has_the_last_checkpoint(
    tiny_pipeline: Path, tmp_path: Path, hub: FakeHub, worlds: WorldPool
):
    worlds[2].run(train_with_hub, tiny_pipeline, tmp_path, hub.url)
    assert [row["error"] for row in pushes(tmp_path)] == [None] * len(pushes(tmp_path)) != []
    files = hub.files("alice/lora")
    assert json.loads(files["wands_export.json"])["step"] == 4
    assert "pytorch_lora_weights.safetensors" in files
    assert hub.repos["alice/lora"].private
