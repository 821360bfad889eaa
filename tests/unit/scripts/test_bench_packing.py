"""bench_packing: its schemes keep every clip, its measures are what they say, and its verdict sees a better scheme."""

from __future__ import annotations

import subprocess
import sys

import bench_packing
import numpy as np
import pytest
from bench_packing import CASES, MIXES, MODELS, SCHEMES, Row, bias_beyond_chance, length_mix

from tests.conftest import ROOT

LENS = length_mix(*MIXES["A"], num_samples=600)
COST = np.array([float(MODELS["14B"].forward_flops((length,))) for length in LENS.tolist()])


def test_the_mixes_are_those_that_are_meant():
    assert (LENS.min(), LENS.max()) == (7605, 75_600)
    whole = length_mix(*MIXES["A"])
    assert (len(whole), len(np.unique(whole)), round(whole.mean())) == (20_000, 85, 34_423)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dp_size", [1, 8])
def test_every_scheme_keeps_every_clip(name: str, dp_size: int):
    pack, cut = SCHEMES[name]
    bins = pack(LENS, 75_600)
    steps = cut(bins, dp_size, LENS, COST)
    assert all(len(step) == dp_size for step in steps)
    assert all(LENS[list(bin)].sum() <= 75_600 for step in steps for bin in step)
    assert sorted(i for step in steps for bin in step for i in bin) == list(range(len(LENS)))


def test_sorting_levels_and_bucketing_is_of_one_length():
    pack, cut = SCHEMES["  sorted over 64 steps"]
    sorted_steps = cut(pack(LENS, 75_600), 8, LENS, COST)
    random_steps = bench_packing.in_random_steps(pack(LENS, 75_600), 8, LENS, COST)
    assert bench_packing.efficiency(sorted_steps, COST) > 0.9 > bench_packing.efficiency(random_steps, COST)
    pack, _ = SCHEMES["bucketing"]
    assert all(len(set(LENS[list(bin)])) == 1 for bin in pack(LENS, 131_072))


def test_efficiency_by_hand():
    cost = np.array([4.0, 2.0, 6.0])
    assert bench_packing.efficiency([[[0], [1]], [[2], []]], cost) == pytest.approx(6 / 10)


def test_bias_is_none_by_chance_and_large_when_sorted():
    drawn = np.random.default_rng(5).permutation(600).reshape(20, 30)
    by_chance = [[step.tolist()] for step in drawn]
    assert abs(bias_beyond_chance(by_chance, LENS)) < 0.04
    ascending = [[step.tolist()] for step in np.argsort(LENS).reshape(20, 30)]
    assert bias_beyond_chance(ascending, LENS) > 0.5


def test_the_verdict_sees_a_better_scheme():
    def row(name: str, fill: float, efficiency: float, bias: float) -> Row:
        return Row(name, fill, 0.0, False, dict.fromkeys(CASES, efficiency), dict.fromkeys(CASES, bias))

    ours = row("wands", 0.98, 0.98, 0.1)
    assert row("fuller", 0.99, 0.98, 0.1).beats(ours, CASES[0])
    assert row("less biased", 0.98, 0.98, 0.05).beats(ours, CASES[0])
    assert not row("fuller, less level", 0.99, 0.97, 0.1).beats(ours, CASES[0])
    assert not ours.beats(ours, CASES[0])
    assert ours.line([row("fuller", 0.99, 0.98, 0.1), ours]).endswith("fuller")
    accumulated = Row("larger steps", 0.98, 0.0, True, ours.efficiency, dict.fromkeys(CASES, 0.0))
    assert ours.line([accumulated, ours]).endswith("none")
    assert ours.line([row("less level", 0.98, 0.97, 0.1), ours]).endswith("none")


@pytest.mark.slow
def test_it_runs_and_prints_one_table():
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench_packing.py"),
        "--clips",
        "400",
        "--large",
        "2000",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert sum(line.startswith("scheme") for line in lines) == 1
    for name in (*SCHEMES, "wands ", "  4 micro steps", "  windows of 2048"):
        assert sum(line.startswith(name) for line in lines) >= 6
    assert lines[-1].startswith("planning 2000 clips")
