"""Every parameter's gradient through the DeepSpeed engine equals stock diffusers run sample by sample.

This also pins what DeepSpeed does: an upgrade that scales gradients differently at some stage fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import make_run
from tests.support.steps import DS_CONFIGS, optimizer_step, stock_gradients, worst, zero
from tests.support.world import WorldPool

# For float64 models, whose stock blocks round to float32 inside. Relative to the parameter's own largest gradient, or to a
# thousandth of the largest of all where a parameter has hardly any. (In float32 stock itself is 6e-4 from its float64 self here:
# the scores of 500 equal text pads cancel.)
TOLERANCE = 1e-5


def engine_gradients(
    worlds: WorldPool,
    world_size: int,
    model: Path,
    out: Path,
    overrides: tuple[str, ...],
    ds: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Gradients of the first optimizer step of ranks that hold different samples."""
    ranks = worlds[world_size].run(optimizer_step, model, out, overrides, ds, dtype)
    assert len({frozenset(rank.clips) for rank in ranks}) == world_size
    return ranks[0].gradients


Stock = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def stock(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """`stock(world_size, overrides, dtype)`: the gradients of stock diffusers, worked out once for all tests that ask."""

    @cache
    def gradients(
        world_size: int, overrides: tuple[str, ...] = (), dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        run = make_run(tiny_pipeline, tmp_path_factory.mktemp("stock"), overrides, world_size=world_size)
        return stock_gradients(tiny_pipeline, run, dtype)

    return gradients


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_every_stage_gives_the_stock_gradient(
    stage: int, world_size: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, stock: Stock
):
    overrides = ("train.bins_per_step=4", "flow.weighting=linear")  # world 2: two micro steps
    ours = engine_gradients(worlds, world_size, tiny_pipeline, tmp_path, overrides, zero(stage))
    theirs = stock(world_size, overrides)
    error = worst(ours, theirs)
    assert error <= TOLERANCE
    assert all(float(grad.abs().max()) > 0 for grad in theirs.values())


def test_stage_zero_in_float32(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, stock: Stock):
    """Without ZeRO DeepSpeed reduces no float64; float32 is no further from the truth than stock float32 is."""
    ours = engine_gradients(worlds, 2, tiny_pipeline, tmp_path, (), zero(0), torch.float32)
    theirs = stock(2)
    error = worst(ours, theirs)
    rounding = worst(stock(2, (), torch.float32), theirs)
    assert error <= rounding


@pytest.mark.slow
def test_a_second_copy_of_the_weights_in_each_node(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, stock: Stock
):
    """With zero_hpz_partition_size, the backward pass gathers the weights from the second copy."""
    ds = zero(3, zero_hpz_partition_size=2)
    ours = engine_gradients(worlds, 2, tiny_pipeline, tmp_path, (), ds)
    error = worst(ours, stock(2))
    assert error <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", DS_CONFIGS)
def test_every_shipped_json_gives_the_stock_gradient(
    name: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, stock: Stock
):
    four = ("train.bins_per_step=4",)

    def ours(dtype: torch.dtype, *overrides: str) -> dict[str, torch.Tensor]:
        return engine_gradients(
            worlds, 4, tiny_pipeline, tmp_path, (*four, *overrides), DS_CONFIGS[name], dtype
        )

    theirs = stock(4, four)
    exact = worst(ours(torch.float64), theirs)
    assert exact <= TOLERANCE
    # In float32, as it trains: no further from the truth than stock float32 is.
    fp32 = worst(ours(torch.float32), theirs)
    assert fp32 <= worst(stock(4, four, torch.float32), theirs)
    bf16 = ours(torch.float32, "precision.compute=bf16")
    flat = [torch.cat([grads[name].double().flatten() for name in theirs]) for grads in (bf16, theirs)]
    error = float((flat[0] - flat[1]).norm() / flat[1].norm())
    assert 0 < error <= 2e-2


@pytest.mark.parametrize(
    "change",
    [
        "loss.reduction=token",
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in ("packing.enabled=false", "model.checkpointing=full")
        ),
    ],
)
def test_other_ways_through_the_same_step(
    change: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, stock: Stock
):
    ours = engine_gradients(worlds, 2, tiny_pipeline, tmp_path, (change,), zero(3))
    theirs = stock(2, (change,))
    error = worst(ours, theirs)
    assert error <= TOLERANCE


def test_a_wrong_scale_would_be_seen(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, stock: Stock):
    """The trap of a loss counted once per rank: a factor on the gradient must fail the check above."""
    ours = engine_gradients(worlds, 2, tiny_pipeline, tmp_path, (), zero(2))
    theirs = stock(2)
    error = worst({name: 2.0 * grad for name, grad in ours.items()}, theirs)
    assert error > 1e4 * TOLERANCE
