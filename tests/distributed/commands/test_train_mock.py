"""`wands train --mock VARIANT`: an ordinary run without data, weights or files of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import losses
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.commands.train import run_train
from wands.config.options import TrainOptions
from wands.errors import ConfigError
from wands.files import read_rows


def train_tiny(name: str, out: Path, deepspeed: str, overrides: tuple[str, ...], resume: bool) -> None:
    settings = (f"output_dir={out}", "train.bins_per_step=2", "train.max_steps=4", *overrides)
    options = TrainOptions(
        mock=name, overrides=settings, deepspeed=deepspeed, resume="auto" if resume else None
    )
    run_train(options, lambda text: None)


@pytest.mark.parametrize(
    ("name", "deepspeed", "overrides"),
    [
        pytest.param(
            *("wan2.2-t2v-tiny", "zero3", ("parallel.cp_size=2", "parallel.ulysses_degree=2")),
            marks=pytest.mark.slow,
        ),
        ("wan2.1-t2v-tiny", "zero2", ("lora.rank=2",)),
        pytest.param("wan2.1-flf2v-tiny", "zero2", ("parallel.ring_degree=2",), marks=pytest.mark.slow),
        pytest.param("wan2.2-ti2v-tiny", "cpu", ("precision.compute=bf16",), marks=pytest.mark.slow),
    ],
)
def test_a_mock_run_trains_and_resumes(
    name: str, deepspeed: str, overrides: tuple[str, ...], tmp_path: Path, worlds: WorldPool
):
    settings = ("data.mock.num_samples=6", "optim.lr=1e-3", "checkpoint.every=2", *overrides)
    worlds[2].run(train_tiny, name, tmp_path, deepspeed, settings, False)
    series = losses(read_rows(tmp_path / "metrics.jsonl"))
    assert len(series) == 4
    assert all(0.5 < loss < 5 for loss in series)
    step, state = find_checkpoint(tmp_path)
    assert (state.variant, state.base) == (name, name)
    (tmp_path / "checkpoints" / step.name).rename(tmp_path / "set aside")
    worlds[2].run(train_tiny, name, tmp_path, deepspeed, settings, True)
    assert losses(read_rows(tmp_path / "metrics.jsonl")) == series


def test_the_recipe_of_a_mock_run(tmp_path: Path):
    said: list[str] = []
    options = TrainOptions(
        recipe="wan2.1-t2v-14b-lora",
        mock="wan2.2-i2v-a14b",
        overrides=(f"output_dir={tmp_path}", "data.mock.num_samples=40"),
        dry_run=True,
        force=True,
    )
    run_train(options, said.append)
    block = said[0]
    for part in ("wan2.2-i2v-a14b", "40 clips", "75,600 tokens", "LoRA of rank"):
        assert part in block, block
    with pytest.raises(
        ConfigError,
        match=r"--mock wan3 is not a published or tiny model; use one of wan2\.1-t2v-1\.3b, .*-tiny",
    ):
        run_train(TrainOptions(mock="wan3"), said.append)


def test_the_name_of_a_variant_has_no_weights(tmp_path: Path):
    overrides = (f"output_dir={tmp_path}", "model.init=pretrained")
    with pytest.raises(ConfigError, match=r"model\.path=wan2\.1-t2v-1\.3b is neither a folder nor a Hub id"):
        run_train(TrainOptions(mock="wan2.1-t2v-1.3b", overrides=overrides, dry_run=True), print)
