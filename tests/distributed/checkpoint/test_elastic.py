"""A run that is resumed with another number of processes, ZeRO stage or grid ends like the run without a change."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.runs import losses, make_run, run_training, weights
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import find_checkpoint, load_average
from wands.checkpoint.fragment_files import FragmentFiles
from wands.data import sampler
from wands.data.packing import EpochPlan, plan_epoch
from wands.files import read_rows

Cell = tuple[int, int, str]
"""Number of processes, ZeRO stage, grid."""

GRIDS = {
    "dp": (),
    "ulysses": ("parallel.ulysses_degree={}",),
    "ring": ("parallel.ring_degree={}",),
    "ring x ulysses": ("parallel.ulysses_degree=2", "parallel.ring_degree=2"),
    "tensor": ("parallel.tensor_degree={}",),
    "dp x tensor": ("parallel.tensor_degree=2",),
    "ring x tensor": ("parallel.ring_degree=2", "parallel.tensor_degree=2"),
}
CELLS: list[Cell] = [
    *((1, stage, "dp") for stage in range(4)),
    *((2, stage, grid) for stage in range(4) for grid in ("dp", "ulysses", "ring", "tensor")),
    *((4, stage, grid) for stage in range(4) for grid in GRIDS),
]
TOLERANCE = 2e-6
STEPS = ("train.bins_per_step=4", "optim.lr=1e-4", "optim.warmup=4", "flow.cfg_dropout=0.3", "ema.decay=0.9")
KINDS = {
    "full": ("wan2.1-t2v-1.3b", ()),
    "lora": ("wan2.1-t2v-1.3b", ("lora.rank=4", "optim.lr=1e-3")),
    "two experts": ("wan2.2-t2v-a14b", ("model.experts=both",)),
}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100}}


def go_on(worlds: WorldPool, model: Path, out: Path, cell: Cell, until: int, *more: str) -> list[float]:
    """Train to a step in the world of a cell, from the newest checkpoint if there is one, and return the loss series."""
    world_size, stage, grid = cell
    overrides = (
        *STEPS,
        *(text.format(world_size) for text in GRIDS[grid]),
        *more,
        f"train.max_steps={until}",
    )
    resume = (out / "checkpoints").is_dir()
    return losses(worlds[world_size].run(run_training, model, out, overrides, zero(stage), resume)[0])


def deviation(ours: list[float], theirs: list[float]) -> float:
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    print(f"worst relative difference of the loss: {worst:.2e}")
    return worst


@pytest.fixture(scope="module")
def undisturbed(
    tiny_variant: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool
) -> Callable[..., tuple[Path, list[float]]]:
    """Folder and loss series of some steps, twenty by default, in one process at ZeRO-0."""

    @cache
    def of_kind(kind: str, steps: int = 20) -> tuple[Path, list[float]]:
        variant, more = KINDS[kind]
        out = tmp_path_factory.mktemp("undisturbed")
        return out, go_on(worlds, tiny_variant(variant), out, (1, 0, "dp"), steps, *more)

    return of_kind


ROUTE: list[Cell] = [(4, 3, "dp"), (2, 2, "dp"), (1, 1, "dp"), (4, 0, "ring"), (2, 3, "ulysses")]
"""4 -> 2 -> 1 -> 4 processes, dp -> ring -> Ulysses, every ZeRO stage."""
TENSOR_ROUTE: list[Cell] = [
    (2, 3, "tensor"),
    (1, 1, "dp"),
    (4, 2, "dp x tensor"),
    (4, 0, "tensor"),
    (2, 1, "dp"),
]
"""Tensor degree 2 -> 1 -> 2 -> 4 -> 1, every ZeRO stage."""
SHORT_ROUTE: list[Cell] = [(2, 3, "ring"), (1, 1, "dp"), (2, 2, "ulysses")]


@pytest.mark.parametrize(
    ("route", "steps_in_a_cell"),
    [
        pytest.param(SHORT_ROUTE, 2, id="short"),
        pytest.param(ROUTE, 4, id="context", marks=pytest.mark.slow),
        pytest.param(TENSOR_ROUTE, 4, id="tensor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "kind", ["full", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lora", "two experts"))]
)
def test_a_run_that_moves_is_the_run_that_stays(
    kind: str,
    route: list[Cell],
    steps_in_a_cell: int,
    undisturbed,
    tiny_variant,
    tmp_path: Path,
    worlds: WorldPool,
):
    variant, more = KINDS[kind]
    steps = steps_in_a_cell * len(route)
    stayed, series = undisturbed(kind, steps)
    for until, cell in zip(range(steps_in_a_cell, steps + 1, steps_in_a_cell), route, strict=True):
        moved = go_on(worlds, tiny_variant(variant), tmp_path, cell, until, *more)
    assert len(set(series)) == steps
    assert deviation(moved, series) < TOLERANCE
    if kind == "full":
        theirs = weights(stayed)
        for name, value in weights(tmp_path).items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)
        ours, theirs = (load_average(find_checkpoint(out)[0] / "transformer") for out in (tmp_path, stayed))
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_moves_at_every_step(
    kind: str, undisturbed, tiny_variant, tmp_path: Path, worlds: WorldPool
):
    """Each step in another cell, in an order in which neighbors have nothing in common more often than not."""
    variant, more = KINDS[kind]
    for number, cell in enumerate(random.Random(0).sample(CELLS, 20), start=1):
        moved = go_on(worlds, tiny_variant(variant), tmp_path, cell, number, *more)
    assert deviation(moved, undisturbed(kind)[1]) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", CELLS, ids=str)
def test_every_move(first: Cell, kind: str, undisturbed, tiny_variant, tmp_path: Path, worlds: WorldPool):
    (variant, more) = KINDS[kind]
    (_, series) = undisturbed(kind)
    worst = dict[Cell, float]()
    go_on(worlds, tiny_variant(variant), tmp_path / "first", first, 10, *more)
    for second in CELLS:
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        moved = go_on(worlds, tiny_variant(variant), tmp_path / "second", second, 20, *more)
        worst[second] = deviation(moved, series)
        shutil.rmtree(tmp_path / "second")
    print("worst", max((value, cell) for cell, value in worst.items()))
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.slow
def test_states_that_start_again_would_be_seen(undisturbed, tiny_variant, tmp_path: Path, worlds: WorldPool):
    """The tolerance is far below what a lost optimizer state makes."""
    model = tiny_variant("wan2.1-t2v-1.3b")
    series = undisturbed("full")[1]
    go_on(worlds, model, tmp_path, (1, 2, "dp"), 10)
    forgotten = worlds[1].run(forget, model, tmp_path)[0]
    assert deviation(forgotten, series) > 10 * TOLERANCE


def forget(model: Path, out: Path) -> list[float]:
    def read(self: FragmentFiles, wanted: Any) -> None:
        read_all(self, {name: place for name, place in wanted.items() if "exp_avg" not in name})

    read_all = FragmentFiles.read
    with mock.patch.object(FragmentFiles, "read", read):
        return losses(run_training(model, out, (*STEPS, "train.max_steps=20"), zero(2), True))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_values(stage: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    """One bias of 16 values on four ranks: DeepSpeed gives all of them to the first ranks."""
    few = ("model.trainable=['patch_embedding.bias']", "ema=null")
    for number, cell in enumerate(((4, stage, "dp"), (1, 0, "dp"), (4, stage, "dp")), start=1):
        moved = go_on(worlds, tiny_pipeline, tmp_path / "moved", cell, 2 * number, *few)
    stayed = go_on(worlds, tiny_pipeline, tmp_path / "stayed", (1, 0, "dp"), 6, *few)
    assert deviation(moved, stayed) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_checkpoint_before_the_first_update(
    optimizer: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """All clips of the first step are excluded, so at ZeRO-0 the optimizer has no states yet."""
    sampler = make_run(tiny_pipeline, tmp_path, (*STEPS, data(40)), zero(0), world_size=1).schedule.sampler
    keys = sorted({sampler.keys[i] for bin in sampler.step_plan(0).bins for i in bin})
    more = (data(40), f"data.exclude={json.dumps(keys)}", f"optim.name={optimizer}", "ema=null")
    stayed = go_on(worlds, tiny_pipeline, tmp_path / "stayed", (1, 0, "dp"), 4, *more)
    for cell in ((1, 0, "dp"), (2, 2, "dp")):
        out = tmp_path / f"zero{cell[1]}"
        go_on(worlds, tiny_pipeline, out, (1, 0, "dp"), 1, *more)
        assert deviation(go_on(worlds, tiny_pipeline, out, cell, 4, *more)[1:], stayed[1:]) < TOLERANCE
    assert stayed[0] == 0


# ---- other optimizers

MOVES = {
    # Muon's orthogonalization may amplify differences of 1e-7 in the gradients; seen were 1e-7, and 2e-6 with 8 bits.
    "muon": (1e-5, [(2, 3, "dp"), (1, 1, "dp"), (4, 2, "dp"), (2, 0, "ring")]),
    "adamw8bit": (2e-5, [(2, 3, "dp"), (1, 1, "dp"), (4, 2, "dp"), (2, 0, "ring")]),
    "adafactor": (TOLERANCE, [(2, 0, "dp"), (1, 0, "dp"), (4, 0, "ring")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", MOVES)
def test_another_optimizer_moves(optimizer: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    more = (f"optim.name={optimizer}", "ema=null", "optim.grad_clip=0")
    tolerance, cells = MOVES[optimizer]
    for number, cell in enumerate(cells, start=1):
        moved = go_on(worlds, tiny_pipeline, tmp_path / "moved", cell, 5 * number, *more)
    stayed = go_on(worlds, tiny_pipeline, tmp_path / "stayed", cells[0], 5 * len(cells), *more)
    assert deviation(moved, stayed) < tolerance


# ---- changed data


def data(num_samples: int) -> str:
    shapes = "[[2,4,4],[3,4,4],[2,2,2],[4,4,6],[1,4,6]]"
    text_lens = "[5,9,3]"
    return f"data.mock={{num_samples: {num_samples}, shapes: {shapes}, text_lens: {text_lens}}}"


def train_with_other_plans(model: Path, out: Path, overrides: tuple[str, ...]) -> str | None:
    """Go on as another version of wands would, which plans the steps of every epoch in another order.

    Return what the start block says of the data.
    """

    def plan(*args: Any, **kwargs: Any) -> EpochPlan:
        planned = plan_epoch(*args, **kwargs)
        return replace(planned, steps=planned.steps[::-1])

    with mock.patch.object(sampler, "plan_epoch", plan):
        change = make_run(model, out, overrides, zero(2), checkpoint=find_checkpoint(out)).data_change
        run_training(model, out, overrides, zero(2), resume=True)
    return change


def uses_of(out: Path) -> dict[int, dict[tuple[str, int], float]]:
    """The uses of samples in each step: (sample, epoch) -> sigma."""
    steps: dict[int, dict[tuple[str, int], float]] = {}
    for path in out.glob("samples-rank*.jsonl"):
        for row in read_rows(path):
            steps.setdefault(row["step"], {})[row["sample_id"], row["epoch"]] = row["sigma"]
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "cell"),
    [
        pytest.param(23, (1, 0, "dp"), id="added"),
        pytest.param(18, (2, 2, "dp"), id="removed", marks=pytest.mark.slow),
    ],
)
def test_changed_data_counts_from_the_next_epoch(
    number: int, cell: Cell, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """After two of the five steps of an epoch, clips are added or removed. The epoch ends as it was planned."""
    more = ("train.log_samples=true", "train.bins_per_step=2", "ema=null")
    for out, until, clips in (
        ("stays", 12, 20),
        ("changes", 2, 20),
        ("changes", 4, number),
        ("changes", 12, number),
    ):
        series = go_on(worlds, tiny_pipeline, tmp_path / out, cell, until, *more, data(clips))
    before = uses_of(tmp_path / "stays")
    after = uses_of(tmp_path / "changes")
    if number > 20:
        stayed = losses(read_rows(tmp_path / "stays" / "metrics.jsonl"))
        assert series[:5] == stayed[:5]
        assert series[5] != stayed[5]
    kept = {f"mock-{i:06d}" for i in range(number)}
    for step in range(1, 6):
        planned = before[step].items()
        assert after[step] == {use: sigma for use, sigma in planned if step <= 2 or use[0] in kept}
    assert sorted(key for step in after.values() for key, epoch in step if epoch == 1) == sorted(kept)
    sigmas = {use: sigma for step in before.values() for use, sigma in step.items()}
    for step in after.values():  # the noise of the other clips did not change
        assert all(sigmas.get(use, sigma) == sigma for use, sigma in step.items())
    assert find_checkpoint(tmp_path / "changes").state.data_start == (1, 5)


@pytest.mark.parametrize("saved", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_another_plan_counts_from_the_next_epoch(
    saved: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """A version of wands that packs in another way must not repeat or skip clips of the epoch in which it resumes."""
    more = (
        "train.log_samples=true",
        "train.bins_per_step=2",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        data(20),
    )
    for out in ("stays", "changes"):
        until = 10 if out == "stays" else saved
        settings = (*more, f"train.max_steps={until}")
        worlds[1].run(run_training, tiny_pipeline, tmp_path / out, settings, zero(2))
    settings = (*more, "train.max_steps=10")
    change = worlds[1].run(train_with_other_plans, tiny_pipeline, tmp_path / "changes", settings)[0]
    assert "packs the clips in another way, which takes effect at step 6" in (change or "")
    before = uses_of(tmp_path / "stays")
    after = uses_of(tmp_path / "changes")
    for step in range(1, 6):
        assert after[step] == before[step]
    # The second epoch has the other order, and the same clips.
    assert [before[step] for step in range(10, 5, -1)] == [after[step] for step in range(6, 11)]
    assert find_checkpoint(tmp_path / "changes").state.data_start == (1, 5)
