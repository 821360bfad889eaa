"""Rank 0 chooses the attention kernel, all ranks use it, and a resumed run uses the choice of its checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import make_run, run_training
from wands.attention.kernels.registry import get_backend
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.save import CheckpointSaver
from wands.checkpoint.step_folders import STATE_FILE
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine import attention_choice
from wands.engine.attention_choice import LENGTHS, Choice, agree_on_backend
from wands.engine.engine import build_model, release_engine
from wands.plugin import Plugin
from wands.train import summary
from wands.train.loop import run_steps
from wands.train.set_up import build_jobs, build_training
from wands.variants import VARIANTS
from wands.watch.bad_steps import BadSteps
from wands.watch.watchdog import Watchdog

CUDA = torch.device("cuda")
CHOICE = {"backend": "cudnn:4096:torch", "setup": f"H200, torch {torch.__version__}, cudnn, torch"}


def agree_on(
    saved: dict[str, str] | None, device: torch.device, compute: str, rank: int, lines: list[str]
) -> Choice:
    """Choose for a model of 12 heads of 128 in two halves; `saved` is the choice of a checkpoint."""
    return agree_on_backend(
        load_recipe(None, [f"precision.compute={compute}"]),
        VARIANTS["wan2.1-t2v-1.3b"].dit,
        2,
        saved,
        rank=rank,
        device=device,
        log=lines.append,
    )


def agree(
    saved: dict[str, str] | None, usable: list[list[str]], ratios: list[float], gpu: str = "H200"
) -> tuple[str, dict[str, str] | None, list[str], list[Any]]:
    """Choose on a GPU that is not there: what it can run, and what it would take, are given.

    Args:
        saved: choice in the checkpoint.
        usable: kernels that run on each rank.
        ratios: time of cudnn / time of torch, as each rank would measure it.
        gpu: name of each rank's GPU.

    Returns:
        (name of the kernel, choice to save, lines of the log, arguments of the measurement).
    """
    rank = init_process_group()[0] if "RANK" in os.environ else 0
    lines = []
    measured = []

    def measure(names: list[str], *args: Any) -> dict[str, dict[int, float]]:
        measured.append([names, *args])
        factors = {"torch": 1.0, "cudnn": ratios[rank], "flash3": 0.1}
        return {name: {length: factors[name] * length for length in LENGTHS} for name in names}

    attention_choice.usable_backends = lambda *args: iter(usable[rank])
    attention_choice.measure_backends = measure
    before = torch.cuda.get_device_name
    torch.cuda.get_device_name = lambda device: gpu
    try:
        backend, choice = agree_on(saved, CUDA, "bf16", rank, lines)
    finally:
        torch.cuda.get_device_name = before
    return backend.name, choice, lines, measured


def test_all_ranks_use_the_choice_of_rank_0(run_world):
    usable = [["flash3", "cudnn", "torch"], ["cudnn", "torch"]]  # rank 1 lacks the fastest kernel
    first, second = run_world(2, agree, None, usable, [0.5, 2.0])
    assert first[0] == second[0] == "cudnn:512:torch"
    assert first[1] == second[1] == {**CHOICE, "backend": "cudnn:512:torch"}
    assert first[3] == [[["cudnn", "torch"], CUDA, 6, 128]]
    assert second[2:] == ([], [])  # rank 1 measures nothing
    first, second = run_world(2, agree, None, usable, [2.0, 0.5])
    assert first[0] == second[0] == "torch"
    first, second = run_world(2, agree, CHOICE, usable, [2.0, 0.5])
    assert first[:2] == second[:2] == (CHOICE["backend"], CHOICE)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name in ("usable_backends", "measure_backends"):  # `agree` replaces them
        monkeypatch.setattr(attention_choice, name, None)


def test_a_resumed_run_measures_only_if_something_changed(one_rank):
    usable = [["cudnn", "torch"]]
    assert agree(CHOICE, usable, [0.5]) == (CHOICE["backend"], CHOICE, [], [])
    other = [
        (CHOICE, [["flash3", "cudnn", "torch"]], "H200"),
        (CHOICE, usable, "A100"),
        ({**CHOICE, "setup": "H200, torch 1.0, cudnn, torch"}, usable, "H200"),
    ]
    for saved, names, gpu in other:
        backend, choice, lines, measured = agree(saved, names, [0.5], gpu)
        assert choice == {
            "backend": backend,
            "setup": f"{gpu}, torch {torch.__version__}, {', '.join(names[0])}",
        }
        assert len(measured) == 1
        assert lines[0] == (
            f"attention.backend=auto measures again: cudnn:4096:torch was chosen on {saved['setup']}"
        )
        assert len(lines) == 2
    assert lines[1] == (
        f"attention.backend=auto: cudnn:512:torch ({choice['setup']}; 16,384 tokens: cudnn 8192.0 ms, torch 16384.0 ms)"
    )


def test_nothing_is_measured_where_there_is_nothing_to_choose(one_rank, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # no flash kernel runs
    for usable in ([], ["cudnn"]):
        assert agree(None, [usable], [1.0]) == ("reference", None, [], [])
    for device, compute in ((torch.device("cpu"), "bf16"), (CUDA, "fp32")):
        assert agree_on(None, device, compute, 0, [])[1] is None


def test_the_start_block_does_not_name_a_kernel_that_is_not_chosen_yet(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(tiny_pipeline, tmp_path)
    assert " cpu kernels, " in summary.start_block(run)
    monkeypatch.setattr(summary, "accelerator_type", lambda: "cuda")
    assert " auto kernels, " in summary.start_block(run)


def test_a_checkpoint_contains_the_choice(tiny_pipeline: Path, tmp_path: Path, run_world):
    [used, saved] = run_world(1, train_with_choice, tiny_pipeline, tmp_path / "auto", CHOICE)[0]
    assert (used, saved) == (["reference"], CHOICE)
    [used, saved] = run_world(1, train_on_cpu, tiny_pipeline, tmp_path / "cpu")[0]
    assert (used, saved) == (["cpu"], None)


def recorded(used: list[str]) -> Plugin:
    """The model of wands; the name of its attention kernel is appended to `used`."""

    def build(*args: Any, **options: Any) -> torch.nn.Module:
        used.append(options["backend"].name)
        return build_model(*args, **options)

    return Plugin(model=build)


def saved_choice(out: Path) -> dict[str, str] | None:
    checkpoint = find_checkpoint(out)
    assert json.loads((checkpoint.folder / STATE_FILE).read_text())["attention"] == checkpoint.state.attention
    return checkpoint.state.attention


def train_on_cpu(model: Path, out: Path) -> tuple[list[str], dict[str, str] | None]:
    """Train for a step. Return the kernels of the models, and the choice in the checkpoint."""
    used: list[str] = []
    run_training(model, out, ("train.max_steps=1",), plugin=recorded(used))
    return used, saved_choice(out)


def train_with_choice(
    model: Path, out: Path, choice: dict[str, str]
) -> tuple[list[str], dict[str, str] | None]:
    """As `train_on_cpu`, where the ranks have agreed on a choice, as they do on GPUs."""
    used: list[str] = []
    run = make_run(model, out, ("train.max_steps=1",), plugin=recorded(used))
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    training = build_training(run, groups, device, (get_backend("reference"), choice), print)
    bad_steps = BadSteps(
        config=run.recipe.train,
        excluded=run.recipe.data.exclude,
        experts=run.model.experts,
        saved=None,
        events=training.events,
    )
    saver = CheckpointSaver(
        config=run.recipe.checkpoint,
        output_dir=run.output_dir,
        engines=training.engines,
        averages=training.averages,
        objective=run.objective,
        data=run.data,
        resumed=None,
        log=print,
    )
    with Watchdog() as watchdog:
        jobs = build_jobs(
            run,
            training,
            saver=saver,
            bad_steps=bad_steps,
            attention=choice,
            encoded_samples={},
            watchdog=watchdog,
        )
        run_steps(run, training, jobs, bad_steps, saver, watchdog)
    for engine in training.engines.values():
        release_engine(engine)
    return used, saved_choice(out)
