"""The scaling prediction: its arithmetic against formulas and wands' own counts, and one run of the script."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench_scaling
import pytest
from bench_scaling import H100, MODELS, SIZES, Setting, prediction, workload_of

from wands.attention.layout import ContextPlan
from wands.data.packing import LEVEL
from wands.planning.hardware import Machine
from wands.planning.memory import CUDA_CONTEXT, NCCL_COMMUNICATOR, reserved_memory
from wands.planning.step_time import (
    ACTIVATION_BYTES,
    ATTENTION_BACKWARD,
    BF16,
    POINTWISE_BYTES,
    Traffic,
    predict,
    ring_traffic,
)
from wands.planning.workload import Weight

SHAPE = MODELS["1.3B"][0]
FAR = Machine(ranks_per_node=1)  # every rank on its own node: no Ulysses, all ring, over the network
INSTANT = Machine(node_bandwidth=1e30, network_bandwidth=1e30)
LENS = (32760, 32760)


def test_tokens_of_a_clip():
    tokens = {
        (model, size): bench_scaling.clip_tokens(shape, stride, sides, 81)
        for model, (shape, stride) in MODELS.items()
        for size, sides in SIZES.items()
    }
    assert tokens["14B", "480p"] == 21 * 30 * 52 == 32_760
    assert tokens["14B", "720p"] == 21 * 45 * 80 == 75_600
    assert tokens["TI2V-5B", "480p"] == 21 * 15 * 26
    assert tokens["TI2V-5B", "720p"] == 21 * 22 * 40  # its sides are multiples of 32: 704 rows


def test_the_5b_has_five_billion_parameters():
    assert MODELS["TI2V-5B"][0].num_params == pytest.approx(5.0e9, rel=0.01)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize(("rounds", "factor"), [("forward", 1.0), ("backward", 1.2)])
def test_the_ring_hides_where_l_eff_says(degree: int, rounds: str, factor: float):
    """R * F / B, and 1.2 times that where blocks and gradients share a round; two ranks never do."""
    if rounds == "backward" and degree == 2:
        factor = 0.4
    one = prediction(SHAPE, [8000, 24000], 8, degree, Setting(FAR))
    assert one.plan.ring_degree == degree
    attention = SHAPE.attention_flops_per_squared_token() * sum(n * n for n in one.plan.seq_lens)
    speed = FAR.attention_speeds()[0]
    seconds = attention / SHAPE.num_layers / degree / speed
    enough = factor * FAR.network_bandwidth * bench_scaling.needed_len(one) / bench_scaling.effective_len(one)
    for bandwidth, hides in ((1.01 * enough, True), (0.99 * enough, False)):
        kernels = seconds, ATTENTION_BACKWARD * seconds  # both passes are equally fast
        forward, backward = ring_traffic(one.plan, SHAPE.dim, kernels, bandwidth)
        grads = ContextPlan.comm_bytes(one.plan, SHAPE.dim, BF16)
        home = (grads.ring_backward - grads.ring_forward) / (degree - 1) / bandwidth  # never hidden
        late = forward.exposed if rounds == "forward" else backward.exposed - home
        assert (late < 1e-12) is hides, late


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("cp", [1, 4, 8])
def test_traffic_is_the_bytes_of_the_plan(checkpointing: str, cp: int):
    machine = Machine(network_bandwidth=1e9, node_bandwidth=1e9)
    one = prediction(SHAPE, LENS, 16, cp, Setting(machine, checkpointing))
    comm = one.plan.comm_bytes(SHAPE.dim, BF16)
    forwards = {"none": (1, 1), "selective": (1.75, 1), "full": (2, 2)}[checkpointing]
    exchanged = SHAPE.num_layers * (forwards[0] * comm.ulysses_forward + comm.ulysses_backward)
    passed_on = SHAPE.num_layers * (forwards[1] * comm.ring_forward + comm.ring_backward)
    assert one.all_to_all.total == pytest.approx(exchanged / 1e9)
    assert one.ring_traffic.total == pytest.approx(passed_on / 1e9)
    assert one.zero.total == pytest.approx(3 * 4 * SHAPE.num_params * 15 / 16 / 1e9)


@pytest.mark.parametrize("compile", ["false", "auto"])
@pytest.mark.parametrize(
    ("checkpointing", "forwards", "attention_forwards"), [("none", 1, 1), ("selective", 2, 1), ("full", 2, 2)]
)
def test_compute_is_the_planners_cost(
    checkpointing: str, forwards: int, attention_forwards: int, compile: str
):
    """Every pass at its speed: matrix products, two passes of attention, and the bytes of pointwise operations."""
    attention = SHAPE.attention_flops_per_squared_token() * sum(n * n for n in LENS)
    linear = SHAPE.forward_flops(LENS) - attention
    own = replace(INSTANT, linear_flops=7e14, attention_flops={"cudnn": (6e14, 4e14)}, copy_bandwidth=3e12)
    base = workload_of(SHAPE, LENS, 8, 1, Setting(own, checkpointing))
    model = base.recipe.model.model_copy(update={"compile": compile == "auto" and "auto"})
    recipe = base.recipe.model_copy(update={"model": model})
    one = predict(replace(base, recipe=recipe), own, LENS)
    work = (forwards + 2) * linear / 7e14
    work += attention_forwards * attention / 6e14 + 2.5 * attention / 4e14
    width = (60 if compile == "auto" else 285) * SHAPE.dim + 4 * SHAPE.ffn_dim
    work += (forwards + 2) * SHAPE.num_layers * sum(LENS) * width / 3e12
    assert one.compute == pytest.approx(work)
    assert one.seconds == pytest.approx(one.compute / LEVEL * 64 / 8)  # 64 bins on 8 dp ranks
    assert one.mfu == pytest.approx(LEVEL * 3 * SHAPE.forward_flops(LENS) / work / own.peak)


@pytest.mark.parametrize(
    ("mode", "saved", "offloaded", "exchanges", "attention_forwards", "host_bytes"),
    [
        ("selective", ["attn_output", "attn_input"], None, 1.0, 1, 0),
        ("selective", ["query_proj"], None, 2.0, 2, 0),
        ("offload", None, None, 2.0, 2, 4),
        ("offload", ["attn_output"], None, 1.75, 1, 4),
        ("offload", None, ["attn_input"], 1.25, 2, 6),
    ],
)
def test_kept_tensors_are_neither_computed_nor_sent_again(
    mode: str,
    saved: list[str] | None,
    offloaded: list[str] | None,
    exchanges: float,
    attention_forwards: int,
    host_bytes: int,
):
    """`host_bytes`: bytes on the host for each token and channel of a block."""
    instant = {"linear_flops": 1e30, "copy_bandwidth": 1e30, "launch_seconds": 0.0, "node_bandwidth": 1e9}
    own = replace(H100, attention_flops={"cudnn": (6e14, 1e30)}, **instant)
    base = workload_of(SHAPE, LENS, 4, 4, Setting(own, mode))
    model = base.recipe.model.model_copy(update={"saved_tensors": saved, "offloaded_tensors": offloaded})
    base = replace(base, recipe=base.recipe.model_copy(update={"model": model}))
    one = predict(base, own, LENS)
    attention = SHAPE.attention_flops_per_squared_token() * sum(n * n for n in LENS)
    comm = one.plan.comm_bytes(SHAPE.dim, BF16)
    exchanged = SHAPE.num_layers * (exchanges * comm.ulysses_forward + comm.ulysses_backward)
    assert one.compute == pytest.approx(attention_forwards * attention / 4 / 6e14)
    assert one.all_to_all.total == pytest.approx(exchanged / 1e9)
    moved = 2 * host_bytes * SHAPE.dim * SHAPE.num_layers * sum(LENS) / 4 / own.host_bandwidth
    zero = 3 * 4 * SHAPE.num_params * 3 / 4 / 1e9
    assert one.zero.total == pytest.approx(zero + moved)


def test_pointwise_bytes_of_a_block():
    """1,140 U + 16 r U without and 240 U + 16 r U with compiled operators: one pass, one again, and twice as much backward."""
    assert [4 * number for number in POINTWISE_BYTES] == [1140, 240]
    assert 4 * ACTIVATION_BYTES == 16


def test_small_bins_wait_for_the_host():
    slow = replace(INSTANT, launch_seconds=1e-4)
    one, many = (prediction(SHAPE, [16] * number, 8, 1, Setting(slow)) for number in (1, 2))
    assert one.compute == many.compute == pytest.approx(4 * SHAPE.num_layers * 25 * 1e-4)


def test_a_named_kernel_has_its_own_speed():
    machine = Machine(attention_flops={"slow": (3e14, 2e14), "fast": (6e14, 5e14), "backward": (3e14, 6e14)})
    assert machine.attention_speeds("slow") == (3e14, 2e14)
    assert machine.attention_speeds("fast") == machine.attention_speeds() == (6e14, 5e14)
    assert machine.attention_speeds("flash9") == machine.attention_speeds("auto") == (6e14, 5e14)


def test_a_prediction_has_the_degrees_of_its_workload():
    """Heads and nodes allow Ulysses over all four ranks, but the recipe chose a ring."""
    workload = replace(workload_of(SHAPE, LENS, 16, 4, Setting()), ulysses_degree=1, ring_degree=4)
    plan = predict(workload, H100, LENS).plan
    assert (plan.ulysses_degree, plan.ring_degree) == (1, 4)


def test_published_speeds_have_a_prediction():
    """The model leaves out what it does not know, so its speeds are above the published speeds, but not by much."""
    rows = bench_scaling.published_errors()
    assert len(rows) == 6
    megatron = [predicted / tflops for row, tflops, predicted in rows if row.startswith("Megatron")]
    assert all(1 < ratio < 1.6 for ratio in megatron), megatron


def test_more_ranks_per_bin_keep_the_work_and_add_traffic():
    slower = [prediction(SHAPE, LENS, 64, cp, Setting()) for cp in (1, 2, 4, 8, 16, 32)]
    assert [one.workload.cp_size * one.dp for one in slower] == [64] * 6
    assert [one.plan.ulysses_degree for one in slower] == [1, 2, 4, 4, 4, 4]  # 12 heads, 8 ranks in a node
    assert sorted(one.seconds for one in slower) == [one.seconds for one in slower]
    held = [bench_scaling.memory(one) for one in slower]
    assert sorted(held, reverse=True) == held
    for traffic in (traffic for one in slower for traffic in (one.ring_traffic, one.zero)):
        assert 0 <= traffic.exposed <= traffic.total + 1e-9


def test_memory_is_that_of_ds_configs_zero3():
    """Weights, gradients and two moments, over all ranks; activations over those of a bin."""
    held = {cp: bench_scaling.memory(prediction(SHAPE, LENS, 64, cp, Setting())) for cp in (1, 2, 64)}
    assert 0.5 * held[1] < held[2] < 0.75 * held[1]  # Ulysses keeps the result of attention twice
    assert 16 * SHAPE.num_params / 64 < held[64] < 0.2 * held[1]


def test_each_communicator_takes_memory_that_tensors_cannot_use():
    """All ranks; then also context parallelism and Ulysses; then also keys and values, and gradients, of a ring."""
    reserved = [reserved_memory(workload_of(SHAPE, LENS, 8, cp, Setting())) for cp in (1, 4, 8)]
    assert reserved == [CUDA_CONTEXT + number * NCCL_COMMUNICATOR for number in (1, 3, 5)]
    on_cpu = replace(workload_of(SHAPE, LENS, 8, 8, Setting()), device_type="cpu")
    assert reserved_memory(on_cpu) == 0


def test_frozen_weights_cost_no_gradients_of_their_own():
    base = workload_of(SHAPE, [1000] * 32, 8, 1, Setting())
    base = replace(base, ds_config={**base.ds_config, "zero_optimization": {"stage": 2}})
    full, lora = (
        predict(replace(base, weights=weights), H100, [1000] * 32)
        for weights in (
            base.weights,
            [Weight(name="lora_A", shape=(10_000_000,), element_size=4, trained=True)],
        )
    )
    assert lora.compute < 0.85 * full.compute
    assert lora.zero.total < 0.01 * full.zero.total
    assert lora.once < 0.01 * full.once


def test_what_is_offloaded_goes_over_the_hosts_link():
    near = workload_of(SHAPE, LENS, 8, 1, Setting(bins=8))
    on_host = {"stage": 3} | {key: {"device": "cpu"} for key in ("offload_optimizer", "offload_param")}
    far = replace(near, ds_config={**near.ds_config, "zero_optimization": on_host})
    plain, offloaded = (predict(workload, H100, LENS) for workload in (near, far))
    assert offloaded.once == pytest.approx(36 * SHAPE.num_params / 8 / H100.host_bandwidth)
    more = 2 * 4 * SHAPE.num_params / 8 / H100.host_bandwidth
    assert offloaded.zero.total - plain.zero.total == pytest.approx(more)
    assert offloaded.seconds > plain.seconds


def test_traffic_that_is_instant_hides():
    one = prediction(SHAPE, LENS, 64, 16, Setting(INSTANT))
    assert one.seconds == pytest.approx(one.compute / LEVEL * 16)
    assert bench_scaling.hidden(Traffic()) == 1.0


@pytest.mark.parametrize("gpus", [8, 64, 1024])
def test_the_smallest_cp_that_fits(gpus: int):
    shape = MODELS["14B"][0]
    setting = Setting()
    one = bench_scaling.smallest_fit(shape, [75600], gpus, setting)
    assert one is not None
    assert bench_scaling.fits(one)
    assert one.dp <= setting.bins
    half = one.workload.cp_size // 2
    smaller = prediction(shape, [75600], gpus, half, setting)
    assert gpus // half > setting.bins or not bench_scaling.fits(smaller)
    nothing = Setting(Machine(memory=1e9))
    assert bench_scaling.smallest_fit(shape, [75600], gpus, nothing) is None


@pytest.mark.slow
def test_the_script_prints_every_size_and_draws(tmp_path: Path):
    plot = tmp_path / "scaling.png"
    script = Path(bench_scaling.__file__)
    command = [sys.executable, str(script), "--plot", str(plot), "--memory", "40", "--every-cp-at", "16"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    for gpus in bench_scaling.GPUS:
        assert len([row for row in rows if row[:1] == [str(gpus)]]) >= len(MODELS) * len(SIZES)
    assert "no cp fits" in result.stdout  # 14B on 8 GPUs of 40 GB
    assert plot.read_bytes().startswith(b"\x89PNG")
