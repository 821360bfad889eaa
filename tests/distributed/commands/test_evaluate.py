"""`wands evaluate`: the numbers of a run's own evaluation, from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from tests.distributed.train.test_datasets import write_cache
from tests.support.commands import evaluate
from tests.support.runs import run_training
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.errors import ConfigError
from wands.files import read_rows
from wands.train import prepare


def of_cache(model: Path, data: Path, out: Path, ema: bool) -> str | None:
    with mock.patch.object(prepare, "fingerprint_pipeline", return_value={}):  # as `write_cache`
        return evaluate(model, data, ema=ema, json_path=out)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, ("ema.decay=0.5", "ema.warmup=false")),
        pytest.param(1, ("lora.rank=2", "ema={}"), marks=pytest.mark.slow),
    ],
)
def test_it_is_the_evaluation_of_the_run(
    world_size: int, settings: tuple[str, ...], tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    train = tmp_path / "train"
    held_out = tmp_path / "held out"
    write_cache(train, tiny_pipeline, "abcd", 1)
    write_cache(held_out, tiny_pipeline, "xyz", 2)
    overrides = ("data.mock=null", f"data.cache={train}", f"eval.cache={held_out}", "eval.max_share=1000")
    overrides += (
        "train.max_steps=2",
        "checkpoint.keep_best=true",
        "flow.flow_shift=2",
        "train.seed=3",
        *settings,
    )
    worlds[world_size].run(run_training, tiny_pipeline, tmp_path / "run", overrides, zero(2))
    rows = {(row["step"], row["weights"]): row for row in read_rows(tmp_path / "run" / "evaluations.jsonl")}
    plan = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    found = {}
    for ema in (False, True):
        text = worlds[world_size].run(of_cache, tmp_path / "run", held_out, tmp_path / "all.json", ema)[0]
        found = json.loads((tmp_path / "all.json").read_text())
        expected = rows[2, "ema" if ema else "raw"]
        assert text.startswith(f"loss {expected['held_out']:.5f} of 3 clips\n")
        own = dict(zip((clip["key"] for clip in found["clips"]), found["losses"], strict=True))
        keys = [clip["key"] for clip in plan["clips"] if clip["side"] == "held_out"]
        assert [own[key] for key in keys] == pytest.approx(expected["losses"][: len(keys)], rel=2e-6)
        assert "WARNING" not in text
    of_train = worlds[world_size].run(of_cache, tmp_path / "run", train, tmp_path / "train.json", False)[0]
    assert "\nWARNING: the run trains on 4 of these clips" in of_train
    assert found["weights"] == "ema"
    assert found["step"] == 2
    # Before training: the model itself, with the noise levels of the defaults.
    worlds[1].run(of_cache, tiny_pipeline, held_out, tmp_path / "base.json", False)
    assert json.loads((tmp_path / "base.json").read_text())["step"] is None
    with pytest.raises(
        ConfigError, match=r"--ema needs a training run, but MODEL=.* is not a run; leave --ema"
    ):
        evaluate(tiny_pipeline, held_out, ema=True)
