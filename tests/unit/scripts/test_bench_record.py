"""The results of a stage, and the record of many runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_record
import pytest
from bench_record import Results, changes, format_rows


def fails() -> bench_record.Rows:
    raise ValueError("no such kernel")


def test_results_are_written_after_every_part(tmp_path: Path):
    """A part sees on disk the results of the parts before it, so that a killed stage keeps them."""
    results = Results(tmp_path, "block", "cpu", ["a=1"])
    seen = []

    def read() -> bench_record.Rows:
        seen.append(json.loads((tmp_path / "block.json").read_text()))
        seen.append((tmp_path / "block.txt").read_text())
        return [{"kernel": "x", "ms": 2.0}]

    results.run("first", fails)
    results.run("second", read)
    assert results.failed
    before, table = seen
    assert before["parts"]["first"]["error"] == "error: ValueError: no such kernel"
    assert before["stage"] == "block"
    assert before["overrides"] == ["a=1"]
    assert "no such kernel" in table
    after = json.loads((tmp_path / "block.json").read_text())
    assert after["parts"].keys() == {"first", "second"}
    assert after["parts"]["second"]["rows"] == [{"kernel": "x", "ms": 2.0}]
    assert [*tmp_path.glob("*.tmp")] == []


def test_only_the_named_parts_run(tmp_path: Path):
    results = Results(tmp_path, "step", "cpu", part="8 clips")
    results.run("1.3B, 1 clip", fails)
    assert not results.ran
    assert results.skipped == ["1.3B, 1 clip"]
    results.run("1.3B, 8 clips", lambda: [{"s": 2.0}])
    assert json.loads((tmp_path / "step.json").read_text())["parts"].keys() == {"1.3B, 8 clips"}


def test_a_table_has_all_columns():
    lines = format_rows([{"name": "a", "ms": 1.5}, {"name": "long name", "n": 3}]).splitlines()
    assert lines == ["name        ms  n", "a          1.5   ", "long name       3"]


def result(commit: str, **row: float) -> dict[str, object]:
    part = {"rows": [{"kernel": "cpu", **row}], "seconds": 1.0}
    return {"stage": "block", "commit": commit, "machine": "CPU", "overrides": [], "parts": {"1 clip": part}}


def test_changes_of_counts_and_ratios_are_printed():
    before = result("a", GB=4.0, ms=1.0, operators=300)
    after = result("b", GB=4.2, ms=1.1, operators=300)
    assert changes(before, after, 0.02) == ["1 clip / cpu / GB: 4 -> 4.2"]
    assert changes(before, result("b", GB=4.0, ms=1.3, operators=301), 0.0) == [
        "1 clip / cpu / ms: 1 -> 1.3",
        "1 clip / cpu / operators: 300 -> 301",
    ]
    broken = {**after, "parts": {"1 clip": {"error": "error: no kernel", "seconds": 1.0}}}
    assert changes(before, broken, 0.02) == ["1 clip: error: no kernel"]
    assert changes(broken, broken, 0.02) == []


def test_a_record_grows_by_a_line_and_compares_equal_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    record = tmp_path / "record.jsonl"
    other = {**result("c", GB=9.0), "machine": "another GPU"}
    for number, value in enumerate((result("a", GB=4.0), other, result("b", GB=5.0))):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(value))
        monkeypatch.setattr(sys, "argv", ["bench_record.py", str(record), str(path)])
        bench_record.main()
    assert [json.loads(line)["commit"] for line in record.read_text().splitlines()] == ["a", "c", "b"]
    assert capsys.readouterr().out.splitlines() == [
        "block: the first line for CPU",
        "block: the first line for another GPU",
        "block, a -> b: 1 changes",
        "  1 clip / cpu / GB: 4 -> 5",
    ]
