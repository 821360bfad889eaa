"""The loop: the same loss series at every ZeRO stage and world size, with and without packing, and exactly resumable."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.fake_wandb import SOURCE
from tests.support.runs import assert_same_bits, losses, run_training, weights
from wands.distributed.bootstrap import init_process_group
from wands.files import read_rows
from wands.train.reduction import StepSums, sum_over_ranks

# ZeRO changes the order in which fp32 gradients are added; five AdamW steps amplify it to a few units in the last place.
SERIES_TOLERANCE = 2e-5


def zero(stage: int) -> dict[str, Any]:
    # threshold 0: even the smallest parameter is sharded and gathered
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


@pytest.fixture(scope="module")
def reference(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, run_world) -> list[float]:
    """Five steps in one process at stage 0: what every other setting must repeat."""
    out = tmp_path_factory.mktemp("reference")
    return losses(run_world(1, run_training, tiny_pipeline, out, ("train.max_steps=5",), zero(0))[0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_loss_series_is_the_same_at_every_stage_and_world(
    stage: int, world_size: int, reference: list[float], tiny_pipeline: Path, tmp_path: Path, run_world
):
    rows = run_world(world_size, run_training, tiny_pipeline, tmp_path, ("train.max_steps=5",), zero(stage))[
        0
    ]
    assert len(reference) == 5
    assert losses(rows) == pytest.approx(reference, rel=SERIES_TOLERANCE)
    assert len(set(reference)) == 5  # a model that does not move would agree with anything


def test_accumulation_is_the_same_step(
    reference: list[float], tiny_pipeline: Path, tmp_path: Path, run_world
):
    """bins_per_step=4 on 2 ranks is two micro steps; on 4 ranks one. Both are the step of one process."""
    overrides = ("train.max_steps=3", "train.bins_per_step=4")
    series = [
        losses(run_world(n, run_training, tiny_pipeline, tmp_path / str(n), overrides, zero(2))[0])
        for n in (1, 2, 4)
    ]
    assert series[1] == pytest.approx(series[0], rel=SERIES_TOLERANCE)
    assert series[2] == pytest.approx(series[0], rel=SERIES_TOLERANCE)


def sample_losses(out: Path) -> dict[tuple[Any, ...], float]:
    rows = [
        json.loads(line)
        for path in sorted(out.glob("samples-rank*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return {(row["step"], row["sample_id"], row["epoch"], row["sigma"]): row["loss"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_packing_off_gives_the_same_loss_per_sample(
    reduction: str, tiny_pipeline: Path, tmp_path: Path, run_world
):
    """Ranks hold unequal numbers of samples here, so the ones with fewer run forwards of weight zero."""
    common = ("train.max_steps=4", "train.log_samples=true", f"loss.reduction={reduction}")
    runs = {}
    for enabled in ("true", "false"):
        out = tmp_path / enabled
        runs[enabled] = losses(
            run_world(2, run_training, tiny_pipeline, out, (*common, f"packing.enabled={enabled}"), zero(3))[
                0
            ]
        )
    packed = sample_losses(tmp_path / "true")
    single = sample_losses(tmp_path / "false")
    assert packed.keys() == single.keys()
    assert len(packed) >= 8
    for key, value in packed.items():
        assert single[key] == pytest.approx(value, rel=1e-5), key
    assert runs["false"] == pytest.approx(runs["true"], rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2), (2, 1))), (3, 2)],
)
def test_k_plus_k_is_2k_bitwise(stage: int, world_size: int, tiny_pipeline: Path, tmp_path: Path, run_world):
    """Stopping and resuming in the middle of an epoch changes no bit of losses, gradient norms or weights."""
    schedule = ("optim.schedule=cosine", "optim.warmup=1", "flow.cfg_dropout=0.3")
    straight = run_world(
        world_size, run_training, tiny_pipeline, tmp_path / "a", ("train.max_steps=4", *schedule), zero(stage)
    )[0]
    every = ("train.max_steps=4", "checkpoint.every=2", "checkpoint.keep=5", *schedule)
    run_world(world_size, run_training, tiny_pipeline, tmp_path / "b", every, zero(stage))
    for path in (tmp_path / "b" / "checkpoints").glob("step_00000004"):
        path.rename(tmp_path / "gone")  # as if the run had died after step 4 was logged, before it was saved
    (tmp_path / "b" / "checkpoints" / "latest").write_text("step_00000002")
    resumed = run_world(world_size, run_training, tiny_pipeline, tmp_path / "b", every, zero(stage), True)[0]

    assert [row["step"] for row in straight] == [1, 2, 3, 4]
    assert len({row["loss"] for row in straight}) == 4
    assert_same_bits(straight, resumed, tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_the_gradient_norm_is_the_same_with_and_without_zero(tiny_pipeline: Path, tmp_path: Path, run_world):
    norms = []
    for stage in (0, 1, 2, 3):
        rows = run_world(
            2, run_training, tiny_pipeline, tmp_path / str(stage), ("train.max_steps=2",), zero(stage)
        )[0]
        norms.append([row["grad_norm"] for row in rows])
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-4)


def test_every_parameter_learns(tiny_pipeline: Path, tmp_path: Path, run_world):
    """No parameter is left out of the optimizer, and the weights in a checkpoint are the trained ones."""
    from wands.model.files.loading import load_transformer

    run_world(2, run_training, tiny_pipeline, tmp_path, ("train.max_steps=2",), zero(3))
    before = dict(load_transformer(str(tiny_pipeline)).named_parameters())
    after = weights(tmp_path)
    assert before.keys() == after.keys()
    unmoved = [name for name, old in before.items() if torch.equal(old.detach(), after[name])]
    assert unmoved == []


@pytest.mark.slow
def test_bf16_follows_fp32(reference: list[float], tiny_pipeline: Path, tmp_path: Path, run_world):
    """bf16 matmuls with fp32 reduction, and with bf16 reduction, stay within bf16's rounding of the fp32 run."""
    for reduce in ("fp32", "bf16"):
        overrides = ("train.max_steps=5", "precision.compute=bf16", f"precision.reduce={reduce}")
        series = losses(run_world(2, run_training, tiny_pipeline, tmp_path / reduce, overrides, zero(3))[0])
        assert series == pytest.approx(reference, rel=2e-2)
        assert series != reference


@pytest.mark.slow
def test_checkpointed_activations_change_nothing(
    reference: list[float], tiny_pipeline: Path, tmp_path: Path, run_world
):
    overrides = ("train.max_steps=5", "model.checkpointing=full")
    series = losses(run_world(2, run_training, tiny_pipeline, tmp_path, overrides, zero(3))[0])
    assert series == pytest.approx(reference, rel=SERIES_TOLERANCE)


def test_prefetching_changes_nothing(reference: list[float], tiny_pipeline: Path, tmp_path: Path, run_world):
    series = losses(
        run_world(
            1, run_training, tiny_pipeline, tmp_path, ("train.max_steps=5", "data.prefetch=0"), zero(0)
        )[0]
    )
    assert series == reference


def run_with_wandb(model: Path, out: Path, site: Path) -> list[dict[str, Any]]:
    (site / "wandb.py").write_text(SOURCE)
    sys.path.insert(0, str(site))
    os.environ["FAKE_WANDB"] = str(site / "calls")
    overrides = ("train.max_steps=3", "logging.trackers=[tensorboard,wandb]", "train.log_samples=true")
    return run_training(model, out, overrides, zero(2))


def test_rows_of_a_step(tiny_pipeline: Path, tmp_path: Path, run_world):
    rows = run_world(2, run_with_wandb, tiny_pipeline, tmp_path, tmp_path)[0]
    for row in rows:
        assert 0 < row["fill"] <= 1
        assert row["imbalance"] >= 1
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["tflops"] > 0
        assert row["grad_norm"] > 0
        assert row["mfu"] is None  # a CPU's peak is not known
        assert row["device_peak"] is None
        assert row["host_peak"] > 2**27
        assert row["tokens_per_second_per_gpu"] == row["tokens_per_second"] / 2
        buckets: list[list[float]] = [[] for _ in range(10)]
        for (step, _, _, sigma), loss in sample_losses(tmp_path).items():
            if step == row["step"]:
                buckets[min(math.floor(sigma * 10), 9)].append(loss)
        means = [value for value in row["loss_by_sigma"] if value is not None]
        assert [value is None for value in row["loss_by_sigma"]] == [not bucket for bucket in buckets]
        assert means == pytest.approx([sum(bucket) / len(bucket) for bucket in buckets if bucket], rel=1e-12)
    assert rows[0]["eta_seconds"] > rows[2]["eta_seconds"] == 0
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    # On a CPU, accelerate would take every rank for the main process.
    calls = read_rows(tmp_path / "calls")
    assert [(call["call"], call.get("step")) for call in calls] == [
        *(("init", None), ("config", None), ("log", 1), ("log", 2), ("log", 3), ("finish", None))
    ]
    assert {call["rank"] for call in calls} == {"0"}
    assert {"train/loss", "train/grad_norm", "speed/seconds"} < calls[2].keys()


def count_reductions(model: Path, out: Path) -> tuple[int, list[dict[str, Any]]]:
    """Train. Return how often a module of wands has summed over the ranks, and the rows of the metrics."""
    callers: list[str] = []
    right = dist.all_reduce

    def all_reduce(*args: Any, **settings: Any) -> Any:
        callers.append(sys._getframe(1).f_globals["__name__"])
        return right(*args, **settings)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        rows = run_training(model, out, ("train.max_steps=3",), zero(2))
    assert any(name.startswith("deepspeed.") for name in callers)  # the gradients
    return sum(name.startswith("wands.") for name in callers), rows


def test_the_loop_sums_over_the_ranks_once_a_step(tiny_pipeline: Path, tmp_path: Path, worlds):
    number, rows = worlds[2].run(count_reductions, tiny_pipeline, tmp_path)[0]
    assert number == len(rows) == 3


def sum_numbers() -> StepSums:
    """Sum a loss, and numbers of which the largest is wanted: one that fp32 does not represent, and one on rank 0 alone."""
    rank, _, device = init_process_group()
    return sum_over_ranks(
        [torch.tensor(0.5 + rank, device=device)],
        torch.tensor([1.0, 2.0 * rank], dtype=torch.float64, device=device),
        {"host_peak": 2**40 + 1 + rank, "save": rank == 0},
        rank=rank,
        world_size=dist.get_world_size(),
    )


def test_one_sum_has_the_losses_and_the_largest_numbers(worlds):
    expected = StepSums([2.0], [2.0, 2.0], {"host_peak": 2**40 + 2, "save": 1}, world_size=2)
    assert worlds[2].run(sum_numbers) == [expected] * 2
