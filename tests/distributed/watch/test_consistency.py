"""Ranks that were given different things, or whose weights drifted apart, stop with one sentence that names them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runs import Hooked, losses, make_run, run_training, weights
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import Checkpoint
from wands.data.cache.reader import CacheWriter
from wands.data.sampler import StepPlan
from wands.distributed import consistency as ranks_module
from wands.distributed.bootstrap import init_process_group
from wands.distributed.consistency import check_agreement, check_tensors_agree, tensor_checksum
from wands.distributed.dims import ContextDegrees
from wands.errors import WandsError
from wands.objectives.flow_matching import FlowMatching
from wands.plugin import Plugin
from wands.run.data_identity import DataIdentity
from wands.train.prepared_run import PreparedRun
from wands.watch import rank_checks
from wands.watch.rank_checks import (
    FIXES,
    bins_digest,
    check_step,
    check_weights_agree,
    weights_checksums,
)

Said = tuple[str, str, bool] | None


def caught(call: Callable[[], Any]) -> Said:
    """(class, message, agreed) of the WandsError that `call` raises; None when it raises none."""
    try:
        call()
    except WandsError as error:
        return type(error).__name__, str(error), error.agreed
    return None


def sentence(results: list[Any]) -> str:
    """The one message that all ranks raised; the class leads."""
    assert results[0] is not None
    assert all(said == results[0] for said in results)
    kind, text, agreed = results[0]
    assert agreed
    return f"{kind}: {text}"


def zero(stage: int, threshold: int = 100) -> dict[str, Any]:
    """Under ZeRO-3, parameters of at most `threshold` elements are kept whole on every rank."""
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold}}


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


def nudge(values: torch.Tensor, place: int, by: int = 1) -> None:
    """Move one fp32 element by units in its last place, in memory."""
    values.view(torch.int32).view(-1)[place] += by


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
    (  # consequences stand behind their cause, what differs elsewhere in a line of its own
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
    """The run as a checkpoint of a step goes on with it."""
    return replace(run, checkpoint=Checkpoint(run.output_dir, replace(run.state, step=step)))


def other_bins(run: PreparedRun) -> PreparedRun:
    """The same run, whose planner went another way."""
    plan = run.schedule.sampler.epoch_plan(0)
    first, *rest = plan.steps
    run.schedule.sampler._plan = (0, replace(plan, steps=(first[::-1], *rest)))
    return run


CACHE = ("data.mock=null", "data.cache=cache")
FOUR_BINS = ("train.bins_per_step=4",)


def compare_runs(model: Path, out: Path, odd: int) -> tuple[dict[str, Said], float]:
    """What is said when rank `odd` differs in one thing, and the longest time a comparison took."""
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


# ---- weights


def after_step(number: int, look: Callable[[Any], Any], found: list[Any]) -> Plugin:
    """A plugin that calls `look(engine)` right after the update of step `number` (0: after each)."""

    def after(step: int, engines: Mapping[str, Any]) -> None:
        if number in (0, step):
            [engine] = engines.values()
            found.append(look(engine))

    return Plugin(objective=Hooked(after=after))


def drift(model: Path, out: Path, ds: dict[str, Any], odd: int) -> list[Said]:
    """Check the weights after two steps, as they are and with bits changed on rank `odd`."""

    def look(engine: Any) -> list[Said]:
        rank = torch.distributed.get_rank()
        whole = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            if parameter.data.numel() > 1  # ZeRO-3 leaves nothing of what it has sharded
        ]
        first = whole[0]
        last = whole[-1]

        def check_with(*changes: tuple[torch.Tensor, int, int]) -> Said:
            if rank == odd:
                for values, place, by in changes:
                    nudge(values, place, by)
            said = caught(lambda: check_weights_agree(engine, engine.device))
            if rank == odd:
                for values, place, by in changes:
                    nudge(values, place, -by)
            return said

        return [
            first[0],
            last[0],
            check_with(),
            check_with((first[1].data, 0, 1)),
            check_with((last[1].data, last[1].numel() - 1, -1)),
            check_with((first[1].data, 0, 1), (first[1].data, 1, -1)),
            check_with(*((parameter.data, 0, 1) for _, parameter in whole)),
            len(whole),
            check_with(),
        ]

    found: list[Any] = []
    plugin = after_step(2, look, found)
    run_training(model, out, ("train.max_steps=2", *FOUR_BINS), ds, plugin=plugin)
    return found[0]


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


def train_with_drift(model: Path, out: Path, resume: bool) -> Said:
    """A run whose rank 1 loses a bit in its first step."""

    def lose_a_bit(engine: Any) -> None:
        if torch.distributed.get_rank() == 1:
            nudge(next(engine.module.parameters()).data, 0)

    overrides = ("train.max_steps=4", "checkpoint.every=1")
    plugin = after_step(1, lose_a_bit, [])
    return caught(lambda: run_training(model, out, overrides, zero(0), resume, plugin=plugin))


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
        (2, 2, FREEZE, 3, r"patch_embedding.weight", 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
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
