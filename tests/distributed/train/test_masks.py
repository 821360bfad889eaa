"""Masks through the trainer: packed next to clips without one, on any grid, the step is the weighted loss of each clip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.distributed.train.test_context import TOLERANCE, check_step
from tests.support.runs import make_run
from tests.support.samples import sample_of
from tests.support.steps import GRIDS, Grid, Step, optimizer_step, stock_gradients, worst, zero
from tests.support.world import WorldPool
from wands.data.cache.reader import CacheWriter
from wands.data.collate import PackedBatch
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.flow.rng import SampleKey, rng
from wands.patches import grid_size
from wands.run import schedule
from wands.train.evaluation import measure
from wands.train.evaluation_plan import plan_evaluation

SHAPES = ((1, 2, 2), (1, 10, 10), (1, 6, 6), (7, 2, 2), (5, 2, 6), (3, 2, 4))
MASKED = (1, 3, 4)


def write_cache(path: Path, model: Path, kind: str) -> tuple[str, ...]:
    """Clips of 1, 25, 9, 7, 15 and 6 tokens, and the overrides that train on them in one bin.

    Args:
        kind: "masks": three clips have a random mask; "ones": all have a mask of ones; "none": no clip has a mask.
    """
    run = make_run(model, path, world_size=1)
    draw = torch.Generator().manual_seed(3)
    with CacheWriter(path, run.model.variant, {}) as writer:
        for number, shape in enumerate(SHAPES):
            latents = torch.randn(run.model.shape.out_channels, *shape, generator=draw).bfloat16()
            text = torch.randn(100 + 80 * number, run.model.shape.text_dim, generator=draw).bfloat16()
            images: dict[str, torch.Tensor] = {}
            if run.model.shape.condition_channels:
                images["image_latents"] = torch.randn(latents.shape, generator=draw).bfloat16()
            if width := run.model.shape.image_dim:
                images["image_embeds"] = torch.randn(
                    run.model.shape.image_len, width, generator=draw
                ).bfloat16()
            weights = torch.rand(grid_size(shape, run.model.shape.patch_size), generator=draw)
            weights = (weights - 0.3).clamp(min=0).bfloat16()
            masks = {"masks": weights if number in MASKED else None, "ones": torch.ones_like(weights)}
            meta = {"num_frames": 4 * shape[0] - 3, "fps": 16.0, "content": f"c{number}"}
            sample = sample_of(f"clip-{number}", latents, text, token_weights=masks.get(kind), **images)
            writer.add(sample.sample_id, sample.arrays, meta)
        writer.commit(torch.randn(1, run.model.shape.text_dim, generator=draw).bfloat16())
    return (
        *("data.mock=null", "packing.max_tokens=63", "train.max_steps=1", "train.bins_per_step=1"),
        *("flow.weighting=linear", f"data.sources=[{{path: {path}, loss_weight: 0.5}}]"),
    )


@pytest.fixture(scope="module")
def masked(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return write_cache(tmp_path_factory.mktemp("masks") / "cache", tiny_pipeline, "masks")


@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_one_process_is_stock_diffusers_clip_by_clip(
    masked: tuple[str, ...], reduction: str, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    overrides = (*masked, f"loss.reduction={reduction}")
    [ours] = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(2), torch.float64)
    run = make_run(tiny_pipeline, tmp_path, overrides, world_size=1)
    assert worst(ours.gradients, stock_gradients(tiny_pipeline, run)) <= TOLERANCE


@pytest.mark.parametrize(
    ("grid", "stage", "reduction", "verify"),
    [
        (Grid(1, 1, 2), 3, "token", "false"),
        *(
            pytest.param(grid, 1 + number % 3, reduction, "false", marks=pytest.mark.full)
            for number, grid in enumerate(GRIDS[1:])
            for reduction in ("sample", "token")
        ),
    ],
    ids=str,
)
def test_any_grid_is_one_process(
    masked: tuple[str, ...],
    grid: Grid,
    stage: int,
    reduction: str,
    verify: str,
    worlds: WorldPool,
    tiny_pipeline: Path,
    tmp_path: Path,
):
    overrides = (*masked, f"loss.reduction={reduction}", f"train.bins_per_step={grid.dp}")
    one = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(0))[0]
    spread = (*overrides, *grid.overrides, f"data.verify={verify}")
    ranks = worlds[grid.world_size].run(optimizer_step, tiny_pipeline, tmp_path, spread, zero(stage))
    assert check_step(ranks, one) <= TOLERANCE


def tier_of(kind: tuple[str, str], grid: Grid) -> tuple[pytest.MarkDecorator, ...]:
    """One process by token, a ring by sample; the larger grids only in the exhaustive matrix."""
    if grid.world_size > 2:
        return (pytest.mark.full,)
    return () if (kind[1] == "token") == (grid == Grid(1, 1, 1)) else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("name", "reduction", "grid"),
    [
        pytest.param(*kind, grid, marks=tier_of(kind, grid), id=f"{kind[0]}-{kind[1]}-{grid}")
        for kind in (("wan2.2-ti2v-5b", "sample"), ("wan2.2-ti2v-5b", "token"), ("wan2.1-i2v-14b", "token"))
        for grid in (Grid(1, 1, 1), Grid(1, 2, 1), *GRIDS[4:])
    ],
)
def test_with_given_frames_it_is_stock_diffusers_clip_by_clip(
    name: str,
    reduction: str,
    grid: Grid,
    worlds: WorldPool,
    tiny_variant: Callable[[str], Path],
    tmp_path: Path,
):
    """A first frame that TI2V is given counts neither in the loss nor in its divisors, whatever its mask is."""
    model = tiny_variant(name)
    ratio = 0.6 if "ti2v" in name else 0.0
    settings = [*write_cache(tmp_path / "cache", model, "masks"), f"loss.reduction={reduction}"]
    settings += [f"train.bins_per_step={grid.dp}", *([f"flow.i2v_ratio={ratio}"] if ratio else [])]
    run = make_run(model, tmp_path, tuple(settings), world_size=1)
    args = (model, tmp_path, (*settings, *grid.overrides), zero(2), torch.float64)
    ranks = worlds[grid.world_size].run(optimizer_step, *args)
    assert worst(ranks[0].gradients, stock_gradients(model, run)) <= TOLERANCE
    if reduction == "sample":
        return
    mean = 0.0
    count = 0.0
    given = set()
    for number, shape in enumerate(SHAPES):
        weights = run.data.read(number).arrays.get("token_weights")
        weights = torch.ones(shape[0], shape[1] // 2, shape[2] // 2) if weights is None else weights.double()
        first = float(weights[0].sum()) if shape[0] > 1 else 0.0
        is_given = run.collator([run.data.read(number)], [0], 0).num_cond_tokens[0] > 0
        given |= {is_given} if number in MASKED[1:] else set()
        mean += float(weights.sum()) - ratio * first
        count += float(weights.sum()) - is_given * first
    plan = run.schedule.sampler.step_plan(0)
    assert (run.schedule.denominator(plan), run.schedule.count(plan)) == pytest.approx(
        (mean, count), rel=1e-12
    )
    assert given == ({True, False} if ratio else {False})  # masked clips with and without a given frame


def test_a_mask_of_ones_is_bitwise_no_mask(worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path):
    steps: list[Step] = []
    for kind in ("none", "ones"):
        overrides = (*write_cache(tmp_path / kind, tiny_pipeline, kind), "loss.reduction=token")
        steps += worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(0))
    none, ones = steps
    assert (none.digest, none.loss, none.grad_norm, none.clips) == (
        ones.digest,
        ones.loss,
        ones.grad_norm,
        ones.clips,
    )
    assert all(torch.equal(ones.gradients[name], grad) for name, grad in none.gradients.items())


def evaluate_zeros(*args: Any) -> list[tuple[str, str, int, float, float]]:
    """(key, kind, quantile, loss, expected loss) of each sample of an evaluation, of a model whose velocity is 0."""
    run = make_run(*args)
    rank, _, device = init_process_group()
    model = run.model
    samples = plan_evaluation(run).samples(model.experts, model.variant, run.data, run.held_out)
    losses = measure(
        {"transformer": lambda tokens, **_: torch.zeros_like(tokens)},
        samples,
        run.objective,
        run.collator,
        max_tokens=run.recipe.packing.max_tokens,
        groups=ProcessGroups.build(run.grid(rank), device),
        device=device,
    )
    found = []
    for sample, loss in zip(samples, losses or (), strict=True):
        clip = sample.row[0].read(sample.row[1])
        batch = run.collator([clip], [0], 0)
        noise = rng(0, SampleKey(clip.sample_id, sample.quantile, -1), "noise")
        target = torch.from_numpy(noise.standard_normal(batch.tokens.shape, dtype=np.float32)) - batch.tokens
        weights = clip.arrays.get("token_weights", torch.ones(batch.grid_sizes[0].tolist()))
        weights = weights.double().flatten()
        if sample.kind == "first frame":
            weights[: len(weights) // batch.grid_sizes[0][0]] = 0
        expected = (target.double().square().mean(1) * weights).sum() / weights.sum()
        found.append((clip.sample_id, sample.kind, sample.quantile, loss.loss, float(expected)))
    return found


@pytest.mark.parametrize(
    "grid", [pytest.param(Grid(1, 1, 1), marks=pytest.mark.slow), Grid(1, 2, 1)], ids=str
)
def test_held_out_losses_are_weighted(
    grid: Grid, worlds: WorldPool, tiny_variant: Callable[[str], Path], tmp_path: Path
):
    model = tiny_variant("wan2.2-ti2v-5b")
    overrides = (*write_cache(tmp_path / "cache", model, "masks"), *grid.overrides, "flow.i2v_ratio=0.5")
    overrides += ("data.holdout=0.5", "eval.every=1", "eval.max_share=1000")
    for found in worlds[grid.world_size].run(evaluate_zeros, model, tmp_path, overrides, zero(0)):
        assert [loss for *_, loss, _ in found] == pytest.approx(
            [expected for *_, expected in found], rel=1e-6
        )
        kinds = {(int(name.removeprefix("clip-")) in MASKED, kind) for name, kind, *_ in found}
        assert kinds == {(masked, kind) for masked in (True, False) for kind in ("text", "first frame")}


# ---- the same mistakes, made on purpose


def not_sliced() -> Any:
    right = PackedBatch.rank_slice

    def wrong(batch: PackedBatch, layout: Any) -> Any:
        from dataclasses import replace

        part = right(batch, layout)
        return replace(part, token_weights=batch.token_weights[: len(part.token_weights)])

    return mock.patch.object(PackedBatch, "rank_slice", wrong)


MISTAKES = {
    "weights not sliced": not_sliced,
    "sum not weighted": lambda: mock.patch.object(
        PackedBatch, "trained_lens", property(lambda self: self.seq_lens)
    ),
    "denominator not weighted": lambda: mock.patch.object(
        schedule, "unmasked_tokens", lambda data, grids: grids.prod(axis=1).astype(float)
    ),
}


def wrong_step(mistake: str, *args: Any) -> Step:
    with MISTAKES[mistake]():
        return optimizer_step(*args)


@pytest.mark.slow
def test_a_mistake_would_be_seen(
    masked: tuple[str, ...], worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    for mistake, reduction in zip(MISTAKES, ("sample", "sample", "token"), strict=True):
        overrides = (*masked, f"loss.reduction={reduction}")
        one = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(0))[0]
        args = (tiny_pipeline, tmp_path, (*overrides, *Grid(1, 1, 2).overrides), zero(2))
        ranks = worlds[2].run(wrong_step, mistake, *args)
        assert worst(ranks[0].gradients, one.gradients) > 1e3 * TOLERANCE, mistake
