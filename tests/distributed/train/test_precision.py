"""Weights kept in bf16 or in codes: what is trained on them, what a checkpoint holds, and what cannot be right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.runs import losses, make_run, model_of, run_training
from tests.support.steps import Grid, Step, optimizer_step, save_random_lora, worst, zero
from tests.support.stored_bytes import stored_bytes
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import load_exported_state, load_full_weights, load_lora_of
from wands.checkpoint.resume import check_resumable
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.optimizers import split_by_dtype
from wands.errors import CheckpointError, ConfigError
from wands.model.files.loading import build_empty, load_config, load_transformer, load_weights
from wands.model.files.lora_update import LoraUpdate
from wands.model.lora import MergedLoras
from wands.model.quantized import QuantizedLinear
from wands.model.weight_dtypes import WeightDtypePolicy
from wands.train.summary import start_block

LORA = ("lora.rank=4", "lora.alpha=6", "lora.targets=all-linear", "train.bins_per_step=2")
DP = Grid(2, 1, 1)
CP = Grid(1, 1, 2)
WEIGHTS_FILE = Path("transformer") / "diffusion_pytorch_model.safetensors"


def full(*values: Any) -> Any:
    """A case of the exhaustive matrix."""
    return pytest.param(*values, marks=pytest.mark.full)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def start(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_lora(tiny_pipeline, tmp_path_factory.mktemp("lora"))


def with_weights(pipeline: Path, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The same pipeline with other weights in its DiT."""
    shutil.copytree(pipeline, folder)
    assert load_file(folder / WEIGHTS_FILE).keys() == weights.keys()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / WEIGHTS_FILE)
    return folder


@pytest.fixture(scope="module")
def rounded(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose weights bf16 can hold."""
    weights = {name: one.bfloat16().float() for name, one in load_weights(tiny_pipeline).items()}
    return with_weights(tiny_pipeline, tmp_path_factory.mktemp("rounded") / "pipeline", weights)


@pytest.fixture(scope="module")
def decoded(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each codec a pipeline whose weights are what the codes stand for."""
    folder = tmp_path_factory.mktemp("decoded")
    found = {}
    for name in ("int8", "nf4"):
        weights = load_weights(tiny_pipeline)
        for path, layer in load_transformer(
            tiny_pipeline, storage=WeightDtypePolicy(quantize=name)
        ).named_modules():
            if isinstance(layer, QuantizedLinear):
                weights[f"{path}.weight"] = layer.codec.decode(layer.weight, layer.scale, layer.in_features)
        found[name] = with_weights(tiny_pipeline, folder / name, weights)
    return found


def step(worlds: WorldPool, pipeline: Path, out: Path, grid: Grid, stage: int, *overrides: str) -> list[Step]:
    settings = (*LORA, *grid.overrides, *overrides)
    return worlds[grid.world_size].run(optimizer_step, pipeline, out, settings, zero(stage))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "grid"), [slow(0, DP), full(1, CP), (2, DP), full(3, DP), slow(3, CP)], ids=str
)
def test_a_frozen_base_in_bf16_changes_no_bit(
    stage: int, grid: Grid, start: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (f"lora.init_from={start}", "precision.compute=bf16")
    plain = step(worlds, tiny_pipeline, tmp_path, grid, stage, *settings)
    narrow = step(worlds, tiny_pipeline, tmp_path, grid, stage, *settings, "precision.weights=bf16")
    assert any(not torch.equal(one, one.bfloat16().float()) for one in load_weights(tiny_pipeline).values())
    assert (plain[0].loss, plain[0].grad_norm) == (narrow[0].loss, narrow[0].grad_norm)
    assert plain[0].gradients.keys() == narrow[0].gradients.keys()
    for name, gradient in plain[0].gradients.items():
        assert gradient.dtype == narrow[0].gradients[name].dtype == torch.float32
        assert torch.equal(gradient, narrow[0].gradients[name]), name
    assert len({rank.digest for rank in narrow}) == 1


@pytest.fixture(scope="module")
def on_decoded(
    decoded: dict[str, Path], start: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool
) -> Callable[[str, Grid], Step]:
    """The step of a LoRA on the plain weights that codes stand for."""
    out = tmp_path_factory.mktemp("plain")

    @cache
    def of(quantize: str, grid: Grid) -> Step:
        return step(worlds, decoded[quantize], out, grid, 2, f"lora.init_from={start}")[0]

    return of


@pytest.mark.parametrize(
    ("quantize", "stage", "grid", "checkpointing"),
    [
        slow("int8", 0, DP, "none"),
        full("int8", 1, DP, "full"),
        full("int8", 2, CP, "none"),
        slow("int8", 3, DP, "full"),
        full("int8", 3, CP, "none"),
        ("nf4", 2, DP, "none"),
        slow("nf4", 3, CP, "full"),
    ],
    ids=str,
)
def test_a_lora_on_codes_learns_as_on_the_decoded_weights(
    quantize: str,
    stage: int,
    grid: Grid,
    checkpointing: str,
    start: Path,
    tiny_pipeline: Path,
    on_decoded: Callable[[str, Grid], Step],
    tmp_path: Path,
    worlds: WorldPool,
):
    settings = (
        f"lora.init_from={start}",
        f"model.checkpointing={checkpointing}",
        f"lora.quantize={quantize}",
    )
    plain = on_decoded(quantize, grid)
    ranks = step(worlds, tiny_pipeline, tmp_path, grid, stage, *settings)
    assert ranks[0].loss == pytest.approx(plain.loss, rel=1e-6)
    assert worst(ranks[0].gradients, plain.gradients) <= 1e-5
    assert all(float(gradient.abs().max()) > 0 for gradient in ranks[0].gradients.values())
    assert len({rank.digest for rank in ranks}) == 1


def held_bytes(pipeline: Path, out: Path, overrides: tuple[str, ...], stage: int) -> dict[torch.dtype, int]:
    """Bytes of a run's base on this rank, by data type."""
    training_run = make_run(pipeline, out, overrides, zero(stage))
    rank, _, device = init_process_group()
    held: dict[torch.dtype, int] = {}
    groups = ProcessGroups.build(training_run.grid(rank), device)
    for name, parameter in model_of(training_run, groups, device).named_parameters():
        if ".lora_" not in name:
            mine = parameter.ds_tensor if stage == 3 else parameter
            held[mine.dtype] = held.get(mine.dtype, 0) + mine.nbytes
    torch.nn.functional.linear = _LINEAR  # ZeRO-3 puts its own in the place of torch's
    return held


_LINEAR = torch.nn.functional.linear


@pytest.mark.parametrize(
    "quantize", ["nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "int8"))]
)
def test_zero_3_leaves_each_rank_its_share(
    quantize: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    overrides = (*LORA, "precision.compute=bf16", "precision.weights=bf16", f"lora.quantize={quantize}")
    promised = build_empty(load_config(tiny_pipeline))
    WeightDtypePolicy.of(load_recipe(None, overrides)).apply(promised)
    whole = stored_bytes(promised)
    [alone] = worlds[1].run(held_bytes, tiny_pipeline, tmp_path, overrides, 2)
    assert alone == whole
    padding = 8 * len(list(promised.parameters()))  # of each to a multiple of the ranks
    for held in worlds[2].run(held_bytes, tiny_pipeline, tmp_path, overrides, 3):
        assert held.keys() == whole.keys()
        for dtype, size in whole.items():
            assert size / 2 <= held[dtype] <= size / 2 + padding


@pytest.mark.slow
@pytest.mark.parametrize("stage", [slow(1), 2])
def test_trained_weights_in_bf16_take_the_steps_of_fp32(
    stage: int, rounded: Path, tmp_path: Path, worlds: WorldPool
):
    """Masters, sums over micro batches and ranks are fp32: from the same start no bit differs, resumed or not."""
    # Of AdamW every step is 1e-5: of 20, most weights notice none in bf16.
    settings = ("precision.compute=bf16", "optim.lr=1e-5", "train.bins_per_step=4", "train.max_steps=4")
    settings += ("checkpoint.every=2", "checkpoint.keep=3")

    def run(weights: str, resume: bool = False) -> list[dict[str, Any]]:
        overrides = (*settings, f"precision.weights={weights}")
        return worlds[2].run(run_training, rounded, tmp_path / weights, overrides, zero(stage), resume)[0]

    plain = run("fp32")
    narrow = run("bf16")
    assert losses(plain) == losses(narrow)
    wanted, found = (load_exported_state(tmp_path / weights) for weights in ("fp32", "bf16"))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    before = load_weights(rounded)
    name = "blocks.0.ffn.net.0.proj.weight"
    assert found[name].dtype == torch.float32
    assert (found[name] != before[name]).float().mean() > 0.99
    assert (found[name].bfloat16() == before[name]).float().mean() > 0.9
    last = tmp_path / "bf16" / "checkpoints" / "step_00000004"
    last.rename(tmp_path / "set aside")
    assert losses(run("bf16", resume=True)) == losses(narrow)
    again = load_exported_state(tmp_path / "bf16")
    assert all(torch.equal(again[name], value) for name, value in found.items())


@pytest.mark.parametrize("stage", [slow(1), 2])  # which keep them in different files
def test_frozen_weights_in_bf16_are_exported_in_fp32(
    stage: int, rounded: Path, tmp_path: Path, worlds: WorldPool
):
    settings = ("precision.compute=bf16", "precision.weights=bf16", "train.max_steps=1")
    before = load_weights(rounded)
    overrides = (*settings, "model.trainable=['blocks.*.attn*']")
    worlds[2].run(run_training, rounded, tmp_path, overrides, zero(stage))
    after = load_exported_state(tmp_path)
    assert after.keys() == before.keys()
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".attn" in name}


@pytest.mark.slow
def test_a_lora_on_codes_resumes_bitwise_and_merges_into_the_weights(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (*LORA, "lora.quantize=int8", "precision.compute=bf16", "precision.weights=bf16")
    settings += ("train.max_steps=4", "checkpoint.every=2", "checkpoint.keep=3")

    def run(resume: bool = False) -> list[dict[str, Any]]:
        return worlds[2].run(run_training, tiny_pipeline, tmp_path / "run", settings, zero(3), resume)[0]

    straight = run()
    last = load_exported_state(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000004").rename(tmp_path / "set aside")
    assert losses(run(resume=True)) == losses(straight)
    again = load_exported_state(tmp_path / "run")
    assert all(torch.equal(again[name], value) for name, value in last.items())
    assert all(".lora_" in name and value.dtype == torch.float32 for name, value in last.items())
    update = MergedLoras([(1.0, LoraUpdate(load_lora_of(tmp_path / "run")))])
    base = load_weights(tiny_pipeline)
    merged = load_full_weights(tmp_path / "run")
    assert base.keys() == merged.keys()
    assert all(torch.equal(merged[name], update(name, weight)) for name, weight in base.items())


@pytest.mark.parametrize("steps", [slow(40), full(100)])
def test_the_losses_stay_in_their_band(steps: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    """Largest deviation of any loss, seen in 40 steps: 0.03 % for trained weights in bf16, 0.02 % for int8, 0.2 % for nf4."""

    def series(name: str, *overrides: str) -> torch.Tensor:
        settings = ("precision.compute=bf16", f"train.max_steps={steps}", "train.bins_per_step=1", *overrides)
        return torch.tensor(
            losses(worlds[1].run(run_training, tiny_pipeline, tmp_path / name, settings, zero(2))[0])
        )

    lora = ("lora.rank=4", "optim.lr=1e-2")
    plain = {"full": series("full"), "lora": series("lora", *lora)}
    for one in plain.values():
        assert len(one) == steps
        assert one[-10:].mean() < 0.97 * one[:10].mean()  # it learns, by far more than any band
    for base, band, overrides in (
        ("full", 2e-3, ("precision.weights=bf16",)),
        ("lora", 1e-3, (*lora, "lora.quantize=int8")),
        ("lora", 1e-2, (*lora, "lora.quantize=nf4")),
    ):
        deviation = (series(overrides[-1], *overrides) / plain[base] - 1).abs()
        assert 0 < float(deviation.max()) < band, overrides


@pytest.mark.parametrize(
    ("overrides", "zero_section", "words"),
    [
        (
            ("precision.compute=fp32",),
            {"stage": 2},
            "would round weights that precision.compute=fp32 multiplies",
        ),
        (("precision.compute=fp32", "lora.rank=4"), {"stage": 2}, "would round weights"),
        ((), {"stage": 0}, "has no fp32 master weights at ZeRO-0"),
        ((), {"stage": 3}, "needs more memory than fp32 in a full finetune at ZeRO-3"),
        ((), {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "in bf16 on the host at ZeRO-2"),
        (("optim.name=muon", "optim.grad_clip=0"), {"stage": 2}, "cannot be used with optim.name=muon"),
    ],
)
def test_what_cannot_be_right_is_refused(
    overrides: tuple[str, ...], zero_section: dict[str, Any], words: str, tiny_pipeline: Path, tmp_path: Path
):
    settings = ("precision.weights=bf16", "precision.compute=bf16", *overrides)
    with pytest.raises(ConfigError) as caught:
        make_run(tiny_pipeline, tmp_path, settings, {"zero_optimization": zero_section}, world_size=1)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if "lora.rank=4" not in overrides and not any("compute" in one for one in overrides):
        lora = (*(one for one in settings if not one.startswith("optim")), "lora.rank=4")
        make_run(tiny_pipeline, tmp_path, lora, {"zero_optimization": zero_section}, world_size=1)


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_codes_are_not_quantized_again(key: str, tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"lora\.quantize=int8 stores quantized weights, which ZeRO\+\+"):
        make_run(tiny_pipeline, tmp_path, ("lora.rank=4", "lora.quantize=int8"), zero(3, **{key: True}), 1)


@pytest.mark.parametrize("overrides", [("lora.quantize=int8",), ("precision.weights=bf16",)])
def test_two_dtypes_do_not_go_to_nvme(overrides: tuple[str, ...], tiny_pipeline: Path, tmp_path: Path):
    settings = ("lora.rank=4", "precision.compute=bf16", *overrides)
    nvme = zero(3, offload_param={"device": "nvme", "nvme_path": str(tmp_path)})
    make_run(tiny_pipeline, tmp_path, settings[:2], nvme, world_size=1)
    with pytest.raises(ConfigError, match="weights cannot be swapped to NVMe"):
        make_run(tiny_pipeline, tmp_path, settings, nvme, world_size=1)


def test_codes_are_for_the_base_of_a_lora():
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        load_recipe(None, ["lora.quantize=int8"])


def test_zero_2_needs_an_fp32_parameter_beside_those_in_bf16():
    narrow = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.zeros(4))
    groups = [{"params": [wide, narrow], "lr": 1.0}]
    for stage, order in ((1, [narrow, wide]), (2, [wide, narrow])):
        split = split_by_dtype(groups, {"stage": stage, "reduce_bucket_size": 3}, "bf16")
        assert [(one["params"], one["lr"]) for one in split] == [([one], 1.0) for one in order]
    with pytest.raises(ConfigError, match="leave no fp32 parameter to train"):
        split_by_dtype([{"params": [narrow]}], {"stage": 2, "reduce_bucket_size": 4}, "fp32")
    with pytest.raises(
        ConfigError,
        match=r"reduce_bucket_size=3 is smaller than the largest matrix \(4 values\).*set the key to 4 or more",
    ):
        split_by_dtype(groups, {"stage": 2, "reduce_bucket_size": 3}, "fp32")


def test_a_resume_on_other_weights_is_refused(tiny_pipeline: Path, tmp_path: Path):
    state = make_run(tiny_pipeline, tmp_path, LORA, world_size=1).state

    def resume(**sections: dict[str, Any]) -> None:
        ours = {name: {**state.recipe[name], **section} for name, section in sections.items()}
        check_resumable(state, replace(state, recipe={**state.recipe, **ours}), "there")

    resume()
    with pytest.raises(
        CheckpointError, match=r"precision\.weights=bf16 must equal the checkpoint's value fp32"
    ):
        resume(precision={"weights": "bf16"})
    with pytest.raises(CheckpointError, match=r"lora\.quantize=int8 must equal the checkpoint's value none"):
        resume(lora={"quantize": "int8"})


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ((), ["weights fp32 (bf16 copies for matmuls)"]),
        (
            ("precision.weights=bf16", "precision.reduce=bf16"),
            [
                "weights bf16 (linear layers, patches), fp32 (time embedding, modulation, norms, head)",
                "masters fp32, initialized from the rounded weights; gradients computed in bf16, reduced in bf16",
            ],
        ),
        (
            ("lora.rank=4", "lora.quantize=nf4"),
            ["base in nf4: linear layers of the blocks; not embeddings, modulation, norms and head"],
        ),
    ],
)
def test_the_start_block_says_it(
    overrides: tuple[str, ...], lines: list[str], tiny_pipeline: Path, tmp_path: Path
):
    training_run = make_run(tiny_pipeline, tmp_path, ("precision.compute=bf16", *overrides), world_size=1)
    block = start_block(training_run).splitlines()
    assert all(any(line.endswith(wanted) for line in block) for wanted in lines)
