"""Logs of a run: a full disk or a deleted folder loses no row and stops nothing, and a resume rewrites logs atomically."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wands import files
from wands.errors import WandsError
from wands.files import read_rows
from wands.run import append_log
from wands.run.append_log import AppendLog, EventLog, continue_rows, marked_steps, to_line

# A real limit of the file size, under which a write succeeds in part. In a separate process: pytest writes files, too.
FULL = """
import resource, sys
from pathlib import Path
from wands.run.append_log import AppendLog
log = AppendLog(Path(sys.argv[1]))
log.append(b"first\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (9, resource.RLIM_INFINITY))
log.append(b"second\\n")
log.append(b"third\\n")
assert Path(sys.argv[1]).read_bytes() == b"first\\n", "a part of a row remains"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.append(b"fourth\\n")
log.close()
"""


def test_a_full_disk_loses_no_row(tmp_path: Path):
    path = tmp_path / "rows"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == b"first\nsecond\nthird\nfourth\n"
    failure, recovery = done.stderr.splitlines()
    assert "rows cannot be written (File too large); free disk space. The training continues" in failure
    assert recovery.endswith("rows can be written again; missing records: 0")


def test_rows_that_no_memory_is_left_for_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(append_log, "MAX_WAITING", 3)
    path = tmp_path / "rows"
    log = AppendLog(path)
    path.mkdir()
    log.append(*(f"{number}\n".encode() for number in range(4)))
    log.append(b"4\n")
    log.close()
    assert caplog.messages[1:] == [f"the log {path} is incomplete; missing records: 5"]
    path.rmdir()
    log.append(b"5\n")
    assert path.read_bytes() == b"3\n4\n5\n"
    assert caplog.messages[-1] == f"the log {path} can be written again; missing records: 3"


def test_a_log_is_rewritten_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps({"step": step}) + "\n" for step in range(1, 5))
    path.write_text(text + '{"step": 5, "lo')

    def full(temporary: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "publish", full)
        with pytest.raises(WandsError, match=r"metrics\.jsonl cannot be written"):
            continue_rows(path, 2)
    assert path.read_text().startswith(text)
    assert [row["step"] for row in continue_rows(path, 2)[0]] == [1, 2]
    assert path.read_text() == text[: 2 * len('{"step": 1}\n')]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.damaged"]


@pytest.mark.parametrize("target", ["precious", "missing"])
def test_a_link_in_the_place_of_a_log_is_not_followed(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture
):
    """The rows wait, and are written when the link is gone."""
    (tmp_path / "precious").write_text("keep me")
    log = AppendLog(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").symlink_to(target)
    with pytest.raises(WandsError, match="must be a regular file, and no link"):
        AppendLog(tmp_path / "metrics.jsonl")
    log.append(b"1\n")
    log.append(b"2\n")
    assert caplog.text.count("must be a regular file, and no link") == 1
    assert ((tmp_path / "precious").read_text(), (tmp_path / "missing").exists()) == ("keep me", False)
    (tmp_path / "metrics.jsonl").unlink()
    log.append(b"3\n")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"1\n2\n3\n"


ROWS = {
    "metrics.jsonl": [{"step": step, "loss": 1 / step, "loss_by_sigma": [0.5, None]} for step in range(1, 6)],
    "events.jsonl": [{"step": step, "event": "save", "checkpoint": f"step_{step}"} for step in range(1, 6)],
    "evaluations.jsonl": [
        {"step": step, "weights": "raw", "held_out": 0.25, "losses": [0.5, 1.5], "by": {"sigma": []}}
        for step in range(1, 6)
    ],
}
KEYS = {
    "metrics.jsonl": ("loss",),
    "events.jsonl": ("event",),
    "evaluations.jsonl": ("weights", "held_out", "losses"),
}


def lines_of(name: str) -> list[bytes]:
    return [to_line(row).rstrip() for row in ROWS[name]]


def read_again(folder: Path, name: str, content: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """(rows that a resumed run keeps, what it sets aside)."""
    path = folder / name
    aside = folder / f"{name}.damaged"
    aside.unlink(missing_ok=True)
    path.write_bytes(content)
    rows, _ = continue_rows(path, 99, *KEYS[name])
    assert read_rows(path) == rows
    return rows, aside.read_bytes() if aside.exists() else b""


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "NUL bytes instead of the line": lambda line: b"\0" * len(line),
    "NUL bytes in the line": lambda line: line[:5] + b"\0" * 8 + line[13:],
    "cut": lambda line: line[: len(line) // 2],
    "null": lambda line: b"null",
    "a list": lambda line: b"[1]",
    "no number of a step": lambda line: line.replace(b'"step"', b'"stop"'),
    "a step that is no number": lambda line: line.replace(b'"step": ', b'"step": 0.'),
    "a step below 0": lambda line: line.replace(b'"step": ', b'"step": -'),
    "a text as a number": lambda line: re.sub(rb'"(loss|event|held_out)": [^,}]+', rb'"\1": [{}]', line),
    "nested without end": lambda line: b"[" * 100_000,
    "not UTF-8": lambda line: line.replace(b"step", b"st\xffp"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ROWS)
def test_a_damaged_line_is_set_aside_and_all_other_rows_stay(
    name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for i in range(5):
        lines = lines_of(name)
        lines[i] = DAMAGES[damage](lines[i])
        caplog.clear()
        rows, aside = read_again(tmp_path, name, b"\n".join(lines) + b"\n")
        assert rows == [row for k, row in enumerate(ROWS[name]) if k != i]
        assert len(aside.splitlines()) == 1
        if "step" not in damage:
            assert aside == lines[i] + b"\n"
        assert caplog.messages == [
            f"{tmp_path / name}: set aside 1 damaged lines in {name}.damaged; all other rows are kept"
        ]


@pytest.mark.parametrize("name", ROWS)
def test_joined_rows_and_rows_after_nul_bytes_are_kept(name: str, tmp_path: Path):
    lines = lines_of(name)
    joined = b"\n".join([lines[0] + lines[1], lines[2], b"\0" * 9 + lines[3], lines[4]]) + b"\n"
    rows, aside = read_again(tmp_path, name, joined)
    assert rows == ROWS[name]
    assert aside == lines[0] + lines[1] + b"\n" + b"\0" * 9 + lines[3] + b"\n"


def test_damaged_lines_of_two_resumes_are_all_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for text in (b"first", b"second"):
        path.write_bytes(lines_of(path.name)[0] + b"\n" + text + b"\n")
        continue_rows(path, 99)
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"first\nsecond\n"


def test_a_link_in_place_of_the_damaged_lines_is_not_followed(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    other = tmp_path / "other"
    (tmp_path / "metrics.jsonl.damaged").symlink_to(other)
    content = lines_of(path.name)[0] + b"\nnull\n"
    path.write_bytes(content)
    with pytest.raises(WandsError, match=r"metrics\.jsonl\.damaged must be a regular file"):
        continue_rows(path, 99)
    assert path.read_bytes() == content
    assert not other.exists()


@given(
    st.sampled_from(sorted(ROWS)),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=6)), min_size=1, max_size=3),
)
def test_any_damage_of_one_line_loses_no_other_row(
    tmp_path_factory: pytest.TempPathFactory, name: str, number: int, changes: list[tuple[int, bytes]]
):
    lines = lines_of(name)
    line = bytearray(lines[number])
    for position, data in changes:
        start = position % len(line)
        line[start : start + len(data)] = data
    lines[number] = bytes(line)
    rows, aside = read_again(tmp_path_factory.mktemp("log"), name, b"\n".join(lines) + b"\n")
    others = [row for i, row in enumerate(ROWS[name]) if i != number]
    assert [row for row in rows if row in others] == others
    if len(rows) == len(others):
        assert aside


def test_a_run_resumes_with_any_line_of_its_events_damaged(tmp_path: Path):
    """A restart is counted from the events that are left."""
    for number in range(5):
        lines = [to_line({"step": n, "event": "restart", "number": n + 1}) for n in range(5)]
        lines[number] = b'null\n[1]\n{"step": null, "event": "error"}\n'
        (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 7}\n{"stop": 8}\n[1]\n')
        EventLog(tmp_path, 0, 9, {})
        last = read_rows(tmp_path / "events.jsonl")[-1]
        assert (last["event"], last["number"], last["last_step"]) == ("restart", 5, 7)
        assert marked_steps(tmp_path, 99)["restart"] == [*(n for n in range(5) if n != number), 9]
