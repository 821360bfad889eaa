"""The estimate of a run's memory against peaks of real runs, as torch's allocator counted them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peak_memory import PeakMemory

from tests.support.runs import engine_of, make_run, model_of
from wands.config.deepspeed import load_ds_config
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import release_engine
from wands.planning.hardware import Machine
from wands.planning.memory import Memory, estimate_memory
from wands.planning.search import SHIPPED, Task, search
from wands.planning.weights import list_weights
from wands.planning.workload import Workload
from wands.train.step import train_step
from wands.variants import DiTShape

CLOSE = 0.10
CONFIG = {
    "_class_name": "WanTransformer3DModel",
    "patch_size": [1, 2, 2],
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 64,
    "freq_dim": 256,
    "ffn_dim": 512,
    "num_layers": 4,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
}
# 1,056 tokens to 1.25 M parameters: activations and states both count.
DATA = (
    "model.init=random",
    "data.mock={num_samples: 16, shapes: [[8, 22, 24]], text_lens: [64]}",
    "packing.max_tokens=1056",
    "data.prefetch=0",
)
SMALL = {
    "stage3_param_persistence_threshold": 1000,
    "stage3_max_live_parameters": 300_000,
    "stage3_max_reuse_distance": 300_000,
    "stage3_prefetch_bucket_size": 100_000,
}
FP8 = ("precision.linears=fp8",)
# three clean and four noisy copies of chunks of 264 tokens: 1,848
CAUSAL = ("objective.name=teacher_forcing", "objective.chunk_frames=2", "packing.max_tokens=1848")
LORA = "lora={rank: 8, targets: attention}"

Case = tuple[tuple[str, ...], dict[str, Any]]
"""Recipe keys, DeepSpeed JSON."""


def case(stage: int, checkpointing: str, compute: str, *keys: str, **zero: Any) -> Case:
    zero = {"stage": stage, "reduce_bucket_size": 300_000, **zero}
    keys = (f"model.checkpointing={checkpointing}", f"precision.compute={compute}", *keys)
    return keys, {"zero_optimization": zero}


ALONE = [
    case(0, "none", "fp32"),
    case(0, "full", "bf16"),
    case(0, "full", "fp32", "model.checkpoint_blocks=1"),
    case(2, "offload", "fp32", LORA, "model.checkpoint_blocks=3"),
    case(2, "offload", "fp32", LORA),
    case(2, "full", "fp32", LORA, "model.swap_blocks=4"),
    case(0, "selective", "bf16", LORA, "model.swap_blocks=3", "precision.weights=bf16"),
    case(2, "none", "bf16", "lora={rank: 8, targets: attention+ffn, dropout: 0.1}"),
    case(2, "none", "bf16", *FP8),
    case(2, "selective", "bf16", *FP8, "precision.fp8_grad_weight=bf16"),
    case(2, "none", "bf16", "lora={rank: 8, targets: attention+ffn}", *FP8),
    case(0, "full", "bf16", "lora={rank: 8, targets: attention, quantize: fp8}"),
    case(2, "none", "fp32", *CAUSAL),
    case(2, "full", "bf16", *CAUSAL),
    case(2, "selective", "bf16", *CAUSAL),
    case(2, "none", "bf16", LORA, *CAUSAL),
]
PAIRS = [
    case(0, "none", "bf16", LORA),
    case(1, "full", "fp32"),
    case(1, "selective", "bf16", "precision.weights=bf16"),
    case(2, "none", "fp32"),
    case(1, "selective", "bf16", "model.checkpoint_blocks=2"),
    case(2, "selective", "bf16", "parallel.ulysses_degree=2"),
    case(3, "none", "fp32", LORA, "parallel.ring_degree=2"),
    case(3, "full", "bf16", "ema={device: gpu}", **SMALL),
    case(3, "offload", "bf16"),
    case(3, "none", "bf16", "lora={rank: 8, targets: all-linear, quantize: int8}"),
    case(3, "none", "bf16", *FP8, **SMALL),
    case(3, "none", "bf16", "lora={rank: 8, targets: all-linear, quantize: fp8}"),
    case(2, "full", "fp32", *CAUSAL, "parallel.ring_degree=2"),
    case(3, "selective", "bf16", *CAUSAL, "parallel.ulysses_degree=2"),
]
TENSOR = [
    case(stage, checkpointing, compute, *lora, "parallel.tensor_degree=2")
    for stage, checkpointing, compute, lora in [
        (0, "none", "fp32", ()),
        (1, "full", "fp32", ()),
        (2, "selective", "bf16", ()),
        (3, "offload", "bf16", ()),
        (2, "none", "bf16", (LORA,)),
        (3, "none", "fp32", (LORA,)),
    ]
]
# The whole grid, on 2 ranks.
GRID = [
    case(stage, checkpointing, compute, *lora, *grid)
    for stage in range(4)
    for checkpointing in ("none", "selective", "full", "offload")
    for compute in ("fp32", "bf16")
    for lora in ((), (LORA,))
    for grid in ((), ("parallel.ulysses_degree=2",), ("parallel.ring_degree=2",))
]


def measure(folder: Path, cases: list[Case], accumulation: int = 1) -> list[tuple[int, Memory]]:
    """For each case the peak of a step that is not the first, and the estimate."""
    model = folder / "model" / "transformer"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    found = []
    for number, (keys, ds) in enumerate(cases):
        rank, world_size, device = init_process_group()
        cp_size = 2 if any(key.startswith("parallel") for key in keys) else 1
        more = (f"train.bins_per_step={world_size // cp_size * accumulation}", *keys)
        run = make_run(model.parent, folder / str(number), (*DATA, *more), ds)
        groups = ProcessGroups.build(run.grid(rank), device)
        with PeakMemory(device) as peak:
            engine = engine_of(run, model_of(run, groups, device), groups)
            batches = run.reader(groups.dims).prefetched(0, run.recipe.data.prefetch)
            average = None
            if run.recipe.ema:
                from wands.checkpoint.ema import WeightAverage

                average = WeightAverage(engine, run.recipe.ema, 0)
            for step in range(5):
                plan, [mine] = next(batches)
                if step > 1:
                    peak.mark()
                train_step(
                    engine,
                    mine,
                    run.objective,
                    groups=groups,
                    device=device,
                    denominator=run.schedule.denominator(plan),
                )
                if average:
                    average.update()
        batches.close()
        found.append((peak.bytes, estimate_memory(run.workload("cpu"))))
        release_engine(engine)
        del engine, batches, plan, mine, average
    return found


def assert_estimated(cases: list[Case], of_ranks: list[list[tuple[int, Memory]]]) -> None:
    assert len(cases) == len(of_ranks[0])
    wrong = []
    for one, ranks in zip(cases, zip(*of_ranks, strict=True), strict=True):
        measured, memory = min(ranks, key=lambda found: found[0])  # all ranks do the same; noise only adds
        line = f"{one}: measured {measured / 2**20:.1f}, estimated {memory.peak / 2**20:.1f} MiB = "
        line += f"{memory.peak / measured:.3f}: { {name: round(size / 2**20, 1) for name, size in memory.device.items()} }"
        print(line)
        if abs(memory.peak / measured - 1) > CLOSE:
            wrong.append(line)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_one_rank(tmp_path, new_world):
    assert_estimated(ALONE, new_world(1, measure, tmp_path, ALONE))


@pytest.mark.slow
def test_two_ranks(tmp_path, new_world):
    assert_estimated(PAIRS, new_world(2, measure, tmp_path, PAIRS))


@pytest.mark.slow
def test_tensor_parallelism(tmp_path, new_world):
    assert_estimated(TENSOR, new_world(2, measure, tmp_path, TENSOR))


@pytest.mark.slow
def test_accumulated_gradients(tmp_path, new_world):
    cases = [case(0, "full", "fp32"), case(2, "none", "fp32")]
    assert_estimated(cases, new_world(1, measure, tmp_path, cases, 2))


@pytest.mark.full
@pytest.mark.parametrize("stage", range(4))
def test_the_whole_grid(tmp_path, new_world, stage):
    cases = [one for one in GRID if one[1]["zero_optimization"]["stage"] == stage]
    assert_estimated(cases, new_world(2, measure, tmp_path, cases, timeout=1800.0))


@pytest.mark.slow
def test_what_a_plan_proposes_has_room(tmp_path, new_world):
    """On two ranks with 50 MB each: the fastest of each DeepSpeed config, run as the plan says."""
    recipe = load_recipe(None, [*DATA, "precision.compute=fp32", "train.bins_per_step=2"])
    shape = DiTShape.from_config(CONFIG)
    weights = list_weights(recipe, CONFIG, ())
    task = Task(
        Workload(recipe, shape, weights, num_models=1, world_size=2, device_type="cpu"),
        seq_lens=np.full(16, 1056),
        machine=Machine(memory=50e6, host_memory=1e9, ranks_per_node=2),
        ds_configs={name: load_ds_config(name) for name in SHIPPED},
    )
    found = search(task)
    assert len(found) > 3
    assert not any(
        one.workload.recipe.model.checkpointing == "none" and one.workload.cp_size == 1 for one in found
    )
    first = {one.ds_name: one for one in reversed(found)}.values()
    cases = [
        (("precision.compute=fp32", *one.changes()), dict(task.ds_configs[one.ds_name])) for one in first
    ]
    for one, ranks in zip(first, zip(*new_world(2, measure, tmp_path, cases), strict=True), strict=True):
        assert max(measured for measured, _ in ranks) <= task.machine.memory, (one.ds_name, one.changes())


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_offloaded_is_on_the_host_alone(tmp_path, stage):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(CONFIG))
    found = {}
    for away in (False, True):
        zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if away else {})
        run = make_run(
            tmp_path, tmp_path / "run", (*DATA, "train.bins_per_step=4"), {"zero_optimization": zero}, 2
        )
        found[away] = estimate_memory(run.workload("cuda"))
    share = run.model.num_trained / 2
    # Of the next step: 2 micro steps, 1,056 noisy tokens and targets of 64 fp32 values, and a text of 64 bf16 tokens.
    ahead = {"prefetched data": 2 * (1056 * 4 * 4 * 32 + 2 * 64 * 64)}
    assert found[False].host == ahead
    assert found[True].host == {"optimizer": 12 * share, "gradients": 4 * share} | ahead
    assert not found[True].device.get("optimizer")
    assert not found[True].device.get("gradients")
