"""The benchmark of causal training prints a row for each size, and a cache that does not grow."""

from __future__ import annotations

import re

import bench_causal
import pytest


@pytest.mark.slow
def test_it_prints_ratios_and_a_constant_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(bench_causal.SIZES, "cpu", [(7, 2, 3)])
    monkeypatch.setitem(bench_causal.MIX, "cpu", [(4, 2, 2), (1, 2, 2)])
    monkeypatch.setattr(bench_causal, "NUM_FRAMES", 84)
    bench = bench_causal.Bench("cpu")
    bench_causal.measure_steps(bench, 1)
    bench_causal.measure_packing(bench, 1)
    bench_causal.measure_rollout(bench)
    printed = capsys.readouterr().out
    assert re.search(r"^ +42 .* s .* s +\d", printed, re.MULTILINE)
    assert "2 clips: packed" in printed
    cached = [float(line.split()[-1]) for line in printed.splitlines() if re.match(r" +\d+ to \d+ ", line)]
    assert len(cached) == 3
    assert len(set(cached)) == 1
