"""Every parameter's gradient through the DeepSpeed engine equals stock diffusers run sample by sample.

This also pins what DeepSpeed does: an upgrade that scales gradients differently at some stage fails here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.runs import make_job
from wands.data.patchify import unpatchify
from wands.flow.corrupt import corrupt
from wands.flow.sigmas import sigma_weight
from wands.parallel.layout import ContextLayout
from wands.parallel.mesh import ContextGroups
from wands.train.batches import rank_shards
from wands.train.engine import build_engine, init_process_group
from wands.train.job import Job
from wands.train.loop import build_model, train_step
from wands.variants import TEXT_LEN

ROOT = Path(__file__).resolve().parents[2]
# For float64 models, whose stock blocks round to float32 inside. Relative to the parameter's own largest gradient, or to a
# thousandth of the largest of all where a parameter has hardly any. (In float32 stock itself is 6e-4 from its float64 self here:
# the scores of 500 equal text pads cancel.)
TOLERANCE = 1e-5


def engine_gradients(
    model: Path,
    out: Path,
    overrides: tuple[str, ...],
    ds: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Gradients of the first optimizer step as DeepSpeed holds them just before its update (on rank 0)."""
    from deepspeed.utils import safe_get_full_grad

    job = make_job(model, out, overrides, ds)
    rank, _, device = init_process_group()
    groups = ContextGroups.build(job.grid(rank))
    engine = build_engine(
        build_model(job, groups, device) if dtype == torch.float32 else _double(job, groups, device),
        job.ds_config,
        job.recipe,
        1,
    )
    found: dict[str, torch.Tensor] = {}

    def capture() -> None:
        for name, parameter in engine.module.named_parameters():
            found[name] = safe_get_full_grad(parameter).clone() * scale

    engine.step = capture
    engine.get_global_grad_norm = lambda: 0.0  # known only after the update that is left out here
    plan = job.sampler.step_plan(0)
    train_step(
        engine,
        rank_shards(job, plan, groups.grid),
        job,
        groups,
        device,
        plan.denominators[job.recipe.loss.reduction],
    )
    names = [None] * job.world_size
    dist.all_gather_object(
        names,
        sorted(
            {key for one in rank_shards(job, plan, groups.grid) for key in [k.sample_id for k in one.keys]}
        ),
    )
    assert len({tuple(one) for one in names}) == job.world_size, "ranks must hold different samples"
    return found if rank == 0 else {}


def _double(job: Job, groups: ContextGroups, device: torch.device) -> torch.nn.Module:
    """The same model in float64; under ZeRO-3 DeepSpeed shards it when the engine is made."""
    return build_model(
        replace(job, ds_config={**job.ds_config, "zero_optimization": {"stage": 2}}), groups, device
    ).double()


def stock_gradients(model: Path, job: Job, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The dumb way: stock diffusers, one sample at a time, one process, plain autograd."""
    from diffusers import WanTransformer3DModel

    stock = WanTransformer3DModel.from_pretrained(model / "transformer").to(dtype)
    plan = job.sampler.step_plan(0)
    for one in (i for bin_ in plan.bins for i in bin_):
        batch = job.collator([job.data.read(one)], plan.occurrences((one,)), plan.epoch)
        layout = ContextLayout.build(batch.seq_lens)
        noisy = corrupt(batch.tokens, layout, batch.keys, job.recipe.flow, job.recipe.train.seed)
        grid = tuple(batch.grid_sizes[0].tolist())
        volume = [
            unpatchify(x, grid, 16, job.shape.patch_size)[None].to(dtype)
            for x in (noisy.tokens, noisy.target)
        ]
        text = torch.nn.functional.pad(
            batch.text_embeds.to(dtype), (0, 0, 0, TEXT_LEN - len(batch.text_embeds))
        )[None]
        pred = stock(volume[0], noisy.timesteps, text, return_dict=False)[0]
        weight = sigma_weight(noisy.sigmas, job.recipe.flow)[0]
        error = (pred - volume[1]).square().mean()  # over the sample's own tokens and channels
        if job.recipe.loss.reduction == "token":
            error = error * len(batch.tokens)
        (weight * error / plan.denominators[job.recipe.loss.reduction]).backward()
    return {name: parameter.grad for name, parameter in stock.named_parameters()}


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest error over all parameters, in units of what the tolerance is relative to."""
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    return max(
        float((ours[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-3 * largest)
        for name, grad in theirs.items()
    )


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_gives_the_stock_gradient(
    stage: int, world_size: int, tiny_pipeline: Path, tmp_path: Path, run_world
):
    overrides = ("train.bins_per_step=4", "flow.weighting=linear")  # world 2: two micro steps
    ours = run_world(world_size, engine_gradients, tiny_pipeline, tmp_path, overrides, zero(stage))[0]
    theirs = stock_gradients(
        tiny_pipeline, make_job(tiny_pipeline, tmp_path, overrides, world_size=world_size)
    )
    error = worst(ours, theirs)
    assert error <= TOLERANCE
    assert all(float(grad.abs().max()) > 0 for grad in theirs.values())


def test_stage_zero_in_float32(tiny_pipeline: Path, tmp_path: Path, run_world):
    """Without ZeRO DeepSpeed reduces no float64; float32 is no further from the truth than stock float32 is."""
    ours = run_world(2, engine_gradients, tiny_pipeline, tmp_path, (), zero(0), torch.float32)[0]
    job = make_job(tiny_pipeline, tmp_path, (), world_size=2)
    theirs = stock_gradients(tiny_pipeline, job)
    error, stock = worst(ours, theirs), worst(stock_gradients(tiny_pipeline, job, torch.float32), theirs)
    assert error <= stock


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_every_shipped_json_gives_the_stock_gradient(
    path: Path, tiny_pipeline: Path, tmp_path: Path, run_world
):
    ds = json.loads(path.read_text())
    overrides = ("train.bins_per_step=4",)
    theirs = stock_gradients(tiny_pipeline, make_job(tiny_pipeline, tmp_path, overrides, world_size=4))
    exact = worst(run_world(4, engine_gradients, tiny_pipeline, tmp_path, overrides, ds)[0], theirs)
    assert exact <= TOLERANCE
    # In float32, as it trains: no further from the truth than stock float32 is.
    fp32 = worst(
        run_world(4, engine_gradients, tiny_pipeline, tmp_path, overrides, ds, torch.float32)[0], theirs
    )
    job = make_job(tiny_pipeline, tmp_path, overrides, world_size=4)
    stock = worst(stock_gradients(tiny_pipeline, job, torch.float32), theirs)
    assert fp32 <= stock
    bf16 = run_world(
        4,
        engine_gradients,
        tiny_pipeline,
        tmp_path,
        (*overrides, "precision.compute=bf16"),
        ds,
        torch.float32,
    )[0]
    flat = [torch.cat([grads[name].double().flatten() for name in theirs]) for grads in (bf16, theirs)]
    error = float((flat[0] - flat[1]).norm() / flat[1].norm())
    assert 0 < error <= 2e-2


@pytest.mark.parametrize(
    "change", ["loss.reduction=token", "packing.enabled=false", "model.checkpointing=full"]
)
def test_other_ways_through_the_same_step(change: str, tiny_pipeline: Path, tmp_path: Path, run_world):
    ours = run_world(2, engine_gradients, tiny_pipeline, tmp_path, (change,), zero(3))[0]
    theirs = stock_gradients(tiny_pipeline, make_job(tiny_pipeline, tmp_path, (change,), world_size=2))
    error = worst(ours, theirs)
    assert error <= TOLERANCE


def test_a_wrong_scale_would_be_seen(tiny_pipeline: Path, tmp_path: Path, run_world):
    """The trap of a loss counted once per rank: a factor on the gradient must fail the check above."""
    ours = run_world(2, engine_gradients, tiny_pipeline, tmp_path, (), zero(2), torch.float64, 2.0)[0]
    theirs = stock_gradients(tiny_pipeline, make_job(tiny_pipeline, tmp_path, (), world_size=2))
    error = worst(ours, theirs)
    assert error > 1e4 * TOLERANCE
