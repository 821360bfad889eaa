"""Random numbers depend on what they are for, and on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wands.flow.rng import SampleKey, permutation, philox, rng

KEY = SampleKey("clip", 0, 0)


def test_the_bits_are_pinned():
    # A change here changes every resumed run: its noise and its order of samples.
    assert philox(0, "a").bit_generator.random_raw(2).tolist() == [18261115058573213494, 12954946177475181376]
    assert permutation(8, 7, 3, "bins").tolist() == [4, 6, 3, 2, 7, 0, 5, 1]
    draw = rng(1, KEY, "noise").standard_normal(3, dtype=np.float32)
    np.testing.assert_array_equal(
        draw, np.array([-0.7677353620529175, 1.2670657634735107, 1.6185011863708496], dtype=np.float32)
    )


def test_every_part_of_the_key_counts():
    variants = [
        (0, KEY, "noise"),
        (1, KEY, "noise"),
        (0, SampleKey("clip2", 0, 0), "noise"),
        (0, SampleKey("clip", 1, 0), "noise"),
        (0, SampleKey("clip", 0, 1), "noise"),
        (0, KEY, "sigma"),
    ]
    draws = [rng(*variant).standard_normal(64) for variant in variants]
    for a, b in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.5
        assert not np.any(a == b)


def test_parts_are_kept_apart():
    first = [
        philox(*parts).random() for parts in [("a", "bc"), ("ab", "c"), ("abc",), (1, 23), (12, 3), ("1", 23)]
    ]
    assert len(set(first)) == len(first)


def test_a_name_may_be_anything():
    # File names that are not UTF-8 reach Python as lone surrogates.
    assert rng(0, SampleKey("\udcff/Ω \n", 0, 0), "noise").random() < 1.0


def test_drawing_elsewhere_changes_nothing():
    expected = rng(0, KEY, "noise").random(4)
    other = rng(0, SampleKey("other", 0, 0), "noise")
    other.random(1000)
    np.random.default_rng().random()
    np.testing.assert_array_equal(rng(0, KEY, "noise").random(4), expected)


@given(length=st.integers(0, 200), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_permutation_is_one(length: int, seed: int, epoch: int):
    order = permutation(length, seed, epoch, "bins")
    assert sorted(order.tolist()) == list(range(length))


def test_permutation_is_uniform():
    counts = np.zeros((5, 5))
    for seed in range(2000):
        counts[np.arange(5), permutation(5, seed)] += 1
    assert counts / 2000 == pytest.approx(np.full((5, 5), 0.2), abs=0.05)
