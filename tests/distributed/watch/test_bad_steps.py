"""A bad step stops the run or is skipped: then nothing but the step counts changes, on all ranks, at every ZeRO stage."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runs import Spy, losses, run_training, weights
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.ema import decay_after
from wands.config.recipe import EmaConfig
from wands.data.collate import RankSlice, Sample
from wands.data.datasets import MockDataset
from wands.errors import DataError
from wands.files import read_rows
from wands.objectives.flow_matching import FlowMatching
from wands.objectives.objective import Loss, Model, Prepared
from wands.plugin import Plugin
from wands.train.jobs import FinishedStep
from wands.train.training import Training
from wands.watch import bad_steps
from wands.watch.bad_steps import robust_z_scores

BAD = "mock-000004"  # in the steps 2, 3, 5 and 8
SKIP = ("train.on_bad_step=skip", "optim.schedule=linear", "optim.weight_decay=0.5")


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


@contextmanager
def damaged_clip(factor: float = torch.nan) -> Iterator[None]:
    """One clip whose latents are not finite, or much too large."""
    read = MockDataset.read

    def reading(data: MockDataset, index: int, *args: Any) -> Sample:
        sample = read(data, index, *args)
        damaged = {**sample.arrays, "latents": sample.latents * factor}
        return replace(sample, arrays=damaged) if sample.sample_id == BAD else sample

    with mock.patch.object(MockDataset, "read", reading):
        yield


def tensors_of(engine: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    """Every weight and optimizer state of this rank, without states that are still zero."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found: dict[tuple[Any, ...], Any] = {(number,): master for number, master in enumerate(masters)}
    for number, master in enumerate(masters):
        found |= {
            (number, name): value
            for name, value in optimizer.state.get(master, {}).items()
            if value is not None
        }
    found |= {(name,): getattr(value, "ds_tensor", value) for name, value in engine.module.named_parameters()}
    copies = {name: torch.as_tensor(value).detach().clone() for name, value in found.items()}
    return {name: value for name, value in copies.items() if value.any()}


def equal(ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


Snapshot = tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]
"""Tensors of an engine, and its moving average."""


def watch(
    model: Path,
    out: Path,
    overrides: tuple[str, ...],
    ds: dict[str, Any],
    factor: float = torch.nan,
    objective: FlowMatching | None = None,
) -> list[tuple[bool, bool, bool]]:
    """Train with the damaged clip. For each update: was it skipped, and are the states and the moving average unchanged?"""
    found: list[tuple[bool, bool, bool]] = []
    before: dict[str, Snapshot] = {}
    objective = objective or FlowMatching()

    def look(training: Training, part: str) -> Snapshot:
        average = {fragment.name: value.clone() for fragment, value in training.averages[part]._pairs}
        return tensors_of(training.engines[part]), average

    def started(training: Training) -> None:
        before.update({part: look(training, part) for part in training.engines})

    def stepped(training: Training, step: FinishedStep) -> None:
        for part, result in zip(training.engines, step.results, strict=True):
            states, average = now = look(training, part)
            same_states = equal(before[part][0], states)
            same_average = equal(before[part][1], average)
            found.append((result.skipped, same_states, same_average))
            before[part] = now

    plugin = Plugin(objective=objective, jobs=(Spy(started, stepped),))
    with damaged_clip(factor):
        run_training(model, out, overrides, ds, plugin=plugin)
    return found


def events(out: Path, event: str = "bad update") -> list[dict[str, Any]]:
    """The rows of bad updates, without their times."""
    rows = [row for row in read_rows(out / "events.jsonl") if row["event"] == event]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


SLOW = pytest.mark.slow
CASES = {
    "stage 0": ((), zero(0)),
    "stage 1": ((), zero(1)),
    "stage 2": ((), zero(2)),
    "stage 3": ((), zero(3)),
    "accumulation": (("train.bins_per_step=4", "data.mock.num_samples=21"), zero(2)),
    "offload 2": ((), zero(2, offload_optimizer={"device": "cpu"})),
    "offload 3": ((), zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})),
    "bf16 weights": (("precision.weights=bf16", "precision.compute=bf16"), zero(2)),
    "muon 2": (("optim.name=muon", "optim.grad_clip=0"), zero(2)),
    "muon 3": (("optim.name=muon", "optim.grad_clip=0"), zero(3)),
    "adafactor": (("optim.name=adafactor",), zero(0)),
    "context parallel": (("parallel.ulysses_degree=2",), zero(2)),
    "LoRA": (("lora.rank=4",), zero(2)),
}
DEFAULT = ("stage 3",)


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_skipped_update_changes_nothing(name: str, tiny_pipeline: Path, tmp_path: Path, run_world):
    more, ds = CASES[name]
    steps = 4 if name in DEFAULT else 8
    overrides = (*SKIP, f"train.max_steps={steps}", "ema.decay=0.9", *more)
    ranks = run_world(2, watch, tiny_pipeline, tmp_path, overrides, ds)
    assert ranks[0] == ranks[1]
    skipped = [number for number, (was_skipped, *_) in enumerate(ranks[0], start=1) if was_skipped]
    assert 0 < len(skipped) < steps
    for was_skipped, same_states, same_average in ranks[0]:
        assert same_states == same_average == was_skipped
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["loss"] is None] == skipped
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * (steps - n) / steps for n in range(steps)])
    assert [row["step"] for row in events(tmp_path)] == skipped
    for row in events(tmp_path):
        assert BAD in {clip["sample_id"] for clip in row["clips"] if clip["loss"] is None}
    assert find_checkpoint(tmp_path).state.bad_steps["skipped"] == skipped
    assert all(bool(value.isfinite().all()) for value in weights(tmp_path).values())


def weights_and_average(
    model: Path, out: Path, overrides: tuple[str, ...], resume: bool | Path = False
) -> Any:
    """Train with the damaged clip: the weights before the run and after each update that was made, and the average at the end."""
    made: list[dict[str, torch.Tensor]] = []
    averages: dict[str, torch.Tensor] = {}
    skipped: list[bool] = []

    def look(training: Training, step: FinishedStep | None = None) -> None:
        pairs = training.averages["transformer"]._pairs
        if step is None or not step.results[0].skipped:
            made.append({fragment.name: fragment.read().clone() for fragment, _ in pairs})
        averages.update({fragment.name: value.clone() for fragment, value in pairs})
        skipped.append(step is not None and step.results[0].skipped)

    with damaged_clip():
        run_training(model, out, (*SKIP, *overrides), zero(2), resume, plugin=Plugin(jobs=(Spy(look, look),)))
    return made, averages, skipped


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_average_is_that_of_a_run_that_never_made_the_skipped_steps(
    every: int, tiny_pipeline: Path, tmp_path: Path, run_world
):
    overrides = ("train.max_steps=6", "checkpoint.every=3", "ema.decay=0.9", f"ema.every={every}")
    made, averages, skipped = run_world(1, weights_and_average, tiny_pipeline, tmp_path, overrides)[0]
    assert 0 < sum(skipped) < 5
    assert any(was_skipped and not follows for was_skipped, follows in pairwise(skipped))
    expected = {name: value.double() for name, value in made[0].items()}
    for step in range(every, len(made), every):
        kept = decay_after(EmaConfig(decay=0.9), step) ** every
        for name, value in made[step].items():
            expected[name] = kept * expected[name] + (1 - kept) * value.double()
    for name, value in averages.items():
        torch.testing.assert_close(
            value.double(), expected[name], rtol=0, atol=1e-6 * float(value.abs().max())
        )
    middle = tmp_path / "checkpoints" / "step_00000003"
    _, again, _ = run_world(1, weights_and_average, tiny_pipeline, tmp_path, overrides, middle)[0]
    assert equal(again, averages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["low", *(pytest.param(case, marks=pytest.mark.slow) for case in (torch.nan, 1e4))]
)
@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3))])
def test_each_expert_is_judged_alone(
    stage: int, case: float | str, tiny_variant: Any, tmp_path: Path, run_world
):
    overrides = (*SKIP, "train.max_steps=3", "ema.decay=0.9", "train.spike_zscore=60")
    ranks = run_world(
        2, watch_experts, tiny_variant("wan2.2-t2v-a14b"), tmp_path, overrides, zero(stage), case
    )
    assert ranks[0] == ranks[1]
    assert all(was_skipped == states == average for was_skipped, states, average in ranks[0])
    found = {(row["step"], row["expert"]) for row in events(tmp_path)}
    order = [(step, name) for step in range(1, 4) for name in ("high", "low")]
    assert found == {key for key, (was_skipped, *_) in zip(order, ranks[0], strict=True) if was_skipped}
    assert found == {
        (step, name) for step in (2, 3) for name in (("low",) if case == "low" else ("high", "low"))
    }


class LowSpikes(FlowMatching):
    """The default objective, whose loss of the low-noise expert is much too large in every step but the first."""

    def loss(self, model: Model, part: RankSlice, prepared: Prepared) -> Loss:
        loss = super().loss(model, part, prepared)
        is_low = float(prepared.sigmas.max()) < 0.875
        is_first = model.global_steps == 0
        return loss if is_first or not is_low else loss._replace(total=1e4 * loss.total)


def watch_experts(
    model: Path, out: Path, overrides: tuple[str, ...], ds: dict[str, Any], case: float | str
) -> Any:
    """As `watch`, with spikes from the second update on. "low": only the updates of the low-noise expert are spikes."""
    bad_steps.MIN_UPDATES = 1
    if case != "low":
        return watch(model, out, overrides, ds, case)
    return watch(model, out, overrides, ds, 1.0, LowSpikes())


# ---- spikes


def reference_z_score(value: float, past: list[float]) -> float:
    """One number after the other, with the statistics module."""
    logs = [math.log(number) for number in past]
    median = statistics.median(logs)
    deviation = statistics.median(abs(log - median) for log in logs)
    return (math.log(value) - median) / max(1.4826 * deviation, 0.05)


@given(st.lists(st.tuples(*[st.floats(1e-6, 1e6)] * 2), min_size=1), st.tuples(*[st.floats(1e-6, 1e6)] * 2))
def test_z_scores_are_those_of_the_reference(past: list[tuple[float, float]], values: tuple[float, float]):
    expected = [
        reference_z_score(value, list(column))
        for value, column in zip(values, zip(*past, strict=True), strict=True)
    ]
    assert robust_z_scores(values, past) == pytest.approx(expected)


@pytest.mark.slow
def test_a_spike_is_skipped_and_a_resume_keeps_the_decisions(tiny_pipeline: Path, tmp_path: Path, run_world):
    """The judged updates are those of the whole run, not of the time since the resume."""
    overrides = (
        *SKIP,
        "train.max_steps=6",
        "checkpoint.every=3",
        "checkpoint.keep=5",
        "train.spike_zscore=60",
    )
    once = tmp_path / "once"
    twice = tmp_path / "twice"
    straight = run_world(2, spiky, tiny_pipeline, once, overrides)[0]
    found = events(once)
    assert (
        [row["step"] for row in found] == [row["step"] for row in straight if row["loss"] > 100] == [2, 3, 5]
    )
    assert {clip["sample_id"] for row in found for clip in row["clips"] if clip["loss"] > 100} == {BAD}
    run_world(2, spiky, tiny_pipeline, twice, overrides)
    middle = twice / "checkpoints" / "step_00000003"
    resumed = run_world(2, spiky, tiny_pipeline, twice, overrides, middle)[0]
    assert losses(resumed) == losses(straight)
    assert events(twice) == found
    assert all(torch.equal(weights(once)[name], value) for name, value in weights(twice).items())


def spiky(
    model: Path, out: Path, overrides: tuple[str, ...], resume: bool | Path = False
) -> list[dict[str, Any]]:
    bad_steps.MIN_UPDATES = 1
    with damaged_clip(1e4):
        return run_training(model, out, overrides, zero(2), resume)


@pytest.mark.parametrize("judges", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_spike_is_named_and_changes_nothing(judges: bool, tiny_pipeline: Path, tmp_path: Path, run_world):
    """With on_bad_step=stop, a spike is only an event. A resumed run writes the event again, in its place."""
    overrides = ("train.max_steps=4", "checkpoint.every=2", "checkpoint.keep=5", "train.spike_zscore=60")
    rows = run_world(2, spiky, tiny_pipeline, tmp_path / "run", overrides)[0]
    if not judges:
        unjudged = (*overrides, "train.spike_zscore=1e9")
        assert losses(run_world(2, spiky, tiny_pipeline, tmp_path / "other", unjudged)[0]) == losses(rows)
        assert not events(tmp_path / "other", "spike")
        middle = tmp_path / "run" / "checkpoints" / "step_00000002"
        run_world(2, spiky, tiny_pipeline, tmp_path / "run", overrides, middle)
    found = events(tmp_path / "run", "spike")
    assert found[0]["step"] == 2
    assert [row["step"] for row in found] == sorted({row["step"] for row in found})
    assert found[0]["loss"] == rows[1]["loss"] > 100
    assert [clip["sample_id"] for clip in found[0]["clips"] if clip["loss"] > 100] == [BAD]
    assert not events(tmp_path / "run")


def odd_rank(model: Path, out: Path, overrides: tuple[str, ...]) -> list[int]:
    """Only rank 1 takes the updates from the second on for spikes, as if its hardware computed other scores."""
    bad_steps.MIN_UPDATES = 1
    if torch.distributed.get_rank() == 1:
        bad_steps.robust_z_scores = lambda values, past: [math.inf]
    run_training(model, out, overrides, zero(2))
    return find_checkpoint(out).state.bad_steps["skipped"]


def test_ranks_that_disagree_skip_alike(tiny_pipeline: Path, tmp_path: Path, run_world):
    assert run_world(2, odd_rank, tiny_pipeline, tmp_path, (*SKIP, "train.max_steps=3")) == [[2, 3], [2, 3]]


@pytest.mark.slow
def test_nothing_bad_changes_no_bit(tiny_pipeline: Path, tmp_path: Path, run_world):
    series = [
        losses(
            run_world(
                2,
                run_training,
                tiny_pipeline,
                tmp_path / mode,
                ("train.max_steps=3", f"train.on_bad_step={mode}"),
            )[0]
        )
        for mode in ("stop", "skip")
    ]
    assert series[0] == series[1]


# ---- the way out of a damaged clip


def failing(
    model: Path, out: Path, overrides: tuple[str, ...], resume: bool = False
) -> tuple[str, list[dict[str, Any]]]:
    with damaged_clip():
        try:
            return "", run_training(model, out, (*overrides, "train.log_samples=true"), zero(2), resume)
        except DataError as error:
            return str(error), []


@pytest.mark.slow
def test_the_error_says_how_to_go_on(tiny_pipeline: Path, tmp_path: Path, run_world):
    overrides = ("train.max_steps=5", "checkpoint.every=1", "data.exclude=[mock-000006]")
    error, _ = run_world(2, failing, tiny_pipeline, tmp_path, overrides)[0]
    assert f"{BAD} (sigma" in error
    assert (
        run_world(2, failing, tiny_pipeline, tmp_path, overrides, True)[0][0] == error
    )  # it dies the same way
    option = shlex.split(re.search(r"\(add --set (.*?)\),", error)[1])
    assert option == [f'data.exclude=["mock-000006", "{BAD}"]']
    error, rows = run_world(2, failing, tiny_pipeline, tmp_path, (*overrides, *option), True)[0]
    assert error == ""
    assert [row["step"] for row in rows] == list(range(1, 6))


@pytest.mark.slow
def test_the_budget(tiny_pipeline: Path, tmp_path: Path, run_world):
    overrides = (*SKIP, "train.max_steps=5", "train.max_bad_steps=1", "checkpoint.every=1")
    error, _ = run_world(2, failing, tiny_pipeline, tmp_path, overrides)[0]
    assert "raise train.max_bad_steps=1" in error
    assert [row["skipped"] for row in events(tmp_path)] == [True, True]
    overrides = (*overrides, "train.max_bad_steps=4")
    error, rows = run_world(2, failing, tiny_pipeline, tmp_path, overrides, True)[0]
    assert error == ""
    assert [row["step"] for row in events(tmp_path)] == [row["step"] for row in rows if row["loss"] is None]
    assert find_checkpoint(tmp_path).state.bad_steps["skipped"] == [2, 3, 5]
