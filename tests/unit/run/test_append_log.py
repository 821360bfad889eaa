"""Logs of a run: a full disk or a deleted folder loses no row and stops nothing, and a resume rewrites logs atomically."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wands import files
from wands.errors import WandsError
from wands.run import append_log
from wands.run.append_log import AppendLog, continue_rows

# A real limit of the file size, under which a write succeeds in part. In a process of its own: pytest writes files, too.
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
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("target", ["precious", "missing"])
def test_a_link_in_the_place_of_a_log_is_not_followed(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture
):
    """The rows wait, and are written when the link is gone."""
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "metrics.jsonl").symlink_to(target)
    log = AppendLog(tmp_path / "metrics.jsonl")
    log.append(b"1\n")
    log.append(b"2\n")
    assert caplog.text.count("must be a regular file, and no link") == 1
    assert ((tmp_path / "precious").read_text(), (tmp_path / "missing").exists()) == ("keep me", False)
    (tmp_path / "metrics.jsonl").unlink()
    log.append(b"3\n")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"1\n2\n3\n"
