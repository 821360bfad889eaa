"""`wands.Trainer` in one process, as a notebook uses it, and the examples, which are programs over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import wands
from examples.robust_loss import Robust
from tests.distributed.train.test_datasets import write_cache
from tests.support.runs import BASE, losses, run_training
from tests.support.steps import zero
from wands import Plugin
from wands.commands.evaluate import evaluate
from wands.commands.train import run_train
from wands.config.options import EvaluateOptions, TrainOptions
from wands.config.recipe_loading import load_recipe
from wands.errors import ConfigError
from wands.files import read_rows
from wands.train import prepare

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def keys(model: Path, out: Path, *more: str) -> list[str]:
    return [*BASE, f"model.path={model}", f"output_dir={out}", "train.max_steps=2", *more]


def series(out: Path) -> list[float]:
    return losses(read_rows(out / "metrics.jsonl"))


def train_as_a_notebook(model: Path, out: Path) -> tuple[list[list[float]], str, str, list[str]]:
    said: list[str] = []
    first = wands.Trainer(load_recipe(None, keys(model, out / "a")), deepspeed="zero3", log=said.append)
    plan = first.plan()
    written = sorted(path.name for path in out.iterdir())
    saved = first.train()
    wands.Trainer(None, keys(model, out / "b"), deepspeed="zero3", log=said.append).train()
    robust = wands.Trainer(
        None, keys(model, out / "c"), deepspeed="zero3", objective=Robust(), log=said.append
    )
    robust.train()
    more = keys(model, out / "a", "train.max_steps=3")
    wands.Trainer(None, more, deepspeed="zero3", resume="auto", log=said.append).train()
    return [series(out / name) for name in "abc"], plan, str(saved), written


@pytest.mark.slow
def test_one_process_makes_several_runs(tiny_pipeline: Path, tmp_path: Path, worlds):
    found, plan, saved, written = worlds[1].run(train_as_a_notebook, tiny_pipeline, tmp_path)[0]
    first, second, robust = found
    assert first[:2] == second
    assert len(first) == 3
    assert robust != second
    assert "ZeRO-3" in plan
    assert written == []
    assert saved.endswith("step_00000002")


def test_overrides_belong_to_a_recipe_that_is_named():
    with pytest.raises(ConfigError, match="overrides"):
        wands.Trainer(load_recipe(None), ["train.max_steps=2"])


def train_example(name: str, model: Path, out: Path, *more: str) -> list[str]:
    said: list[str] = []
    path = str(EXAMPLES / f"{name}.py")
    options = TrainOptions(imports=(path,), overrides=tuple(keys(model, out, *more)), force=True)
    run_train(options, said.append)
    return said


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("robust_loss", ()),
        ("loss_per_clip", ()),
        ("held_to_base", ("lora={rank: 4, targets: attention}",)),
    ],
)
def test_an_example_is_imported_by_wands_train(
    tiny_pipeline: Path, tmp_path: Path, worlds, name: str, more: tuple[str, ...]
):
    said = worlds[1].run(train_example, name, tiny_pipeline, tmp_path, *more)[0]
    assert any(f"plugins     {EXAMPLES / name}.py" in text for text in said)
    assert len(series(tmp_path)) == 2
    if name == "loss_per_clip":
        found = json.loads((tmp_path / "loss_per_clip_rank0.json").read_text())
        assert found
        assert list(found.values()) == sorted(found.values(), reverse=True)


@pytest.mark.slow
@pytest.mark.launch
def test_a_program_trains_from_python(tiny_pipeline: Path, tmp_path: Path):
    program = [sys.executable, EXAMPLES / "train_from_python.py", "tiny", *keys(tiny_pipeline, tmp_path)]
    of_launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in of_launcher}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"the newest checkpoint: {tmp_path}/checkpoints/step_00000002" in done.stdout


ROBUST = str(EXAMPLES / "robust_loss.py")


def evaluate_robust(run: Path, data: Path, out: Path) -> tuple[str, float, float]:
    """Return the error without the objective's code, the loss with it, and the loss of the run's own evaluation."""
    with mock.patch.object(prepare, "fingerprint_pipeline", return_value={}):  # as `write_cache`
        with pytest.raises(ConfigError) as caught:
            evaluate(EvaluateOptions(model=str(run), data=str(data)))
        evaluate(EvaluateOptions(model=str(run), data=str(data), json_path=out, imports=(ROBUST,)))
    own = [row for row in read_rows(run / "evaluations.jsonl") if row["step"] == 2]
    return str(caught.value), json.loads(out.read_text())["held_out"], own[0]["held_out"]


def test_the_held_out_loss_is_that_of_the_objective(tiny_pipeline: Path, tmp_path: Path, worlds):
    train = tmp_path / "train"
    held_out = tmp_path / "held out"
    write_cache(train, tiny_pipeline, "abcd", 1)
    write_cache(held_out, tiny_pipeline, "xyz", 2)
    data = ("data.mock=null", f"data.cache={train}", f"eval.cache={held_out}", "eval.max_share=1000")
    overrides = (*data, "train.max_steps=2")
    rows = {}
    for name, plugin in {"robust": Plugin(objective=Robust()), "plain": None}.items():
        run = partial(run_training, overrides=overrides, ds=zero(2), plugin=plugin)
        worlds[1].run(run, tiny_pipeline, tmp_path / name)
        rows[name] = read_rows(tmp_path / name / "evaluations.jsonl")
    assert rows["robust"][0]["held_out"] < 0.8 * rows["plain"][0]["held_out"]
    said, ours, theirs = worlds[1].run(
        evaluate_robust, tmp_path / "robust", held_out, tmp_path / "found.json"
    )[0]
    assert "the objective robust (version 1)" in said
    assert "--import" in said
    assert ours == pytest.approx(theirs, rel=2e-6)
