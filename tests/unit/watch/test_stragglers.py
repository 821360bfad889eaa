"""Ranks that count as slow, and times that the hooks on the feed-forward measure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from wands.run.append_log import EventLog
from wands.watch.stragglers import SLOW, ComputeTimes, slow_ranks


def table(loads: list[float], fixed: float, factors: dict[int, float] | None = None) -> np.ndarray:
    """Seconds, and seconds per token, of ranks with `loads` tokens that cost `fixed` + tokens, times the rank's factor."""
    seconds = [(fixed + load) * (factors or {}).get(rank, 1.0) for rank, load in enumerate(loads)]
    return np.array([[time, time / load] for time, load in zip(seconds, loads, strict=True)])


@examples(200)
@given(st.lists(st.floats(1, 1e5), min_size=1, max_size=9), st.sampled_from([0.0, 10.0, 1e4, 1e7]))
def test_no_plan_makes_a_rank_slow(loads: list[float], fixed: float):
    assert slow_ranks(table(loads, fixed)) == {}


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_slow_rank_is_compared_with_the_others(world_size: int):
    loads = [1000.0] * world_size
    assert slow_ranks(table(loads, 5.0, {1: 1.5})) == {1: 1.5}
    assert slow_ranks(table(loads, 5.0, {1: 1.21})) == {1: 1.21}
    assert slow_ranks(table(loads, 5.0, {1: SLOW - 0.01})) == {}
    assert slow_ranks(table(loads, 5.0, {1: 0.5})) == ({0: 2.0} if world_size == 2 else {})


def test_half_of_the_ranks_may_be_slow():
    assert slow_ranks(table([100.0] * 4, 0.0, {0: 1.5, 3: 1.5})) == {0: 1.5, 3: 1.5}
    assert slow_ranks(table([100.0] * 3, 0.0, {0: 1.5, 2: 1.5})) == {}


def test_the_slowest_rank_comes_first():
    assert list(slow_ranks(table([100.0] * 8, 0.0, {2: 1.3, 5: 2.0, 7: 1.5}))) == [5, 7, 2]


def test_a_slow_rank_with_more_tokens_is_slow_by_its_speed():
    assert slow_ranks(table([1000.0, 1500.0, 1000.0], 0.0, {1: 1.3})) == {1: 1.3}


class Clock:
    """A CUDA event: `elapsed_time` is in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = Clock.now
        Clock.now = Clock.now + 1.5

    def elapsed_time(self, end: Clock) -> float:
        return end.time - self.time


def test_events_time_the_linear_layers_of_the_feed_forward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    block = torch.nn.ModuleDict({"ffn": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))})
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block]), "head": torch.nn.Linear(4, 4)})
    times = ComputeTimes(
        models=[model],
        device=torch.device("cuda"),
        events=EventLog(output_dir=tmp_path, rank=0, step=0, facts={}),
        log=print,
    )
    for _ in range(3):
        model["head"](block["ffn"](torch.ones(5, 4)))
    model.eval()["head"](block["ffn"](torch.ones(50, 4)))  # samples and evaluations are not part of the step
    assert times.end_step(1) is None
    assert list(times._steps) == [pytest.approx((6 * 1.5e-3, 6 * 1.5e-3 / (3 * 5 * (4 + 8))))]
