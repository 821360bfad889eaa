"""Held-out loss: the same numbers however a run is spread over ranks, and a training that does not notice it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.support.evaluated import EVAL, STEPS
from tests.support.runs import losses, make_run, run_training, weights
from tests.support.steps import Grid, zero
from tests.support.world import WorldPool
from wands.checkpoint import save as checkpoint
from wands.checkpoint.checkpoint_files import find_checkpoint, load_exported_state
from wands.config.recipe import MockConfig
from wands.data.collate import RankSlice
from wands.data.datasets import MockDataset
from wands.files import read_rows
from wands.flow.rng import SampleKey, rng
from wands.objectives.flow_matching import FlowMatching
from wands.objectives.objective import Prepared
from wands.patches import unpatchify
from wands.plugin import Plugin
from wands.selftest.stock import add_conditions, stock_velocity
from wands.train.evaluation_plan import (
    HELD_OUT,
    TRAIN,
)

TI2V = "wan2.2-ti2v-5b"
A14B = "wan2.2-t2v-a14b"


def evaluated(*args: Any) -> list[dict[str, Any]]:
    """A run's rows of evaluations.jsonl, on rank 0."""
    run_training(*args)
    return read_rows(args[1] / "evaluations.jsonl")


def numbers(row: dict[str, Any]) -> list[float]:
    """Every mean and every loss of a row."""
    buckets = [bucket for kind in row["by"].values() for bucket in kind]
    found = [value for item in (row, *buckets) for key, value in item.items() if key in ("held_out", "train")]
    return [value for value in (*found, *row["losses"]) if value is not None]


# ---- the numbers


@pytest.fixture(scope="module")
def reference(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool) -> Any:
    out = tmp_path_factory.mktemp("reference")
    return out, worlds[1].run(evaluated, tiny_pipeline, out, (*EVAL, *STEPS), zero(0))[0]


def test_it_is_the_loss_of_stock_diffusers(reference: Any, tiny_pipeline: Path):
    """Before the first step: each clip alone through the stock model, with noise keyed (clip, quantile, epoch -1)."""
    out, rows = reference
    plan = json.loads((out / "evaluation.json").read_text())
    model = WanTransformer3DModel.from_pretrained(tiny_pipeline, subfolder="transformer").eval()
    run = make_run(tiny_pipeline, out / "again", EVAL, world_size=1)
    data = MockDataset(MockConfig.model_validate(run.recipe.data.mock), run.model.shape, 0)
    patch = run.model.shape.patch_size
    assert [clip["side"] for clip in plan["clips"]] == [HELD_OUT] * 2 + [TRAIN] * 2
    expected = []
    for clip in plan["clips"]:
        sample = data.read(data.keys.index(clip["key"]))
        clean = sample.latents.float()
        of_clip = []
        for number in range(9):
            quantile = (number + 1) / 10
            sigma = 3 * quantile / (1 + 2 * quantile)  # uniform, shift 3
            assert clip["sigmas"]["transformer"][number] == pytest.approx(sigma, rel=1e-6)
            tokens = rng(0, SampleKey(clip["key"], number, -1), "noise").standard_normal(
                (clip["num_tokens"], clean.shape[0] * np.prod(patch)), dtype=np.float32
            )
            grid = tuple(n // p for n, p in zip(clean.shape[1:], patch, strict=True))
            noise = unpatchify(torch.from_numpy(tokens), grid, clean.shape[0], patch)
            noisy = (1 - sigma) * clean + sigma * noise
            inputs = add_conditions(noisy, torch.tensor(1000 * sigma))
            with torch.no_grad():
                velocity = stock_velocity(model, *inputs, sample.text_embeds.float())
            of_clip.append(float((velocity - (noise - clean)).square().mean()))
        expected.append(np.mean(of_clip))
    assert rows[0]["losses"] == pytest.approx(expected, rel=2e-6)
    assert rows[0]["held_out"] == pytest.approx(np.mean(expected[:2]), rel=2e-6)
    assert rows[0]["gap"] == pytest.approx(np.mean(expected[:2]) - np.mean(expected[2:]), abs=1e-5)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[0]["change"] is None
    assert rows[2]["change"]["mean"] == pytest.approx(rows[2]["held_out"] - rows[0]["held_out"], abs=1e-7)


CELLS = {
    "dp2-zero3-single": (Grid(2, 1, 1), 3, False),
    "ring2-zero1": (Grid(1, 2, 1), 1, True),
    "ulysses2-zero2": (Grid(1, 1, 2), 2, True),
    "tensor2-zero0": (Grid(1, 1, 1, tensor=2), 0, True),
}
FULL = {
    f"{grid}-zero{stage}-{'packed' if packs else 'single'}": (grid, stage, packs)
    for grid in (
        *(Grid(1, 1, 1), Grid(2, 1, 1), Grid(1, 2, 1), Grid(1, 1, 2), Grid(1, 2, 2), Grid(2, 2, 1)),
        *(Grid(1, 1, 1, tensor=2), Grid(2, 1, 1, tensor=2), Grid(1, 2, 1, tensor=2)),
    )
    for stage in range(4)
    for packs in (True, False)
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "stage", "packs"),
    [
        pytest.param(*CELLS["ring2-zero1"], id="ring2-zero1"),
        *(
            pytest.param(*CELLS[name], id=name, marks=pytest.mark.slow)
            for name in ("dp2-zero3-single", "ulysses2-zero2", "tensor2-zero0")
        ),
        *(pytest.param(*cell, id=name, marks=pytest.mark.full) for name, cell in FULL.items()),
    ],
)
def test_every_grid_has_the_same_values(
    grid: Grid,
    stage: int,
    packs: bool,
    reference: Any,
    tiny_pipeline: Path,
    tmp_path: Path,
    worlds: WorldPool,
):
    """The step has two bins on every grid; more ranks than two would need four."""
    more = (f"packing.enabled={str(packs).lower()}", *grid.overrides)
    rows = worlds[grid.world_size].run(
        evaluated, tiny_pipeline, tmp_path, (*EVAL, *STEPS, *more), zero(stage)
    )[0]
    assert [row["step"] for row in rows] == [0, 2, 4]
    for row, expected in zip(rows, reference[1], strict=True):
        assert numbers(row) == pytest.approx(numbers(expected), rel=2e-6)
    same = ("evaluation.json",)
    assert all((tmp_path / name).read_bytes() == (reference[0] / name).read_bytes() for name in same)


@pytest.mark.parametrize(
    ("world_size", "stage", "dropout"),
    [
        (1, 2, True),
        pytest.param(2, 3, True, marks=pytest.mark.slow),
        pytest.param(2, 3, False, marks=pytest.mark.slow),
    ],
)
def test_the_training_does_not_notice_it(
    world_size: int, stage: int, dropout: bool, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (
        *STEPS,
        "data.holdout=0.4",
        "ema.decay=0.7",
        "ema.warmup=false",
        "flow.cfg_dropout=0.5",
        "data.prefetch=2",
    )
    settings += ("train.max_steps=3", "model.dropout=0.2") if dropout else ("train.max_steps=3",)
    series = {}
    evaluates = ("eval.every=1", "eval.max_share=1000", "eval.max_clips=1")
    for name, more in (("with", evaluates), ("without", ())):
        args = (tiny_pipeline, tmp_path / name, (*settings, *more), zero(stage))
        ranks = worlds[world_size].run(run_training, *args)
        series[name] = ranks[0]
    assert losses(series["with"]) == losses(series["without"])
    assert [row["grad_norm"] for row in series["with"]] == [row["grad_norm"] for row in series["without"]]
    ours = weights(tmp_path / "with")
    theirs = weights(tmp_path / "without")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for path in (tmp_path / "with" / "checkpoints" / "step_00000003").rglob("*_rank_*"):
        assert path.read_bytes() == Path(str(path).replace("/with/", "/without/")).read_bytes(), path.name
    rows = read_rows(tmp_path / "with" / "evaluations.jsonl")
    assert [(row["step"], row["weights"]) for row in rows] == [
        (0, "raw"),
        *((step, which) for step in (1, 2, 3) for which in ("raw", "ema")),
    ]
    assert rows[-1]["held_out"] != rows[-2]["held_out"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("variant", [TI2V, A14B])
def test_kinds_and_experts(
    world_size: int, variant: str, tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    """TI2V without and with a first frame, A14B inside the range of each expert."""
    settings = (*EVAL, "train.max_steps=1", STEPS[-1])
    args = (tiny_variant(variant), tmp_path / "run", settings, zero(3))
    rows = worlds[world_size].run(evaluated, *args)[0]
    if world_size > 1:
        one = worlds[1].run(evaluated, args[0], tmp_path / "one", *args[2:])[0]
        assert [*map(numbers, rows)] == [pytest.approx(numbers(row), rel=2e-6) for row in one]
    first = rows[0]
    assert [bucket["name"] for bucket in first["by"]["kind"]] == (
        ["text", "first frame"] if variant == TI2V else ["text"]
    )
    values = [bucket["held_out"] for bucket in first["by"]["sigma"]]
    assert len(set(values)) == len(values) == (9 if variant == TI2V else 18)
    if variant == A14B:
        assert [bucket["name"] for bucket in first["by"]["expert"]] == ["high", "low"]
        sigmas = {bucket["name"]: bucket["sigma"] for bucket in first["by"]["sigma"]}
        assert all((sigma >= 0.875) == name.startswith("high") for name, sigma in sigmas.items())
    else:
        kinds = [bucket["held_out"] for bucket in first["by"]["kind"]]
        assert kinds[0] != kinds[1]


# ---- a run that stops


@pytest.mark.slow
def test_a_resumed_run_has_the_same_curve(
    reference: Any, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Killed after step 3 and while it was evaluated for the last time: rows that are missing are made up for."""
    settings = (*EVAL, *STEPS)
    said = []
    worlds[1].run(run_training, tiny_pipeline, tmp_path, settings, zero(0))
    for path in (tmp_path / "checkpoints").glob("step_00000004"):
        path.rename(tmp_path / "gone")
    (tmp_path / "checkpoints" / "latest").write_text("step_00000002")
    rows = worlds[1].run(evaluated, tiny_pipeline, tmp_path, settings, zero(0), True)[0]
    timeless = [{**row, "seconds": 0} for row in rows]
    assert timeless == [{**row, "seconds": 0} for row in reference[1]]

    path = tmp_path / "evaluations.jsonl"
    path.write_text(
        "".join(path.read_text().splitlines(keepends=True)[:1])
    )  # killed during the evaluation of step 2
    worlds[1].run(
        run_training, tiny_pipeline, tmp_path, settings, zero(0), tmp_path / "checkpoints" / "step_00000002"
    )
    assert [{**row, "seconds": 0} for row in read_rows(path)] == timeless
    # A clip that vanishes is left out. Another budget begins a new series.
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    stored["clips"][0]["key"] = "gone"
    (tmp_path / "evaluation.json").write_text(json.dumps(stored))
    again = (*settings, "train.max_steps=6")
    said = worlds[1].run(said_by, tiny_pipeline, tmp_path, again, zero(0), True)[0]
    assert "evaluation: 1 of the clips are no longer in the data, and are left out" in said
    last = read_rows(path)[-1]
    assert last["losses"][0] is None
    assert last["held_out"] == last["losses"][1]
    more = (*again, "train.max_steps=7", "eval.max_clips=1")
    said = worlds[1].run(said_by, tiny_pipeline, tmp_path, more, zero(0), True)[0]
    assert "a new series of evaluations begins, because eval or data.holdout changed" in said
    assert [row["step"] for row in read_rows(path)] == [6, 7]
    assert len(read_rows(tmp_path / "evaluations_until_00000006.jsonl")) == 4


def said_by(*args: Any) -> list[str]:
    said: list[str] = []
    run_training(*args, said.append)
    return said


class StopsWhileEvaluating(FlowMatching):
    """The default objective. The first bin of the evaluation of step 2 sends a signal to the process, and waits for it."""

    def evaluate(self, model: Any, part: RankSlice, prepared: Prepared) -> torch.Tensor:
        if model.global_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return super().evaluate(model, part, prepared)


def stopped_run(*args: Any) -> list[dict[str, Any]]:
    """A run that gets a signal while it evaluates for the second time."""
    run_training(*args, plugin=Plugin(objective=StopsWhileEvaluating()))
    return read_rows(args[1] / "evaluations.jsonl")


@pytest.mark.slow
def test_a_request_to_stop_does_not_wait_for_an_evaluation(
    reference: Any, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """The run stops at the step of the evaluation, and the resumed run makes up for it."""
    settings = (*EVAL, *STEPS)
    rows = worlds[1].run(stopped_run, tiny_pipeline, tmp_path, settings, zero(0))[0]
    assert [row["step"] for row in rows] == [0]
    assert find_checkpoint(tmp_path).state.step == 2
    rows = worlds[1].run(evaluated, tiny_pipeline, tmp_path, settings, zero(0), True)[0]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert [row["losses"] for row in rows] == [row["losses"] for row in reference[1]]


# ---- what it is for


@pytest.mark.slow
def test_an_overfitted_run_parts(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    """Four clips, learned by heart: their loss falls, that of the held-out clips does not. patience ends the run."""
    settings = (
        "data.mock={num_samples: 8, shapes: [[1,4,4]], text_lens: [4]}",
        *("data.holdout=0.5", "eval.every=30", "eval.max_share=1000", "eval.patience=2"),
        *("train.max_steps=600", "train.bins_per_step=1", "optim.lr=3e-3", "flow.cfg_dropout=0"),
    )
    rows = worlds[1].run(evaluated, tiny_pipeline, tmp_path, settings, zero(0))[0]
    assert rows[-1]["train"] < rows[0]["train"]
    assert rows[-1]["gap"] > rows[0]["gap"] + 0.05
    assert rows[-1]["train_change"]["high"] < 0
    assert rows[-1]["step"] < 600
    events = [row["event"] for row in read_rows(tmp_path / "events.jsonl")]
    assert "early stop" in events
    assert events[-1] == "stop"


LEVELS = {0: 1.0, 1: 0.9, 2: 0.8, 3: 0.85, 4: 0.795, 5: 0.83}


class Scripted(FlowMatching):
    """Has the held-out losses LEVELS. At step 4, the clips disagree whether the loss is lower than at step 2."""

    def __init__(self, plan_file: Path) -> None:
        self._plan_file = plan_file

    def evaluate(self, model: Any, part: RankSlice, prepared: Prepared) -> torch.Tensor:
        step = model.global_steps
        clips = [clip["key"] for clip in json.loads(self._plan_file.read_text())["clips"]]
        noise = dict(zip(clips, [0.1, -0.1] * 2, strict=True)) if step == 4 else {}
        losses = [LEVELS[step] + noise.get(key.sample_id, 0.0) for key in part.keys]
        return torch.tensor(losses, dtype=torch.float64) * torch.tensor(part.trained_lens)


def scripted_run(*args: Any) -> list[str]:
    """A run whose held-out losses are LEVELS."""
    said: list[str] = []
    run_training(*args, said.append, Plugin(objective=Scripted(args[1] / "evaluation.json")))
    return said


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_patience_ends_the_run(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (*EVAL, "eval.every=1", "eval.patience=3", "checkpoint.keep_best=true", "train.max_steps=6")
    folder = tmp_path / "checkpoints"
    said = worlds[2].run(scripted_run, tiny_pipeline, tmp_path, settings, zero(1), False)[0]
    assert [row["step"] for row in read_rows(tmp_path / "evaluations.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert "eval.patience=3: the held-out loss has not improved since step 2; the run ends" in said
    assert not any("as requested" in line for line in said)
    assert find_checkpoint(folder / "best").state.step == 4
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_00000004", "step_00000005"]
    assert load_exported_state(folder / "best")
    # A resumed run keeps the best checkpoint, unless it makes that step again.
    again = (*settings, "checkpoint.keep=1", "checkpoint.every=1")
    worlds[2].run(scripted_run, tiny_pipeline, tmp_path, again, zero(1), folder / "step_00000004")
    assert find_checkpoint(folder / "best").state.step == 4
    assert [row["event"] for row in read_rows(tmp_path / "events.jsonl")].count("early stop") == 2
    (folder / "best").write_text("step_00000005")
    worlds[2].run(scripted_run, tiny_pipeline, tmp_path, again, zero(1), folder / "step_00000004")
    assert not (folder / "best").exists()


def killed_run(*args: Any) -> None:
    """A run that ends when the checkpoint of step 2 has its final name. Its held-out loss is the lowest so far."""
    publish = checkpoint.publish

    def publish_and_die(temporary: Path, path: Path) -> None:
        publish(temporary, path)
        if path.name == "step_00000002":
            raise KeyboardInterrupt

    with mock.patch.object(checkpoint, "publish", publish_and_die), suppress(BaseException):
        scripted_run(*args)


def test_a_kill_just_after_the_best_step_is_saved(tiny_pipeline: Path, tmp_path: Path, run_world):
    """A resumed run does not evaluate step 2 again."""
    settings = (*EVAL, "eval.every=1", "checkpoint.every=1", "checkpoint.keep_best=true", "train.max_steps=3")
    run_world(1, killed_run, tiny_pipeline, tmp_path, settings, zero(1), False)
    assert find_checkpoint(tmp_path).state.step == 2
    assert find_checkpoint(tmp_path / "checkpoints" / "best").state.step == 2
