"""For which GPUs `wands plan` plans, what it says about them, and the limits of their memory."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import plan
from tests.unit.commands.test_plan import rows_of
from wands.errors import ConfigError
from wands.planning import cluster
from wands.planning.hardware import Machine


@pytest.mark.parametrize(
    ("options", "head"),
    [
        (
            {},
            "8 x H100 80 GB (assumed, because this machine has no GPU; name yours with --hardware or --gpu-memory)",
        ),
        (
            {"gpu_memory": 24.0},
            "1 x RTX 4090 24 GB (the known GPU closest to --gpu-memory 24; name yours with --hardware)",
        ),
        pytest.param(
            {"gpu_memory": 12.0},
            "1 x RTX 4070 12 GB (the known GPU closest to --gpu-memory 12; name yours with --hardware)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"hardware": "rtx3090", "gpus": 2}, "2 x RTX 3090 24 GB (--hardware)", marks=pytest.mark.slow
        ),
    ],
)
def test_the_first_line_says_which_hardware_was_assumed(options, head):
    report = plan("wan2.1-t2v-1.3b-lora", deepspeed="zero2", **options)
    assert report.splitlines()[0] == f"wan2.1-t2v-1.3b, LoRA, on {head}"


def test_a_plan_is_for_the_gpus_of_this_machine(monkeypatch):
    here = Machine(name="NVIDIA GeForce RTX 3090", memory=25.3e9, host_memory=128e9, ranks_per_node=2)
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cluster, "machine_here", lambda device, ranks: here)
    report = plan("wan2.1-t2v-1.3b-lora", deepspeed="zero2")
    assert report.startswith(
        "wan2.1-t2v-1.3b, LoRA, on 2 x RTX 3090 25.3 GB (this machine, with NVIDIA GeForce RTX 3090)\n"
    )
    assert "(107.29 GiB available, 90% of 119.21 GiB)" in report


def test_host_memory_that_does_not_fit_is_shown_with_its_limit():
    """A tenth is left to the system. A base that is quantized already is not to be quantized."""
    keys = ("model.swap_blocks=0", "lora.quantize=nf4")
    options = {"hardware": "rtx4090", "gpus": 1, "size": "720p", "deepspeed": "zero3_offload"}
    with pytest.raises(ConfigError) as refused:
        plan("wan2.1-t2v-14b-lora", host_memory=24.0, overrides=keys, **options)
    text = str(refused.value)
    needed, limit, total = map(float, re.findall(r"([\d.]+) GiB", text.partition(" and ")[2])[:3])
    assert needed > limit == pytest.approx(0.9 * total, abs=0.01)
    assert "available, 90% of 22.35 GiB) per node" in text
    assert "lora.quantize" not in text.partition("per node; ")[2]


@pytest.mark.slow
def test_a_base_is_quantized_where_the_host_has_no_room_for_it():
    """A 14B base on 24 GB: swapped with 64 GB of RAM, quantized with 24 GB."""
    options = {"hardware": "rtx4090", "clips": 10, "frames": 33, "deepspeed": "zero2"}
    keys = ("packing.max_tokens=14040",)
    large, small = (
        plan("wan2.1-t2v-14b-lora", host_memory=memory, overrides=keys, **options) for memory in (64.0, 20.0)
    )
    assert "lora.quantize" not in large
    assert "swap_blocks" in large.splitlines()[-1]
    assert {row[-1] for row in rows_of(small)} <= {"int8", "nf4"}
    assert re.search(r" --set lora\.quantize=(int8|nf4)", small.splitlines()[-1])
