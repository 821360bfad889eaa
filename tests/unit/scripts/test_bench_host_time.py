"""scripts/bench_host_time.py prints a time and counts for each row."""

from __future__ import annotations

import re
import sys

import bench_host_time
import pytest


@pytest.mark.slow
def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    command = "bench_host_time.py --only plain/selective/ --rounds 1"
    monkeypatch.setattr(sys, "argv", command.split())
    bench_host_time.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plain/selective/")]
    assert [row.split()[0] for row in rows] == ["plain/selective/full", "plain/selective/lora"]
    for row in rows:
        times = re.findall(r"-?\d+", row[36:90])
        counts = re.findall(r"[\d,]+ / [\d,]+", row)
        assert len(times) == 6
        assert all(int(time) > 0 for time in times)
        assert len(counts) == 2
