"""Context parallelism through the trainer: whatever the ranks share, the step is that of one process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.context_runs import TWO_BY_TWO
from tests.support.runs import make_run
from tests.support.steps import (
    CHECKPOINTING,
    DS_CONFIGS,
    GRIDS,
    MATRIX,
    PAIRWISE,
    Case,
    Grid,
    Step,
    errors,
    optimizer_step,
    stock_gradients,
    worst,
    zero,
)
from tests.support.world import WorldPool
from wands.attention import ring
from wands.attention.layout import ContextLayout
from wands.data.collate import PackedBatch, RankSlice
from wands.distributed import dims
from wands.flow import noise as noise_module
from wands.flow.rng import SampleKey, rng
from wands.objectives import flow_matching

# Of every parameter, on the scale of `steps.errors`, in float32 and in float64 (whose blocks round to float32 inside).
TOLERANCE = 1e-5

# Five clips of 1, 25, 9, 7 and 15 tokens, all of them in the first step. The first is shorter than any ring, all are odd, so
# that rows have tails, and six bins leave one empty.
CLIPS = (
    "data.mock={num_samples: 5, shapes: [[1,2,2],[1,10,10],[1,6,6],[7,2,2],[5,2,6]], text_lens: [100,512,200,300,150]}",
    "packing.max_tokens=57",
    "train.max_steps=1",
    "train.bins_per_step=1",
    "flow.weighting=linear",
)
# Cells of the pairwise table in which each value of each axis and each degree is; the other cells are slow.
FEW = tuple(
    case
    for case in PAIRWISE
    if (case.grid, case.ds_name)
    in {
        (Grid(2, 1, 1), "zero3_offload"),
        (Grid(1, 1, 2), "zero2"),
        (Grid(2, 2, 1), "cpu"),
        (Grid(1, 2, 2), "zero3"),
    }
)


@pytest.fixture(scope="module")
def single(
    worlds: WorldPool, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Step]:
    """The same clips in one process without ZeRO, in as many bins as the cells have."""
    out = tmp_path_factory.mktemp("single")
    return {
        bins: worlds[1].run(
            optimizer_step, tiny_pipeline, out, (*CLIPS, f"train.bins_per_step={bins}"), zero(0)
        )[0]
        for bins in sorted({case.bins_per_step for case in MATRIX})
    }


def check_step(ranks: list[Step], one_process: Step) -> float:
    """Compare everything but the gradient, whose error is returned."""
    assert len({rank.digest for rank in ranks}) == 1  # after the update
    for rank in ranks:
        assert rank.loss == pytest.approx(one_process.loss, rel=1e-6)
        assert rank.grad_norm == pytest.approx(one_process.grad_norm, rel=1e-6)
    found = [item for rank in ranks for item in rank.clips.items()]
    assert {name for name, _ in found} == one_process.clips.keys()
    for name, value in found:
        assert value == pytest.approx(one_process.clips[name], rel=1e-6), name
    return worst(ranks[0].gradients, one_process.gradients)


# ---- the data and the matrix are what they say


def test_the_step_has_what_is_hard(tiny_pipeline: Path, tmp_path: Path):
    def job_of(bins: int) -> Any:
        return make_run(tiny_pipeline, tmp_path, (*CLIPS, f"train.bins_per_step={bins}"), world_size=1)

    run = job_of(1)
    lens = run.schedule.num_tokens.tolist()
    assert sorted(lens) == [1, 7, 9, 15, 25]
    assert sorted(run.schedule.sampler.step_plan(0).bins[0]) == list(range(5))
    assert [len(bins) for bins in job_of(6).schedule.sampler.step_plan(0).bins].count(0) == 1
    order = [lens[i] for i in run.schedule.sampler.step_plan(0).bins[0]]
    ranks = [ContextLayout.build(order, ulysses_degree=2, ring_degree=2, cp_rank=rank) for rank in range(4)]
    assert any(rank.num_valid < rank.num_tokens for rank in ranks)
    assert any(0 in rank.local_seq_lens for rank in ranks)


def test_the_subset_is_pairwise():
    assert len(MATRIX) == 7 * 4 * 2 * 3
    for one, other in itertools.combinations(range(len(Case._fields)), 2):
        pairs = [{(case[one], case[other]) for case in cases} for cases in (PAIRWISE, MATRIX)]
        assert pairs[0] == pairs[1]
    values_of = [
        [set(axis) for axis in zip(*(case.grid + case[1:] for case in cases), strict=True)]
        for cases in (FEW, MATRIX)
    ]
    assert values_of[0] == values_of[1]


# ---- gradients


def run_case(case: Case, worlds: WorldPool, model: Path, out: Path) -> list[Step]:
    world = worlds[case.grid.world_size]
    return world.run(optimizer_step, model, out, (*CLIPS, *case.overrides), DS_CONFIGS[case.ds_name])


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in PAIRWISE],
    ids=str,
)
def test_the_gradient_is_that_of_one_process(
    case: Case, single: dict[int, Step], worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    error = check_step(run_case(case, worlds, tiny_pipeline, tmp_path), single[case.bins_per_step])
    assert error <= TOLERANCE
    print(f"dp x ring x ulysses {case.grid}: {error:.1e}")


@pytest.mark.full
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_the_whole_matrix(
    case: Case,
    single: dict[int, Step],
    worlds: WorldPool,
    tiny_pipeline: Path,
    tmp_path: Path,
):
    error = check_step(run_case(case, worlds, tiny_pipeline, tmp_path), single[case.bins_per_step])
    print(f"{case}: {error:.1e}")  # with -s, the table
    assert error <= TOLERANCE


@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, marks=() if grid == TWO_BY_TWO else pytest.mark.slow) for grid in GRIDS],
    ids=str,
)
def test_float64_is_stock_diffusers(grid: Grid, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path):
    """Through every ZeRO stage that reduces float64, with each parameter sharded."""
    number = GRIDS.index(grid)
    case = Case(grid, "", 1 + 2 * (number % 2), CHECKPOINTING[number % 3])
    overrides = (*CLIPS, *case.overrides)
    ds = zero(1 + number % 3)
    ranks = worlds[grid.world_size].run(optimizer_step, tiny_pipeline, tmp_path, overrides, ds, torch.float64)
    run = make_run(tiny_pipeline, tmp_path, overrides, world_size=grid.world_size)
    truth = stock_gradients(tiny_pipeline, run)
    assert all(float(grad.abs().max()) > 0 for grad in truth.values())
    error = worst(ranks[0].gradients, truth)
    assert error <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "packing.enabled=false",
        pytest.param("loss.reduction=token", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        (TWO_BY_TWO, 3),
        *(pytest.param(grid, 2, marks=pytest.mark.slow) for grid in (Grid(2, 2, 1), Grid(2, 1, 2))),
    ],
    ids=str,
)
def test_other_ways_through_the_same_step(
    grid: Grid, stage: int, change: str, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    overrides = (*CLIPS, "train.bins_per_step=2", change)
    one_process = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(0))[0]
    spread = (*overrides, *grid.overrides)
    ranks = worlds[grid.world_size].run(optimizer_step, tiny_pipeline, tmp_path, spread, zero(stage))
    assert check_step(ranks, one_process) <= TOLERANCE


@pytest.mark.slow
def test_where_float32_itself_is_worse(worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path):
    """With captions of a few tokens the 500 equal text pads make `attn2.to_k.bias` a difference of nearly equal sums: one process
    is further than TOLERANCE from its own float64 there. Spreading the step moves no gradient further than that."""
    short = (*CLIPS, CLIPS[0].replace("[100,512,200,300,150]", "[5,9,3]"))
    truth = stock_gradients(tiny_pipeline, make_run(tiny_pipeline, tmp_path, short, world_size=1))
    spread = []
    alone = []
    for bins in (1, 2, 6):
        overrides = (*short, f"train.bins_per_step={bins}")
        ours = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(0))[0].gradients
        alone.append(errors(ours, truth))
        grid = TWO_BY_TWO if bins == 1 else Grid(2, 2, 1)
        ranks = worlds[4].run(optimizer_step, tiny_pipeline, tmp_path, (*overrides, *grid.overrides), zero(2))
        spread.append(errors(ranks[0].gradients, ours))
    rounding = {name: max(one[name] for one in alone) for name in truth}
    assert max(rounding, key=rounding.__getitem__).endswith("attn2.to_k.bias")
    for one in spread:
        for name, error in one.items():
            assert error <= max(TOLERANCE, rounding[name]), name


@pytest.mark.slow
def test_bf16_stays_near_float32(
    single: dict[int, Step], worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    overrides = (*CLIPS, *TWO_BY_TWO.overrides, "precision.compute=bf16")
    ranks = worlds[4].run(optimizer_step, tiny_pipeline, tmp_path, overrides, DS_CONFIGS["zero3"])
    ours, theirs = (
        torch.cat([grads[name].flatten() for name in single[1].gradients])
        for grads in (ranks[0].gradients, single[1].gradients)
    )
    error = float((ours - theirs).norm() / theirs.norm())
    assert 0 < error <= 2e-2


# ---- the same mistakes, made on purpose


def scaled_loss(*args: Any) -> torch.Tensor:
    return TWO_BY_TWO.world_size * loss_weights(*args)


loss_weights = flow_matching.loss_weights


def noise_of_a_shard(
    layout: ContextLayout, keys: tuple[SampleKey, ...], seed: int, channels: int
) -> torch.Tensor:
    """As `draw_noise`, but each rank draws only for the tokens it holds."""
    noise = torch.zeros(layout.num_tokens, channels)
    start = 0
    for key, length in zip(keys, layout.local_seq_lens, strict=True):
        drawn = rng(seed, key, "noise").standard_normal((length, channels), dtype=np.float32)
        noise[start : start + length] = torch.from_numpy(drawn)
        start += length
    return noise


def in_place_of(mask: int) -> type[ContextLayout]:
    """A layout that gives this rank what another one of its group should hold."""

    class Other(ContextLayout):
        @classmethod
        def build(cls, *args: Any, cp_rank: int, **kwargs: Any) -> ContextLayout:
            return ContextLayout.build(*args, cp_rank=cp_rank ^ mask, **kwargs)

    return Other


shard_of = PackedBatch.rank_slice


def shard_with_positions_anew(batch: PackedBatch, layout: ContextLayout) -> RankSlice:
    """Every rank counts positions from the first token of the pack."""
    first = ContextLayout.build(
        batch.seq_lens, ulysses_degree=layout.plan.ulysses_degree, ring_degree=layout.plan.ring_degree
    )
    shard = shard_of(batch, layout)
    positions = shard_of(batch, first).meta.positions
    return replace(shard, meta=replace(shard.meta, positions=positions))


def kernel_with_local_lse(name: str) -> Any:
    """A kernel whose backward takes each block of keys for all of them."""
    right = get_backend(name)

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, segments: Any, scale: float) -> Any:
        return right.backward(dout, q, k, v, *right.forward(q, k, v, segments, scale), segments, scale)

    return SimpleNamespace(forward=right.forward, backward=backward)


get_backend = ring.get_backend

MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "loss counted on every rank": lambda: mock.patch.object(flow_matching, "loss_weights", scaled_loss),
    "noise drawn per shard": lambda: mock.patch.object(noise_module, "draw_noise", noise_of_a_shard),
    "ring rows swapped": lambda: mock.patch.object(dims, "ContextLayout", in_place_of(2)),
    "order of a row lost": lambda: mock.patch.object(dims, "ContextLayout", in_place_of(1)),
    "positions begin anew": lambda: mock.patch.object(PackedBatch, "rank_slice", shard_with_positions_anew),
    "log-sum-exp of one block": lambda: mock.patch.object(ring, "get_backend", kernel_with_local_lse),
}


def step_with_a_mistake(mistake: str, *args: Any) -> Step:
    with MISTAKES[mistake]():
        return optimizer_step(*args)


@pytest.mark.slow
def test_a_mistake_would_be_seen(
    single: dict[int, Step], worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    overrides = (*CLIPS, *TWO_BY_TWO.overrides)
    args = (tiny_pipeline, tmp_path, overrides, DS_CONFIGS["zero2"])
    for mistake in MISTAKES:
        ranks = worlds[4].run(step_with_a_mistake, mistake, *args)
        error = worst(ranks[0].gradients, single[1].gradients)
        assert error > 1e3 * TOLERANCE, mistake
    right = worlds[4].run(optimizer_step, *args)  # and nothing of the mistakes is left
    assert check_step(right, single[1]) <= TOLERANCE


# ---- what backward computes again


def counted_step(*args: Any) -> tuple[Step, Counter[str]]:
    """A step, and how often self-attention called its kernel."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        kernel = get_backend(name)

        def forward(*inputs: Any) -> Any:
            calls["forward"] += 1
            return kernel.forward(*inputs)

        def backward(*inputs: Any) -> Any:
            calls["backward"] += 1
            return kernel.backward(*inputs)

        return SimpleNamespace(forward=forward, backward=backward)

    with mock.patch.object(ring, "get_backend", counting):
        return optimizer_step(*args), calls


KEPT = {
    **{mode: (f"model.checkpointing={mode}",) for mode in CHECKPOINTING},
    "every name": (
        "model.checkpointing=offload",
        "model.saved_tensors=[attn_input, query_proj, ffn_activation]",
        "model.offloaded_tensors=[block_input, attn_output, key_proj, value_proj]",
    ),
}


@pytest.mark.parametrize(
    ("stage", "grid"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, TWO_BY_TWO), (3, Grid(1, 1, 2)), (3, Grid(1, 2, 1))]
        ),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(2, Grid(1, 1, 2)), (2, Grid(1, 2, 1)), (3, TWO_BY_TWO)]
        ),
    ],
    ids=str,
)
def test_what_is_kept_does_not_go_round_the_ring_again(
    stage: int, grid: Grid, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    num_layers = 2
    gradients = {}
    for mode, settings in KEPT.items():
        overrides = (*CLIPS, *grid.overrides, *settings)
        ranks = worlds[grid.world_size].run(counted_step, tiny_pipeline, tmp_path, overrides, zero(stage))
        rounds = num_layers * grid.ring
        for _, calls in ranks:
            assert calls["forward"] == rounds * (2 if mode == "full" else 1), mode
            assert calls["backward"] == rounds, mode
        gradients[mode] = ranks[0][0].gradients
    for mode in KEPT:
        for name, grad in gradients["none"].items():
            assert torch.equal(gradients[mode][name], grad), (mode, name)


# ---- worlds that live on


def what_is_left() -> tuple[int, int]:
    """Engines and process groups in this process."""
    import gc

    import torch.distributed as dist
    from deepspeed.runtime.engine import DeepSpeedEngine

    gc.collect()
    engines = [one for one in gc.get_objects() if isinstance(one, DeepSpeedEngine)]
    return len(engines), len(dist.distributed_c10d._world.pg_map)


@pytest.mark.slow
def test_nothing_is_left_from_case_to_case(worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path):
    # ZeRO-3 only traces the first bin of a model; what it keeps of one comes with the next.
    overrides = (*CLIPS, "parallel.ring_degree=2", "train.bins_per_step=2")
    left = []
    for ds in (zero(2), DS_CONFIGS["zero3_offload"], zero(3)):
        worlds[2].run(optimizer_step, tiny_pipeline, tmp_path, overrides, ds)
        left += worlds[2].run(what_is_left)
    assert len(set(left)) == 1


def fail_on_rank_1(exception: str) -> int:
    import os
    import time

    if os.environ["RANK"] == "1":
        if exception == "dies":
            os._exit(3)
        raise ValueError(exception)
    time.sleep(0 if exception == "says so" else 60)
    return os.getpid()


@pytest.mark.parametrize("exception", ["says so", pytest.param("dies", marks=pytest.mark.slow)])
def test_a_world_begins_anew_after_a_failure(exception: str):
    import os

    from tests.support.world import World

    world = World(2)
    before = world.run(os.getpid)
    assert world.run(os.getpid) == before
    with pytest.raises(AssertionError, match="rank 1 died" if exception == "dies" else "ValueError: says so"):
        world.run(fail_on_rank_1, exception, timeout=2.0)
    assert not set(world.run(os.getpid)) & set(before)
    world.close()
