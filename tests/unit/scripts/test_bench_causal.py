"""The benchmark of causal training returns a row for each size, and a cache that does not grow."""

from __future__ import annotations

import bench_causal
import pytest


@pytest.mark.slow
def test_it_measures_ratios_and_a_constant_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(bench_causal.MIX, "cpu", [(4, 2, 2), (1, 2, 2)])
    monkeypatch.setattr(bench_causal, "NUM_FRAMES", 84)
    bench = bench_causal.Bench("cpu")
    (row,) = bench_causal.measure_steps(bench, (7, 2, 3), 1)
    assert row["clip"] == "42 tokens"
    assert row["time / FLOPs"] == pytest.approx(row["time"] / row["FLOPs"])
    (row,) = bench_causal.measure_packing(bench, 1)
    assert row["clips"] == "2 clips"
    rows = bench_causal.measure_rollout(bench)
    assert [row["frames"] for row in rows] == ["0 to 20", "21 to 41", "42 to 62"]
    assert len({row["cached MiB"] for row in rows}) == 1
