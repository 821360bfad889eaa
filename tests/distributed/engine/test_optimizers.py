"""Optimizers by name: each is its library's own on the same gradients, resumes bitwise, or is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import engine_of, losses, make_run, model_of, run_training
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.checkpoint.engine_state import Fragment
from wands.config.optimizer_kinds import MIN_8BIT, is_hidden_matrix, state_bytes
from wands.config.recipe import OptimConfig
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import build_schedule, release_engine
from wands.engine.optimizers import build_optimizer, muon_ratio
from wands.errors import ConfigError
from wands.model.files.loading import build_empty
from wands.train.step import train_step

STEPS = 4
MANY_STEPS = 16
LR = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
DECAY = 0.1
CLIP = 0.5
SETTINGS = (
    f"train.max_steps={STEPS}",
    "optim.warmup=2",
    f"optim.weight_decay={DECAY}",
    "precision.compute=fp32",
)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recorded:
    """A short run as its ranks saw it.

    Attributes:
        start: weights before the first step.
        gradients: of every step, as they go into the update (before clipping); of Muon's matrices only without ZeRO.
        end: weights after the last.
        state_bytes: of the optimizer's states on this rank.
    """

    start: Tensors
    gradients: list[Tensors]
    end: Tensors
    state_bytes: int


def record(
    model: Path, out: Path, overrides: tuple[str, ...], ds: dict[str, Any], steps: int = STEPS
) -> Recorded:
    """A few steps of the trainer on an engine whose gradients and states are looked at."""
    from deepspeed.utils import safe_get_full_grad

    training_run = make_run(model, out, (*SETTINGS, *overrides, f"train.max_steps={steps}"), ds)
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(training_run.grid(rank), device)
    engine = engine_of(training_run, model_of(training_run, groups, device))
    start = _full(engine.module)
    gradients = []
    update = engine.step

    def capture() -> None:
        named = engine.module.named_parameters()
        gradients.append(
            {
                name: (p.grad if engine.zero_optimization_stage() == 0 else safe_get_full_grad(p)).clone()
                for name, p in named
            }
        )
        update()

    engine.step = capture
    for step in range(steps):
        plan = training_run.schedule.sampler.step_plan(step)
        [batches] = training_run.reader(groups.dims).micro_batches(plan)
        train_step(
            engine,
            batches,
            training_run.objective,
            groups=groups,
            device=device,
            denominator=training_run.schedule.denominator(plan),
        )
    flats = list(engine.basic_optimizer.state.values())  # 8-bit AdamW has a dict for each fragment
    nested = [value for state in flats for value in state.values() if isinstance(value, dict)]
    states = [
        value for state in flats + nested for value in state.values() if isinstance(value, torch.Tensor)
    ]
    states += [entry[0] for entry in getattr(engine.optimizer, "_muon_pending_momentum", {}).values()]
    size = sum(value.nbytes for value in states)
    found = Recorded(start, gradients, _full(engine.module), size)
    release_engine(engine)
    torch.compiler.set_stance("default")
    return found


def _full(module: torch.nn.Module) -> Tensors:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def rates(steps: int) -> list[float]:
    """The learning rate of every step."""
    schedule = build_schedule(OptimConfig(lr=LR, warmup=2), steps)
    return [LR * schedule(step) for step in range(steps)]


def clipped(gradients: Tensors, clip: float) -> Tensors:
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
    return {name: g * scale for name, g in gradients.items()}


def far(found: Tensors, wanted: Tensors, start: Tensors) -> float:
    """Largest error of a parameter's way, over the largest way of that parameter."""
    assert found.keys() == wanted.keys() == start.keys()
    return max(
        float((found[n] - wanted[n]).abs().max()) / float((wanted[n] - start[n]).abs().max()) for n in wanted
    )


# ---- the dumb way: the library's own optimizer in this process, on the gradients that DeepSpeed had


def alone(run: Recorded, build: Any, clip: float) -> Tensors:
    """One tensor after the other, without DeepSpeed; `build` takes them by name."""
    params = {name: torch.nn.Parameter(value.clone()) for name, value in run.start.items()}
    optimizers = build(params)
    base = [[group["lr"] for group in one.param_groups] for one in optimizers]
    for gradients, rate in zip(run.gradients, rates(len(run.gradients)), strict=True):
        for name, gradient in clipped(gradients, clip).items():
            params[name].grad = gradient.clone()
        for one, lrs in zip(optimizers, base, strict=True):
            for group, lr in zip(one.param_groups, lrs, strict=True):
                group["lr"] = lr * rate / LR
            one.step()
    return {name: parameter.detach() for name, parameter in params.items()}


def movement(found: Tensors, wanted: Tensors, start: Tensors) -> tuple[dict[str, float], dict[str, float]]:
    """Distance that each parameter moved and norm of its error, both divided by the distance that it should have moved."""
    ways = {name: float((wanted[name] - start[name]).norm()) for name in start}
    assert all(ways.values())
    moved = {name: float((found[name] - start[name]).norm()) / way for name, way in ways.items()}
    return moved, {name: float((found[name] - wanted[name]).norm()) / way for name, way in ways.items()}


EIGHT = ("optim.name=adamw8bit", f"optim.grad_clip={CLIP}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [
        (2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2))
        ),
    ],
)
def test_adamw8bit_is_bitsandbytes_on_whole_tensors(
    stage: int, world_size: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Norm gains, biases and matrices alike; a block that two ranks share has two scales."""
    import bitsandbytes

    ranks = worlds[world_size].run(record, tiny_pipeline, tmp_path, EIGHT, zero(stage), MANY_STEPS)
    run = ranks[0]
    assert sum(value.numel() >= MIN_8BIT for value in run.start.values()) >= 4
    wanted = alone(
        run,
        lambda params: [
            bitsandbytes.optim.AdamW8bit(params.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        ],
        CLIP,
    )
    moved, off = movement(run.end, wanted, run.start)
    assert min(moved.values()) >= 0.99
    assert max(moved.values()) <= 1.01
    for name, value in run.start.items():
        # A code changes with the last bit of a gradient.
        assert off[name] <= (5e-3 if value.numel() >= MIN_8BIT else 1e-4), name
    assert _bytes(run, list(run.start), ranks, "adamw8bit", stage) == pytest.approx(1, rel=0.01)


@pytest.mark.slow
def test_adamw8bit_moves_each_tensor_as_far_at_every_stage(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """The gradients are those of the run itself, so differences grow over the steps."""
    runs = {
        (stage, world_size): worlds[world_size].run(
            record, tiny_pipeline, tmp_path, EIGHT, zero(stage), MANY_STEPS
        )[0]
        for stage in range(4)
        for world_size in (1, 2)
    }
    wanted = runs[0, 1]
    for case, run in runs.items():
        moved, off = movement(run.end, wanted.end, wanted.start)
        assert min(moved.values()) >= 0.99, case
        assert max(moved.values()) <= 1.01, case
        assert max(off.values()) <= 0.02, case


def _bytes(run: Recorded, names: list[str], ranks: list[Recorded], name: str, stage: int) -> float:
    """Bytes that the states take over those foretold."""
    shapes = [(key, tuple(run.start[key].shape)) for key in names]
    foretold = state_bytes(name, shapes, stage)
    held = sum(one.state_bytes for one in ranks) if stage else run.state_bytes
    return held / foretold


def test_adafactor_is_that_of_transformers(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    from transformers.optimization import Adafactor

    overrides = ("optim.name=adafactor", f"optim.grad_clip={CLIP}")
    ranks = worlds[2].run(record, tiny_pipeline, tmp_path, overrides, zero(0))
    wanted = alone(
        ranks[0],
        lambda params: [
            Adafactor(params.values(), lr=LR, weight_decay=DECAY, relative_step=False, scale_parameter=False)
        ],
        CLIP,
    )
    assert far(ranks[0].end, wanted, ranks[0].start) <= 1e-3
    assert _bytes(ranks[0], list(ranks[0].start), ranks, "adafactor", 0) == pytest.approx(1, rel=0.01)


def _torch_muon(params: dict[str, torch.nn.Parameter]) -> list[Any]:
    matrices = [p for name, p in params.items() if is_hidden_matrix(name, p.shape)]
    others = [p for name, p in params.items() if not is_hidden_matrix(name, p.shape)]
    return [
        torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(0, 2), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)])
def test_muon_is_that_of_torch_at_every_stage(
    stages: tuple[int, ...],
    tiny_pipeline: Path,
    tmp_path: Path,
    worlds: WorldPool,
    monkeypatch: pytest.MonkeyPatch,
):
    runs = {
        stage: worlds[2].run(
            record, tiny_pipeline, tmp_path, ("optim.name=muon", "optim.grad_clip=0"), zero(stage)
        )
        for stage in stages
    }
    run = runs[0][0]
    with monkeypatch.context() as patch:  # torch orthogonalizes in bf16, DeepSpeed on a CPU in fp32
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        wanted = alone(run, _torch_muon, 0)
    matrices = [name for name, value in run.start.items() if is_hidden_matrix(name, value.shape)]
    assert len(matrices) == 2 * 10  # per block: two attentions of four, and the feed-forward

    def part(values: Tensors, of: bool) -> Tensors:
        return {name: value for name, value in values.items() if (name in matrices) == of}

    assert far(part(run.end, False), part(wanted, False), part(run.start, False)) <= 1e-3
    assert far(part(run.end, True), part(wanted, True), part(run.start, True)) <= 5e-3
    for stage in stages[1:]:
        assert far(runs[stage][0].end, run.end, run.start) <= 1e-3, stage
    for stage, ranks in runs.items():
        assert _bytes(run, list(run.start), ranks, "muon", stage) == pytest.approx(1, rel=0.05), stage


def test_muons_update_is_of_adamws_size():
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    with torch.compiler.set_stance("force_eager"):
        for rows, columns in ((64, 64), (160, 32), (32, 160)):
            gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
            update = muon_update(gradient, torch.zeros(rows, columns)) * muon_ratio(rows, columns)
            assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize(
    ("name", "stage", "more"),
    [
        ("adamw", 3, ()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("adamw", stage, ()) for stage in (0, 1, 2)),
                *(("adamw8bit", stage, ()) for stage in (2, 3)),
                *(("muon", stage, ("optim.grad_clip=0",)) for stage in (0, 1, 3)),
            )
        ),
    ],
)
def test_norms_biases_and_modulation_are_not_decayed(
    name: str, stage: int, more: tuple[str, ...], tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = (f"optim.name={name}", f"optim.grad_clip={CLIP}", "optim.decay_norms=false", *more)
    run = worlds[2].run(record, tiny_pipeline, tmp_path, overrides, zero(stage))[0]
    norms = {key for key, value in run.start.items() if value.dim() < 2 or "scale_shift_table" in key}
    assert {"blocks.0.norm2.weight", "blocks.0.scale_shift_table", "proj_out.bias"} <= norms

    def build(params: dict[str, torch.nn.Parameter]) -> list[Any]:
        parts = {0.0: [], DECAY: []}
        for key, parameter in params.items():
            parts[0.0 if key in norms else DECAY].append(parameter)
        settings = {"lr": LR, "betas": BETAS, "eps": EPS}
        return [torch.optim.AdamW(part, weight_decay=decay, **settings) for decay, part in parts.items()]

    wanted = alone(run, build, 0 if more else CLIP)
    judged = run.start.keys() if name == "adamw" else norms
    sides = ({key: values[key] for key in judged} for values in (run.end, wanted, run.start))
    assert far(*sides) <= 1e-3


@pytest.mark.parametrize("stage", [1, 2])
def test_two_dtypes_and_no_decay_are_four_groups(stage: int, tiny_pipeline: Path, tmp_path: Path):
    from wands.engine.optimizers import split_by_decay, split_by_dtype
    from wands.model.files.loading import load_transformer
    from wands.model.weight_dtypes import WeightDtypePolicy

    run = make_run(tiny_pipeline, tmp_path, ("precision.weights=bf16", "precision.compute=bf16"))
    model = load_transformer(
        str(tiny_pipeline), init="pretrained", seed=0, storage=WeightDtypePolicy.of(run.recipe)
    )
    trained = list(model.named_parameters())
    groups = split_by_decay([{"params": [parameter for _, parameter in trained]}], trained)
    groups = split_by_dtype(groups, {"stage": stage, "reduce_bucket_size": 10**9}, "fp32")
    found = [({p.dtype for p in group["params"]}, group.get("weight_decay")) for group in groups]
    wide = [({torch.float32}, None), ({torch.float32}, 0.0)]
    narrow = [({torch.bfloat16}, None), ({torch.bfloat16}, 0.0)]
    assert [entry for entry in found if entry in narrow + wide] == found
    assert sum(len(group["params"]) for group in groups) == len(trained)
    assert len(groups) >= 3


FUSED = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}}
ON_HOST = {
    "optimizer": {"type": "AdamW", "params": {"torch_adam": False}},
    "zero_force_ds_cpu_optimizer": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *(("fused", stage) for stage in range(4)),
        pytest.param(
            "on host", 2, marks=pytest.mark.full
        ),  # compiled for a minute where it is for the first time
        pytest.param("on host", 3, marks=pytest.mark.full),
    ],
)
def test_the_adam_that_a_gpu_takes(
    kind: str, stage: int, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    """torch's fused kernel, and DeepSpeed's where states are offloaded; both are there for CPUs too.

    The losses are close to those of the plain optimizer, and a stopped run resumes bit for bit.
    """
    ds = {**zero(stage), **FUSED}
    if kind == "on host":
        ds = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}, **ON_HOST}
    short = tuple(one.replace(f"max_steps={STEPS}", "max_steps=2") for one in SETTINGS)
    assert short != SETTINGS

    def series(name: str, settings: tuple[str, ...], ds: dict[str, Any], resume: bool = False) -> list[float]:
        return losses(worlds[2].run(run_training, tiny_pipeline, tmp_path / name, settings, ds, resume)[0])

    whole = series("whole", SETTINGS, ds)
    assert whole == pytest.approx(series("plain", SETTINGS, zero(stage)), rel=1e-6)
    series("twice", short, ds)
    assert series("twice", SETTINGS, ds, resume=True) == whole


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_8_bits_step_as_32_do(device: str):
    """Ten steps of one tensor: the way is AdamW's within a few percent, on the device that it is on."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10_001, generator=generator)
    gradients = [torch.randn(10_001, generator=generator) for _ in range(10)]
    params = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    ends = []
    for build in (
        lambda p: build_optimizer([("p", p)], {"type": "AdamW8bit", "params": params}, fused=False),
        lambda p: torch.optim.AdamW([p], **params),
    ):
        parameter = torch.nn.Parameter(start.clone().to(device))
        optimizer = build(parameter)
        optimizer.fragments = {
            parameter: [Fragment(name="p", start=0, numel=10_001, shape=[10_001], tensor=parameter)]
        }
        for gradient in gradients:
            parameter.grad = gradient.to(device)
            optimizer.step()
        ends.append(parameter.detach().cpu() - start)
    eight, full = ends
    assert 0 < float((eight - full).norm()) <= 0.05 * float(full.norm())


def test_muon_without_a_matrix():
    bias = torch.nn.Parameter(torch.zeros(3))
    section = {"type": "Muon", "params": {"lr": 1.0, "weight_decay": 0.0}}
    with pytest.raises(ConfigError, match="needs a trained weight matrix in a transformer block"):
        build_optimizer([("blocks.0.norm2.bias", bias)], section, fused=False)


def test_bytes_of_a_wan(tiny_pipeline: Path):
    """Bytes for the widths of the 1.3B model: nearly all of its parameters are in matrices."""
    config = json.loads((tiny_pipeline / "transformer" / "config.json").read_text())
    config |= {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 2}
    shapes = [(name, tuple(p.shape)) for name, p in build_empty(config).named_parameters()]
    num_params = sum(math.prod(shape) for _, shape in shapes)
    assert state_bytes("adamw", shapes, 2) == 8 * num_params
    assert state_bytes("adamw8bit", shapes, 2) / num_params == pytest.approx(2.03, abs=0.01)
    assert state_bytes("adamw8bit", [("blocks.0.norm2.bias", (MIN_8BIT - 1,))], 2) == 8 * (MIN_8BIT - 1)
    assert state_bytes("adafactor", shapes, 0) < 0.1 * num_params
    assert 4 < state_bytes("muon", shapes, 3) / num_params < 4.8
