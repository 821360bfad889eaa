"""Tensor parallelism through the trainer: the step is that of one process, whoever has which part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.distributed.train.test_context import CLIPS, check_step
from tests.distributed.train.test_context_series import run_series
from tests.distributed.train.test_variants import VARIANTS
from tests.support.commands import export
from tests.support.runs import Spy, make_run, run_training
from tests.support.steps import (
    Grid,
    Step,
    optimizer_step,
    save_random_lora,
    stock_gradients,
    whole_of,
    worst,
    zero,
)
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import load_exported_state
from wands.config.deepspeed import build_ds_config
from wands.config.recipe_loading import load_recipe
from wands.errors import ConfigError
from wands.model import tensor_parallel
from wands.model.files import loading
from wands.model.tensor_parallel import ColumnsLinear, RowsLinear
from wands.plugin import Plugin
from wands.train.jobs import FinishedStep
from wands.train.training import Training

TOLERANCE = 1e-5
SERIES_TOLERANCE = 2e-6
TP2 = Grid(1, 1, 1, tensor=2)
GRIDS = (
    TP2,
    Grid(2, 1, 1, tensor=2),
    Grid(1, 1, 2, tensor=2),
    Grid(1, 2, 1, tensor=2),
    Grid(1, 1, 1, tensor=4),
)
CASES = [(grid, stage) for grid in GRIDS for stage in range(4)]
FEW = [(GRIDS[2], 1)]
MODES = ("none", "full", "selective", "offload")


def settings(grid: Grid, *more: str) -> tuple[str, ...]:
    return (*CLIPS, *grid.overrides, f"train.bins_per_step={grid.dp}", *more)


@pytest.fixture(scope="module")
def single(
    worlds: WorldPool, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Grid], Step]:
    """The same clips in one process without ZeRO, in as many bins as the grid has."""
    out = tmp_path_factory.mktemp("single")
    found: dict[int, Step] = {}

    def of_grid(grid: Grid) -> Step:
        if grid.dp not in found:
            alone = settings(Grid(1, 1, 1), f"train.bins_per_step={grid.dp}")
            found[grid.dp] = worlds[1].run(optimizer_step, tiny_pipeline, out, alone, zero(0))[0]
        return found[grid.dp]

    return of_grid


# ---- gradients


@pytest.mark.parametrize(
    ("grid", "stage"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_the_gradient_is_that_of_one_process(
    grid: Grid,
    stage: int,
    single: Callable[[Grid], Step],
    worlds: WorldPool,
    tiny_pipeline: Path,
    tmp_path: Path,
):
    """Every stage of ZeRO and every kind of checkpointing. All ranks have the same weights after the update, bit for bit."""
    mode = MODES[(GRIDS.index(grid) + stage) % len(MODES)]
    overrides = settings(grid, f"model.checkpointing={mode}")
    ranks = worlds[grid.world_size].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(stage))
    error = check_step(ranks, single(grid))
    assert error <= TOLERANCE
    print(f"dp x ring x ulysses x tensor {grid}, ZeRO-{stage}: {error:.1e}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "grid", "stage"),
    [
        ("wan2.1-i2v-14b", TP2, 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("wan2.1-i2v-14b", GRIDS[2], 2),
                ("wan2.1-flf2v-14b", TP2, 1),
                ("wan2.2-ti2v-5b", GRIDS[3], 1),
                ("wan2.2-i2v-a14b", TP2, 2),
                ("wan2.1-t2v-1.3b", GRIDS[4], 2),
            ]
        ),
    ],
    ids=str,
)
def test_float64_is_stock_diffusers(
    variant: str,
    grid: Grid,
    stage: int,
    tiny_variant: Callable[[str], Path],
    worlds: WorldPool,
    tmp_path: Path,
):
    """Also cross-attention to images, whose keys are normalized over the heads of all ranks, too."""
    model = tiny_variant(variant)
    more = VARIANTS.get(variant, ())
    overrides = ("train.bins_per_step=2", "flow.weighting=linear", *grid.overrides, *more)
    ranks = worlds[grid.world_size].run(
        optimizer_step, model, tmp_path, overrides, zero(stage), torch.float64
    )
    theirs = stock_gradients(model, make_run(model, tmp_path, overrides, world_size=grid.world_size))
    assert all(float(grad.abs().max()) > 0 for grad in theirs.values())
    assert worst(ranks[0].gradients, theirs) <= TOLERANCE


@pytest.mark.parametrize(
    ("targets", "grid", "stage"),
    [
        ("all-linear", TP2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("all-linear", GRIDS[1], 3),
                ("attention+ffn", GRIDS[2], 0),
                ("all-linear", GRIDS[4], 1),
            ]
        ),
    ],
    ids=str,
)
def test_a_lora_is_divided_as_its_layers_are(
    targets: str, grid: Grid, stage: int, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    """With a B that is not zero, so that every matrix has a gradient, and with the B of zeros of a new LoRA."""
    start = (
        () if targets != "all-linear" else (f"lora.init_from={save_random_lora(tiny_pipeline, tmp_path)}",)
    )
    lora = ("lora.rank=4", "lora.alpha=4", f"lora.targets={targets}", *start)
    alone = settings(Grid(1, 1, 1), f"train.bins_per_step={grid.dp}", *lora)
    one_process = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, alone, zero(0))[0]
    overrides = settings(grid, *lora)
    ranks = worlds[grid.world_size].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(stage))
    assert check_step(ranks, one_process) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("precision.reduce=bf16",), ("precision.weights=bf16",)], ids=str)
def test_bf16_stays_near_float32(
    more: tuple[str, ...],
    single: Callable[[Grid], Step],
    worlds: WorldPool,
    tiny_pipeline: Path,
    tmp_path: Path,
):
    grid = GRIDS[1]
    overrides = settings(grid, "precision.compute=bf16", *more)
    ranks = worlds[4].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(2))
    assert len({rank.digest for rank in ranks}) == 1
    one_process = single(grid).gradients
    ours, theirs = (
        torch.cat([grads[name].flatten() for name in one_process])
        for grads in (ranks[0].gradients, one_process)
    )
    error = float((ours - theirs).norm() / theirs.norm())
    assert 0 < error <= 2e-2


# ---- the same mistakes, made on purpose


def norm_of_own_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Leaves out the sum over the ranks for the one number of a norm; sums the outputs of layers."""
    return x * group.size() if x.shape[-1] == 1 else sum_outputs(x, group)


sum_outputs = tensor_parallel.sum_outputs


def set_cut_without_norm(parameter: Any, cut: Any) -> None:
    """Set the cut, but leave out the mark that says to DeepSpeed that the ranks have parts of the parameter."""
    if cut is not None:
        parameter.wands_cut = cut


def unmarked() -> ExitStack:
    """`set_cut` without the mark by which DeepSpeed counts the norm of each part."""
    stack = ExitStack()
    for module in (tensor_parallel, loading):
        stack.enter_context(mock.patch.object(module, "set_cut", set_cut_without_norm))
    return stack


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients of inputs not summed": lambda: mock.patch.object(
        tensor_parallel, "sum_gradients", lambda x, group: x
    ),
    "norm over the heads of one rank": lambda: mock.patch.object(
        tensor_parallel, "sum_outputs", norm_of_own_heads
    ),
    "norm of the parts of one rank": unmarked,
}


def step_with_a_mistake(mistake: str, *args: Any) -> Step:
    with MISTAKES[mistake]():
        return optimizer_step(*args)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*MISTAKES][:2])
def test_a_mistake_would_be_seen(
    mistake: str, single: Callable[[Grid], Step], worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    args = (tiny_pipeline, tmp_path, settings(TP2), zero(2))
    ranks = worlds[2].run(step_with_a_mistake, mistake, *args)
    assert worst(ranks[0].gradients, single(TP2).gradients) > 1e3 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_norm_of_the_parts_of_one_rank_would_be_seen(
    stage: int, single: Callable[[Grid], Step], worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    args = (tiny_pipeline, tmp_path, settings(TP2), zero(stage))
    ranks = worlds[2].run(step_with_a_mistake, [*MISTAKES][2], *args)
    assert abs(ranks[0].grad_norm / single(TP2).grad_norm - 1) > 1e-3


# ---- runs


@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        (TP2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(TP2, 0), (GRIDS[1], 3), (GRIDS[2], 1), (GRIDS[3], 0), (GRIDS[4], 3)]
        ),
    ],
    ids=str,
)
def test_the_loss_series_is_that_of_one_process(
    grid: Grid, stage: int, worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    """Five clipped steps: losses, norms, and the losses of the clips."""
    more = ("optim.grad_clip=0.05", "train.on_bad_step=skip")
    rows, clips = run_series(grid, zero(stage), 5, worlds, tiny_pipeline, tmp_path / "divided", more)
    theirs, their_clips = run_series(Grid(1, 1, 1), zero(0), 5, worlds, tiny_pipeline, tmp_path / "one", more)
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in theirs]
        assert [row[key] for row in rows] == pytest.approx(expected, rel=SERIES_TOLERANCE), key
    assert min(row["grad_norm"] for row in theirs) > 0.05  # every step is clipped
    assert {clip: sigma for clip, (sigma, _) in clips.items()} == {
        clip: sigma for clip, (sigma, _) in their_clips.items()
    }
    for clip, (_, loss) in clips.items():
        assert loss == pytest.approx(their_clips[clip][1], rel=SERIES_TOLERANCE), clip


def weights_in_the_ranks(*args: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A run, and its whole fp32 weights after the last step, put together from what the ranks have in memory."""
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, torch.Tensor] = {}

    def look(training: Training, _: FinishedStep) -> None:
        [engine] = training.engines.values()
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                full = safe_get_full_fp32_param(parameter)  # None at ZeRO-0
                values = (
                    parameter if full is None else full.view(getattr(parameter, "ds_shape", parameter.shape))
                )
                found[name] = whole_of(parameter, values.detach(), training.groups.tensor).clone()

    rows = run_training(*args, plugin=Plugin(jobs=(Spy(stepped=look),)))
    return rows, found


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        *((stage, ("ema={}",)) for stage in range(4)),
        (2, ("lora={rank: 4, targets: all-linear}",)),
        (2, ("model.trainable=['blocks.*']",)),
    ],
    ids=str,
)
def test_an_export_has_the_bits_of_the_ranks_and_a_resumed_run_those_of_a_run(
    stage: int, more: tuple[str, ...], worlds: WorldPool, tiny_pipeline: Path, tmp_path: Path
):
    keys = (*more, *GRIDS[1].overrides, "train.bins_per_step=2", "flow.cfg_dropout=0.3")
    straight = worlds[4].run(
        weights_in_the_ranks, tiny_pipeline, tmp_path / "a", (*keys, "train.max_steps=4"), zero(stage)
    )
    for rank in straight:
        assert same(rank[1], straight[0][1])
    exported = load_exported_state(tmp_path / "a")
    assert same({name: exported[name] for name in straight[0][1]}, straight[0][1])
    if "lora" not in more[0]:
        export(tmp_path / "a", tmp_path / "exported", dtype="fp32")
        [file] = (tmp_path / "exported" / "transformer").glob("*.safetensors")
        assert same(load_file(file), exported)
    halves = (*keys, "checkpoint.every=2", "checkpoint.keep=5")
    worlds[4].run(run_training, tiny_pipeline, tmp_path / "b", (*halves, "train.max_steps=2"), zero(stage))
    args = (tiny_pipeline, tmp_path / "b", (*halves, "train.max_steps=4"), zero(stage), True)
    rows = worlds[4].run(run_training, *args)[0]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == [row[key] for row in straight[0][0]], key
    assert same(load_exported_state(tmp_path / "b"), exported)
    if more == ("ema={}",):
        averages = (load_exported_state(tmp_path / out, ema=True) for out in ("a", "b"))
        assert same(*averages)


# ---- refusals


@pytest.mark.parametrize(
    ("overrides", "ds", "words"),
    [
        (("precision.compute=bf16", "precision.linears=fp8"), {}, "set precision.linears=bf16"),
        (("precision.compute=bf16", "lora.rank=4", "lora.quantize=fp8"), {}, "set lora.quantize=none"),
        (("model.dropout=0.1",), {}, "set model.dropout=0"),
        (("lora.rank=4", "lora.dropout=0.1"), {}, "lora.dropout=0"),
        (("optim.name=muon", "optim.grad_clip=0"), {}, "the optimizer Muon may need whole matrices"),
        (("optim.name=adafactor",), zero(0), "the optimizer Adafactor may need whole matrices"),
        (("optim.name=adamw8bit",), {}, "the optimizer AdamW8bit may need whole matrices"),
        ((), zero(2, offload_optimizer={"device": "cpu"}), "zero_optimization.offload_optimizer"),
        ((), zero(3, offload_param={"device": "cpu"}), "zero_optimization.offload_param"),
        ((), zero(3, zero_hpz_partition_size=2), "zero_optimization.zero_hpz_partition_size"),
    ],
)
def test_what_tensor_parallelism_cannot_do_is_refused(
    overrides: tuple[str, ...], ds: dict[str, Any], words: str, tiny_pipeline: Path, tmp_path: Path
):
    with pytest.raises(ConfigError) as caught:
        make_run(tiny_pipeline, tmp_path, (*overrides, "parallel.tensor_degree=2"), ds or None, world_size=2)
    [line] = [line for line in str(caught.value).splitlines() if "parallel.tensor_degree=2" in line]
    assert words in line


def test_degrees_that_do_not_fit_the_model_are_refused(tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"parallel.tensor_degree=3 must divide num_heads=4"):
        make_run(tiny_pipeline, tmp_path, ("parallel.tensor_degree=3",), world_size=3)
    with pytest.raises(
        ConfigError, match=r"train.bins_per_step=2: .* \(12 processes / \(cp_size x tensor_degree\)\)"
    ):
        make_run(tiny_pipeline, tmp_path, ("parallel.tensor_degree=4",), world_size=12)


def test_divided_layers_are_reduced_in_bf16_where_that_is_asked():
    keys = ("precision.reduce=bf16", "parallel.tensor_degree=2", "model.path=m", "data.cache=c")
    config = build_ds_config({}, load_recipe(None, keys), world_size=2, device_type="cpu")
    modules = config["torch_autocast"]["lower_precision_safe_modules"]
    linears = [f"{layer.__module__}.{layer.__name__}" for layer in (RowsLinear, ColumnsLinear)]
    assert modules == ["torch.nn.Linear", *linears]
