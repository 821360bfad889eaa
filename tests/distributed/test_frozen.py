"""Stored results that later commits must reproduce: command options, a cache, a checkpoint, loss series.

CONTRIBUTING.md says when a stored result may be replaced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import losses, run_training
from tests.support.world import WorldPool
from wands.cli import main
from wands.convert import old_checkpoint
from wands.data.cache.reader import LatentCache

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
STORED: dict[str, list[float]] = json.loads((FIXTURES / "series.json").read_text())
STEPS = "train.max_steps=6"
LORA = ("lora.rank=2", "lora.alpha=4", "lora.targets=attention")
CASES = {
    "t2v": ("wan2.1-t2v-1.3b", ()),
    "lora": ("wan2.1-t2v-1.3b", LORA),
    "i2v": ("wan2.1-i2v-14b", ()),
    "experts": ("wan2.2-t2v-a14b", ("model.experts=both",)),
}
DEFAULT_TIER = {("t2v", 2), ("lora", 1), ("i2v", 1), ("experts", 2)}
TOLERANCE = 2e-6
"""Relative. The bits of a float32 loss differ between kinds of CPU; `scripts/golden.py` compares them on one machine."""


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        pytest.param(case, size, marks=() if (case, size) in DEFAULT_TIER else pytest.mark.slow)
        for case in CASES
        for size in (1, 2)
    ],
)
def test_losses_are_the_stored_ones(
    case: str, world_size: int, tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    variant, settings = CASES[case]
    stage = {"zero_optimization": {"stage": 2 if world_size == 1 else 3}}
    rows = worlds[world_size].run(run_training, tiny_variant(variant), tmp_path, (STEPS, *settings), stage)[0]
    assert losses(rows) == pytest.approx(STORED[f"{case} {world_size}"], rel=TOLERANCE)


def test_a_stored_checkpoint_resumes(tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool):
    """Three steps were made by commit 2950222, whose checkpoints are pickles. Three are made now."""
    shutil.copytree(FIXTURES / "checkpoint", tmp_path / "run")
    old_checkpoint.main(tmp_path / "run")  # `wands convert --trust-pickle` runs it in a subprocess
    model = tiny_variant("wan2.1-t2v-1.3b")
    stage = {"zero_optimization": {"stage": 2}}
    rows = worlds[1].run(run_training, model, tmp_path / "run", (STEPS, *LORA), stage, True)[0]
    assert losses(rows)[-3:] == pytest.approx(STORED["resumed checkpoint"], rel=TOLERANCE)


def test_a_stored_checkpoint_of_two_ranks_resumes(
    tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    """Three steps were made by commit 5f6b28b on two ranks at ZeRO-3. Three are made now by one rank at ZeRO-2.

    The stored state has no digest of the base weights, because random weights differ between kinds of CPU.
    """
    shutil.copytree(FIXTURES / "checkpoint_ranks", tmp_path / "run")
    model, stage = tiny_variant("wan2.1-t2v-1.3b"), {"zero_optimization": {"stage": 2}}
    settings = (STEPS, *LORA, "ema.decay=0.9")
    rows = worlds[1].run(run_training, model, tmp_path / "run", settings, stage, True)[0]
    assert losses(rows)[-3:] == pytest.approx(STORED["resumed checkpoint_ranks"], rel=TOLERANCE)
    # The average goes on after step 3: (1 + 6) / (10 + 6).
    assert rows[-1]["ema_decay"] == pytest.approx(7 / 16)


def test_a_stored_cache_opens():
    """With every checksum right."""
    cache = LatentCache(FIXTURES / "cache", verify=True)
    assert len(cache.keys) == 4
    assert [cache.read(i).sample_id for i in range(4)] == list(cache.keys)


STORED_OPTIONS = json.loads((FIXTURES / "options.json").read_text())


@pytest.mark.parametrize("command", STORED_OPTIONS)
def test_every_stored_option_is_still_there(command: str):
    """By its name or as an alias, and with or without a value as before."""
    from build_reference import options_of  # conftest.py puts scripts/ on the path

    found = options_of(main.commands[command])
    stored = STORED_OPTIONS[command]
    assert {name: found.get(name) for name in stored} == stored


def test_a_release_adds_options_and_removes_none():
    from build_reference import add_options

    full = add_options({"train": {"--old": True, "--resume": True}, "gone": {"--x": False}})
    assert list(full["train"])[:2] == ["--old", "--resume"]
    assert len(full["train"]) > 2
    assert full["gone"] == {"--x": False}
    assert set(main.commands) < set(full)
