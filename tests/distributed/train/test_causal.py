"""Causal training: every parameter's gradient equals stock diffusers under a dense mask, on every grid and in every setting."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.train.test_datasets import write_cache
from tests.support.causal import stock_causal_gradients
from tests.support.runs import losses, make_run, run_training
from tests.support.steps import Grid, Step, optimizer_step, save_random_lora, worst, zero
from tests.support.world import WorldPool
from wands.attention import layout
from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.attention.units import Unit
from wands.commands.evaluate import evaluate
from wands.config.options import EvaluateOptions
from wands.config.recipe import ObjectiveConfig
from wands.data.collate import PackedBatch
from wands.errors import ConfigError
from wands.files import read_rows
from wands.objectives import causal
from wands.objectives.flow_matching import FlowMatching
from wands.plugin import Plugin
from wands.train import prepare

TOLERANCE = 1e-5  # as in test_gradients.py
STEP = ("train.bins_per_step=2", "packing.max_tokens=48", "flow.weighting=linear")
TEACHER = ("objective.name=teacher_forcing", "objective.chunk_frames=1")
DIFFUSION = ("objective.name=diffusion_forcing", "objective.chunk_frames=1")
RULES = {
    "teacher": TEACHER,
    "teacher, chunks of two": (*TEACHER[:1], "objective.chunk_frames=2", "loss.reduction=token"),
    "teacher, first frame": (
        *TEACHER[:1],
        "objective.chunk_frames=2",
        "objective.independent_first_frame=true",
    ),
    "teacher, window": (
        *TEACHER,
        "objective.window_frames=1",
        "objective.sink_frames=1",
        "objective.context_noise=0.2",
    ),
    "diffusion": DIFFUSION,
    "diffusion, window": (*DIFFUSION, "objective.window_frames=1"),
}
GRIDS = [Grid(1, 1, 1), Grid(1, 2, 1), Grid(1, 3, 1), Grid(1, 1, 2), Grid(1, 2, 2), Grid(2, 1, 1)]


def cell(grid: Grid, rule: str) -> Any:
    """One cell is in the default tier. Those in which each grid and each rule is once are slow, the matrix is in `full`."""
    marks = pytest.mark.slow if GRIDS.index(grid) == [*RULES].index(rule) else pytest.mark.full
    return pytest.param(grid, rule, marks=() if (grid, rule) == (GRIDS[1], "teacher, window") else marks)


CELLS = [cell(grid, rule) for grid, rule in itertools.product(GRIDS, RULES)]


@pytest.mark.parametrize(("grid", "rule"), CELLS, ids=str)
def test_the_gradient_is_that_of_a_dense_mask(
    grid: Grid, rule: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = (*STEP, *RULES[rule])
    ranks = worlds[grid.world_size].run(
        optimizer_step, tiny_pipeline, tmp_path, (*overrides, *grid.overrides), zero(2), torch.float64
    )
    theirs = stock_causal_gradients(
        tiny_pipeline, make_run(tiny_pipeline, tmp_path / "stock", overrides, world_size=1)
    )
    assert all(float(grad.abs().max()) > 0 for grad in theirs.values())
    assert worst(ranks[0].gradients, theirs) <= TOLERANCE


VARIANTS = {
    "wan2.1-i2v-14b": (*TEACHER, "objective.independent_first_frame=true"),
    "wan2.2-ti2v-5b": (*TEACHER, "objective.context_noise=0.1", "flow.i2v_ratio=0.6"),
    "wan2.2-t2v-a14b": (*TEACHER, "model.experts=low"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_the_gradient_of_a_dense_mask(
    name: str, tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    model = tiny_variant(name)
    overrides = (*STEP, *VARIANTS[name])
    theirs = stock_causal_gradients(model, make_run(model, tmp_path, overrides, world_size=1))
    for grid in (Grid(1, 1, 1), Grid(1, 2, 1)):
        ranks = worlds[grid.world_size].run(
            optimizer_step, model, tmp_path, (*overrides, *grid.overrides), zero(3), torch.float64
        )
        assert worst(ranks[0].gradients, theirs) <= TOLERANCE


SETTINGS = {
    "alone": ("packing.enabled=false",),
    "selective": ("model.checkpointing=selective",),
    "full": ("model.checkpointing=full",),
    "offload": ("model.checkpointing=offload",),
    "compiled": ("model.compile=true",),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_gradient_is_the_same_in_every_setting(
    setting: str, lora: bool, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Also with dropout, whose masks follow clip and position."""
    common = (*STEP, *RULES["teacher, window"], "train.bins_per_step=2")
    if lora:
        update = save_random_lora(tiny_pipeline, tmp_path)
        common += ("lora.rank=4", "lora.targets=all-linear", "lora.dropout=0.2", f"lora.init_from={update}")

    def gradients(grid: Grid, stage: int, *more: str) -> dict[str, torch.Tensor]:
        settings = (*common, *grid.overrides, *more)
        ranks = worlds[grid.world_size].run(
            optimizer_step, tiny_pipeline, tmp_path, settings, zero(stage), torch.float64
        )
        return ranks[0].gradients

    alone = gradients(Grid(1, 1, 1), 2)
    assert worst(gradients(Grid(1, 1, 1), 3, *SETTINGS[setting]), alone) <= TOLERANCE
    assert worst(gradients(Grid(1, 1, 2), 2, *SETTINGS[setting]), alone) <= TOLERANCE


SERIES = (
    "data.mock={num_samples: 7, shapes: [[1,2,2],[1,6,6],[3,4,4],[4,4,6],[7,2,2],[5,2,6],[2,2,2]], text_lens: [60,512,30,100,7]}",
    *("packing.max_tokens=48", "train.log_samples=true", "train.max_steps=8", "ema={decay: 0.9}"),
    *("eval.every=4", "eval.max_share=1000", "data.holdout=0.4", "objective.stratify_chunks=true"),
)


def series(grid: Grid, rule: str, worlds: WorldPool, model: Path, out: Path) -> tuple[list, list, dict]:
    """Losses of the steps, rows of the evaluations, and (sigma, loss) of each chunk of the sample log."""
    settings = (*SERIES, *RULES[rule], *grid.overrides)
    rows = worlds[grid.world_size].run(run_training, model, out, settings, zero(2))[0]
    chunks = {}
    for path in out.glob("samples-rank*.jsonl"):
        for row in read_rows(path):
            use = row["step"], row["sample_id"], row["repeat_index"], row.get("chunk")
            assert use not in chunks
            chunks[use] = row["sigma"], row["loss"]
    return losses(rows), read_rows(out / "evaluations.jsonl"), chunks


@pytest.mark.parametrize(
    ("rule", "grid"),
    [
        ("teacher", Grid(1, 2, 1)),
        pytest.param("diffusion", Grid(2, 1, 1), marks=pytest.mark.slow),
        pytest.param("teacher, window", Grid(1, 2, 2), marks=pytest.mark.slow),
        pytest.param("teacher, chunks of two", Grid(2, 1, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_is_the_same_on_every_grid(
    rule: str, grid: Grid, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    alone = series(Grid(1, 1, 1), rule, worlds, tiny_pipeline, tmp_path / "alone")
    spread = series(grid, rule, worlds, tiny_pipeline, tmp_path / "spread")
    assert spread[0] == pytest.approx(alone[0], rel=2e-6)
    assert spread[2].keys() == alone[2].keys()
    for use, (sigma, loss) in alone[2].items():
        assert spread[2][use] == (sigma, pytest.approx(loss, rel=1e-4))
    sigmas = {use[:3]: set() for use in alone[2] if use[3] is not None}
    for use, (sigma, _) in alone[2].items():
        sigmas.get(use[:3], set()).add(sigma)
    assert min(map(len, sigmas.values())) > 1  # every chunk has its own noise level
    for ours, theirs in zip(spread[1], alone[1], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-6)
        of_chunks = [row["by"]["chunk"] for row in (ours, theirs)]
        assert len(of_chunks[0]) > 1
        for one, other in zip(*of_chunks, strict=True):
            assert one["name"] == other["name"]
            assert one["train"] == pytest.approx(other["train"], rel=2e-6)


def test_the_chunks_of_a_clip_make_up_its_held_out_loss(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """All clips have two chunks of equal length, so that the mean of the two is the loss."""
    settings = (
        "data.mock={num_samples: 6, shapes: [[4,4,4]], text_lens: [8]}",
        *("packing.max_tokens=64", "train.max_steps=1", "eval.every=1", "data.holdout=0.4"),
        *("objective.name=teacher_forcing", "objective.chunk_frames=2", "eval.max_share=1000"),
    )
    worlds[1].run(run_training, tiny_pipeline, tmp_path, settings, zero(2))
    for row in read_rows(tmp_path / "evaluations.jsonl"):
        first, second = row["by"]["chunk"]
        assert (first["held_out"] + second["held_out"]) / 2 == pytest.approx(row["held_out"], rel=1e-12)
        assert first["held_out"] != second["held_out"]


@pytest.mark.parametrize(
    "name", ["teacher_forcing", pytest.param("diffusion_forcing", marks=pytest.mark.slow)]
)
def test_one_chunk_is_training_without_chunks_bit_for_bit(
    name: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = ("train.max_steps=3",)
    chunks = (f"objective.name={name}", "objective.chunk_frames=30")
    plain = worlds[2].run(run_training, tiny_pipeline, tmp_path / "plain", settings, zero(2))[0]
    ours = worlds[2].run(run_training, tiny_pipeline, tmp_path / "causal", (*settings, *chunks), zero(2))[0]
    assert losses(ours) == losses(plain)


@pytest.mark.slow
def test_a_resumed_run_continues_bit_for_bit(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    settings = (*RULES["teacher, window"], "packing.max_tokens=48", "checkpoint.every=2", "ema={}")
    whole = worlds[2].run(
        run_training, tiny_pipeline, tmp_path / "whole", (*settings, "train.max_steps=4"), zero(3)
    )[0]
    out = tmp_path / "resumed"
    worlds[2].run(run_training, tiny_pipeline, out, (*settings, "train.max_steps=2"), zero(3))
    rows = worlds[2].run(run_training, tiny_pipeline, out, (*settings, "train.max_steps=4"), zero(3), True)[0]
    assert losses(rows) == losses(whole)


@pytest.mark.slow
def test_a_run_moves_to_other_grids(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    settings = (
        *RULES["teacher, window"],
        "packing.max_tokens=48",
        "checkpoint.every=2",
        "train.bins_per_step=2",
    )
    steps = ("train.max_steps=6",)
    whole = worlds[1].run(run_training, tiny_pipeline, tmp_path / "whole", (*settings, *steps), zero(2))[0]
    out = tmp_path / "moved"
    for number, grid in enumerate((Grid(1, 2, 1), Grid(2, 1, 1), Grid(1, 1, 2))):
        moved = (*settings, *grid.overrides, f"train.max_steps={2 * number + 2}")
        rows = worlds[2].run(run_training, tiny_pipeline, out, moved, zero(2 + number % 2), number > 0)[0]
    assert losses(rows) == pytest.approx(losses(whole), rel=2e-6)


@pytest.mark.slow
def test_both_experts_train_with_teacher_forcing(
    tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    """All chunks of a forward pass are in the range of its expert."""
    model = tiny_variant("wan2.2-t2v-a14b")
    settings = (*TEACHER, "train.max_steps=2", "packing.max_tokens=48", "train.log_samples=true")
    worlds[2].run(run_training, model, tmp_path, settings, zero(2))
    rows = [row for path in tmp_path.glob("samples-rank*.jsonl") for row in read_rows(path)]
    assert {row["expert"] for row in rows} == {"high", "low"}
    assert all((row["sigma"] >= 0.875) == (row["expert"] == "high") for row in rows)
    assert max(row.get("chunk") or 0 for row in rows) > 0


def test_a_causal_run_is_evaluated_by_chunk(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    cache = tmp_path / "cache"
    write_cache(cache, tiny_pipeline, "abcdef", seed=1)
    settings = (
        *(*TEACHER, f"data.cache={cache}", "data.mock=null", "train.max_steps=1"),
        *("packing.max_tokens=200", "checkpoint.every=1"),
    )
    run = tmp_path / "run"
    worlds[1].run(run_training, tiny_pipeline, run, settings, zero(2))
    table = worlds[1].run(evaluated, run, cache)[0]
    assert re.search(r"chunk +chunk 1 ", table)


def evaluated(run: Path, cache: Path) -> str | None:
    with mock.patch.object(prepare, "fingerprint_pipeline", return_value={}):  # as `write_cache`
        return evaluate(EvaluateOptions(model=str(run), data=str(cache)))


def test_two_experts_cannot_force_diffusion(tiny_variant: Callable[[str], Path], tmp_path: Path):
    with pytest.raises(ConfigError, match="has two experts, each for a range of noise levels"):
        make_run(
            tiny_variant("wan2.2-t2v-a14b"), tmp_path, ("objective.name=diffusion_forcing",), world_size=1
        )


class Other(FlowMatching):
    name = "other"


def test_outside_code_and_the_recipe_cannot_both_name_an_objective(tiny_pipeline: Path, tmp_path: Path):
    plugin = Plugin(objective=Other())
    with pytest.raises(
        ConfigError, match="the run has the objective other of outside code; remove one of them"
    ):
        make_run(tiny_pipeline, tmp_path, TEACHER, world_size=1, plugin=plugin)


# ---- mistakes that the comparisons above must find


def mistaken_step(mistake: str, *args: Any) -> Step:
    with MISTAKES[mistake]():
        return optimizer_step(*args)


def changed_units(change: Callable[[Unit, list[Unit]], Unit]) -> Any:
    """Patch the rule of teacher forcing: `change` gets a unit and all units of its sample."""
    right = causal.teacher_forcing_units

    def wrong(grid: tuple[int, int, int], config: ObjectiveConfig) -> tuple[Unit, ...]:
        units = right(grid, config)
        return tuple(change(unit, list(units)) for unit in units)

    return mock.patch.object(causal, "teacher_forcing_units", wrong)


def sees_own_copy(unit: Unit, units: list[Unit]) -> Unit:
    if unit.is_context or not any(one.is_context and one.chunk == unit.chunk for one in units):
        return unit
    own = units.index(unit)
    return unit._replace(sees=((0, unit.chunk + 1), (own, own + 1)))


def sees_later(unit: Unit, units: list[Unit]) -> Unit:
    return unit._replace(sees=((0, len(units)),)) if unit.is_context else unit


def sees_another_clip() -> Any:
    def wrong(samples: Any) -> Any:
        visible = right(samples)
        return tuple(
            (unit, 0, end) if first == min(f for _, f, _ in visible[-2:]) else (unit, first, end)
            for unit, first, end in visible
        )

    right = layout.join_visible
    return mock.patch.object(layout, "join_visible", wrong)


def shifted_rotation() -> Any:
    """The noisy copy follows the clean one in time."""
    right = PackedBatch._meta

    def wrong(self: PackedBatch, own: ContextLayout) -> PackedMeta:
        meta = right(self, own)
        is_noisy = torch.tensor([not unit.is_context for units in own.samples for unit in units])[
            own.unit_ids
        ]
        positions = meta.positions.clone()
        positions[is_noisy, 0] += 5
        return replace(meta, positions=positions)

    return mock.patch.object(PackedBatch, "_meta", wrong)


def loss_on_context() -> Any:
    return changed_units(lambda unit, _: unit._replace(is_context=False))


MISTAKES = {
    "a noisy chunk sees its clean copy": lambda: changed_units(sees_own_copy),
    "a clean chunk sees later chunks": lambda: changed_units(sees_later),
    "a clip sees another": sees_another_clip,
    "wrong positions": shifted_rotation,
    "loss on the clean copy": loss_on_context,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_seen(mistake: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    overrides = (*STEP, *RULES["teacher"])
    ranks = worlds[1].run(mistaken_step, mistake, tiny_pipeline, tmp_path, overrides, zero(2), torch.float64)
    theirs = stock_causal_gradients(
        tiny_pipeline, make_run(tiny_pipeline, tmp_path / "stock", overrides, world_size=1)
    )
    assert worst(ranks[0].gradients, theirs) > 100 * TOLERANCE
