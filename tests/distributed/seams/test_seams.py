"""The doors of wands, used from outside: an objective with two forwards and a state, an optimizer, a schedule, a job."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wands
from examples.held_to_base import HeldToBase
from tests.distributed.seams import outside
from tests.support.runs import engine_of, losses, make_run, model_of, run_training, weights
from tests.support.steps import capture_gradients, worst, zero
from wands import FlowMatching, Plugin, adapter_off
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.resume import check_resumable
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import release_engine
from wands.errors import CheckpointError, ConfigError
from wands.train.step import train_step

EXTENDING = Path(__file__).parents[3] / "docs" / "extending.md"
LORA = ("lora={rank: 4, targets: attention}", "train.max_steps=4", "checkpoint.every=2", "optim.warmup=0")


def held() -> HeldToBase:
    return HeldToBase(weight=1.0, warmup=3)


def train_held(model: Path, out: Path, stage: int, *more: str, resume: Any = False) -> list[float]:
    plugin = Plugin(objective=held())
    return losses(run_training(model, out, (*LORA, *more), zero(stage), resume=resume, plugin=plugin))


def interrupt(model: Path, out: Path, stage: int) -> tuple[list[float], list[float], bool]:
    whole = train_held(model, out / "whole", stage)
    step = out / "whole" / "checkpoints" / "step_00000002"
    resumed = train_held(model, out / "resumed", stage, resume=step)
    same = True
    for name, value in weights(out / "whole").items():
        same = same and torch.equal(value, weights(out / "resumed")[name])
    return whole, resumed, same


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(1, 2), *(pytest.param(2, stage, marks=pytest.mark.slow) for stage in (2, 3))],
)
def test_an_objective_with_a_state_is_resumed_bit_for_bit(
    tiny_pipeline: Path, tmp_path: Path, worlds, world_size: int, stage: int
):
    whole, resumed, same = worlds[world_size].run(interrupt, tiny_pipeline, tmp_path, stage)[0]
    assert resumed == whole[2:]
    assert same


def documented(name: str) -> type[FlowMatching]:
    """Return the objective of docs/extending.md with this name of its class."""
    blocks = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(), flags=re.DOTALL)
    [block] = [block for block in blocks if f"class {name}(" in block]
    scope: dict[str, Any] = {"wands": wands, "__name__": __name__}
    exec(block, scope)
    objective: type[FlowMatching] = scope[name]
    return objective


def train_documented(model: Path, out: Path) -> dict[str, list[float]]:
    kinds = {name: documented(name)() for name in ("Robust", "HeldToBase", "Consistent")}
    runs = {"default": None} | {name: Plugin(objective=kind) for name, kind in kinds.items()}
    keys = (*LORA, "eval={every: 2}", "data.holdout=0.3")
    return {
        name: losses(run_training(model, out / name, keys, zero(2), plugin=plugin))
        for name, plugin in runs.items()
    }


@pytest.mark.slow
def test_the_objectives_of_the_docs_train(tiny_pipeline: Path, tmp_path: Path, worlds):
    """With context parallelism over two ranks, and a held-out loss."""
    runs = worlds[2].run(train_documented, tiny_pipeline, tmp_path)[0]
    assert all(len(series) == 4 and np.isfinite(series).all() for series in runs.values())
    assert len({tuple(series) for series in runs.values()}) == 4
    assert runs["HeldToBase"][0] == runs["default"][0], "a LoRA starts as its base"


def forget_state(model: Path, out: Path) -> tuple[list[float], list[float]]:
    class Forgetful(HeldToBase):
        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            pass

    whole = train_held(model, out / "whole", 2)
    plugin = Plugin(objective=Forgetful(weight=1.0, warmup=3))
    step = out / "whole" / "checkpoints" / "step_00000002"
    return whole, losses(run_training(model, out / "r", LORA, zero(2), resume=step, plugin=plugin))


@pytest.mark.slow
def test_a_state_that_is_lost_would_be_seen(tiny_pipeline: Path, tmp_path: Path, worlds):
    whole, resumed = worlds[1].run(forget_state, tiny_pipeline, tmp_path)[0]
    assert resumed != whole[2:]


def resume_with_another(model: Path, out: Path) -> str:
    train_held(model, out, 2, "train.max_steps=2")
    saved = find_checkpoint(out).state
    current = make_run(model, out, LORA).state
    with pytest.raises(CheckpointError) as caught:
        check_resumable(saved, current, "--resume run")
    return str(caught.value)


def test_a_run_is_not_resumed_with_another_objective(tiny_pipeline: Path, tmp_path: Path, worlds):
    [text] = worlds[1].run(resume_with_another, tiny_pipeline, tmp_path)
    assert "flow_matching (version 1) must equal the checkpoint's held_to_base (version 1)" in text


def held_gradients(model: Path, out: Path, mode: str, overrides: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Gradients of one step with a LoRA that is not zero, at the full weight of the distance."""
    objective = held()
    objective.num_steps = 10
    keys = (*LORA, f"model.checkpointing={mode}", *overrides)
    run = make_run(model, out, keys, zero(3), plugin=Plugin(objective=objective))
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    # A model that is made under ZeRO-3 is float32; this one is sharded by the engine.
    whole = replace(run, ds_config={**run.ds_config, "zero_optimization": {"stage": 2}})
    module = model_of(whole, groups, device).double()
    fill_lora(module)
    engine = engine_of(run, module)
    gradients = capture_gradients(engine)
    plan = run.schedule.sampler.step_plan(0)
    [batches] = run.reader(groups.dims).micro_batches(plan)
    train_step(
        engine,
        batches,
        run.objective,
        groups=groups,
        device=device,
        denominator=run.schedule.denominator(plan),
    )
    release_engine(engine)
    return gradients


def fill_lora(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator) / 10
            with torch.no_grad():
                parameter.copy_(values)


def plain_gradients(model: Path, out: Path) -> dict[str, torch.Tensor]:
    """The same gradients with plain autograd: one process, no engine, the base as a second model."""
    run = make_run(model, out, LORA, zero(2), world_size=1, plugin=Plugin(objective=held()))
    _, _, device = init_process_group()
    groups = ProcessGroups(run.grid(0))
    module = model_of(run, groups, device).double()
    fill_lora(module)
    base = model_of(make_run(model, out, (), zero(2), world_size=1), groups, device).double()
    plan = run.schedule.sampler.step_plan(0)
    [batches] = run.reader(run.grid(0)).micro_batches(plan)
    for part, noisy in batches:
        inputs = part.model_inputs(noisy.tokens, noisy.timesteps)
        prediction = module(**inputs)
        rows = noisy.trained
        ids = part.meta.segment_ids[rows]
        squares = (prediction - noisy.target)[rows].square().mean(1)
        squares = squares + (prediction - base(**inputs).detach())[rows].square().mean(1)
        per_clip = torch.tensor(part.trained_lens, dtype=torch.float64)
        ((squares / per_clip[ids]).sum() / run.schedule.denominator(plan)).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("mode", "grid"),
    [
        ("full", ()),
        pytest.param("none", (), marks=pytest.mark.slow),
        pytest.param("selective", ("parallel.ring_degree=2",), marks=pytest.mark.slow),
        pytest.param("full", ("parallel.ulysses_degree=2",), marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_a_lora_held_to_its_base_is_that_of_two_plain_models(
    tiny_pipeline: Path, tmp_path: Path, worlds, mode: str, grid: tuple[str, ...]
):
    ours = worlds[2].run(held_gradients, tiny_pipeline, tmp_path, mode, grid)[0]
    theirs = worlds[1].run(plain_gradients, tiny_pipeline, tmp_path)[0]
    assert worst(ours, theirs) <= 1e-6


def base_of_adapter(model: Path, out: Path) -> tuple[bool, bool, list[bool]]:
    run = make_run(model, out, LORA, zero(2), world_size=1)
    _, _, device = init_process_group()
    groups = ProcessGroups(run.grid(0))
    module = model_of(run, groups, device)
    fill_lora(module)
    base = model_of(make_run(model, out, (), zero(2), world_size=1), groups, device)
    plan = run.schedule.sampler.step_plan(0)
    [batches] = run.reader(run.grid(0)).micro_batches(plan)
    part, noisy = batches[0]
    inputs = part.model_inputs(noisy.tokens, noisy.timesteps)
    with adapter_off(module):
        off = module(**inputs)
    trained = [p.requires_grad for name, p in module.named_parameters() if "lora" in name]
    return torch.equal(off, base(**inputs)), torch.equal(off, module(**inputs)), trained


def test_adapter_off_is_the_base_and_changes_nothing_afterwards(tiny_pipeline: Path, tmp_path: Path, worlds):
    is_base, is_tuned, trained = worlds[1].run(base_of_adapter, tiny_pipeline, tmp_path)[0]
    assert is_base
    assert not is_tuned
    assert all(trained)


def train_with_momentum(model: Path, out: Path, stage: int) -> tuple[list[float], list[float], list[float]]:
    keys = ("train.max_steps=4", "checkpoint.every=2", "optim.warmup=0")
    plugin = Plugin(optimizer=outside.momentum, schedule=outside.halved, jobs=(outside.StepNames(),))
    rows = run_training(model, out / "whole", keys, zero(stage), plugin=plugin)
    step = out / "whole" / "checkpoints" / "step_00000002"
    resumed = run_training(model, out / "resumed", keys, zero(stage), resume=step, plugin=plugin)
    return losses(rows), losses(resumed), [row["lr"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
def test_a_torch_optimizer_from_outside_trains_at_every_zero_stage(
    tiny_pipeline: Path, tmp_path: Path, worlds, stage: int
):
    series, resumed, rates = worlds[2].run(train_with_momentum, tiny_pipeline, tmp_path, stage)[0]
    one = worlds[1].run(train_with_momentum, tiny_pipeline, tmp_path / "one", 0)[0][0]
    assert series == pytest.approx(one, rel=1e-5)
    assert resumed == series[2:]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])
    for rank in range(2):
        lines = (tmp_path / "whole" / f"steps_{rank}.txt").read_text().splitlines()
        assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
    assert float(lines[0].split()[1]) == series[0]


def test_an_optimizer_of_outside_code_and_one_of_the_json_are_refused(tiny_pipeline: Path, tmp_path: Path):
    ds = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {}}}
    with pytest.raises(ConfigError, match=r"AdamW.*remove one"):
        make_run(tiny_pipeline, tmp_path, (), ds, world_size=1, plugin=Plugin(optimizer=outside.momentum))
