"""Weights that drift apart between ranks are named, and end the run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drifting import FOUR_BINS, Said, after_step, caught, drift, nudge, sentence, zero
from tests.support.runs import Hooked, losses, run_training, weights
from wands.plugin import Plugin
from wands.watch.rank_checks import (
    check_weights_agree,
    weights_checksums,
)


@pytest.mark.parametrize(
    ("stage", "world_size", "odd", "others"),
    [
        (0, 2, 1, "rank 0"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, 2, 1, "rank 0"), (2, 4, 2, "ranks 0-1, 3"), (3, 4, 2, "ranks 0-1, 3")]
        ),
    ],
)
def test_weights_that_drifted_are_named(
    stage: int, world_size: int, odd: int, others: str, tiny_pipeline: Path, tmp_path: Path, run_world
):
    results = run_world(world_size, drift, tiny_pipeline, tmp_path, zero(stage), odd)
    first, last, clean, one, end, two, every, num_whole, restored = zip(*results, strict=True)
    assert clean == restored == (None,) * world_size
    who = f"between rank {odd} and {others}. Continue from the last checkpoint"
    assert "DataError: the weights differ between ranks (1 of " in sentence(one)
    assert f"parameters): {first[0]} {who}" in sentence(one)
    assert f"parameters): {last[0]} {who}" in sentence(end)
    assert f"parameters): {first[0]} {who}" in sentence(two)
    assert f"differ between ranks ({num_whole[0]} of " in sentence(every)
    assert f" and {num_whole[0] - 3} more {who}" in sentence(every)


def two_drifts(model: Path, out: Path) -> tuple[Said, list[str]]:
    """Ranks 0 and 1 each lose another parameter."""

    def look(engine: Any) -> tuple[Said, list[str]]:
        named = list(engine.module.named_parameters())[:2]
        rank = torch.distributed.get_rank()
        if rank < 2:
            nudge(named[rank][1].data, 0)
        said = caught(lambda: check_weights_agree(engine, engine.device))
        if rank < 2:
            nudge(named[rank][1].data, 0, -1)
        return said, [name for name, _ in named]

    found: list[Any] = []
    overrides = ("train.max_steps=1", "train.bins_per_step=3")
    run_training(model, out, overrides, zero(0), plugin=after_step(1, look, found))
    return found[0]


def test_two_ranks_drift_apart(tiny_pipeline: Path, tmp_path: Path, run_world):
    said, names = zip(*run_world(3, two_drifts, tiny_pipeline, tmp_path), strict=True)
    one, two = names[0]
    assert (
        f"{one} between rank 0 and ranks 1-2; {two} between rank 1 and ranks 0, 2. Continue from"
        in sentence(said)
    )


def read_shards(model: Path, out: Path) -> list[Any]:
    """Under ZeRO-3: is all held as before, and which checksums change with a bit of rank 1's shard?"""

    def held(engine: Any) -> list[tuple[str, int]]:
        return [(str(p.ds_status), p.data.numel()) for p in engine.module.parameters()]

    def look(engine: Any) -> Any:
        before = held(engine)
        names, clean = weights_checksums(engine.module, engine.device)
        shards = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            if not parameter.ds_persist
        ]
        name, parameter = shards[0]
        rank = torch.distributed.get_rank()
        if rank == 1:
            nudge(parameter.ds_tensor.data, 0)
        changed = weights_checksums(engine.module, engine.device)[1]
        said = caught(lambda: check_weights_agree(engine, engine.device))
        whole = weights_checksums(engine.module, engine.device, gather=False)[0]
        assert whole == [name for name, weight in engine.module.named_parameters() if weight.ds_persist]
        assert check_weights_agree(engine, engine.device, gather=False) == len(whole) > 3
        if rank == 1:
            nudge(parameter.ds_tensor.data, 0, -1)
        with_bits = (clean != changed).nonzero().flatten().tolist()
        return before == held(engine), len(shards), name, [names[i] for i in with_bits], said

    found: list[Any] = []
    run_training(model, out, ("train.max_steps=2",), zero(3), plugin=after_step(2, look, found))
    return found


@pytest.mark.slow
def test_shards_are_gathered_read_and_let_go(tiny_pipeline: Path, tmp_path: Path, run_world):
    """A shard is one of a kind: the whole that all ranks gather from it changes on all of them, so they still agree."""
    for ((untouched, num_shards, name, changed, said),) in run_world(2, read_shards, tiny_pipeline, tmp_path):
        assert untouched
        assert num_shards > 3
        assert changed == [name]
        assert said is None


def checked_run(model: Path, out: Path, ds: dict[str, Any], check: bool) -> tuple[Any, ...]:
    found: list[Any] = []

    def look(engine: Any) -> Any:
        return check_weights_agree(engine, engine.device) if check else None

    overrides = ("train.max_steps=4", "train.check_every=0")
    return run_training(model, out, overrides, ds, plugin=after_step(0, look, found)), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "threshold"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 0), (1, 0), (3, 0), (3, 100)]), (2, 0)],
)
def test_checking_changes_no_bit(stage: int, threshold: int, tiny_pipeline: Path, tmp_path: Path, run_world):
    runs = {}
    for check in (False, True):
        out = tmp_path / str(check)
        runs[check], found = run_world(2, checked_run, tiny_pipeline, out, zero(stage, threshold), check)[0]
        assert len(found) == 4
        assert all((number or 0) > 10 for number in found) == check
    assert losses(runs[True]) == losses(runs[False])
    assert [row["grad_norm"] for row in runs[True]] == [row["grad_norm"] for row in runs[False]]
    assert len(set(losses(runs[True]))) == 4
    ours = weights(tmp_path / "True")
    theirs = weights(tmp_path / "False")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def train_with_drift(model: Path, out: Path, resume: bool) -> Said:
    """A run whose rank 1 loses a bit in its first step."""

    def lose_a_bit(engine: Any) -> None:
        if torch.distributed.get_rank() == 1:
            nudge(next(engine.module.parameters()).data, 0)

    overrides = ("train.max_steps=4", "checkpoint.every=1")
    plugin = after_step(1, lose_a_bit, [])
    return caught(lambda: run_training(model, out, overrides, zero(0), resume, plugin=plugin))


@pytest.mark.slow
def test_training_stops_when_weights_drift_in_its_first_step(tiny_pipeline: Path, tmp_path: Path, run_world):
    said = run_world(2, train_with_drift, tiny_pipeline, tmp_path, False)
    assert "the weights differ between ranks (1 of" in sentence(said)
    assert not (tmp_path / "checkpoints").exists()  # nothing bad was saved
    run_world(2, run_training, tiny_pipeline, tmp_path, ("train.max_steps=2", "checkpoint.every=1"), zero(0))
    assert "the weights differ between ranks" in sentence(
        run_world(2, train_with_drift, tiny_pipeline, tmp_path, True)
    )


def train_with_flips(
    model: Path,
    out: Path,
    ds: dict[str, Any],
    overrides: tuple[str, ...],
    odd: int,
    step: int,
    pattern: str,
    in_moment: bool = False,
) -> tuple[Said, int, str]:
    """A run in which a bit of a parameter of rank `odd` flips right after a step: (error, steps made, the parameter)."""
    num_steps = 0
    flipped: list[str] = []

    def flip(number: int, engines: Mapping[str, Any]) -> None:
        nonlocal num_steps
        num_steps = number
        if number == step:
            [engine] = engines.values()
            named = engine.module.named_parameters()
            name, parameter = next(item for item in named if re.search(pattern, item[0]))
            flipped.append(name)
            changed = engine.optimizer.state[parameter]["exp_avg"] if in_moment else parameter.data
            if torch.distributed.get_rank() == odd:
                changed.view(torch.int32).view(-1)[-1] ^= 1 << 12

    overrides = ("train.max_steps=12", "train.check_every=5", *FOUR_BINS, *overrides)
    plugin = Plugin(objective=Hooked(after=flip))
    said = caught(lambda: run_training(model, out, overrides, ds, plugin=plugin))
    return said, num_steps, "".join(flipped)


FREEZE = ("model.freeze=[patch_embedding.*]",)


@pytest.mark.parametrize(
    ("stage", "world_size", "overrides", "step", "pattern", "found_at"),
    [
        (0, 2, (), 3, r"ffn.net.2.weight", 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (2, 2, FREEZE, 3, r"patch_embedding.weight", 5),
                (0, 4, (), 6, r"attn1.to_q.weight", 10),
                (2, 4, (), 10, r"ffn.net.2.weight", 10),
                (2, 4, FREEZE, 6, r"patch_embedding.weight", 10),
                (1, 2, ("lora.rank=4",), 3, r"base_layer.weight", 5),
                (3, 2, (), 5, r"blocks.1.norm2.bias", 5),
                # The next update copies the fp32 master weight, which has no replica, to all ranks.
                (2, 2, (), 3, r"ffn.net.2.weight", None),
                (0, 2, ("train.check_every=0", "checkpoint.every=4"), 3, r"ffn.net.2.weight", None),
                # Weights are compared before each checkpoint.
                (0, 2, ("train.check_every=100", "checkpoint.every=4"), 3, r"ffn.net.2.weight", 4),
                (0, 2, ("train.check_every=100",), 11, r"ffn.net.2.weight", 12),
            ]
        ),
    ],
)
def test_a_flipped_bit_ends_the_run_at_the_next_comparison(
    stage: int,
    world_size: int,
    overrides: tuple[str, ...],
    step: int,
    pattern: str,
    found_at: int | None,
    tiny_pipeline: Path,
    tmp_path: Path,
    run_world,
):
    odd = world_size // 2
    args = (tiny_pipeline, tmp_path, zero(stage), overrides, odd, step, pattern)
    said, steps, names = zip(*run_world(world_size, train_with_flips, *args), strict=True)
    if found_at is None:
        assert said == (None,) * world_size
        assert steps[0] == 12
        return
    others = "rank 0" if world_size == 2 else "ranks 0-1, 3"
    assert f"parameters): {names[0]} between rank {odd} and {others}. Continue from" in sentence(said)
    assert set(steps) == {found_at}
    assert not list(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.slow
def test_a_flipped_bit_of_a_moment_without_zero_is_found(tiny_pipeline: Path, tmp_path: Path, run_world):
    args = (tiny_pipeline, tmp_path, zero(0), (), 1, 5, "ffn.net.2.weight", True)
    said, steps, names = zip(*run_world(2, train_with_flips, *args), strict=True)
    assert f"{names[0]} between rank 1 and rank 0" in sentence(said)
    assert steps == (10, 10)  # the update of step 6 has changed the weight


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_sound_ranks_never_differ(stage: int, tiny_pipeline: Path, tmp_path: Path, run_world):
    overrides = ("train.max_steps=50", "train.check_every=1")
    args = (tiny_pipeline, tmp_path, zero(stage), overrides, 0, 0, "")
    said, steps, _ = zip(*run_world(2, train_with_flips, *args), strict=True)
    assert said == (None, None)
    assert steps == (50, 50)


def check_on_demand(model: Path, out: Path, drift: bool) -> tuple[Said, list[str], bool]:
    """Someone puts a file `check` into the run folder during step 2."""
    lines: list[str] = []

    def request(engine: Any) -> None:
        rank = torch.distributed.get_rank()
        if rank == 0:
            (out / "check").touch()
        if rank == 1 and drift:
            nudge(next(engine.module.parameters()).data, 0)

    plugin = after_step(2, request, [])
    overrides = ("train.max_steps=3",)
    said = caught(lambda: run_training(model, out, overrides, zero(0), log=lines.append, plugin=plugin))
    return said, lines, (out / "check").exists()


@pytest.mark.parametrize("drift", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_check_on_demand(drift: bool, tiny_pipeline: Path, tmp_path: Path, run_world):
    results = run_world(2, check_on_demand, tiny_pipeline, tmp_path, drift)
    said, lines, left = zip(*results, strict=True)
    assert not any(left)
    if drift:
        assert "weights differ between ranks" in sentence(said)
    else:
        assert said == (None, None)
        assert any(
            re.fullmatch(r"step 2: \d+ parameters and the packing plan are equal on all ranks", s)
            for s in lines[0]
        )
