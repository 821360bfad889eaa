"""Bins: no sample lost, never too full, as few as the best of three packers, and level."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from bench_packing import MIXES, decreasing, length_mix
from bench_packing import best_fit as plain_best_fit
from hypothesis import given
from hypothesis import strategies as st

import wands.data.bins as bins_module
from tests.support.examples import examples
from wands.data.bins import best_fit, even_out, fewest_bins, fill_exactly, level, pack_bins

LENS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def histogram(lens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(np.array(lens), return_counts=True)


def check_contents(
    contents: list[list[int]], lengths: np.ndarray, counts: np.ndarray, max_tokens: int
) -> None:
    assert Counter(one for bin in contents for one in bin) == Counter(
        {i: int(count) for i, count in enumerate(counts)}
    )
    assert all(bin and sum(int(lengths[one]) for one in bin) <= max_tokens for bin in contents)


def cost_of(lens: np.ndarray) -> np.ndarray:
    return lens * (1.0 + 0.01 * lens)


@examples(100)
@given(lens=LENS)
def test_every_packer_keeps_every_sample(lens: list[int]):
    lengths, counts = histogram(lens)
    found = {
        "best fit": best_fit(lengths, counts, 100),
        "longest": fill_exactly(lengths, counts, 100, lambda candidates, left: int(candidates[-1])),
        "shortest": fill_exactly(lengths, counts, 100, lambda candidates, left: int(candidates[0])),
        "fewest": fewest_bins(lengths, counts, 100),
    }
    for contents in found.values():
        check_contents(contents, lengths, counts, 100)
    assert len(found["fewest"]) <= min(len(found["best fit"]), len(found["longest"]))
    assert len(found["best fit"]) == len(decreasing(plain_best_fit)(np.array(lens), 100))


def test_sums_are_exactly_those_that_samples_can_have():
    lengths = np.array([6, 10, 15])
    sums = bins_module._Sums(lengths, 64)
    plain = {6 * a + 10 * b + 15 * c for a in range(11) for b in range(7) for c in range(5)}
    assert np.flatnonzero(sums.reachable).tolist() == sorted(s for s in plain if s <= 64)
    assert [sums.largest_below(room) for room in (0, 5, 6, 9, 29, 64)] == [0, 0, 6, 6, 28, 64]


def test_a_bin_is_filled_to_the_last_token_where_that_can_be():
    lengths, counts = histogram([51, 30, 19, 51, 25, 24])  # the first fit by size is 51 + 30, then nothing
    contents = fill_exactly(lengths, counts, 100, lambda candidates, left: int(candidates[-1]))
    assert sorted(sum(int(lengths[one]) for one in bin) for bin in contents) == [100, 100]


@examples(60)
@given(lens=LENS, key=st.integers(0, 9))
def test_levelling_only_ever_narrows_and_keeps_all(lens: list[int], key: int):
    lengths, counts = histogram(lens)
    before = fewest_bins(lengths, counts, 100)
    costs = (cost_of(lengths) * 1000).astype(np.int64)
    after = level(before, lengths, costs, 100, (key,))
    check_contents(after, lengths, counts, 100)
    assert len(after) == len(before)
    spread = [sum(int(costs[bin].sum()) ** 2 for bin in contents) for contents in (before, after)]
    assert spread[1] <= spread[0]


def test_levelling_finds_what_is_level():
    lengths = np.array([10, 30])
    costs = np.array([100, 900])
    after = level([[1, 1, 1], [0] * 9], lengths, costs, 90, (0,))
    # 30 + 30 + 30 and nine tens: one swap of 30 for three tens leaves 2100 and 1500, no other is nearer
    assert sorted(int(costs[bin].sum()) for bin in after) == [1500, 2100]


def test_bins_of_samples_are_levelled_like_bins_of_lengths():
    lens = np.array([30, 30, 30] + [10] * 9 + [77])
    after = even_out([(0, 1, 2), tuple(range(3, 12))], lens, (lens**2).astype(float), 90, (0,))
    assert sorted(i for bin in after for i in bin) == list(range(12))
    assert sorted(int((lens[list(bin)] ** 2).sum()) for bin in after) == [1500, 2100]


@pytest.mark.parametrize(("mix", "narrower"), [("A", 0.6), ("B", 0.3)])
def test_swaps_level_real_mixes(mix: str, narrower: float):
    lens = length_mix(*MIXES[mix], num_samples=4000)
    max_tokens = 131_072
    lengths, counts = histogram(lens.tolist())
    before = fewest_bins(lengths, counts, max_tokens)
    costs = (lengths.astype(np.int64) ** 2) // 1000
    deviation = [
        np.std([costs[bin].sum() for bin in contents])
        for contents in (before, level(before, lengths, costs, max_tokens, (0,)))
    ]
    assert deviation[1] < narrower * deviation[0]


@examples(30)
@given(lens=LENS, part=st.integers(1, 30), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_large_data_is_packed_in_parts(lens: list[int], part: int, seed: int, epoch: int):
    whole = bins_module.PART
    bins_module.PART = part
    try:
        found = pack_bins(np.array(lens), cost_of(np.array(lens)), 100, seed, epoch)
    finally:
        bins_module.PART = whole
    assert sorted(i for bin in found for i in bin) == list(range(len(lens)))
    assert all(sum(lens[i] for i in bin) <= 100 for bin in found)


def test_parts_cost_almost_no_bins(monkeypatch: pytest.MonkeyPatch):
    lens = length_mix(*MIXES["A"], num_samples=6000)
    whole = len(pack_bins(lens, cost_of(lens), 131_072, 0, 0))
    monkeypatch.setattr(bins_module, "PART", 1500)
    assert len(pack_bins(lens, cost_of(lens), 131_072, 0, 0)) <= 1.01 * whole


def test_many_lengths_are_rounded_and_still_fit(monkeypatch: pytest.MonkeyPatch):
    lens = np.random.default_rng(0).integers(500, 30_000, size=3000)
    assert len(np.unique(lens)) > bins_module.MAX_LENGTHS
    lens[0] = 75_600  # fills a bin to the last token
    found = pack_bins(lens, cost_of(lens), 75_600, 0, 0)
    assert sorted(i for bin in found for i in bin) == list(range(3000))
    assert all(lens[list(bin)].sum() <= 75_600 for bin in found)
    assert lens.sum() / 75_600 / len(found) > 0.99


def test_samples_of_one_length_take_turns():
    lens = np.array([50] * 20)
    packs = {
        (seed, epoch): frozenset(map(frozenset, pack_bins(lens, cost_of(lens), 100, seed, epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(packs.values())) == 4
