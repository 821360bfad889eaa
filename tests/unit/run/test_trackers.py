"""Trackers: curves of a resumed run, one run in wandb, no secret, and failures that stop nothing."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fake_wandb import SOURCE
from tests.support.runs import make_run
from tests.support.secret_texts import SECRET_TEXTS
from wands.config.deepspeed_rules import check_json
from wands.config.recipe import Recipe
from wands.distributed.dims import ParallelDims
from wands.errors import ConfigError
from wands.files import read_rows
from wands.flow.rng import SampleKey
from wands.run import trackers
from wands.run.step_result import StepResult, TrainedClip
from wands.run.trackers import Trackers, check_trackers
from wands.train.jobs import FinishedStep
from wands.train.metrics import NUM_SIGMAS, StepLog, curves, sigma_sums
from wands.train.prepared_run import PreparedRun
from wands.train.reduction import StepSums


def build_recipe(out: Path, names: tuple[str, ...] = ("tensorboard",), **values: Any) -> Recipe:
    settings = {"output_dir": str(out), "logging": {"trackers": names, **values}}
    settings["model"] = {"path": "/data/somebody/wan"}
    return Recipe.model_validate(settings)


def build_trackers(
    out: Path, names: tuple[str, ...] = ("tensorboard",), start_step: int = 0, **values: Any
) -> Trackers:
    """The trackers of rank 0, in a new run or in one that resumes at `start_step`."""
    return Trackers(build_recipe(out, names, **values), 0, start_step + 1 if start_step else 0)


def build_log(run: PreparedRun, board: Trackers, start_step: int = 0) -> StepLog:
    training: Any = SimpleNamespace(
        recipe=run.recipe,
        output_dir=run.output_dir,
        start_step=start_step,
        total_steps=run.schedule.total_steps,
        rank=0,
        device=torch.device("cpu"),
        groups=SimpleNamespace(dims=run.grid(0)),
        averages={},
        trackers=board,
        log=lambda text: None,
    )
    return StepLog(training=training, model=run.model, schedule=run.schedule, past_losses=[])


def finished(run: PreparedRun, number: int, loss: float, norm: float = 1.0) -> FinishedStep:
    """Step `number` of a process that has no samples."""
    nothing = torch.zeros(0, dtype=torch.float64)
    result = StepResult(loss=torch.tensor(loss), clips=[], errors=nothing, norm=norm, skipped=False)
    return FinishedStep(
        plan=run.schedule.sampler.step_plan(number - 1),
        results=[result],
        sums=StepSums(
            losses=[loss],
            of_sigmas=[0.0] * 2 * NUM_SIGMAS,
            largest={"data_wait": 0.0, "device_peak": 0.0, "host_peak": 1.0},
            world_size=1,
        ),
        lr=1e-3,
        seconds=1.0,
        own_seconds=None,
        is_first=False,
        is_last=False,
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the fake package. The fixture is a function that returns the calls so far."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "calls"))
    monkeypatch.delitem(trackers.importlib.sys.modules, "wandb", raising=False)
    yield lambda: read_rows(tmp_path / "calls")
    trackers.importlib.sys.modules.pop("wandb", None)


def test_curves_and_rows_of_a_resumed_run(tiny_pipeline: Path, tmp_path: Path):
    run = make_run(tiny_pipeline, tmp_path, ("train.max_steps=5",), world_size=1)
    for start_step, end in ((0, 4), (3, 4)):
        board = build_trackers(tmp_path, start_step=start_step)
        log = build_log(run, board, start_step)
        for step in range(start_step + 1, end + 1):
            log.run(finished(run, step, loss=float(10 * start_step + step)))
        board.log(0, {"eval/held_out": 1.0}) if not start_step else None
        log.close()
        board.close()
    series = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 34.0)]
    found = scalars(tmp_path / "tensorboard")
    assert found["train/loss"] == series
    assert found["eval/held_out"] == [(0, 1.0)]
    assert found["train/epoch"][-1] == (4, float(run.schedule.sampler.step_plan(3).epoch))
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path / "metrics.jsonl")] == series
    assert log.history == series


@pytest.mark.parametrize(("norms", "is_warned"), [([0.0, 0.0], True), ([1.0, 0.0], False)])
def test_a_run_that_changes_no_weight_is_one_warning(
    norms: list[float],
    is_warned: bool,
    tiny_pipeline: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    run = make_run(tiny_pipeline, tmp_path, ("train.max_steps=5",), world_size=1)
    log = build_log(run, build_trackers(tmp_path, ()))
    for step, norm in enumerate(norms, start=1):
        log.run(finished(run, step, loss=1.0, norm=norm))
    assert caplog.text.count("this run changes no weight") == is_warned


def test_time_to_the_end(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A first step of 100 s does not spoil the prediction. Saves between the steps count as they were so far."""
    log = build_log(make_run(tiny_pipeline, tmp_path, world_size=1), build_trackers(tmp_path, ()))
    now = [1000.0]
    monkeypatch.setattr("wands.train.metrics.time.perf_counter", lambda: now[0])
    assert log._eta(100.0, 9) == 900.0
    for _ in range(3):
        now[0] += 2.0
        eta = log._eta(2.0, 10)
    assert eta == 20.0
    now[0] += 2.0 + 10.0  # a save of 10 s
    assert log._eta(2.0, 10) == 10 * (2.0 + 10.0 / 5)


def test_clips_of_ranks_that_share_a_bin_count_once():
    key = SampleKey("a", 0, 0)
    errors = torch.tensor([0.1, 0.2, 4.0, 9.0], dtype=torch.float64)
    clips = [
        TrainedClip(key, sigma, weight, None) for sigma, weight in ((0.0, 1), (0.05, 1), (1.0, 1), (0.5, 0))
    ]
    results = [SimpleNamespace(clips=clips[:n], errors=errors[:n]) for n in (4, 1)]
    first, *others = (
        sigma_sums(results, ParallelDims(4, rank, ulysses_degree=2, tensor_degree=2)) for rank in range(4)
    )
    assert first.tolist() == [0.1 + 0.2 + 0.1, 3, *[0] * 16, 4.0, 1]
    assert not any(other.any() for other in others)


def test_names_of_curves():
    row = {"step": 3, "loss": 1.0, "loss_high": 2.0, "mfu": None, "own_seconds": [1.0, 2.0, 5.0]}
    row |= {"loss_by_sigma": [None] * 9 + [0.5], "grad_norm_blocks": {"blocks.0": 3.0}, "device_peak": 7}
    assert curves(row) == {
        "train/loss": 1.0,
        "train/loss_high": 2.0,
        "loss_by_sigma/0.9": 0.5,
        "grad_norm_blocks/blocks.0": 3.0,
        "speed/device_peak": 7,
        "speed/own_seconds_max": 5.0,
        "speed/own_seconds_median": 2.0,
    }


def test_a_deleted_folder_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any):
    uncaught: list[object] = []
    monkeypatch.setattr(
        "threading.excepthook", uncaught.append
    )  # would print a traceback of TensorBoard's thread
    board = build_trackers(tmp_path)
    board.log(1, {"train/loss": 0.5})
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(1, 0.5)]}
    shutil.rmtree(tmp_path / "tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    board._retry_at = dict.fromkeys(board._retry_at, 0)
    board.log(2, {"train/loss": 1.5})
    board.log(2, {"train/loss": 1.5})
    (tmp_path / "tensorboard").unlink()
    for step in (3, 4):
        board._retry_at = dict.fromkeys(board._retry_at, 0)
        board.log(step, {"train/loss": step + 0.5})
    board.close()
    assert scalars(tmp_path / "tensorboard")["train/loss"][-1] == (4, 4.5)
    assert len([text for text in caplog.messages if "the tracker tensorboard fails" in text]) == 1
    assert not uncaught


def test_a_disk_that_refuses_the_curves_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The folder exists and opens files, but each write fails, as on a full or read-only disk."""
    from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

    uncaught: list[object] = []
    monkeypatch.setattr("threading.excepthook", uncaught.append)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    board = build_trackers(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "_write", refuse)
        for step in range(1, 4):
            board.log(step, {"train/loss": 0.5})
            board._retry_at = dict.fromkeys(board._retry_at, 0)
    for step in (4, 5):
        board._retry_at = dict.fromkeys(board._retry_at, 0)
        board.log(step, {"train/loss": step + 0.5})
    board.close()
    assert scalars(tmp_path / "tensorboard")["train/loss"][-1] == (5, 5.5)
    assert caplog.messages == [
        "the tracker tensorboard fails (Read-only file system); the training continues."
    ]
    assert not uncaught


def test_pictures_in_tensorboard(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = build_trackers(tmp_path)
    board.log_media(2, "Image", {"samples/0": np.full((8, 6, 3), 200, np.uint8)})
    board.log_media(2, "Video", {"samples/0": str(tmp_path / "0.mp4")})
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (image,) = events.Images("samples/0")
    assert (image.step, image.height, image.width) == (2, 8, 6)
    (recipe,) = events.Tensors("recipe/text_summary")
    text = recipe.tensor_proto.string_val[0].decode()
    assert "path: wan\n" in text
    assert "somebody" not in text


def test_one_run_in_wandb(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "my_run"
    out.mkdir()
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    for step in (0, 4):
        monkeypatch.setenv("FAKE_WANDB_STEP", str(2 * step))
        board = build_trackers(out, ("wandb",), step, project="p-0123456789abcdef")
        board.log(step + 1, {"train/loss": 0.5})
        board.log(9 + step, {"train/loss": 0.25})
        board.close()
    monkeypatch.setenv("FAKE_WANDB_STEP", "0")
    board = build_trackers(out, ("wandb",), run_name="other")
    board.log_media(1, "Image", {"samples/0": np.zeros((8, 6, 3), np.uint8)})
    board.log_media(1, "Video", {"samples/0": str(out / "0.mp4")})

    calls = wandb()
    first, second, third = (call for call in calls if call["call"] == "init")
    assert first == second
    assert (first["name"], first["resume"], first["dir"]) == ("my_run", "allow", str(out))
    assert third["name"] == "other"
    # The steps up to 8 are in the curves of the first process.
    logged = [(call["step"], call.get("train/loss")) for call in calls if call["call"] == "log"]
    assert logged == [(1, "0.5"), (9, "0.25"), (13, "0.25"), (1, None), (1, None)]
    media = [call["samples/0"] for call in calls if "samples/0" in call]
    assert media == ["image (8, 6, 3) uint8", f"video {out / '0.mp4'}"]
    config = next(call for call in calls if call["call"] == "config")["values"]
    assert config["model"]["path"] == "wan"
    assert config["optim"]["lr"] == Recipe().optim.lr
    assert config["logging"]["project"] == "p-REDACTED"


def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, wandb: Any, caplog: pytest.LogCaptureFixture):
    (tmp_path / "calls.down").touch()
    board = build_trackers(tmp_path, ("wandb", "tensorboard"))
    for step in range(1, 4):
        board._retry_at = dict.fromkeys(board._retry_at, 0)
        board.log(step, {"train/loss": 0.5})
    assert [text for text in caplog.messages if "tracker" in text] == [
        "the tracker wandb fails (no network); the training continues."
    ]
    assert [call["call"] for call in wandb()] == ["init"] * 4
    assert len(scalars(tmp_path / "tensorboard")["train/loss"]) == 3
    board._retry_at["wandb"] = trackers.time.monotonic() + 100
    board.log(4, {"train/loss": 0.5})
    assert len(wandb()) == 4
    (tmp_path / "calls.down").unlink()
    board._retry_at = dict.fromkeys(board._retry_at, 0)
    board.log(5, {"train/loss": 0.5})
    assert [call["call"] for call in wandb()[4:]] == ["init", "config", "log"]


def test_a_package_that_is_missing():
    check_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match=r"installed: comet_ml clearml\. Run pip install comet_ml clearml,"):
        check_trackers(["comet_ml", "tensorboard", "clearml"])


@pytest.mark.parametrize("section", ["wandb", "tensorboard", "csv_monitor", "comet"])
def test_monitors_of_deepspeed_are_refused(section: str):
    (problem,) = check_json({section: {"enabled": True}}, "my.json")
    assert problem == (
        f"my.json: {section} is not supported by wands; use logging.trackers of the recipe, which also get the loss."
    )


def test_names_are_those_of_accelerate():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    for name in LOGGER_TYPE_TO_CLASS:
        Recipe.model_validate({"logging": {"trackers": [name]}})
    assert json.loads(Recipe().model_dump_json())["logging"]["trackers"] == ["tensorboard"]


def test_tensorboard_gets_no_secret(tmp_path: Path):
    recipe = build_recipe(tmp_path)
    texts = [text.format(secret) for text, secret in SECRET_TEXTS.items()]
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"exclude": texts})})
    board = Trackers(recipe, 0, 0)
    board.close()
    (file,) = (path for path in (tmp_path / "tensorboard").rglob("*") if path.is_file())
    written = file.read_bytes()
    assert written.count(b"REDACTED") >= len(texts)
    assert [
        secret for secret in SECRET_TEXTS.values() if len(secret) > 3 and secret.encode() in written
    ] == []
