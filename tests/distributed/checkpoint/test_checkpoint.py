"""Checkpoints: complete or not there, `latest` last, older ones pruned, and never resumed where that would be wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.checkpoint_runs import ZERO2
from tests.support.runs import Hooked, make_run, run_training
from wands.checkpoint import save as checkpoint
from wands.checkpoint.checkpoint_files import find_checkpoint, load_state
from wands.checkpoint.resume import check_resumable, find_resume
from wands.checkpoint.step_folders import STATE_FILE, step_name
from wands.errors import CheckpointError, ConfigError, DiskError
from wands.files import read_rows
from wands.plugin import Plugin
from wands.train.trainer import _claim
from wands.watch.watchdog import Watchdog


@pytest.fixture(scope="module")
def finished(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, run_world) -> Path:
    """A run of six steps saved at every second, of which two checkpoints are kept."""
    out = tmp_path_factory.mktemp("run")
    overrides = ("train.max_steps=6", "checkpoint.every=2", "checkpoint.keep=2")
    run_world(2, run_training, tiny_pipeline, out, overrides, ZERO2)
    return out


def copy_of(run: Path, to: Path) -> Path:
    import shutil

    shutil.copytree(run, to)
    return to


def test_layout_latest_and_pruning(finished: Path):
    folder = finished / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == [
        "latest",
        "step_00000004",
        "step_00000006",
    ]
    assert (folder / "latest").read_text() == "step_00000006"
    state = load_state(folder / "step_00000006")
    assert (state.step, state.world_size, state.zero_stage) == (6, 2, 2)
    found = {
        str(p.relative_to(folder / "step_00000006"))
        for p in (folder / "step_00000006").rglob("*")
        if p.is_file()
    }
    assert set(state.files) == found - {STATE_FILE}
    assert {name.split("/")[0] for name in state.files if "/" in name} == {"transformer"}
    assert [step for step, _ in state.loss] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step_00000006"])
def test_found_from_run_folder_or_step(finished: Path, where: str):
    assert find_checkpoint(finished / where)[1].step == 6


@pytest.mark.parametrize("text", [None, "", "step_00000099", "nonsense"])
def test_a_damaged_latest_costs_nothing(finished: Path, tmp_path: Path, text: str | None):
    run = copy_of(finished, tmp_path / "run")
    latest = run / "checkpoints" / "latest"
    latest.unlink() if text is None else latest.write_text(text)
    assert find_checkpoint(run)[1].step == 6


def test_a_kill_before_latest_is_replaced_loses_no_checkpoint(
    finished: Path, tiny_pipeline: Path, tmp_path: Path, run_world
):
    """The folder of step 6 is complete, and `latest` still names step 4."""
    folder = copy_of(finished, tmp_path / "run") / "checkpoints"
    (folder / "latest").write_text("step_00000004")
    assert find_checkpoint(folder)[1].step == 4  # a user may go back
    (folder / "next").write_text("step_00000008")  # killed before the folder had its final name
    assert find_checkpoint(folder)[1].step == 4
    (folder / "next").write_text("step_00000006")
    assert find_checkpoint(folder)[1].step == 6
    assert find_checkpoint(folder / "latest")[1].step == 4  # as the user typed it
    overrides = ("train.max_steps=7",)
    rows = run_world(2, run_training, tiny_pipeline, folder.parent, overrides, ZERO2, True)[0]
    assert [row["step"] for row in rows][-1] == 7
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000006", "step_00000007"]
    assert (folder / "latest").read_text() == "step_00000007"


@pytest.mark.parametrize(("next_step", "latest", "newest"), [(6, 4, 6), (8, 4, 4), (4, 6, 6), (6, 9, 6)])
def test_the_next_run_finishes_an_interrupted_save(
    finished: Path, tmp_path: Path, next_step: int, latest: int, newest: int
):
    """A backup that never deletes files may contain an old `next`, which must not win over a newer `latest`."""
    folder = copy_of(finished, tmp_path / "run") / "checkpoints"
    (folder / "next").write_text(step_name(next_step))
    (folder / "latest").write_text(step_name(latest))
    assert find_checkpoint(folder)[1].step == newest
    with ExitStack() as stack:
        _claim(folder.parent, stack, lambda text: None, Watchdog(), force=False)
    assert not (folder / "next").exists()
    assert (folder / "latest").read_text() == step_name(newest)


def test_a_save_meanwhile_is_no_error(finished: Path, tmp_path: Path):
    """A training renames `next` to `latest` after another process has listed the folder."""
    folder = copy_of(finished, tmp_path / "run") / "checkpoints"
    (folder / "latest").write_text("step_00000004")
    (folder / "next").write_text("step_00000006")
    read_text = Path.read_text

    def rename_and_read(path: Path, *args: object, **options: object) -> str:
        if path.name == "next":
            path.replace(folder / "latest")
        return read_text(path, *args, **options)  # type: ignore[arg-type]

    with mock.patch.object(Path, "read_text", rename_and_read):
        assert find_checkpoint(folder)[1].step == 6


def save_and_die(model: Path, out: Path) -> None:
    """Save steps 1 and 2, and raise before `latest` is replaced for the second time."""
    publish = checkpoint.publish

    def publish_or_die(temporary: Path, path: Path) -> None:
        if path.name == "latest" and path.is_file():
            raise KeyboardInterrupt
        if path.name.startswith("step_"):
            assert (path.parent / "next").read_text() == path.name, (
                "a kill after this rename would lose the folder"
            )
        publish(temporary, path)

    with mock.patch.object(checkpoint, "publish", publish_or_die), pytest.raises(BaseException):  # noqa: B017, PT011
        run_training(model, out, ("train.max_steps=2", "checkpoint.every=1"), ZERO2)


def test_a_save_that_dies_before_latest_is_found(tiny_pipeline: Path, tmp_path: Path, run_world):
    run_world(1, save_and_die, tiny_pipeline, tmp_path)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000001"
    assert find_checkpoint(tmp_path)[1].step == 2


def test_an_incomplete_checkpoint_is_passed_over(finished: Path, tmp_path: Path):
    run = copy_of(finished, tmp_path / "run")
    shard = next((run / "checkpoints" / "step_00000006").rglob("state_rank_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert find_checkpoint(run)[1].step == 4
    with pytest.raises(
        CheckpointError, match=r"should have \d+ bytes but has \d+; use another step_\* folder"
    ):
        load_state(run / "checkpoints" / "step_00000006")
    for step in (run / "checkpoints").glob("step_*"):
        (step / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        find_checkpoint(run)


def test_a_state_file_without_its_hash_is_passed_over(finished: Path, tmp_path: Path):
    run = copy_of(finished, tmp_path / "run")
    path = run / "checkpoints" / "step_00000006" / STATE_FILE
    values = json.loads(path.read_text())
    del values["hash_of_this_file"]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"hash_of_this_file=None .*; use another step_\* folder"):
        load_state(path.parent)
    assert find_checkpoint(run).state.step == 4


def test_resuming_where_it_would_be_wrong_is_refused(finished: Path, tiny_pipeline: Path):
    _, state = find_checkpoint(finished)
    recipe = state.recipe
    check_resumable(state, state, "x")
    for change, said in (
        (
            {"recipe": {**recipe, "train": {**recipe["train"], "seed": 9}}},
            "train.seed=9 must equal the checkpoint's value 0",
        ),
        *(
            (
                {"recipe": {**recipe, "packing": {**recipe["packing"], key: 99}}},
                f"packing.{key}=99 must equal",
            )
            for key in ("max_tokens", "level_bins", "buffer_size")
        ),
        ({"parts": ["transformer_2"]}, "model.experts="),
        ({"transformer_config": {**state.transformer_config, "num_layers": 7}}, "different num_layers"),
    ):
        with pytest.raises(CheckpointError, match=said):
            check_resumable(state, replace(state, **change), "x")


def test_another_number_of_bins_is_refused_and_blames_no_file(finished: Path, tiny_pipeline: Path):
    checkpoint = find_checkpoint(finished)
    run = make_run(
        tiny_pipeline, finished, ("train.bins_per_step=4", "train.max_steps=9"), checkpoint=checkpoint
    )
    with pytest.raises(CheckpointError, match=r"train\.bins_per_step=4 must equal the checkpoint's value 2"):
        check_resumable(checkpoint.state, run.state, "x")


def lines_of_run(*args: Any) -> tuple[list[str], list[float]]:
    """Lines of a run about its learning rate, and the learning rates of all its steps."""
    lines: list[str] = []
    rows = run_training(*args, log=lines.append)
    return [line for line in lines if "learning rate" in line], [row["lr"] for row in rows]


@pytest.mark.slow
def test_a_finished_schedule_that_is_extended_says_how_the_learning_rate_jumps(
    tiny_pipeline: Path, tmp_path: Path, run_world
):
    cosine = ("optim.lr=2e-3", "optim.schedule=cosine", "checkpoint.every=3", "checkpoint.keep=9")
    cosine = (*cosine, "optim.scale_lr=linear", "optim.scale_lr_base=4")  # halves it
    steps = tmp_path / "checkpoints"
    run = partial(run_world, 1, lines_of_run, tiny_pipeline, tmp_path)
    assert run((*cosine, "train.max_steps=6"), ZERO2)[0][0] == []
    lines, rates = run((*cosine, "train.max_steps=6"), ZERO2, steps / "step_00000003")[0]
    assert lines == []
    assert rates[5] == pytest.approx(6.70e-5, rel=1e-3)
    (line,), rates = run((*cosine, "train.max_steps=12"), ZERO2, True)[0]
    assert line.startswith("the learning rate changes from 6.70e-05 at step 6 to 5.00e-04 at step 7, because")
    assert (rates[5], rates[6]) == (pytest.approx(6.70e-5, rel=1e-3), pytest.approx(5e-4))
    keep = re.findall(r"--set (\S+)", line)
    lines, rates = run((*cosine, *keep, "train.max_steps=12"), ZERO2, steps / "step_00000006")[0]
    assert lines == []
    assert rates[5:] == pytest.approx([rates[5]] * 7, rel=1e-4)


def test_going_on_from_an_older_step_sets_the_newer_aside(
    finished: Path, tiny_pipeline: Path, tmp_path: Path, run_world
):
    run = copy_of(finished, tmp_path / "run")
    (run / "checkpoints" / "step_00000007.tmp").mkdir()  # a save that was killed
    for suffix in ("abandoned", "abandoned1"):  # of earlier resumes
        (run / "checkpoints" / f"step_00000005.{suffix}").mkdir()
        os.utime(run / "checkpoints" / f"step_00000005.{suffix}", (0, 0))
    overrides = ("train.max_steps=5", "checkpoint.keep=1")
    run_world(2, run_training, tiny_pipeline, run, overrides, ZERO2, run / "checkpoints" / "step_00000004")
    names = sorted(p.name for p in (run / "checkpoints").glob("step_*"))
    assert names == ["step_00000005", "step_00000006.abandoned"]  # `keep` of either kind
    (run / "checkpoints" / "latest").unlink()
    assert find_checkpoint(run)[1].step == 5
    # What was set aside can be looked at and exported; going on from it would leave two pasts side by side.
    aside = run / "checkpoints" / "step_00000006.abandoned"
    assert find_checkpoint(aside)[1].step == 6
    with pytest.raises(ConfigError, match=r"rename step_00000006\.abandoned to step_00000006"):
        find_resume(str(run), str(aside))


def test_todays_optimizer_settings_stay_in_force_on_resume(
    finished: Path, tiny_pipeline: Path, tmp_path: Path, run_world
):
    """DeepSpeed alone would bring the old learning rate back, whatever the recipe says now."""
    run = copy_of(finished, tmp_path / "run")
    overrides = ("train.max_steps=8", "optim.lr=1e-5", "optim.weight_decay=0.3")
    rows = run_world(2, run_training, tiny_pipeline, run, overrides, ZERO2, True)[0]
    assert [row["lr"] for row in rows] == [1e-3] * 6 + [1e-5] * 2


def test_data_fingerprint_sees_order_and_lengths(tiny_pipeline: Path, tmp_path: Path):
    one = make_run(tiny_pipeline, tmp_path, world_size=1)
    same = make_run(tiny_pipeline, tmp_path, world_size=1)
    other = make_run(tiny_pipeline, tmp_path, ("data.mock.shapes=[[2,4,4],[1,2,2]]",), world_size=1)
    assert one.identity.fingerprint == same.identity.fingerprint != other.identity.fingerprint


def test_a_kill_during_saving_leaves_the_previous_one(finished: Path, tmp_path: Path):
    run = copy_of(finished, tmp_path / "run")
    partial = run / "checkpoints" / "step_00000008.tmp"
    partial.mkdir()
    (partial / "state_rank_00000.safetensors").write_bytes(b"half")
    assert find_checkpoint(run)[1].step == 6


def latest_while_saving(model: Path, out: Path) -> list[str | None]:
    """Checkpoints that `latest` names before each part of a checkpoint is written; each is complete at that moment."""
    folder = out / "checkpoints"
    seen = []

    def looking(write: Callable[..., Any]) -> Callable[..., Any]:
        def look_and_write(*args: Any) -> Any:
            name = (folder / "latest").read_text() if (folder / "latest").exists() else None
            seen.append(name)
            assert name is None or load_state(folder / name), name
            return write(*args)

        return look_and_write

    writers = {name: looking(getattr(checkpoint, name)) for name in ("sync", "write_text", "publish")}
    with mock.patch.multiple(checkpoint, **writers):
        run_training(model, out, ("train.max_steps=2", "checkpoint.every=1"), ZERO2)
    return seen


def test_latest_names_a_whole_checkpoint_at_every_moment(tiny_pipeline: Path, tmp_path: Path, run_world):
    seen = run_world(1, latest_while_saving, tiny_pipeline, tmp_path)[0]
    parts = len(seen) // 2  # the file, the state, the folder's name, `latest`
    assert parts >= 4
    assert seen == [None] * parts + ["step_00000001"] * parts


def _send_after(number: int, run: Path, steps: int) -> None:
    """In rank 1 only: a signal to itself once the run has made some steps."""

    def wait() -> None:
        for _ in range(2000):
            if len(read_rows(run / "metrics.jsonl")) >= steps:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.01)

    if os.environ["RANK"] == "1":
        threading.Thread(target=wait, daemon=True).start()


def run_until(number: int, model: Path, out: Path, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    _send_after(number, out, 2)
    return run_training(model, out, overrides, ZERO2)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_to_one_worker_saves_and_stops_all(number: int, tiny_pipeline: Path, tmp_path: Path, worlds):
    rows = worlds[2].run(run_until, number, tiny_pipeline, tmp_path, ("train.max_steps=500",))[0]
    assert 2 <= len(rows) < 500
    assert find_checkpoint(tmp_path)[1].step == len(rows)


@pytest.mark.parametrize(("name", "stops"), [("save", False), ("save_quit", True)])
def test_files_ask_for_a_checkpoint(name: str, stops: bool, tiny_pipeline: Path, tmp_path: Path, run_world):
    (tmp_path / name).touch()
    rows = run_world(
        2, run_training, tiny_pipeline, tmp_path, ("train.max_steps=3", "checkpoint.keep=5"), ZERO2
    )[0]
    assert not (tmp_path / name).exists()
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()
    assert len(rows) == (1 if stops else 3)


def asked_to_quit(model: Path, out: Path, step: int) -> str:
    said: list[str] = []

    def ask(number: int) -> None:
        if number == step:
            (out / "save_quit").touch()

    plugin = Plugin(objective=Hooked(before=ask))
    run_training(model, out, ("train.max_steps=2",), ZERO2, log=said.append, plugin=plugin)
    return "\n".join(said)


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_asked_to_stop_as_it_ends_is_over(step: int, tiny_pipeline: Path, tmp_path: Path, worlds):
    said = worlds[1].run(asked_to_quit, tiny_pipeline, tmp_path, step)[0]
    assert ("use --resume to continue" in said) == (step == 1)
    assert find_checkpoint(tmp_path)[1].step == step


def test_state_file_is_plain_json(finished: Path):
    values = json.loads((finished / "checkpoints" / "step_00000006" / STATE_FILE).read_text())
    assert values["recipe"]["train"]["max_steps"] == 6
    assert values["transformer_config"]["_class_name"] == "WanTransformer3DModel"


def test_links_in_checkpoints_do_not_stop_a_run(tiny_pipeline: Path, tmp_path: Path, worlds):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes.txt").write_text("keep me")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_00000001.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints" / "step_00000002").symlink_to(tmp_path / "elsewhere")
    overrides = ("train.max_steps=2", "checkpoint.every=1", "checkpoint.keep=1")
    worlds[2].run(run_training, tiny_pipeline, tmp_path / "run", overrides, ZERO2)
    assert find_checkpoint(tmp_path / "run")[1].step == 2
    assert os.listdir(tmp_path / "elsewhere") == ["notes.txt"]


def train_over_a_file(model: Path, out: Path) -> tuple[list[str], str]:
    lines: list[str] = []
    with pytest.raises(DiskError) as caught:  # of the last step: that checkpoint is required
        run_training(model, out, ("train.max_steps=2", "checkpoint.every=1"), ZERO2, log=lines.append)
    return lines, str(caught.value)


def test_a_file_in_the_place_of_checkpoints_is_one_sentence(tiny_pipeline: Path, tmp_path: Path, worlds):
    (tmp_path / "checkpoints").write_text("a file")
    for lines, error in worlds[1].run(train_over_a_file, tiny_pipeline, tmp_path):
        assert "no checkpoint of step 2 can be written" in error
        assert "(File exists)" in error
        assert any("The training continues without a checkpoint of step 1." in line for line in lines)
