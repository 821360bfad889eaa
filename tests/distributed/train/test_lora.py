"""LoRA and partial finetunes through the trainer: what gets a gradient, what a checkpoint holds, and that resuming is exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.runs import BASE, losses, make_run, run_training
from tests.support.steps import Grid, optimizer_step, save_random_lora, worst, zero
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import load_exported_state
from wands.checkpoint.resume import check_resumable
from wands.commands.train import run_train
from wands.config.deepspeed import SHIPPED_CONFIGS
from wands.config.options import TrainOptions
from wands.errors import CheckpointError, ConfigError
from wands.model.files.loading import load_weights

LORA = ("lora.rank=4", "lora.alpha=6", "lora.targets=all-linear")
CELLS = [(3, Grid(1, 1, 2))]
MORE_CELLS = [(2, Grid(1, 2, 2)), (3, Grid(2, 1, 1))]
OTHER_CELLS = [(2, Grid(2, 1, 1)), (2, Grid(1, 1, 2)), (3, Grid(1, 2, 2))]


@pytest.fixture(scope="module")
def start(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_lora(tiny_pipeline, tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize(
    "cells",
    [
        CELLS,
        pytest.param(MORE_CELLS, marks=pytest.mark.slow),
        pytest.param(OTHER_CELLS, marks=pytest.mark.full),
    ],
    ids=["one", "more", "others"],
)
def test_the_gradient_of_a_lora_is_the_same_on_every_grid(
    cells: list[tuple[int, Grid]], start: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Every matrix of the LoRA gets a gradient, nothing else does."""
    settings = (*LORA, f"lora.init_from={start}", "train.bins_per_step=2")
    alone = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path, settings, zero(2), torch.float64)[0]
    linears = make_run(tiny_pipeline, tmp_path, settings, world_size=1).model.num_trained
    assert sum(grad.numel() for grad in alone.gradients.values()) == linears
    assert all(".lora_" in name for name in alone.gradients)
    assert all(float(grad.abs().max()) > 0 for grad in alone.gradients.values())
    for stage, grid in cells:
        overrides = (*settings, *grid.overrides)
        ranks = worlds[grid.world_size].run(
            optimizer_step, tiny_pipeline, tmp_path, overrides, zero(stage), torch.float64
        )
        error = worst(ranks[0].gradients, alone.gradients)
        assert error <= 1e-5, grid
        assert len({rank.digest for rank in ranks}) == 1


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_lora_resumes_bitwise_and_its_checkpoint_holds_nothing_else(
    stage: int, start: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Not even what it began from is needed again."""
    begun = shutil.copytree(start, tmp_path / "begun")
    settings = (
        *LORA,
        f"lora.init_from={begun}",
        "train.max_steps=4",
        "checkpoint.every=2",
        "checkpoint.keep=3",
    )

    def run(resume: bool = False) -> list[dict[str, Any]]:
        return worlds[2].run(run_training, tiny_pipeline, tmp_path / "run", settings, zero(stage), resume)[0]

    straight = run()
    first = load_exported_state(tmp_path / "run" / "checkpoints" / "step_00000002")
    last = load_exported_state(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000004").rename(tmp_path / "set aside")
    shutil.rmtree(begun)
    assert losses(run(resume=True)) == losses(straight)
    again = load_exported_state(tmp_path / "run")
    assert all(torch.equal(again[name], value) for name, value in last.items())
    assert all(".lora_" in name for name in last)
    assert any(not torch.equal(first[name], value) for name, value in last.items())
    for path in (tmp_path / "run" / "checkpoints" / "step_00000004" / "transformer").iterdir():
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.startswith("flat.")]  # noqa: SIM118, not a dict
        assert names
        assert all(".lora_" in name for name in names)


def test_only_a_run_that_begins_asks_for_the_lora_that_it_goes_on_from(
    start: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    begun = shutil.copytree(start, tmp_path / "begun")
    run = tmp_path / "run"
    settings = (*LORA, f"lora.init_from={begun}")
    worlds[1].run(run_training, tiny_pipeline, run, (*settings, "train.max_steps=1"), zero(2))
    shutil.rmtree(begun)
    said: list[str] = []

    def dry(output_dir: Path, resume: str | None) -> None:
        recipe = (*BASE, f"model.path={tiny_pipeline}", *settings, "train.max_steps=2")
        overrides = (*recipe, f"output_dir={output_dir}")
        run_train(TrainOptions(overrides=overrides, resume=resume, dry_run=True), said.append)

    dry(run, "auto")
    dry(tmp_path / "elsewhere", str(run))
    assert ["starting at 1" in text for text in said] == [True, True]
    for output_dir, resume in ((tmp_path / "new", None), (tmp_path / "new", "auto")):
        with pytest.raises(ConfigError, match=r"lora\.init_from"):
            dry(output_dir, resume)


@pytest.mark.slow
def test_frozen_weights_stay_bitwise_and_resume_too(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    settings = (
        "model.trainable=['blocks.*.attn*']",
        "model.freeze=['*.bias']",
        "train.max_steps=4",
        "checkpoint.every=2",
    )

    def run(resume: bool = False) -> list[dict[str, Any]]:
        return worlds[2].run(
            run_training, tiny_pipeline, tmp_path / "run", (*settings, "checkpoint.keep=3"), zero(3), resume
        )[0]

    straight = run()
    after = load_exported_state(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000004").rename(tmp_path / "set aside")
    assert losses(run(resume=True)) == losses(straight)
    again = load_exported_state(tmp_path / "run")
    before = load_weights(tiny_pipeline)
    assert after.keys() == before.keys()
    assert all(torch.equal(again[name], value) for name, value in after.items())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".attn" in name and not name.endswith("bias")}


def test_settings_that_exclude_each_other(tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.freeze is for full finetunes"):
        make_run(tiny_pipeline, tmp_path, ("lora.rank=4", "model.freeze=['*.bias']"))
    with pytest.raises((ConfigError, CheckpointError), match=r"lora\.init_from=nowhere"):
        make_run(tiny_pipeline, tmp_path, ("lora.rank=4", "lora.init_from=nowhere"), world_size=1)


def test_a_resume_that_would_train_something_else_is_refused(tiny_pipeline: Path, tmp_path: Path):
    """The base and the places of a LoRA are not in its checkpoint: the recipe must say the same.

    Random base weights have no fingerprint; `test_changed_settings.py` tests those that have one.
    """

    training_run = make_run(tiny_pipeline, tmp_path, LORA, world_size=1)
    state = replace(training_run.state, base_fingerprint=None)
    recipe = state.recipe

    def resume(**sections: dict[str, Any] | None) -> None:
        changed = {
            name: value and {**(recipe[name] or {}), **value} if value else None
            for name, value in sections.items()
        }
        check_resumable(state, replace(state, recipe={**recipe, **changed}), "there")

    resume()
    resume(model={"path": f"/moved/{tiny_pipeline.name}"})
    resume(lora={"init_from": "anything"})
    for sections, words in (
        (
            {"lora": {"targets": "attention"}},
            "lora.targets=attention must equal the checkpoint's value all-linear",
        ),
        ({"lora": {"alpha": 8.0}}, "lora.alpha=8.0"),
        ({"lora": {"rank": 8}}, "lora.rank=8"),
        ({"lora": None}, "lora.rank=None"),
        ({"model": {"path": "/another/model"}}, "model.path=model"),
        ({"model": {"init": "random"}}, "model.init=random"),
        ({"model": {"merge_loras": [{"path": "x", "scale": 1.0}]}}, "model.merge_loras="),
        ({"model": {"freeze": ["*.bias"]}}, "model.freeze="),
    ):
        with pytest.raises(CheckpointError) as caught:
            resume(**sections)
        assert words in str(caught.value)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_frozen_weights_are_in_the_checkpoint_of_every_stage(
    stage: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = ("model.trainable=['blocks.*.attn*']", "train.max_steps=1")
    worlds[2].run(run_training, tiny_pipeline, tmp_path, settings, zero(stage))
    after = load_exported_state(tmp_path)
    before = load_weights(tiny_pipeline)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before if ".attn" not in name)


def test_merging_into_a_base_of_bf16_loses_nothing(tiny_pipeline: Path, start: Path, tmp_path: Path):
    """Rounded to bf16 a small update is gone; training and export must merge in fp32."""
    from safetensors.torch import load_file

    from wands.config.recipe import MergeConfig
    from wands.model.files.loading import load_transformer
    from wands.model.lora import MergedLoras
    from wands.variants import Expert

    folder = tmp_path / "bf16"
    shutil.copytree(tiny_pipeline, folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    base = {name: value.bfloat16() for name, value in load_file(file).items()}
    save_file(base, file)
    merged = MergedLoras.load(
        [MergeConfig(path=str(start), scale=1e-3)], Expert("", "transformer", (0.0, 1.0))
    )
    model = dict(load_transformer(folder, merge=merged).named_parameters())
    for name in ("blocks.0.attn1.to_q.weight", "proj_out.weight"):
        update = merged(name, torch.zeros_like(model[name]))
        torch.testing.assert_close(model[name] - base[name].float(), update, rtol=1e-3, atol=1e-7)


def test_targets_that_choose_nothing(tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"lora\.targets=\[\] selects no layer"):
        make_run(tiny_pipeline, tmp_path, ("lora.rank=4", "lora.targets=[]"), world_size=1)


FROZEN = {
    "lora": ("lora.rank=4",),
    "trainable": ("model.trainable=['blocks.1.*']",),
    "lora with ffn": ("lora.rank=4", "lora.targets=attention+ffn"),
    "freeze": ("model.freeze=['patch_embedding*','condition_embedder*']",),
}
SLOW_FROZEN = ("lora", "lora with ffn", "freeze")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW_FROZEN)) for case in FROZEN]
)
def test_the_config_for_cpus_trains_with_frozen_weights(
    case: str, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Its leaf modules would free the frozen weights of a recomputed block before their backward pass."""
    cpu = json.loads((SHIPPED_CONFIGS / "cpu.json").read_text())
    run = partial(run_training, tiny_pipeline, overrides=(*FROZEN[case], "train.max_steps=2"))
    found = [worlds[2].run(partial(run, tmp_path / str(i), ds=ds))[0] for i, ds in enumerate((cpu, zero(3)))]
    assert losses(found[0]) == pytest.approx(losses(found[1]), rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["wan2.1-t2v-1.3b", "wan2.2-t2v-a14b"])
def test_a_lora_run_goes_on_with_the_config_for_cpus(
    variant: str, tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    cpu = json.loads((SHIPPED_CONFIGS / "cpu.json").read_text())
    settings = ("lora.rank=4", "train.max_steps=4", "checkpoint.every=2", "checkpoint.keep=3")
    run = partial(run_training, tiny_variant(variant), tmp_path, settings)
    straight = losses(worlds[2].run(partial(run, ds=zero(3)))[0])
    (tmp_path / "checkpoints" / "step_00000004").rename(tmp_path / "set aside")
    resumed = losses(worlds[2].run(partial(run, ds=cpu, resume=True))[0])
    assert resumed == pytest.approx(straight, rel=2e-6)
