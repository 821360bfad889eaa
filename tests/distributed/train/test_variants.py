"""Every variant through the trainer: the gradient of stock diffusers, on one rank and on several; two experts as one object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.train.test_datasets import write_cache
from tests.support.runs import losses, make_run, run_training, weights
from tests.support.steps import Grid, optimizer_step, stock_gradients, worst, zero
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import find_checkpoint, load_exported_state
from wands.errors import ConfigError
from wands.planning import weights as weights_module

TOLERANCE = 1e-5
ONE_EXPERT = ("model.experts=high",)
VARIANTS = {
    "wan2.1-i2v-14b": (),
    "wan2.1-flf2v-14b": (),
    "wan2.2-i2v-a14b": ONE_EXPERT,
    "wan2.2-t2v-a14b": ("model.experts=low",),
    "wan2.2-ti2v-5b": ("flow.i2v_ratio=0.6",),
}
GRIDS = (Grid(2, 1, 1), Grid(1, 2, 2))


@pytest.fixture(scope="module")
def pipelines(tiny_variant: Callable[[str], Path]) -> dict[str, Path]:
    return {name: tiny_variant(name) for name in VARIANTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "wan2.1-i2v-14b" else pytest.mark.slow) for name in VARIANTS],
)
def test_the_step_has_the_gradient_of_the_stock_model(
    name: str, pipelines: dict[str, Path], tmp_path: Path, worlds: WorldPool
):
    """Also: every parameter gets a gradient that is not zero. On one of the grids each variant is under ZeRO-3."""
    settings = (*VARIANTS[name], "train.bins_per_step=2", "flow.weighting=linear")
    theirs = stock_gradients(pipelines[name], make_run(pipelines[name], tmp_path, settings, world_size=1))
    assert all(float(grad.abs().max()) > 0 for grad in theirs.values())
    for number, grid in enumerate(GRIDS, start=list(VARIANTS).index(name)):
        overrides = (*settings, *grid.overrides)
        ranks = worlds[grid.world_size].run(
            optimizer_step, pipelines[name], tmp_path, overrides, zero(2 + number % 2), torch.float64
        )
        error = worst(ranks[0].gradients, theirs)
        assert error <= TOLERANCE, grid


def test_tokens_of_given_frames_are_neither_trained_nor_counted(
    pipelines: dict[str, Path], tmp_path: Path, worlds: WorldPool
):
    model = pipelines["wan2.2-ti2v-5b"]
    settings = ("flow.i2v_ratio=1.0", "loss.reduction=token", "train.bins_per_step=2")
    training_run = make_run(model, tmp_path, settings, world_size=1)
    schedule = training_run.schedule
    plan = schedule.sampler.step_plan(0)
    lens = schedule.num_tokens.tolist()
    samples = [i for bin_ in plan.bins for i in bin_]
    firsts = {i: lens[i] // training_run.data.latent_shape(i)[0] for i in samples}
    trained = {i: lens[i] - firsts[i] for i in samples if training_run.data.latent_shape(i)[0] > 1}
    pictures = {i: lens[i] for i in samples if training_run.data.latent_shape(i)[0] == 1}
    assert schedule.count(plan) == sum(trained.values()) + sum(pictures.values())
    steps = range(schedule.sampler.steps_per_epoch)
    counts = [schedule.count(schedule.sampler.step_plan(step)) for step in steps]
    assert schedule.denominator(plan) == pytest.approx(sum(counts) / len(counts))
    ranks = worlds[2].run(
        optimizer_step, model, tmp_path, (*settings, *GRIDS[0].overrides), zero(2), torch.float64
    )
    error = worst(ranks[0].gradients, stock_gradients(model, training_run))
    assert error <= TOLERANCE


def test_of_sources_visited_in_part_the_rows_visited_count(pipelines: dict[str, Path], tmp_path: Path):
    """A mean over all rows would be wrong here, negative even."""
    model = pipelines["wan2.2-ti2v-5b"]
    sources = []
    for name, names, repeat in (("a", "abcdefghij", 0.1), ("b", "klmnopqrst", 1.0)):
        write_cache(tmp_path / name, model, names, seed=1)
        sources.append(f"{{path: {tmp_path / name}, repeat: {repeat}}}")
    settings = (
        "data.mock=null",
        f"data.sources=[{', '.join(sources)}]",
        "loss.reduction=token",
        "flow.i2v_ratio=1.0",
    )
    schedule = make_run(model, tmp_path, settings, world_size=1).schedule
    for epoch in (0, 3):
        first, end = (schedule.sampler.first_step(number) for number in (epoch, epoch + 1))
        plans = [schedule.sampler.step_plan(step) for step in range(first, end)]
        mean = sum(schedule.count(plan) for plan in plans) / len(plans)
        assert [schedule.denominator(plan) for plan in plans] == pytest.approx([mean] * len(plans))


def test_first_frames_are_for_models_that_take_them(tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"flow\.i2v_ratio=0\.3 applies to TI2V models"):
        make_run(tiny_pipeline, tmp_path, ("flow.i2v_ratio=0.3",), world_size=1)


# ---- two experts


TWO = (
    "train.max_steps=4",
    "checkpoint.every=2",
    "checkpoint.keep=3",
    "optim.schedule=linear",
    "optim.warmup=2",
)


@pytest.mark.parametrize(
    "stage", [pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.slow)]
)
def test_both_experts_are_two_runs_of_one(
    stage: int, pipelines: dict[str, Path], tmp_path: Path, worlds: WorldPool
):
    """The dumb reference of `both` is one run for each: same losses, same weights, bit for bit; also after a resume."""
    model = pipelines["wan2.2-t2v-a14b"]

    def run(name: str, experts: str, *more: str, resume: bool = False) -> list[dict[str, Any]]:
        overrides = (*TWO, f"model.experts={experts}", *more)
        return worlds[2].run(run_training, model, tmp_path / name, overrides, zero(stage), resume)[0]

    both = run("both", "both")
    high = run("high", "high")
    low = run("low", "low")
    assert [row["loss_high"] for row in both] == losses(high) == [row["loss_high"] for row in high]
    assert [row["loss_low"] for row in both] == losses(low)
    for name, alone in (("high", high), ("low", low)):
        assert [row[f"grad_norm_{name}"] for row in both] == [row["grad_norm"] for row in alone]
    assert [row["loss"] for row in both] == [
        (a + b) / 2 for a, b in zip(losses(high), losses(low), strict=True)
    ]
    assert losses(high) != losses(low)
    assert find_checkpoint(tmp_path / "both")[1].parts == ["transformer", "transformer_2"]
    for part, alone in (("transformer", "high"), ("transformer_2", "low")):
        ours, theirs = (load_exported_state(tmp_path / name, part) for name in ("both", alone))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    newest = tmp_path / "both" / "checkpoints" / "step_00000004"
    newest.rename(tmp_path / "set aside")
    resumed = run("both", "both", resume=True)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in both]
    again = weights(tmp_path / "both")
    assert all(
        torch.equal(again[key], value) for key, value in load_exported_state(tmp_path / "high").items()
    )


@pytest.mark.parametrize("experts", ["high", "low"])
@pytest.mark.parametrize("flow", ["flow.flow_shift=1", "flow.flow_shift=12", "flow.preset=pretrain"])
def test_an_expert_sees_only_its_own_timesteps(
    experts: str, flow: str, pipelines: dict[str, Path], tmp_path: Path
):
    from wands.attention.layout import ContextLayout
    from wands.flow.noise import add_noise

    training_run = make_run(
        pipelines["wan2.2-i2v-a14b"], tmp_path, (f"model.experts={experts}", flow), world_size=1
    )
    [expert] = training_run.model.experts
    assert expert.subfolder == {"high": "transformer", "low": "transformer_2"}[experts]
    batch = training_run.collator([training_run.data.read(0)], [0], 0)
    layout = ContextLayout.build(batch.seq_lens)
    timesteps = torch.cat(
        [
            add_noise(
                batch.tokens,
                layout,
                batch.keys,
                training_run.recipe.flow,
                seed,
                sigma_range=expert.sigma_range,
            ).timesteps
            for seed in range(200)
        ]
    )
    # As the pipeline chooses: the high-noise expert from the boundary on.
    assert set((timesteps >= 0.9 * 1000).tolist()) == {experts == "high"}


def test_the_histogram_is_that_of_each_expert(pipelines: dict[str, Path]):
    from click.testing import CliRunner

    from wands.cli import main

    def show(*settings: str) -> str:
        arguments = [word for one in settings for word in ("--set", one)]
        return CliRunner().invoke(main, ["train", "--show-timesteps", *arguments]).output

    text = show(f"model.path={pipelines['wan2.2-t2v-a14b']}", "flow.flow_shift=5")
    high, low = text.split("low-noise expert (transformer_2)")
    assert "high-noise expert (transformer)" in high
    shares = [
        {line.split()[0]: line.split()[3] for line in part.splitlines() if " - " in line}
        for part in (high, low)
    ]
    assert shares[0]["400"] == shares[1]["900"] == "0.0%"
    assert float(shares[0]["900"].rstrip("%")) > 30
    assert float(shares[1]["800"].rstrip("%")) > 5
    assert "expert" not in show("flow.flow_shift=5")


def test_an_expert_trains_the_timesteps_that_the_recipe_leaves(
    pipelines: dict[str, Path], tiny_pipeline: Path, tmp_path: Path
):
    def ranges(model: Path, *flow: str) -> list[tuple[float, float]]:
        run = make_run(model, tmp_path, flow, world_size=1)
        return [expert.sigma_range for expert in run.model.experts]

    experts = pipelines["wan2.2-i2v-a14b"]
    assert ranges(tiny_pipeline, "flow.min_timestep=100", "flow.max_timestep=950") == [(0.1, 0.95)]
    assert ranges(experts, "flow.min_timestep=500", "flow.max_timestep=950") == [(0.9, 0.95), (0.5, 0.9)]
    assert ranges(experts, "flow.max_timestep=900", "model.experts=low") == [(0.0, 0.9)]
    with pytest.raises(ConfigError, match=r"max_timestep=900 leave no timestep of the high-noise expert"):
        ranges(experts, "flow.max_timestep=900")
    with pytest.raises(ConfigError, match=r"min_timestep=.* must be < flow\.max_timestep"):
        ranges(tiny_pipeline, "flow.min_timestep=900", "flow.max_timestep=900")


def test_experts_of_a_model_that_has_one(tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.experts=high applies to models with two experts"):
        make_run(tiny_pipeline, tmp_path, ONE_EXPERT)


def test_experts_that_are_not_alike(
    pipelines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load = weights_module.load_config

    def other(path: str, part: str = "transformer") -> dict[str, Any]:
        return load(path, part) | ({"num_layers": 7} if part == "transformer_2" else {})

    monkeypatch.setattr(weights_module, "load_config", other)
    with pytest.raises(ConfigError, match="two experts differ in num_layers"):
        make_run(pipelines["wan2.2-t2v-a14b"], tmp_path)
