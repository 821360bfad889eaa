"""Disks without room for a checkpoint, and runs that are killed in their first save."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.checkpoint_runs import ZERO2
from tests.support.runs import engine_of, make_run, model_of, run_training
from wands.checkpoint import save as checkpoint
from wands.checkpoint.buffers import TensorFile
from wands.checkpoint.save import CheckpointSaver
from wands.checkpoint.step_folders import list_steps
from wands.config.recipe import EmaConfig
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.errors import DiskError
from wands.model.files.tensor_files import LazyTensor
from wands.planning.memory import checkpoint_bytes
from wands.planning.workload import Weight, Workload
from wands.variants import VARIANTS


def save_without_space(model: Path, out: Path) -> str:
    """Save once more under a file size limit that the shards exceed."""
    import resource

    run = make_run(model, out, ("train.max_steps=1",), ZERO2)
    _, _, device = init_process_group()
    engine = engine_of(run, model_of(run, ProcessGroups(run.grid(0)), device))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    saver = CheckpointSaver(
        config=run.recipe.checkpoint,
        output_dir=run.output_dir,
        engines={"transformer": engine},
        averages={},
        objective=run.objective,
        data=run.data,
        resumed=None,
        log=print,
    )
    plan = run.schedule.sampler.step_plan(0)
    with pytest.raises(DiskError) as caught:
        saver.save(replace(run.state, step=1), plan, required=True)
    assert caught.value.agreed
    return str(caught.value)


def test_no_disk_space_is_one_sentence_and_nothing_half_written(
    tiny_pipeline: Path, tmp_path: Path, new_world
):
    said = new_world(2, save_without_space, tiny_pipeline, tmp_path)
    assert said[0] == said[1]
    assert "the file size limit (ulimit -f) is 100000 bytes. Raise the limit" in said[0]
    assert not list(tmp_path.rglob("step_*"))


@pytest.mark.parametrize(("whole", "needed"), [(True, 4 * 250_000 + 12 * 25_000), (False, 12 * 25_000)])
def test_frozen_weights_need_room_for_themselves_alone(whole: bool, needed: int):
    """And none where only what is trained is saved."""
    weights = [
        Weight(name="0.weight", shape=(250, 1000), element_size=4, trained=False),
        Weight(name="1.weight", shape=(100, 250), element_size=4, trained=True),
    ]
    recipe = load_recipe(None, [] if whole else ["lora.rank=4"])
    shape = VARIANTS["wan2.1-t2v-1.3b"].dit
    ds_config = {"zero_optimization": {"stage": 2}}
    workload = Workload(recipe, shape, weights, num_models=1, world_size=2, ds_config=ds_config)
    assert checkpoint_bytes(workload) == needed
    averaged = recipe.model_copy(update={"ema": EmaConfig()})
    assert checkpoint_bytes(replace(workload, recipe=averaged, num_models=2)) == 2 * (needed + 4 * 25_000)


def test_all_files_of_all_ranks_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = [[LazyTensor.of("x", torch.zeros(100)), LazyTensor.of("y", torch.zeros(50))], []]
    files = [TensorFile(f"file{number}", items, {}) for number, items in enumerate(tensors)]
    monkeypatch.setattr(checkpoint, "gather_objects", lambda value: [value] * 2)
    for free in (1200, 1199):
        monkeypatch.setattr(
            checkpoint.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        with nullcontext() if free == 1200 else pytest.raises(DiskError, match=r"are free\. Free disk space"):
            checkpoint._check_space(tmp_path, files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, "adamw"), (0, "adafactor"), (1, "adamw"), (2, "adamw8bit"))
        ),
        (3, "adamw"),
    ],
)
def test_the_room_that_is_asked_for_is_what_a_checkpoint_takes(
    stage: int, optimizer: str, tiny_pipeline: Path, tmp_path: Path, worlds
):
    settings = ("train.max_steps=1", f"optim.name={optimizer}")
    worlds[2].run(run_training, tiny_pipeline, tmp_path, settings, {"zero_optimization": {"stage": stage}})
    files = (tmp_path / "checkpoints" / "step_00000001" / "transformer").iterdir()
    run = make_run(tiny_pipeline, tmp_path / "like", settings, {"zero_optimization": {"stage": stage}}, 2)
    expected = checkpoint_bytes(run.workload("cpu"))
    # Names, offsets and what aligns shards come to 64 KB a file, whatever the model.
    assert expected <= sum(file.stat().st_size for file in files) <= 1.02 * expected + 3 * 65_536


def kill_in_the_first_save(model: Path, out: Path) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            run_training(model, out, ("train.max_steps=1",), ZERO2)


@pytest.mark.slow
def test_a_run_killed_in_its_first_save_starts_anew(
    tiny_pipeline: Path, tmp_path: Path, worlds, monkeypatch: pytest.MonkeyPatch
):
    """And what it left behind makes room before room is asked for."""
    worlds[1].run(kill_in_the_first_save, tiny_pipeline, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001.tmp"]
    assert not list_steps(tmp_path / "checkpoints")
    rows = worlds[1].run(run_with_little_room, tiny_pipeline, tmp_path)[0]
    assert len(rows) == 1
    assert [path.name for path in list_steps(tmp_path / "checkpoints")] == ["step_00000001"]


def run_with_little_room(model: Path, out: Path) -> list[dict[str, Any]]:
    def usage(path: Path) -> SimpleNamespace:
        taken = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        return SimpleNamespace(free=2_000_000 - taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", usage)
        return run_training(model, out, ("train.max_steps=1",), ZERO2)
