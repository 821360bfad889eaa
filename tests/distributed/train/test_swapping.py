"""Runs whose frozen blocks live in host memory give the bits of runs without: losses, held-out losses, LoRA."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.planning.test_memory import CONFIG
from tests.support.runs import make_run, run_training, weights
from tests.support.steps import zero
from wands.config.recipe_loading import load_recipe
from wands.errors import ConfigError, WandsError
from wands.files import read_rows
from wands.train.trainer import Trainer

KEYS = (
    "model.init=random",
    "train.max_steps=3",
    "optim.warmup=0",
    "optim.lr=1e-2",
    "eval={every: 2, max_clips: 2}",
    "data.holdout=0.3",
    "ema={decay: 0.5}",
)


def write_model(folder: Path) -> Path:
    model = folder / "model"
    (model / "transformer").mkdir(parents=True, exist_ok=True)
    (model / "transformer" / "config.json").write_text(json.dumps(CONFIG))
    return model


def case(mode: str, base: str, swap: int) -> tuple[str, ...]:
    quantize = base if base in ("int8", "nf4", "fp8") else "none"
    compute = "fp32" if base == "fp32" else "bf16"
    storage = "bf16" if base == "bf16" else "fp32"
    return (
        f"lora={{rank: 4, targets: attention+ffn, quantize: {quantize}}}",
        f"precision={{compute: {compute}, weights: {storage}}}",
        f"model.checkpointing={mode}",
        f"model.swap_blocks={swap}",
    )


def outcome(folder: Path, stage: int, keys: tuple[str, ...]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses, gradient norms and held-out losses, and the LoRA."""
    model = write_model(folder)
    out = folder / "-".join(keys[2:])
    rows = run_training(model, out, (*KEYS, *keys), zero(stage))
    steps = [(row["loss"], row["grad_norm"]) for row in rows]
    held_out = (
        [(row["weights"], row["held_out"]) for row in read_rows(out / "evaluations.jsonl")] if rows else []
    )
    return steps + held_out, weights(out)


def compare(folder: Path, stage: int, mode: str, base: str, swap: int) -> tuple[list[Any], list[Any], bool]:
    found, lora = outcome(folder, stage, case(mode, base, swap))
    wanted, plain = outcome(folder, stage, case(mode, base, 0))
    return found, wanted, all(torch.equal(lora[name], plain[name]) for name in plain)


def assert_equal_bits(worlds: Any, folder: Path, world_size: int, *what: Any) -> None:
    found, wanted, is_same = worlds[world_size].run(compare, folder, *what)[0]
    assert found == wanted
    assert len(found) > 4
    assert is_same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "stage", "mode", "base", "swap"),
    [(2, 2, "full", "fp32", 3), pytest.param(1, 0, "offload", "nf4", 4, marks=pytest.mark.slow)],
)
def test_the_bits_are_those_of_no_swap(
    worlds: Any, tmp_path: Path, world_size: int, stage: int, mode: str, base: str, swap: int
):
    assert_equal_bits(worlds, tmp_path, world_size, stage, mode, base, swap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "mode", "base"),
    list(product((0, 2), ("full", "selective", "offload"), ("fp32", "bf16", "int8", "nf4", "fp8"))),
)
def test_every_base_mode_and_stage(worlds: Any, tmp_path: Path, stage: int, mode: str, base: str):
    assert_equal_bits(worlds, tmp_path, 1, stage, mode, base, 3)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["parallel.ulysses_degree=2", "parallel.ring_degree=2"])
def test_context_parallel_ranks(worlds: Any, tmp_path: Path, grid: str):
    keys = (*case("selective", "bf16", 4), grid)
    [found, lora], *_ = worlds[2].run(outcome, tmp_path, 1, keys)
    [wanted, plain], *_ = worlds[2].run(outcome, tmp_path, 1, (*case("selective", "bf16", 0), grid))
    assert found == wanted
    assert all(torch.equal(lora[name], plain[name]) for name in plain)


def resume(folder: Path) -> tuple[list[Any], list[Any]]:
    model = write_model(folder)
    keys = (*KEYS, *case("full", "fp32", 0), "checkpoint={every: 1, keep: 9}")
    whole = run_training(model, folder / "whole", keys, zero(1))
    step = folder / "whole" / "checkpoints" / "step_00000001"
    more = (*KEYS, *case("full", "fp32", 2))
    return whole, run_training(model, folder / "resumed", more, zero(1), resume=step)


@pytest.mark.slow
def test_a_run_is_resumed_with_another_number(worlds: Any, tmp_path: Path):
    whole, resumed = worlds[1].run(resume, tmp_path)[0]
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole][1:]


def drop_wait(folder: Path) -> bool:
    """Whether weights that are read before their copy is done change the result, on a device that is behind the host."""
    from tests.unit.model.test_offload import LateLane
    from wands.model import swapping

    plain = outcome(folder, 0, case("full", "fp32", 0))[0]
    original = swapping.new_copy_stream
    swapping.new_copy_stream = lambda device: LateLane()
    wait = LateLane.wait
    LateLane.wait = lambda self, event: None
    try:
        return outcome(folder, 0, case("full", "fp32", 4))[0] != plain
    except (
        WandsError
    ):  # the memory of a buffer that was never filled may contain NaN, also in the held-out loss
        return True
    finally:
        LateLane.wait = wait
        swapping.new_copy_stream = original


@pytest.mark.slow
def test_weights_that_are_read_too_early_would_be_seen(worlds: Any, tmp_path: Path):
    assert worlds[1].run(drop_wait, tmp_path)[0]


@pytest.mark.parametrize(
    ("overrides", "stage", "said"),
    [
        ((), 2, "model.swap_blocks=2 needs frozen weights, but a full finetune trains them"),
        (("lora.rank=4", "model.checkpointing=none"), 2, "needs blocks that the backward pass runs again"),
        (("lora.rank=4", "model.checkpoint_blocks=1"), 2, "because model.checkpoint_blocks=1; raise"),
        (("lora.rank=4",), 3, "has no effect on weights that ZeRO-3 divides among the GPUs"),
        (
            ("lora.rank=4", "parallel.tensor_degree=2"),
            2,
            "is not tested with parallel.tensor_degree=2; remove one",
        ),
    ],
)
def test_what_cannot_be_swapped_is_refused(tmp_path: Path, overrides: tuple[str, ...], stage: int, said: str):
    keys = ("model.init=random", "model.swap_blocks=2", "model.checkpointing=full", *overrides)
    with pytest.raises(ConfigError, match=said):
        make_run(write_model(tmp_path), tmp_path / "run", keys, zero(stage), world_size=2)


def train_auto(model: Path, out: Path) -> str:
    keys = (
        f"model.path={model}",
        "data.mock={num_samples: 4, shapes: [[2, 4, 4]], text_lens: [4]}",
        "lora.rank=4",
        "model.checkpointing=full",
        "model.swap_blocks=auto",
        f"output_dir={out}",
        "precision.compute=fp32",
        "train.max_steps=1",
    )
    trainer = Trainer(load_recipe(None, [*keys]))
    text = trainer.plan()
    trainer.train()
    return text


def test_auto_is_settled_for_the_run_and_kept_in_its_recipe(worlds: Any, tmp_path: Path, tiny_pipeline: Path):
    out = tmp_path / "run"
    [text] = worlds[1].run(train_auto, tiny_pipeline, out)
    assert "checkpointing full" in text
    assert "blocks in host memory" not in text, "the model fits the memory of this machine"
    assert "swap_blocks: auto" in (out / "recipe.yaml").read_text()
    [step] = (out / "checkpoints").glob("step_*")
    assert json.loads((step / "wands_state.json").read_text())["recipe"]["model"]["swap_blocks"] == 0
