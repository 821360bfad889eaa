"""Kills and full disks during `wands preprocess`, its progress and its report."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import preprocess
from tests.support.preprocessed import SMALL, clips, contents, one_clip
from wands.data.cache.reader import LatentCache
from wands.data.clips.records import Rejection
from wands.errors import CacheError
from wands.preprocess import progress as progress_module
from wands.preprocess.length_histogram import token_histogram
from wands.preprocess.preprocess_report import PreprocessReport

__all__ = ["clips", "one_clip"]  # fixtures


# ---- other processes


WINDOWS = SMALL | {"clip_mode": "slide", "max_samples": 2}


def start(body: str, *args: object) -> subprocess.Popen[str]:
    """A fresh interpreter: what forks a process in which torch has run may hang."""
    code = f"""
import resource, sys
from tests.support.commands import preprocess
from wands.encoders.vae import WanVideoEncoder
from wands.errors import WandsError
source, out, model = sys.argv[1:4]
options = {WINDOWS!r}
""" + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )


@pytest.mark.kill
def test_kill_9_then_the_same_command_equals_an_undisturbed_run(
    one_clip: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    child = start(
        """
        encode = WanVideoEncoder.encode
        def reported(self, pixels):
            print("clip", flush=True)
            return encode(self, pixels)
        WanVideoEncoder.encode = reported
        preprocess(source, out, model, **options)
        """,
        one_clip,
        tmp_path / "cache",
        tiny_pipeline,
    )
    assert child.stdout is not None
    for _ in range(4):  # three windows are encoded, the fourth has begun: one shard of two is finished
        assert child.stdout.readline() == "clip\n"
    child.kill()
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(CacheError, match="unfinished"):
        LatentCache(tmp_path / "cache")
    report = preprocess(str(one_clip), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    assert report.num_reused >= 2
    preprocess(str(one_clip), tmp_path / "whole", tiny_pipeline, **WINDOWS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")
    assert not list((tmp_path / "cache").glob(".*"))


@pytest.mark.slow
def test_full_disk_is_one_sentence_and_the_next_run_goes_on(
    one_clip: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    """The disk fills up at the manifest, between the two passes, and in the middle of the shards."""
    (one_clip / "man.txt").write_text("A man in a dark suit sits in a moving car and talks to us. " * 3)
    child = start(
        """
        for limit in (500, 2000, 140_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                preprocess(source, out, model, **options)
            except WandsError as error:
                print(f"{type(error).__name__}: {error}")
        sys.exit(2)
        """,
        one_clip,
        tmp_path / "cache",
        tiny_pipeline,
    )
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 2, errors
    assert "Traceback" not in errors
    messages = output.splitlines()
    assert len(messages) == 3, output
    for message, file in zip(messages, ("manifest.json", "text-0.journal", "shard-0000"), strict=True):
        assert message.startswith(f"DiskError: cache={tmp_path / 'cache'} cannot store {file}")
        assert "File too large" in message
    assert [path.name for path in (tmp_path / "cache").glob(".*")] == [".work"]  # what is encoded is kept
    report = preprocess(str(one_clip), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    assert report.num_accepted > 3
    assert report.num_reused >= 2
    assert not list((tmp_path / "cache").glob(".*"))
    LatentCache(tmp_path / "cache", verify=True).read(0)


# ---- what the person sees


def test_progress_without_a_terminal_is_a_line_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with caplog.at_level("INFO"), progress_module.progress("clips", 4) as advance:
        for _ in range(4):
            now[0] += 6
            advance()
    assert [record.message for record in caplog.records] == [
        "clips: 2 of 4, 12 s passed, 12 s left",
        "clips: 4 of 4, 24 s passed, 0 s left",
    ]


def test_progress_on_a_terminal_is_a_bar_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_module.progress("clips", 3) as advance:
        for _ in range(3):
            advance()
            time.sleep(0.05)
    captured = capsys.readouterr()
    assert "clips" in captured.err
    assert "3/3" in captured.err
    assert not captured.out


def test_progress_on_a_terminal_that_cannot_move_the_cursor_is_a_log_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    caplog.set_level("INFO", logger=progress_module.__name__)
    with progress_module.progress("clips", 1) as advance:
        advance()
    assert "clips: 1 of 1" in caplog.text
    assert "1/1" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "lengths", [[80], [80, 100, 80], list(range(100, 5000, 7)), [1, 10**6] * 30 + [*range(20)]]
)
def test_histogram_counts_everything(lengths: list[int]) -> None:
    lines = token_histogram(lengths).splitlines()
    rows = [line for line in lines[1:-1]]
    counted = [int(line.split("  #")[0].split()[-1].replace(",", "")) for line in rows]
    assert sum(counted) == len(lengths)
    assert len(rows) <= 10
    assert all(("#" in line) == (count > 0) for line, count in zip(rows, counted, strict=True))
    assert f"{sum(lengths):,} tokens in all" in lines[-1]


def test_long_reports_end() -> None:
    """The summary stands after the list of rejected clips, and counts the reasons."""
    reasons = ["broken; replace it", "width=3 is too small", "a=1, but --where requires a > 2"]
    rejected = tuple(
        Rejection(f"clip{i}", f"clip{i}.mp4", reasons[i % 10 // 8 + i % 10 // 9]) for i in range(60)
    )
    report = PreprocessReport(
        out=Path("c"),
        variant="wan2.1-t2v-1.3b",
        num_accepted=1,
        num_reused=0,
        num_left_out=0,
        num_cut_captions=3,
        rejected=rejected,
        tokens=np.array([80]),
        num_shards=1,
        num_bytes=10,
        seconds=1.0,
    )
    text = str(report)
    assert "clip19: a=1" in text
    assert "clip20: broken" not in text
    _, summary = text.split("  ... and 40 more\n")
    counts = (
        "       48  broken\n        6  width is too small\n        6  --where requires a > 2\nc: 1 sample"
    )
    assert summary.startswith(f"60 rejected, listed in rejects.jsonl:\n{counts}")
    assert "3 captions with all 512 text tokens" in text
