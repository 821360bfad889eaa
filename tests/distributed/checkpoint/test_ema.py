"""The moving average: that of one process that has all weights, however ZeRO and context parallelism cut them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from tests.support.commands import export
from tests.support.ema_runs import PLAIN, STEPS, Weights, averaged, parts_in, same
from tests.support.runs import Spy, make_run, run_training
from tests.support.sampling import options_of, source_of
from tests.support.steps import DS_CONFIGS, Grid, zero
from tests.support.world import WorldPool
from wands.checkpoint import ema
from wands.checkpoint.checkpoint_files import (
    average_file,
    find_checkpoint,
    load_average,
    load_exported_state,
    load_full_weights,
    load_lora_of,
)
from wands.commands import infer
from wands.config.recipe import EmaConfig
from wands.errors import CheckpointError, ConfigError
from wands.export.export_record import RECORD_FILE
from wands.export.model_card import FolderContents, build_card
from wands.model.files.lora_files import LORA_FILE
from wands.plugin import Plugin
from wands.sampling.pipeline import load_pipeline
from wands.train.summary import start_block
from wands.train.training import Training

RUNS = {
    "alone": (Grid(1, 1, 1), zero(2)),
    "zero0": (Grid(2, 1, 1), zero(0)),
    "zero1": (Grid(2, 1, 1), zero(1)),
    "zero2": (Grid(2, 1, 1), zero(2)),
    "zero3": (Grid(2, 1, 1), zero(3)),
    "offload": (Grid(2, 1, 1), DS_CONFIGS["zero3_offload"]),
    "cp": (Grid(1, 1, 2), zero(3)),
    "dp and cp": (Grid(2, 1, 2), zero(3)),
    "dp 4": (Grid(4, 1, 1), zero(3)),
}
TIER = {"zero3": (), "dp and cp": pytest.mark.full, "dp 4": pytest.mark.full}


# ---- the dumb way


def whole_weights(engine: Any) -> Weights:
    """All trained fp32 weights of an engine, on every rank; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: (parameter if (full := safe_get_full_fp32_param(parameter)) is None else full).detach().clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def watched_run(*args: Any) -> tuple[list[list[Weights]], list[str]]:
    """A run: of each engine the weights before it and after each of its steps, on rank 0, and what the run said."""
    series: dict[str, list[Weights]] = {}
    said: list[str] = []

    def look(training: Training, *_: Any) -> None:
        for part, engine in training.engines.items():
            series.setdefault(part, []).append(whole_weights(engine))

    rows = run_training(*args, said.append, Plugin(jobs=(Spy(look, look),)))
    return (list(series.values()), said) if rows else ([], [])


def refused_run(*args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        run_training(*args)
    return str(caught.value)


def files_of(step: Path) -> dict[str, bytes]:
    return {str(path.relative_to(step)): path.read_bytes() for path in sorted(step.rglob("ema_rank_*"))}


# ---- what it is


Finished = Callable[[str], tuple[Path, list[Weights]]]


@pytest.fixture(scope="module")
def finished(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool) -> Finished:
    """Run folder and weights of one of RUNS, which trains when it is first asked for."""
    done: dict[str, tuple[Path, list[Weights]]] = {}

    def run(name: str) -> tuple[Path, list[Weights]]:
        if name not in done:
            (grid, ds) = RUNS[name]
            folder = tmp_path_factory.mktemp(name)
            overrides = (*PLAIN, *STEPS, *grid.overrides)
            ranks = worlds[grid.world_size].run(watched_run, tiny_pipeline, folder, overrides, ds, False)
            done[name] = folder, ranks[0][0][0]
        return done[name]

    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=TIER.get(name, pytest.mark.slow)) for name in RUNS],
)
def test_it_is_the_average_of_one_process_and_no_rank_has_it_all(name: str, finished: Finished):
    folder, series = finished(name)
    assert len(series) == 5
    for steps in (2, 4):
        found = load_exported_state(folder / "checkpoints" / f"step_{steps:08d}", ema=True)
        assert same(found, averaged(series[: steps + 1], 0.7))
    for key, value in load_exported_state(finished("alone")[0], ema=True).items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)  # as the weights themselves
    last = load_exported_state(folder)
    assert same(last, series[-1])
    assert not same(found, last)
    shares = [sum(map(torch.numel, own.values())) for own in parts_in(find_checkpoint(folder)[0])]
    num_params = sum(map(torch.numel, last.values()))
    assert sum(shares) == num_params
    assert max(shares) <= num_params / len(shares) + 64 * len(
        last
    )  # shards are cut at multiples of a few values


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero0", "zero2", "cp"])
def test_a_run_that_was_stopped_has_the_same_bits(
    name: str, finished: Finished, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    (grid, ds) = RUNS[name]
    run = shutil.copytree(finished(name)[0], tmp_path / "run")
    straight = parts_in((run / "checkpoints" / "step_00000004").rename(tmp_path / "aside"))
    worlds[grid.world_size].run(run_training, tiny_pipeline, run, (*PLAIN, *STEPS, *grid.overrides), ds, True)
    again = parts_in(run / "checkpoints" / "step_00000004")
    assert len(again) == len(straight) == grid.world_size
    assert all(same(mine, theirs) for mine, theirs in zip(again, straight, strict=True))
    assert not same(again[0], parts_in(run / "checkpoints" / "step_00000002")[0])


@pytest.mark.slow
def test_warm_up_and_rare_updates_of_the_loras_of_two_experts(
    tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    """Each expert has its own; a step that `every` passes over is made up for by the next update."""
    model = tiny_variant("wan2.2-t2v-a14b")
    settings = (*STEPS, "ema.decay=0.9", "ema.every=3", "lora.rank=2")
    ranks = worlds[2].run(watched_run, model, tmp_path / "run", settings, zero(2), False)
    for part, series in zip(("transformer", "transformer_2"), ranks[0][0], strict=True):
        kept = (4 / 13) ** 3
        truth = {
            name: kept * series[0][name].double() + (1 - kept) * series[3][name].double()
            for name in series[0]
        }
        found = load_exported_state(tmp_path / "run", part, ema=True)
        assert found.keys() == truth.keys()
        assert all(".lora_" in name for name in found)
        for name, value in truth.items():
            torch.testing.assert_close(
                found[name].double(), value, rtol=0, atol=1e-7 * float(value.abs().max())
            )
        assert not same(found, load_exported_state(tmp_path / "run", part))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["ema_decay"] for row in rows] == [1 / 10, 1 / 10, 4 / 13, 4 / 13]

    straight = shutil.move(tmp_path / "run" / "checkpoints" / "step_00000004", tmp_path / "aside")
    worlds[2].run(run_training, model, tmp_path / "run", settings, zero(2), True)  # in between two updates
    for part in ("transformer", "transformer_2"):
        again = parts_in(tmp_path / "run" / "checkpoints" / "step_00000004", part)
        assert [*map(len, again)] == [*map(len, parts_in(straight, part))]
        assert all(map(same, again, parts_in(straight, part)))

    folder = export(tmp_path / "run", tmp_path / "lora", ema=True)
    for part, where in (("transformer", "high_noise"), ("transformer_2", "low_noise")):
        pairs = load_lora_of(tmp_path / "run", part, ema=True)
        written = load_file(folder / where / LORA_FILE)
        assert len(written) == 2 * len(pairs)
        for module, pair in pairs.items():
            assert torch.equal(written[f"transformer.{module}.lora_A.weight"], pair.lora_A)
    merged = export(tmp_path / "run", tmp_path / "merged", ema=True, merge=True)
    for part in ("transformer", "transformer_2"):
        stock = WanTransformer3DModel.from_pretrained(merged / part).state_dict()
        assert same(stock, load_full_weights(tmp_path / "run", part, ema=True))
        assert not same(stock, load_full_weights(tmp_path / "run", part))


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3))])
def test_frozen_weights_are_what_they_were(
    stage: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (*PLAIN, "model.trainable=['blocks.*.attn*']", "train.max_steps=1")
    worlds[2].run(run_training, tiny_pipeline, tmp_path, settings, zero(stage))
    last = load_exported_state(tmp_path)
    average = load_exported_state(tmp_path, ema=True)
    assert last.keys() == average.keys()
    changed = {name for name in last if not torch.equal(last[name], average[name])}
    assert changed == {name for name in last if ".attn" in name}


def test_the_decay_warms_up():
    section = EmaConfig(decay=0.9)
    assert [ema.decay_after(section, n) for n in (1, 71, 80, 1000)] == [2 / 11, 72 / 81, 0.9, 0.9]
    assert ema.decay_after(EmaConfig(decay=0.9, warmup=False), 1) == 0.9


# ---- going on with one, without one, and what is refused


@pytest.mark.slow
def test_turned_off_and_on_again(finished: Finished, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    run = shutil.copytree(finished("zero2")[0], tmp_path / "run")

    def go_on(steps: int, *overrides: str) -> tuple[list[Weights], list[str]]:
        settings = (f"train.max_steps={steps}", "train.bins_per_step=4", "checkpoint.keep=9", *overrides)
        [series], said = worlds[2].run(watched_run, tiny_pipeline, run, settings, zero(2), True)[0]
        return series, said

    assert "the recipe has no ema section: the moving average in the checkpoint is ignored" in go_on(5)[1]
    with pytest.raises(
        CheckpointError,
        match=r"step_00000005 contains no moving average .* leave --ema out, or train a new run with",
    ):
        load_exported_state(run, ema=True)
    with pytest.raises(CheckpointError, match="contains no moving average"):
        export(run, tmp_path / "out", ema=True)
    assert not (tmp_path / "out").exists()
    series, said = go_on(6, *PLAIN)
    assert "the checkpoint has no moving average: ema starts from the weights at step 5" in said
    assert same(load_exported_state(run, ema=True), averaged(series, 0.7))
    before = load_exported_state(run, ema=True)
    series, _ = go_on(7, "ema.decay=0.2", "ema.warmup=false")  # today's decay is in force
    assert same(load_exported_state(run, ema=True), averaged([before, *series[1:]], 0.2))


@pytest.mark.slow
def test_an_average_that_is_not_whole_is_refused(finished: Finished, tmp_path: Path):
    folder = shutil.copytree(find_checkpoint(finished("zero3")[0])[0], tmp_path / "step") / "transformer"
    whole = load_average(folder)
    (folder / average_file(1)).rename(folder / "gone")
    with pytest.raises(
        CheckpointError,
        match=r"the files ema_rank_\* lack values of .*; use another step_\* folder",
    ):
        load_average(folder)
    assert len(whole) > 1


def test_keys_that_make_no_sense(tiny_pipeline: Path, tmp_path: Path):
    for key, value in (("decay", 1), ("decay", 0), ("every", 0), ("device", "disk"), ("decoy", 1)):
        with pytest.raises(ConfigError, match=rf"ema\.{key}"):
            make_run(tiny_pipeline, tmp_path, (f"ema.{key}={value}",), world_size=1)
    nvme = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(
        ConfigError, match=r"zero_optimization\.offload_optimizer\.device=nvme keeps .* use device=cpu"
    ):
        make_run(tiny_pipeline, tmp_path, PLAIN, {"zero_optimization": nvme}, world_size=1)


def test_the_start_block_says_so(tiny_pipeline: Path, tmp_path: Path):
    training_run = make_run(tiny_pipeline, tmp_path, ("ema.decay=0.999", "ema.every=5"), world_size=1)
    assert "ema decay 0.999, warm-up, every 5 steps, on cpu\n" in start_block(training_run)
    assert EmaConfig() == make_run(tiny_pipeline, tmp_path, ("ema={}",), world_size=1).recipe.ema


# ---- what becomes of it


def test_it_is_exported_and_sampled(finished: Finished, tiny_pipeline: Path, tmp_path: Path):
    run = finished("zero3")[0]
    average = load_exported_state(run, ema=True)
    folder = export(run, tmp_path / "out", ema=True)
    assert same(WanTransformer3DModel.from_pretrained(folder / "transformer").state_dict(), average)
    source = source_of(tiny_pipeline, checkpoint=run, ema=True)
    assert same(load_pipeline(source).transformer.state_dict(), average)
    options = options_of(tiny_pipeline, checkpoint=run, ema=True)
    assert infer._describe_weights(source, options, "fp32")["ema"] is True
    with pytest.raises(
        ConfigError,
        match=r"--ema needs --checkpoint; add --checkpoint, or leave --ema out if the weights are from",
    ):
        source_of(tiny_pipeline, ema=True)

    record = json.loads((folder / RECORD_FILE).read_text())
    card = build_card(folder, "me/average", record, FolderContents("WanPipeline"), "apache-2.0")
    assert "| Weights | fp32, exponential moving average (decay 0.7) |" in card
    export(run, folder)  # in its place the last weights, and no word of an average
    record = json.loads((folder / RECORD_FILE).read_text())
    assert "moving average" not in build_card(
        folder, "me/last", record, FolderContents("WanPipeline"), "apache-2.0"
    )
