"""Ranks that were given different things, or whose weights drifted apart, stop with one sentence that names them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.drifting import FOUR_BINS, Said, caught, nudge, sentence, zero
from tests.support.runs import make_run, run_training
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import Checkpoint
from wands.data.cache.reader import CacheWriter
from wands.data.sampler import StepPlan
from wands.distributed import consistency as ranks_module
from wands.distributed.bootstrap import init_process_group
from wands.distributed.consistency import check_agreement, check_tensors_agree, tensor_checksum
from wands.distributed.dims import ContextDegrees
from wands.objectives.flow_matching import FlowMatching
from wands.run.data_identity import DataIdentity
from wands.train.prepared_run import PreparedRun
from wands.watch import rank_checks
from wands.watch.rank_checks import (
    FIXES,
    bins_digest,
    check_step,
    check_weights_agree,
)

# ---- the checksum


def slow_checksum(tensor: torch.Tensor) -> int:
    """The same hash in Python integers, element by element."""
    size = tensor.element_size()
    mask = (1 << 64) - 1
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    width = min(size, 4)
    total = 0
    for place in range(len(data) // width):
        bits = int.from_bytes(data[place * width : (place + 1) * width], "little", signed=True)
        value = ((bits << 32) & mask) | place
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            value ^= value >> 33
            value = value * multiplier & mask
        total += value ^ (value >> 33)
    total &= mask
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_the_checksum_is_the_slow_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    values = (torch.randn(7, 5) * 50).to(dtype)
    wanted = slow_checksum(values)
    assert tensor_checksum(values).item() == wanted
    monkeypatch.setattr(ranks_module, "_CHUNK", 4)
    assert tensor_checksum(values).item() == wanted
    assert tensor_checksum(values.T).item() == slow_checksum(values.T.contiguous()) != wanted


def test_the_checksum_sees_every_change():
    values = torch.randn(3000)
    values[:4] = torch.tensor([0.0, float("nan"), float("inf"), 1.0])
    original = tensor_checksum(values).item()
    assert tensor_checksum(values.clone()).item() == original  # a NaN is equal to itself here

    def changed(change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        other = values.clone()
        result = change(other)
        return other if result is None else result

    def compensate(tensor: torch.Tensor) -> None:  # what a sum, and a sum weighted by the place, cannot see
        for place, by in ((10, 1), (11, -2), (12, 1)):
            nudge(tensor, place, by)

    def negative_zero(tensor: torch.Tensor) -> None:
        tensor[0] = -0.0

    others = [changed(lambda t, i=i: nudge(t, i)) for i in range(len(values))]
    others += [changed(lambda t: nudge(t, 7, -1)), changed(compensate), changed(negative_zero)]
    others += [values.flip(0), values.roll(1), values[torch.randperm(3000)], values[:-1]]
    for i in range(0, 2998, 2):  # neighbors change places
        swapped = values.clone()
        swapped[i] = values[i + 1]
        swapped[i + 1] = values[i]
        others.append(swapped)
    sums = [tensor_checksum(other).item() for other in others]
    assert original not in sums
    assert len(set(sums)) == len(sums)


# ---- named texts


PARTS: list[tuple[list[dict[str, str]], str | None]] = [
    ([{"recipe": "a", "data": "b"}] * 4, None),
    (
        [{"recipe": '{"lr": 1, "x": {"y": [1]}}'}] * 3 + [{"recipe": '{"lr": 1, "x": {"y": [2]}}'}],
        "ConfigError: the recipe of rank 3 (x.y=[2], not [1]) differs from the recipe of ranks 0-2; start every node with the "
        "same recipe file and the same --set.",
    ),
    (
        [{"data": "b"}, {"data": "a"}, {"data": "b"}, {"data": "b"}],
        "ConfigError: the data of rank 1 differs from the data of ranks 0, 2-3; use the same cache (data.cache) on every node: "
        "one shared folder, or complete copies.",
    ),
    (  # a tie: the group with rank 0 is the measure
        [{"size": "4"}, {"size": "5"}, {"size": "5"}, {"size": "4"}],
        "ConfigError: the size of ranks 1-2 differs from the size of ranks 0, 3; start every rank with the same size.",
    ),
    (  # rank 0 is the odd one
        [{"size": "4"}, {"size": "5"}, {"size": "5"}, {"size": "5"}],
        "ConfigError: the size of rank 0 differs from the size of ranks 1-3; start every rank with the same size.",
    ),
    (
        [{"size": str(rank)} for rank in (0, 1, 1, 2)],
        "ConfigError: the size of rank 0, of rank 3 differs from the size of ranks 1-2; start every rank with the same size.",
    ),
    (  # other names
        [{"size": "4"}, {"size": "4"}, {"size": "4"}, {"color": "red"}],
        "ConfigError: the size of rank 3 (missing) differs from the size of ranks 0-2, and so does the color; start every "
        "rank with the same size.",
    ),
    (  # consequences are listed after their cause, another difference is in a separate line
        [
            {"recipe": x, "plan": x, "fit": x, "data": y}
            for x, y in (("a", "a"), ("b", "a"), ("a", "b"), ("a", "a"))
        ],
        "ConfigError: 2 problems:\n"
        "  - the recipe of rank 1 differs from the recipe of ranks 0, 2-3, and so do the plan, the fit; start every node with "
        "the same recipe file and the same --set.\n"
        "  - the data of rank 2 differs from the data of ranks 0-1, 3; use the same cache (data.cache) on every node: one shared "
        "folder, or complete copies.",
    ),
]


def compare_parts(cases: list[list[dict[str, str]]]) -> list[Said]:
    rank, _, device = init_process_group()
    return [caught(lambda ranks=ranks: check_agreement(ranks[rank], device, FIXES)) for ranks in cases]


def test_a_difference_is_named_on_every_rank(run_world):
    results = run_world(4, compare_parts, [ranks for ranks, _ in PARTS])
    for number, (_, wanted) in enumerate(PARTS):
        said = [found[number] for found in results]
        if wanted is None:
            assert said == [None] * 4
        else:
            assert sentence(said) == wanted


# ---- what a run was given


def compare_divided(cases: list[tuple[int, str]]) -> list[Said]:
    """A whole tensor and one of which neighbouring ranks have different parts; one rank has another value."""
    _, _, device = init_process_group()
    rank = int(os.environ["RANK"])
    said = []
    for odd, name in cases:
        sums = {"whole": 7, "divided": 100 + rank % 2}
        sums[name] += rank == odd
        values = torch.tensor([*sums.values()], device=device)
        said.append(caught(lambda values=values: check_tensors_agree(["whole", "divided"], values, [1, 2])))
    return said


def test_parts_of_weights_are_compared_between_the_ranks_that_have_them(worlds: WorldPool):
    cases = [(3, "whole"), (3, "divided"), (2, "divided"), (9, "whole")]
    ranks = worlds[4].run(compare_divided, cases)
    for number, (odd, name) in enumerate(cases[:3]):
        said = sentence([rank[number] for rank in ranks])
        assert f"(1 of 2 parameters): {name} between rank {odd} and ranks 0-" in said
    assert all(rank[3] is None for rank in ranks)


def write_cache(path: Path, run: PreparedRun, seed: int) -> None:
    """Five clips whose names and lengths do not depend on the seed, but their latents do."""
    generator = torch.Generator().manual_seed(seed)
    text_dim = run.model.shape.text_dim
    with CacheWriter(path, run.model.variant, {"vae": "aa"}) as writer:
        for number in range(5):
            latents = torch.randn(16, 1 + number, 4, 4, generator=generator).bfloat16()
            meta = {"num_frames": 1 + 4 * number, "fps": 16.0, "content": "c", "caption": ""}
            text = torch.ones(2, text_dim, dtype=torch.bfloat16)
            writer.add(f"clip{number}", {"latents": latents, "text_embeds": text}, meta)
        writer.commit(torch.zeros(1, text_dim, dtype=torch.bfloat16))


def resumed_at(run: PreparedRun, step: int) -> PreparedRun:
    """The run as resumed from its checkpoint of a step."""
    return replace(run, checkpoint=Checkpoint(run.output_dir, replace(run.state, step=step)))


def other_bins(run: PreparedRun) -> PreparedRun:
    """The same run, whose planner went another way."""
    plan = run.schedule.sampler.epoch_plan(0)
    first, *rest = plan.steps
    run.schedule.sampler._plan = (0, replace(plan, steps=(first[::-1], *rest)))
    return run


CACHE = ("data.mock=null", "data.cache=cache")


def compare_runs(model: Path, out: Path, odd: int) -> tuple[dict[str, Said], float]:
    """Return what each comparison says when rank `odd` differs in one thing, and the longest time one took."""
    rank = int(os.environ["RANK"])
    is_odd = rank == odd
    home = out / f"node{rank}"  # the caches have one path on all nodes
    home.mkdir()
    os.chdir(home)

    def run_with(*overrides: str, stage: int = 2) -> PreparedRun:
        return make_run(model, Path("run"), (*FOUR_BINS, *overrides), zero(stage))

    mock = run_with()
    write_cache(Path("cache"), mock, seed=int(is_odd))
    other_config = {**mock.model.config, "num_layers": 7}
    other_objective = FlowMatching()
    other_objective.version = 2
    runs = {
        "agree": run_with(),
        "recipe": run_with("optim.lr=2e-3") if is_odd else mock,
        "ds": run_with(stage=3) if is_odd else mock,
        "model": replace(mock, model=replace(mock.model, config=other_config)) if is_odd else mock,
        "degrees": replace(mock, degrees=ContextDegrees(2, 1)) if is_odd else mock,
        "objective": replace(mock, objective=other_objective) if is_odd else mock,
        "data": run_with(*CACHE),
        "plan": other_bins(run_with()) if is_odd else mock,
    }
    _, _, device = init_process_group()
    said = {}
    slowest = 0.0
    for name, run in runs.items():
        parts = run.digests()
        started = time.perf_counter()
        said[name] = caught(lambda parts=parts: check_agreement(parts, device, FIXES))
        slowest = max(slowest, time.perf_counter() - started)
    start = 1 if is_odd else 0
    said["start"] = caught(lambda: check_agreement(resumed_at(mock, start).digests(), device, FIXES))
    if is_odd:
        rank_checks.__version__ = "0.0.9"
    said["software"] = caught(lambda: check_agreement(mock.digests(), device, FIXES))
    return said, slowest


@pytest.mark.parametrize(("world_size", "odd", "others"), [(2, 1, "rank 0"), (4, 2, "ranks 0-1, 3")])
def test_a_job_that_is_not_the_same_everywhere(
    world_size: int, odd: int, others: str, tiny_pipeline: Path, tmp_path: Path, run_world
):
    results = run_world(world_size, compare_runs, tiny_pipeline, tmp_path, odd)
    assert max(slowest for _, slowest in results) < 20  # no hang: a collective would wait for minutes
    said = {name: [found[name] for found, _ in results] for name in results[0][0]}
    assert said.pop("agree") == [None] * world_size
    found = {name: sentence(said_of) for name, said_of in said.items()}

    def differs(name: str, key: str) -> str:
        return f"ConfigError: the {name} of rank {odd} ({key}) differs from the {name} of {others}"

    cause = differs("recipe", "optim.lr=0.002, not 0.001")
    assert found["recipe"].startswith(f"{cause}, and so does the DeepSpeed config; start every node with")
    assert found["ds"].startswith(f"{differs('DeepSpeed config', 'zero_optimization.stage=3, not 2')}; ")
    assert "ConfigError: the model config of rank" in found["model"]
    assert "(num_layers=7, not" in found["model"]
    assert differs("context parallelism", "ulysses_degree=2, not 1") in found["degrees"]
    assert differs("objective", "version=2, not 1") in found["objective"]
    assert found["data"].startswith(f"ConfigError: the data of rank {odd} (contents=")
    assert f"differs from the data of {others}; use the same cache" in found["data"]
    assert found["plan"].startswith(f"ConfigError: the plan of rank {odd} (bins=")
    assert "(start_step=1, not 0)" in found["start"]
    assert "(wands=0.0.9, not " in found["software"]
    assert all(text.count(f"rank {odd}") == 1 for text in found.values())


def test_the_plan_is_that_of_the_epoch(tiny_pipeline: Path, tmp_path: Path):
    """A resumed run compares the epoch that it is in."""
    run = make_run(tiny_pipeline, tmp_path, world_size=1)
    per_epoch = run.schedule.sampler.steps_per_epoch
    assert per_epoch > 1
    plans = [
        run.schedule.sampler.epoch_plan(epoch).steps for epoch in range(9)
    ]  # seven clips: some epochs are alike
    assert 1 < len({bins_digest(steps) for steps in plans}) == len(set(plans))
    for step in (0, 1, per_epoch - 1, per_epoch, 2 * per_epoch):
        parts = resumed_at(run, step).digests()
        assert bins_digest(run.schedule.sampler.epoch_plan(step // per_epoch).steps) in parts["plan"]
    assert (
        bins_digest((((0, 1), (2,)),)) != bins_digest((((0,), (1, 2)),)) != bins_digest((((0,),), ((1, 2),)))
    )


def test_the_digest_of_the_data_sees_names_lengths_and_order(tiny_pipeline: Path, tmp_path: Path):
    run = make_run(tiny_pipeline, tmp_path, world_size=1)

    def data_of(keys: list[str], lengths: np.ndarray) -> str:
        other = SimpleNamespace(keys=keys, licenses=[""] * len(keys))
        identity = DataIdentity.of(run.recipe, other, lengths)
        return replace(run, identity=identity).digests()["data"]

    keys = run.data.keys
    lengths = run.schedule.num_tokens
    assert data_of(list(keys), lengths.copy()) == run.digests()["data"]
    longer = lengths.copy()
    longer[3] += 1
    others = [
        data_of([*keys[:-1], "other"], lengths),
        data_of(keys[::-1], lengths),
        data_of(keys, longer),
        data_of(keys, np.roll(lengths, 1)),
        data_of(["\udcff.mp4", *keys[1:]], lengths),  # a file name that is not Unicode
    ]
    assert len({run.digests()["data"], *others}) == 6


class BareEngine:
    """As much of an engine as a check needs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


def other_model() -> list[Said]:
    """Ranks with modules of other shapes: nothing of unequal size may enter a collective."""
    rank, _, device = init_process_group()
    wider = torch.nn.Linear(3, 4 + rank)
    deeper = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(1 + rank)))
    return [caught(lambda m=m: check_weights_agree(BareEngine(m), device)) for m in (wider, deeper)]


def test_ranks_with_other_models_do_not_hang(run_world):
    one, two = zip(*run_world(2, other_model), strict=True)
    assert "the model of rank 1 (bias=torch.float32 [5], not torch.float32 [4])" in sentence(one)
    assert "the model of rank 1 (1.bias=torch.float32 [2], not null)" in sentence(two)


def compare_steps(cases: list[tuple[list[StepPlan], int]]) -> list[Said]:
    """Each case: the plan of every rank, and by how much rank 1's weight is off."""
    rank, _, device = init_process_group()
    said = []
    for plans, drift in cases:
        engine = BareEngine(torch.nn.Linear(3, 4))
        torch.nn.init.ones_(engine.module.weight)
        torch.nn.init.ones_(engine.module.bias)
        nudge(engine.module.weight.data, 5, drift * (rank == 1))
        said.append(caught(lambda plan=plans[rank], engine=engine: check_step(engine, plan, device)))
    return said


def test_a_step_compares_its_plan_and_the_weights(tiny_pipeline: Path, tmp_path: Path, run_world):
    plan = make_run(tiny_pipeline, tmp_path, world_size=1).schedule.sampler.step_plan(1)
    other = replace(plan, bins=plan.bins[::-1])
    later = replace(plan, step=2)
    cases = [([plan, plan], 0), ([plan, other], 0), ([plan, later], 0), ([plan, plan], 1)]
    same, bins, step, weight = zip(*run_world(2, compare_steps, cases), strict=True)
    assert same == (None, None)
    assert "the plan of rank 1 (bins=" in sentence(bins)
    assert "the plan of rank 1 (step=2, not 1)" in sentence(step)
    assert "(1 of 2 parameters): weight between rank 1 and rank 0" in sentence(weight)


# ---- in the loop


def train_with(model: Path, out: Path, odd_override: tuple[str, ...], odd_ds: int) -> tuple[Said, float]:
    """A whole run in which rank 1 was started with something else, and how long it took to say so."""
    odd = os.environ["RANK"] == "1"
    overrides = ("train.max_steps=2", *(odd_override if odd else ()))
    started = time.perf_counter()
    said = caught(lambda: run_training(model, out, overrides, zero(odd_ds if odd else 2)))
    return said, time.perf_counter() - started


@pytest.mark.parametrize(
    ("override", "stage", "named"),
    [
        (
            ("train.seed=3",),
            2,
            "the recipe of rank 1 (train.seed=3, not 0) differs from the recipe of rank 0",
        ),
        ((), 3, "the DeepSpeed config of rank 1 (zero_optimization.stage=3, not 2)"),
        (("packing.max_tokens=30",), 2, "the recipe of rank 1 (packing.max_tokens=30, not 24)"),
    ],
)
def test_training_refuses_ranks_that_were_started_differently(
    override: tuple[str, ...], stage: int, named: str, tiny_pipeline: Path, tmp_path: Path, run_world
):
    results = run_world(2, train_with, tiny_pipeline, tmp_path, override, stage)
    assert named in sentence([said for said, _ in results])
    assert max(seconds for _, seconds in results) < 60  # a hang lasts for minutes
