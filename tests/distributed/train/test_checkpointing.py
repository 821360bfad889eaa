"""SelectiveCheckpoint through the trainer, ZeRO-3 gathering in both runs of a block: the bits of a run that keeps everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.runs import losses, make_run, run_training
from tests.support.steps import optimizer_step, zero
from tests.support.world import WorldPool
from wands.model.offload import ActivationOffloader
from wands.train.summary import start_block

ONE_BIN = ("train.bins_per_step=1", "flow.weighting=linear")
MODES = {
    "none": (),
    "offload": ("model.checkpointing=offload",),
    "every name": (
        "model.checkpointing=offload",
        "model.saved_tensors=[query_proj, key_proj]",
        "model.offloaded_tensors=[block_input, attn_output, value_proj, ffn_activation]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("precision.compute=bf16", "lora.rank=2", "lora.targets=attention+ffn"),
        pytest.param(
            ("precision.compute=bf16", "model.trainable=[blocks.*.attn1.*]"), marks=pytest.mark.slow
        ),
        pytest.param(("packing.enabled=false",), marks=pytest.mark.slow),
    ],
    ids=["lora in bf16", "frozen in bf16", "one sample at a time"],
)
def test_a_step_of_i2v_has_the_same_bits(
    settings: tuple[str, ...], tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    model = tiny_variant("wan2.1-i2v-14b")
    steps = {
        mode: worlds[1].run(optimizer_step, model, tmp_path, (*ONE_BIN, *settings, *more), zero(3))[0]
        for mode, more in MODES.items()
    }
    right = steps["none"]
    assert any(grad.any() for grad in right.gradients.values())
    for mode, step in steps.items():
        assert step.digest == right.digest, mode
        assert all(torch.equal(step.gradients[name], grad) for name, grad in right.gradients.items()), mode


def run_and_count_stores(*args: Any) -> tuple[list[dict[str, Any]], int]:
    with mock.patch.object(
        ActivationOffloader, "__init__", autospec=True, side_effect=ActivationOffloader.__init__
    ) as made:
        return run_training(*args), made.call_count


@pytest.mark.slow
def test_two_experts_share_a_store(tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool):
    model = tiny_variant("wan2.2-t2v-a14b")
    shared = ("train.max_steps=2", "train.bins_per_step=2", "model.experts=both")
    series = {}
    for mode in ("none", "every name"):
        args = model, tmp_path / mode, (*shared, *MODES[mode]), zero(3)
        rows, num_stores = worlds[1].run(run_and_count_stores, *args)[0]
        assert num_stores == 1
        series[mode] = losses(rows), [row["grad_norm_low"] for row in rows]
    assert len(series["none"][0]) == 2
    assert series["every name"] == series["none"]


def test_the_start_block_says_what_is_kept(tiny_pipeline: Path, tmp_path: Path):
    said = {
        mode: start_block(make_run(tiny_pipeline, tmp_path, settings, world_size=1))
        for mode, settings in MODES.items()
    }
    assert "checkpointing none\n" in said["none"]
    assert "checkpointing offload (block_input on the host)\n" in said["offload"]
    assert (
        "offload (query_proj, key_proj on the device; block_input, attn_output, value_proj, ffn_activation on the host)"
        in said["every name"]
    )
