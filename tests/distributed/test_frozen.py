"""Stored results that later commits must reproduce: command options, a cache, a checkpoint, loss series.

CONTRIBUTING.md says when a stored result may be replaced.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.commands import export
from tests.support.runs import losses, run_training
from tests.support.store_cache import CAPTIONS
from tests.support.store_cache import STORED as STORED_CACHE
from tests.support.store_cache import VARIANT as CACHED_FOR
from tests.support.store_checkpoint import SETTINGS, VARIANT
from tests.support.store_checkpoint import STORED as STORED_CHECKPOINT
from tests.support.world import WorldPool
from wands.cli import main
from wands.data.cache.format import to_bits
from wands.data.cache.reader import LatentCache

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
STORED: dict[str, list[float]] = json.loads((FIXTURES / "series.json").read_text())
LORA = ("lora.rank=2", "lora.alpha=4", "lora.targets=attention")
CASES = {
    "t2v": ("wan2.1-t2v-1.3b", ()),
    "lora": ("wan2.1-t2v-1.3b", LORA),
    "i2v": ("wan2.1-i2v-14b", ()),
    "experts": ("wan2.2-t2v-a14b", ("model.experts=both",)),
}
DEFAULT_TIER = {("t2v", 1), ("lora", 1), ("i2v", 1), ("experts", 1)}
CACHED = {
    "bikes": {
        "latents": "930087f2",
        "text_embeds": "a2c0336c",
        "image_latents": "6674f33b",
        "image_embeds": "eb1fdfcf",
    },
    "man": {
        "latents": "52c0b408",
        "text_embeds": "953cc733",
        "image_latents": "a423b727",
        "image_embeds": "cbace7e5",
        "token_weights": "046d4a7d",
    },
}
"""Sample -> array -> start of the SHA-256 of its bits. Only one clip has a mask."""
EXPORTED = {False: "4ae33ab1134c55f4", True: "0e256442e24f68a0"}
"""`--ema` -> start of the SHA-256 of the exported names and weights."""
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
    rows = worlds[world_size].run(
        run_training, tiny_variant(variant), tmp_path, ("train.max_steps=6", *settings), stage
    )[0]
    assert losses(rows) == pytest.approx(STORED[f"{case} {world_size}"], rel=TOLERANCE)


def test_the_stored_checkpoint_resumes(
    tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    """Three steps were made by two ranks at ZeRO-3. Three are made now by one rank at ZeRO-2."""
    run = shutil.copytree(STORED_CHECKPOINT, tmp_path / "run")
    model = tiny_variant(VARIANT)
    stage = {"zero_optimization": {"stage": 2}}
    rows = worlds[1].run(run_training, model, run, SETTINGS, stage, True)[0]
    assert losses(rows)[-3:] == pytest.approx(STORED["resumed checkpoint"], rel=TOLERANCE)
    # The average continues after step 3: (1 + 6) / (10 + 6).
    assert rows[-1]["ema_decay"] == pytest.approx(7 / 16)


def test_the_stored_cache_opens(tmp_path: Path):
    """With every checksum right, and with the bits that were stored."""
    cache = LatentCache(STORED_CACHE, verify=True)
    found = {}
    for index, key in enumerate(cache.keys):
        arrays = cache.read(index).arrays
        found[key] = {
            name: hashlib.sha256(to_bits(value).tobytes()).hexdigest()[:8] for name, value in arrays.items()
        }
    assert found == CACHED
    assert cache.meta(1)["caption"] == CAPTIONS["man.mp4"]


def test_the_stored_cache_trains(tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool):
    """A model of the same architecture, whose encoders have other weights."""
    settings = ("packing.max_tokens=30", "train.max_steps=2", f"data.cache={STORED_CACHE}", "data.mock=null")
    rows = worlds[2].run(run_training, tiny_variant(CACHED_FOR), tmp_path, settings, {})[0]
    assert [row["samples"] for row in rows] == [2, 2]


@pytest.mark.parametrize(("ema", "digest"), EXPORTED.items())
def test_the_stored_checkpoint_is_exported(ema: bool, digest: str, tmp_path: Path):
    out = export(STORED_CHECKPOINT, tmp_path / "out", ema=ema, dtype="fp32")
    weights = load_file(next(out.glob("*.safetensors")))
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].numpy().tobytes())
    assert found.hexdigest()[:16] == digest


STORED_OPTIONS = json.loads((FIXTURES / "options.json").read_text())


@pytest.mark.parametrize("command", STORED_OPTIONS)
def test_every_stored_option_is_still_there(command: str):
    """By its name or as an alias, and with or without a value as before."""
    from build_reference import list_commands, options_of  # conftest.py puts scripts/ on the path

    found = options_of(list_commands(main)[command])
    stored = STORED_OPTIONS[command]
    assert {name: found.get(name) for name in stored} == stored


def test_a_release_adds_options_and_removes_none():
    from build_reference import add_options, list_commands

    full = add_options({"train": {"--old": True, "--resume": True}, "gone": {"--x": False}})
    assert list(full["train"])[:2] == ["--old", "--resume"]
    assert len(full["train"]) > 2
    assert full["gone"] == {"--x": False}
    assert set(list_commands(main)) < set(full)
