"""Training in fp8: equal at every ZeRO stage and checkpointing mode, resumed bit for bit, near to bf16."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fp8 import needs_products
from tests.support.runs import engine_of, losses, make_run, model_of, run_training
from tests.support.steps import Grid, Step, optimizer_step, worst, zero
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import load_exported_state, load_full_weights, load_lora_of
from wands.config.deepspeed import build_ds_config
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import release_engine
from wands.errors import ConfigError
from wands.model.files.loading import load_weights
from wands.model.files.lora_files import LoraUpdate
from wands.model.lora import MergedLoras

pytestmark = needs_products

FP8 = ("precision.compute=bf16", "precision.linears=fp8")
LORA = ("lora.rank=4", "lora.targets=attention+ffn")
STORED = (*LORA, "precision.compute=bf16", "lora.quantize=fp8")
DP = Grid(2, 1, 1)
EVERY_NAME = (
    "model.checkpointing=offload",
    "model.saved_tensors=[query_proj, key_proj]",
    "model.offloaded_tensors=[block_input, attn_output, value_proj, ffn_activation]",
)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


SETTINGS = {"full": FP8, "lora": (*FP8, *LORA), "stored": STORED}


@pytest.fixture(scope="module")
def plain_step(
    tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool
) -> Callable[[str, int], Step]:
    """A step that keeps all activations, at ZeRO-2 or ZeRO-3, whose linear layers in bf16 round differently."""
    out = tmp_path_factory.mktemp("plain")

    @cache
    def of(kind: str, stage: int) -> Step:
        overrides = (*SETTINGS[kind], "train.bins_per_step=2")
        return worlds[2].run(optimizer_step, tiny_pipeline, out, overrides, zero(stage))[0]

    return of


@pytest.mark.parametrize(
    ("kind", "stage", "more"),
    [
        ("full", 3, ("model.checkpointing=selective",)),
        slow("full", 0, ("model.checkpointing=full",)),
        slow("full", 1, EVERY_NAME),
        slow("full", 3, EVERY_NAME),
        slow("full", 3, ("model.compile=true",)),
        slow("lora", 3, ("model.checkpointing=full",)),
        slow("lora", 0, EVERY_NAME),
        slow("stored", 3, EVERY_NAME),
        slow("stored", 3, ("model.checkpointing=selective",)),
        slow("stored", 1, ("model.compile=true",)),
    ],
    ids=str,
)
def test_a_step_is_that_of_a_run_that_keeps_all_activations(
    kind: str,
    stage: int,
    more: tuple[str, ...],
    plain_step: Callable[[str, int], Step],
    tiny_pipeline: Path,
    tmp_path: Path,
    worlds: WorldPool,
):
    overrides = (*SETTINGS[kind], "train.bins_per_step=2", *more)
    ranks = worlds[2].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(stage))
    plain = plain_step(kind, 3 if stage == 3 else 2)
    assert plain.gradients
    if "model.compile=true" in more:  # the compiled norms sum in another order
        assert ranks[0].loss == pytest.approx(plain.loss, rel=1e-3)
        return
    assert ranks[0].loss == pytest.approx(plain.loss, rel=1e-6)
    assert worst(ranks[0].gradients, plain.gradients) <= 1e-5
    assert len({rank.digest for rank in ranks}) == 1


def test_gradients_point_where_those_of_bf16_do(
    plain_step: Callable[[str, int], Step], tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = ("precision.compute=bf16", "train.bins_per_step=2")
    bf16 = worlds[2].run(optimizer_step, tiny_pipeline, tmp_path, overrides, zero(2))[0]
    fp8 = plain_step("full", 2)
    assert fp8.loss != bf16.loss
    assert fp8.loss == pytest.approx(bf16.loss, rel=1e-3)
    matrices = {name: gradient for name, gradient in bf16.gradients.items() if gradient.dim() == 2}
    for name, gradient in matrices.items():
        cosine = torch.cosine_similarity(gradient.flatten(), fp8.gradients[name].flatten(), dim=0)
        assert float(cosine) > 0.97, name


def live_bytes() -> int:
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def bytes_kept_over_a_forward(model: Path, out: Path, overrides: tuple[str, ...]) -> tuple[int, int]:
    """Return (bytes that the forward pass leaves, bytes of the largest weight) at ZeRO-3, where nothing else may be kept."""
    small = {
        "stage3_max_live_parameters": 1,
        "stage3_prefetch_bucket_size": 1,
        "stage3_max_reuse_distance": 0,
    }
    run = make_run(model, out, (*overrides, "train.bins_per_step=2"), zero(3, **small))
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    engine = engine_of(run, model_of(run, groups, device))
    [batches] = run.reader(groups.dims).micro_batches(run.schedule.sampler.step_plan(0))
    for _ in range(3):  # DeepSpeed records the order of the modules in the first steps
        loss, _ = run.objective.loss(engine, *batches[0])
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
    before = live_bytes()
    kept = run.objective.loss(engine, *batches[0])
    size = live_bytes() - before
    largest = max(parameter.ds_numel * 4 for parameter in engine.module.parameters())
    assert kept[0].requires_grad
    release_engine(engine)
    return size, largest


@pytest.mark.slow
def test_zero_3_keeps_no_gathered_weight_over_a_forward(tiny_pipeline: Path, tmp_path: Path, new_world: Any):
    """In new processes, where nothing of another test is freed in between."""
    sizes = {}
    for name, settings in {"bf16": ("precision.compute=bf16",), "fp8": FP8}.items():
        overrides = (*settings, "model.checkpointing=none")
        sizes[name], largest = new_world(
            2, bytes_kept_over_a_forward, tiny_pipeline, tmp_path / name, overrides
        )[0]
    assert sizes["fp8"] <= sizes["bf16"] + largest


@pytest.mark.parametrize("settings", [slow(FP8), slow((*FP8, *LORA))], ids=["full", "lora"])
def test_a_run_in_fp8_resumes_bit_for_bit(
    settings: tuple[str, ...], tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = (*settings, "train.max_steps=4", "checkpoint.every=2", "checkpoint.keep=3")

    def run(resume: bool = False) -> list[dict[str, Any]]:
        return worlds[2].run(run_training, tiny_pipeline, tmp_path / "run", overrides, zero(3), resume)[0]

    straight = run()
    last = load_exported_state(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000004").rename(tmp_path / "set aside")
    assert losses(run(resume=True)) == losses(straight)
    again = load_exported_state(tmp_path / "run")
    assert all(torch.equal(again[name], value) for name, value in last.items())
    assert {value.dtype for value in last.values()} == {torch.float32}


@pytest.mark.slow
def test_a_lora_on_a_base_in_fp8_is_merged_into_the_original_weights(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = (*STORED, "train.max_steps=1")
    worlds[2].run(run_training, tiny_pipeline, tmp_path / "run", overrides, zero(3))
    update = MergedLoras([(1.0, LoraUpdate(load_lora_of(tmp_path / "run")))])
    base = load_weights(tiny_pipeline)
    merged = load_full_weights(tmp_path / "run")
    assert base.keys() == merged.keys()
    assert all(torch.equal(merged[name], update(name, weight)) for name, weight in base.items())


def classes(model: Path, out: Path, overrides: tuple[str, ...]) -> dict[str, str]:
    run = make_run(model, out, overrides)
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    return {name: type(module).__name__ for name, module in model_of(run, groups, device).named_modules()}


def test_only_projections_and_feed_forward_of_the_blocks_multiply_in_fp8(
    tiny_variant: Any, tmp_path: Path, worlds: WorldPool
):
    model = tiny_variant("wan2.1-i2v-14b")
    [found] = worlds[1].run(classes, model, tmp_path, (*FP8, *LORA))
    inside = {name for name, kind in found.items() if kind == "Fp8Linear"}
    leaves = {name.removesuffix(".base_layer").rsplit("attn", 1)[-1].split("ffn")[-1] for name in inside}
    attention = {"to_q", "to_k", "to_v", "to_out.0"}
    image = {"2.add_k_proj", "2.add_v_proj"}
    expected = {f"{number}.{name}" for number in (1, 2) for name in attention} | image
    assert leaves == expected | {".net.0.proj", ".net.2"}
    assert all(name.startswith("blocks.") for name in inside)
    assert not any("lora_" in name for name in inside)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("precision.linears=fp8",), "precision.compute=fp32 asks for products in fp32"),
        (("lora.rank=4", "lora.quantize=fp8"), "precision.compute=fp32 asks for products in fp32"),
        ((*FP8, "lora.rank=4", "lora.quantize=int8"), "cannot multiply the codes of lora.quantize=int8"),
        (("precision.fp8_grad_weight=bf16",), "has no effect without a full finetune"),
        ((*FP8, *LORA, "precision.fp8_grad_weight=bf16"), "has no effect without a full finetune"),
    ],
)
def test_what_fp8_cannot_do_is_refused(
    overrides: tuple[str, ...], words: str, tiny_pipeline: Path, tmp_path: Path
):
    with pytest.raises(ConfigError) as caught:
        make_run(tiny_pipeline, tmp_path, overrides, world_size=1)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_in_fp8_are_reduced_in_bf16_where_that_is_asked():
    recipe = load_recipe(None, [*FP8, "precision.reduce=bf16", "model.path=m", "data.cache=c"])
    config = build_ds_config({}, recipe, world_size=1, device_type="cpu")
    modules = config["torch_autocast"]["lower_precision_safe_modules"]
    assert modules == ["torch.nn.Linear", "wands.model.fp8.Fp8Linear"]
