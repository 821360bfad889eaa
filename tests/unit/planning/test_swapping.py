"""Frozen blocks in host memory in a plan: bytes, time, the number of blocks, and the advice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wands.config.deepspeed import build_ds_config, load_ds_config
from wands.config.recipe_loading import load_recipe
from wands.planning.hardware import MACHINES
from wands.planning.memory import estimate_memory
from wands.planning.search import SHIPPED, Candidate, Task, check_memory, search, settle_swapping
from wands.planning.step_time import predict
from wands.planning.weights import list_weights
from wands.planning.workload import Workload
from wands.variants import VARIANTS

CLIP = 32_760


def task_of(*overrides: str, hardware: str = "rtx4090") -> Task:
    variant = VARIANTS["wan2.1-t2v-14b"]
    recipe = load_recipe("wan2.1-t2v-14b-lora", [f"packing.max_tokens={CLIP}", *overrides])
    workload = Workload(
        recipe=recipe,
        shape=variant.dit,
        weights=list_weights(recipe, variant.dit.to_config(), variant.experts),
        num_models=1,
        world_size=1,
        ds_config=build_ds_config(load_ds_config("zero2"), recipe, world_size=1, device_type="cuda"),
        max_tokens=CLIP,
    )
    ds_configs = {name: load_ds_config(name) for name in SHIPPED}
    return Task(workload, np.array([CLIP]), replace(MACHINES[hardware], host_memory=64e9), ds_configs)


def frozen_of_a_block(task: Task) -> int:
    return sum(
        weight.numel * weight.element_size
        for weight in task.workload.weights
        if weight.name.startswith("blocks.7.") and not weight.trained
    )


def test_bytes_of_swapped_blocks_are_on_the_host_but_for_two_buffers():
    full = "model.checkpointing=full"
    plain, swapped = (
        estimate_memory(task_of(full, *keys).workload) for keys in ((), ("model.swap_blocks=30",))
    )
    block = frozen_of_a_block(task_of())
    assert plain.device["weights"] - swapped.device["weights"] == 28 * block
    assert swapped.host["weights"] == 30 * block
    assert "weights" not in plain.host


def test_a_base_that_does_not_fit_is_swapped():
    """A bf16 base of 28 GB on 24 GB, with 64 GB of RAM."""
    task = task_of("model.checkpointing=full")
    found = search(task)
    assert found
    assert all(0 < one.workload.recipe.model.swap_blocks <= 40 for one in found)
    assert any("model.swap_blocks" in change for change in found[0].changes())
    assert "model.swap_blocks=" in str(check_memory(task, "zero2"))


@pytest.mark.slow
def test_auto_swaps_as_few_blocks_as_fit():
    task = task_of("model.checkpointing=offload", "model.swap_blocks=auto")
    number = settle_swapping(task, "zero2")
    assert 0 < number < 40
    for settled, fits in ((number, True), (number - 1, False)):
        one = task_of("model.checkpointing=offload", f"model.swap_blocks={settled}")
        assert Candidate(one, "zero2", one.workload).fits == fits
    assert settle_swapping(replace(task, machine=MACHINES["h200"]), "zero2") == 0


def test_a_base_that_fits_is_not_swapped():
    found = search(task_of("model.checkpointing=full", hardware="h200"))
    assert found
    assert found[0].workload.recipe.model.swap_blocks == 0


def test_copies_that_take_longer_than_the_step_are_counted():
    """Over a slow link the step takes as long as two copies of every swapped block."""
    task = task_of("model.checkpointing=full", "model.swap_blocks=40")
    slow = replace(task.machine, host_bandwidth=1e8)
    seconds = predict(task.workload, slow, [CLIP]).seconds
    copies = 2 * 40 * frozen_of_a_block(task) / 1e8
    assert seconds == pytest.approx(task.workload.recipe.train.bins_per_step * copies, rel=0.05)
    fast = predict(task.workload, task.machine, [CLIP])
    assert fast.zero.total > 0
    assert fast.zero.exposed == 0, "a clip of 32,760 tokens computes for longer than its copies take"
