"""Rows that an epoch visits, compared with an explicit list of all visits, one after the other."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.examples import examples
from wands.data.sampler import RepeatSchedule, exact, repeats_of_weights
from wands.errors import ConfigError

SOURCES = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([0.01, 0.3, 0.5, 1, 1.5, 2, 2.75])), min_size=1, max_size=3
)


def visits_of(sources: list[tuple[int, float]], seed: int = 0) -> RepeatSchedule:
    assume(sum(floor(exact(repeat) * num) for num, repeat in sources) > 0)
    return RepeatSchedule([num for num, _ in sources], [exact(repeat) for _, repeat in sources], seed)


def by_hand(visits: RepeatSchedule, num_epochs: int) -> list[list[tuple[int, int, int]]]:
    """(source, sample, copy) of each visit of each epoch: whole copies, then the next samples of an endless list."""
    epochs: list[list[tuple[int, int, int]]] = [[] for _ in range(num_epochs)]
    for source, (num, repeat) in enumerate(zip(visits.num_samples, visits.repeats, strict=True)):
        whole = floor(repeat)
        due = Fraction(0)
        endless = list(visits._orders[source]) * (num_epochs + 1)
        for epoch in epochs:
            epoch += [(source, sample, copy) for copy in range(whole) for sample in range(num)]
            before = floor(due)
            due = due + (repeat - whole) * num
            epoch += [(source, int(sample), whole) for sample in endless[before : floor(due)]]
    return epochs


@examples(80)
@given(sources=SOURCES, seed=st.integers(0, 9))
def test_as_an_explicit_list_would_have_it(sources: list[tuple[int, float]], seed: int):
    visits = visits_of(sources, seed)
    named = [
        (source, sample, copy)
        for source, (num, repeat) in enumerate(sources)
        for copy in range(ceil(repeat))
        for sample in range(num)
    ]
    assert len(visits.sample_of) == len(named)
    firsts = np.cumsum([0, *(num for num, _ in sources)])
    assert visits.sample_of.tolist() == [firsts[source] + sample for source, sample, _ in named]
    for epoch, wanted in enumerate(by_hand(visits, 12)):
        rows = visits.rows(epoch).tolist()
        assert rows == sorted(set(rows))
        assert sorted(named[row] for row in rows) == sorted(wanted)
        assert len(rows) >= visits.min_samples


@examples(40)
@given(sources=SOURCES, first=st.integers(0, 30), count=st.integers(1, 12))
def test_every_sample_gets_its_visits_over_any_epochs(
    sources: list[tuple[int, float]], first: int, count: int
):
    """As often as repeat says, to within one visit."""
    visits = visits_of(sources)
    seen = np.zeros(sum(visits.num_samples), int)
    for epoch in range(first, first + count):
        np.add.at(seen, visits.sample_of[visits.rows(epoch)], 1)
    wanted = np.repeat([float(count * repeat) for repeat in visits.repeats], visits.num_samples)
    assert (np.abs(seen - wanted) <= 1 + 1e-9).all()


def test_a_half_is_followed_by_the_other_half():
    visits = visits_of([(10, 0.5)])
    halves = [set(visits.rows(epoch).tolist()) for epoch in range(4)]
    assert halves[0] | halves[1] == set(range(10))
    assert not halves[0] & halves[1]
    assert halves[2:] == halves[:2]
    assert [visits.phase(epoch) for epoch in (0, 1)] == [visits.phase(epoch) for epoch in (2, 3)]
    assert halves[0] != set(visits_of([(10, 0.5)], seed=1).rows(0).tolist())
    assert not visits.is_constant
    assert visits_of([(10, 2), (3, 1)]).is_constant


@examples(60)
@given(
    sources=st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([0.1, 0.25, 1, 3])), min_size=1, max_size=4
    )
)
def test_weights_are_shares_of_an_epoch(sources: list[tuple[int, float]]):
    numbers = [num for num, _ in sources]
    weights = [weight for _, weight in sources]
    assume(any(numbers))
    repeats = repeats_of_weights(numbers, weights)
    visited = [num * repeat for num, repeat in zip(numbers, repeats, strict=True)]
    assert sum(visited) == sum(numbers)
    there = sum(weight for num, weight in sources if num)
    for num, weight, share in zip(numbers, weights, visited, strict=True):
        assert float(share) == pytest.approx(sum(numbers) * weight / there if num else 0)


def test_weights_in_the_ratio_of_the_sizes_are_one_visit_each():
    assert repeats_of_weights([10, 30], [0.1, 0.3]) == [1, 1]
    assert repeats_of_weights([10, 30], [1, 1]) == [2, Fraction(2, 3)]


def test_an_epoch_without_a_visit_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"less than one sample per epoch \(samples x repeat: 3 x 0\.3 \+ 2 x 0\.4\); increase",
    ):
        RepeatSchedule([3, 2], [exact(0.3), exact(0.4)], 0)
