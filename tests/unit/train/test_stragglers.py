"""Which ranks count as slow, and what the hooks on the feed-forward measure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from wands.train.stragglers import SLOW, slow_ranks


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
