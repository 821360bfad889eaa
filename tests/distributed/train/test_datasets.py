"""Training on several caches: each step from the step number alone, the same on any number of ranks, named in the start block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.runs import losses, make_run, run_training, weights
from wands.data.cache.reader import CacheWriter
from wands.errors import DataError
from wands.train.summary import start_block

STEPS = 8


def write_cache(
    path: Path, model: Path, names: str, seed: int, licenses: dict[str, str] | None = None
) -> None:
    """Clips of 4 to 20 tokens."""
    run = make_run(model, path, world_size=1)
    draw = torch.Generator().manual_seed(seed)
    with CacheWriter(path, run.model.variant, {}, max_samples=2) as writer:
        for number, name in enumerate(names):
            latents = torch.randn(
                run.model.shape.in_channels, 1 + number % 5, 4, 4, generator=draw
            ).bfloat16()
            text = torch.randn(3, run.model.shape.text_dim, generator=draw).bfloat16()
            meta = {"num_frames": 1, "fps": 16.0, "content": "c", "license": (licenses or {}).get(name, "")}
            writer.add(name, {"latents": latents, "text_embeds": text}, meta)
        writer.commit(torch.zeros(1, run.model.shape.text_dim, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def overrides(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two sources, of which one shares a name with the other; one and a half visits to one, a half to the other."""
    folder = tmp_path_factory.mktemp("caches")
    write_cache(folder / "a", tiny_pipeline, "abcdefg", 1)
    write_cache(folder / "b", tiny_pipeline, "axyz", 2)
    sources = f"[{{path: {folder / 'a'}, repeat: 1.5}}, {{path: {folder / 'b'}, repeat: 0.5}}]"
    return (
        *("data.mock=null", f"data.sources={sources}", "packing.buffer_size=5"),
        *("train.log_samples=true", f"train.max_steps={STEPS}"),
    )


def visited(run_dir: Path, step: int) -> set[tuple[str, int, int, float]]:
    rows = [json.loads(line) for path in run_dir.glob("samples-rank*.jsonl") for line in path.open()]
    found = [
        (row["sample_id"], row["repeat_index"], row["epoch"], row["sigma"])
        for row in rows
        if row["step"] == step
    ]
    assert len(set(found)) == len(found) > 0
    return set(found)


@pytest.mark.slow
def test_a_run_on_two_sources_resumed_is_the_run(tiny_pipeline: Path, overrides, tmp_path: Path, run_world):
    once = tmp_path / "once"
    twice = tmp_path / "twice"
    whole, *_ = run_world(2, run_training, tiny_pipeline, once, overrides)
    run_world(2, run_training, tiny_pipeline, twice, (*overrides, "train.max_steps=5"))
    resumed, *_ = run_world(2, run_training, tiny_pipeline, twice, overrides, None, True)
    assert len(whole) == STEPS
    assert whole[-1]["epoch"] > whole[4]["epoch"]  # it stopped in an earlier epoch than the last
    assert losses(resumed) == losses(whole)
    for name, value in weights(once).items():
        assert torch.equal(value, weights(twice)[name]), name
    alone = make_run(tiny_pipeline, tmp_path / "alone", overrides, world_size=1).schedule.sampler
    for plan in alone.iterate():  # the same samples at another dp size
        planned = {
            (alone.keys[i], o)
            for bin in plan.bins
            for i, o in zip(bin, plan.repeat_indices(bin), strict=True)
        }
        assert visited(once, plan.step + 1) == visited(twice, plan.step + 1)
        assert {(name, o) for name, o, *_ in visited(once, plan.step + 1)} == planned
    names = {name for step in range(1, STEPS + 1) for name, *_ in visited(once, step)}
    assert {"a", *"bcdefgxyz"} < names
    assert len([name for name in names if name.startswith("a#")]) == 1


def test_the_start_block_names_sources_and_split(tiny_pipeline: Path, overrides, tmp_path: Path):
    run = make_run(tiny_pipeline, tmp_path, (*overrides, "data.holdout=0.4"), world_size=1)
    lines = [line.strip() for line in start_block(run).splitlines()]
    held = sum(len(part.data.keys) - len(part.chosen) for part in run.data.sources)
    assert 0 < held < 11
    assert f"split train (data.holdout=0.4): {11 - held} clips to train on, {held} held out" in lines
    first = next(line for line in lines if line.startswith("data"))
    assert first.endswith(f"/a: {len(run.data.sources[0].chosen)} clips, each used 1.5 times per epoch")
    plan = run.schedule.sampler.epoch_plan(0)
    rows = [i for step in plan.steps for bin in step for i in bin]
    assert f"epoch 0: {len(rows)} samples, {run.schedule.num_tokens[rows].sum()} tokens" in lines


def test_other_visits_are_other_data(tiny_pipeline: Path, overrides, tmp_path: Path):
    """The fingerprint, which a resumed run compares, changes with everything that decides which samples form a step."""
    found = set()
    for old, new in (("1.5", "1.5"), ("1.5", "1.25"), ("0.5", "0.75"), ("1.5", "2")):
        changed = tuple(item.replace(f"repeat: {old}", f"repeat: {new}") for item in overrides)
        found.add(make_run(tiny_pipeline, tmp_path, changed, world_size=1).identity.fingerprint)
    found.add(
        make_run(tiny_pipeline, tmp_path, (*overrides, "data.holdout=0.4"), world_size=1).identity.fingerprint
    )
    assert len(found) == 5


def test_as_many_samples_as_ranks_in_every_epoch(tiny_pipeline: Path, overrides, tmp_path: Path):
    few = tuple(item.replace("repeat: 1.5", "repeat: 0.3") for item in overrides)  # 2 + 2 of each epoch
    make_run(tiny_pipeline, tmp_path, (*few, "train.bins_per_step=4"), world_size=4)
    with pytest.raises(DataError, match="data has 4 samples, fewer than the 5 data-parallel ranks"):
        make_run(tiny_pipeline, tmp_path, (*few, "train.bins_per_step=5"), world_size=5)
