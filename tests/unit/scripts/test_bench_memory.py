"""The memory benchmark: one run prints every mode, and memory out of order ends it with an error."""

from __future__ import annotations

import sys
from dataclasses import replace

import bench_memory
import pytest
from bench_memory import MODES, Measured

COMMAND = "bench_memory.py --clock cpu --rounds 1 --heads 2 --layers 5 --ffn-dim 256 --tokens 60"
DIM = 2 * 64
ROWS = 60 * 5


def lines(printed: str) -> dict[str, list[float]]:
    """The numbers of each mode's line."""
    return {
        name: [*map(float, line[24:].split())]
        for line in printed.splitlines()
        if (name := line[:24].strip()) in MODES
    }


@pytest.mark.slow
def test_one_run_prints_every_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", COMMAND.split())
    found = {}
    measure = bench_memory.measure
    monkeypatch.setattr(bench_memory, "measure", lambda args: found.update(measure(args)) or found)
    assert bench_memory.main() == 0
    printed = capsys.readouterr().out
    assert "memory is in the order promised" in printed
    table = lines(printed)
    assert table.keys() == MODES.keys()
    for name, (device, of_none, host, *_) in table.items():
        assert device == pytest.approx(found[name].device / 2**20, abs=0.06)
        assert of_none == pytest.approx(found[name].device / found["none"].device, abs=0.006)
        assert host == pytest.approx(found[name].host / 2**20, abs=0.06)
    assert found["offload"].host == 4 * DIM * ROWS
    named = 4 * 4 * DIM + 4 * 2 + 4 * 256  # projections, attention with its log-sum-exp, feed-forward
    assert found["offload, every name"].host == (4 * DIM + named) * ROWS
    assert all(one.host == 0 for name, one in found.items() if not name.startswith("offload"))
    assert found["full"].device < found["selective"].device < found["none"].device / 2


def test_memory_out_of_order_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    sizes = {"none": 900, "selective, every name": 500, "selective": 300, "full": 200, "offload": 100}
    right = {name: Measured(sizes.get(name, 100), 0, [1.0, 2.0]) for name in MODES}
    assert bench_memory.report(right) == []
    wrong = right | {"full": replace(right["full"], device=301)}
    assert bench_memory.report(wrong) == ["full > selective by 1 bytes"]
    assert "memory is not in the order promised: full > selective by 1 bytes" in capsys.readouterr().out
    monkeypatch.setattr(bench_memory, "measure", lambda args: wrong)
    monkeypatch.setattr(sys, "argv", ["bench_memory.py"])
    assert bench_memory.main() == 1


def test_times_out_of_order_are_only_said(capsys: pytest.CaptureFixture[str]):
    found = {name: Measured(100, 0, [1.0, 2.0]) for name in MODES} | {"none": Measured(100, 0, [1.5, 3.0])}
    assert bench_memory.report(found) == []
    assert "time is not in the order promised: none > selective by 50%" in capsys.readouterr().out
