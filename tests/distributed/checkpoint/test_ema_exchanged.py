"""The moving average in the model for a while, on the host or on the device of the weights."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.ema_runs import PLAIN, STEPS, Weights, averaged, parts_in, same
from tests.support.runs import Spy, run_training
from tests.support.steps import DS_CONFIGS, zero
from tests.support.world import WorldPool
from wands.checkpoint import ema
from wands.checkpoint.checkpoint_files import (
    average_file,
    load_average,
)
from wands.checkpoint.engine_state import engine_tensors
from wands.config.recipe import EmaConfig
from wands.model.files.tensor_files import write_safetensors
from wands.plugin import Plugin
from wands.train.jobs import FinishedStep
from wands.train.training import Training


def exchanged_run(*args: Any) -> dict[str, list[str]]:
    """A run that has its averages in the model before its third step: what differed then and what differs afterwards."""
    import deepspeed

    found: dict[str, list[str]] = {}

    def own(engine: Any) -> Weights:
        """This rank's values, and those of parameters that ZeRO-3 keeps whole between steps."""
        parameters = dict(engine.module.named_parameters())
        parts = {f"own/{name}": getattr(value, "ds_tensor", value) for name, value in parameters.items()}
        parts |= {f"whole/{name}": value for name, value in parameters.items() if value.numel()}
        return {name: value.detach().clone() for name, value in parts.items()}

    def everything(training: Training) -> Weights:
        state = {}
        for part, engine in training.engines.items():
            kept = engine_tensors(engine)[0]
            averages = training.averages[part].stored()[0]
            state |= {f"{part}/state/{item.name}": item.read().clone() for item in kept}
            state |= {f"{part}/average/{item.name}": item.read().clone() for item in averages}
            state |= {f"{part}/{name}": value for name, value in own(engine).items()}
        return state

    def bits(value: torch.Tensor) -> bytes:
        return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def gathered(engine: Any, used: Weights) -> Weights:
        """All parameters, as a forward pass would use them."""
        every = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(
            [*every.values()], enabled=not all(map(torch.numel, every.values()))
        ):
            whole = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
        return whole | {name: used[f"whole/{name}"] for name in whole if f"whole/{name}" in used}

    def exchange(training: Training, step: FinishedStep) -> None:
        if step.number != 2:
            return
        before = everything(training)
        digest = hashlib.sha256()
        with training.inference("ema"):
            for part, engine in training.engines.items():
                inside = gathered(engine, own(engine))
                for fragment, _ in training.averages[part]._pairs:
                    name = fragment.name
                    start = fragment.start
                    average = before[f"{part}/average/{name}"]
                    mine = inside[name].reshape(-1)[start : start + len(average)]
                    judged = "right" if torch.equal(mine, average.to(mine.dtype)) else "wrong"
                    found.setdefault(judged, []).append(name)
                    has_masters = engine.zero_optimization_stage() > 0
                    master = before[f"{part}/state/{name}/master"] if has_masters else mine
                    found.setdefault("moved", []).append(str(not torch.equal(master, average)))
                digest.update(b"".join(map(bits, inside.values())))
        after = everything(training)
        assert before.keys() == after.keys()
        found["other"] = [name for name in before if bits(before[name]) != bits(after[name])]
        found["digest"] = [digest.hexdigest()]

    run_training(*args, plugin=Plugin(jobs=(Spy(stepped=exchange),)))
    return found


@pytest.mark.parametrize(
    ("variant", "settings", "ds"),
    [
        pytest.param("wan2.1-t2v-1.3b", (), zero(0), marks=pytest.mark.slow),
        pytest.param("wan2.1-t2v-1.3b", (), zero(2), marks=pytest.mark.slow),
        pytest.param(
            "wan2.1-t2v-1.3b",
            (),
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}},
            marks=pytest.mark.slow,
        ),
        pytest.param("wan2.2-t2v-a14b", ("lora.rank=2",), zero(0), marks=pytest.mark.slow),
        ("wan2.1-t2v-1.3b", ("precision.weights=bf16", "precision.compute=bf16"), zero(1)),
        pytest.param("wan2.2-t2v-a14b", (), zero(3), marks=pytest.mark.slow),
        pytest.param(
            "wan2.1-t2v-1.3b", ("ema.device=gpu",), DS_CONFIGS["zero3_offload"], marks=pytest.mark.slow
        ),
        pytest.param(
            "wan2.1-t2v-1.3b", (), zero(2, offload_optimizer={"device": "cpu"}), marks=pytest.mark.slow
        ),
    ],
    ids=["zero0", "zero2", "zero3", "lora", "bf16", "experts", "offload3", "offload2"],
)
def test_in_the_model_for_a_while_and_every_bit_is_restored(
    variant: str,
    settings: Any,
    ds: Any,
    tiny_variant: Callable[[str], Path],
    tmp_path: Path,
    worlds: WorldPool,
):
    overrides = (*PLAIN, *STEPS, "train.max_steps=3", *settings)
    ranks = worlds[2].run(exchanged_run, tiny_variant(variant), tmp_path, overrides, ds, False)
    for found in ranks:
        assert found["other"] == []
        assert "wrong" not in found
        assert found["right"]
        assert "True" in found["moved"] or ds == zero(0)
        assert found["digest"] == ranks[0]["digest"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_the_host_or_beside_the_weights_it_has_the_same_bits(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three ranks have all weights each. An average on the host is computed on the GPU and sent back without waiting."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (700, 300), "b": (2,), "c": (5, 1, 7)}
    series = [
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(4)
    ]
    module = torch.nn.ParameterDict({name: torch.empty(shape) for name, shape in shapes.items()}).to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    stage = SimpleNamespace(zero_optimization_stage=lambda: 0, optimizer=optimizer)
    alone = {"mpu": None, "seq_data_parallel_group": None}
    engine = SimpleNamespace(module=module, device=torch.device(device), **vars(stage), **alone)

    def share(rank: int, where: str) -> None:
        monkeypatch.setattr(ema, "dist", SimpleNamespace(get_rank=lambda _: rank, get_world_size=lambda _: 3))
        for step, weights in enumerate(series):
            with torch.no_grad():
                for name, value in weights.items():
                    module[name].copy_(value)
            if step == 0:
                average = ema.WeightAverage(engine, EmaConfig(decay=0.9, warmup=False, device=where), step=0)
            else:
                average.update()
        (tmp_path / where / "part").mkdir(parents=True, exist_ok=True)
        write_safetensors(tmp_path / where / "part" / average_file(rank), *average.stored())

    for rank, where in itertools.product(range(3), ("cpu", "gpu")):
        share(rank, where)
    truth = averaged([{name: value.to(device) for name, value in one.items()} for one in series], 0.9)
    host, beside = (load_average(tmp_path / where / "part") for where in ("cpu", "gpu"))
    assert same(host, beside)
    for name, value in truth.items():
        torch.testing.assert_close(host[name], value.cpu(), rtol=1e-6, atol=1e-7)
    assert [*map(set, parts_in(tmp_path / "cpu", "part"))] == [{"a", "c"}, {"a", "b", "c"}, {"a", "b", "c"}]
