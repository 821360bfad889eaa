"""Lines of `wands train` on a real terminal (a pty) and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import BASE

STEP = re.compile(r"step 4/4  loss \d\.\d{4}  0:00:00 left  [\d,]+ tok/s  \d+\.\d GiB")


def command(model: Path, out: Path, *before: str) -> list[str]:
    pairs = (*BASE, f"model.path={model}", f"output_dir={out}", "train.max_steps=4", "train.log_every=2")
    overrides = [text for pair in pairs for text in ("--set", pair)]
    return [sys.executable, "-m", "wands", *before, "train", *overrides]


def on_a_terminal(argv: list[str]) -> str:
    """Run a command whose stdin, stdout and stderr are a terminal."""
    main, side = pty.openpty()
    with subprocess.Popen(argv, stdin=side, stdout=side, stderr=side, close_fds=True) as process:
        os.close(side)
        chunks = []
        try:
            while chunk := os.read(main, 4096):
                chunks.append(chunk)
        except OSError:  # the process has closed the terminal
            pass
    os.close(main)
    assert process.returncode == 0, b"".join(chunks)
    return b"".join(chunks).decode()


@pytest.mark.slow
def test_a_live_line_on_a_terminal(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    text = on_a_terminal(command(tiny_pipeline, tmp_path))
    assert STEP.search(text)
    # Every other text begins at the start of a line, and no line of a step remains.
    rows = [re.split(r"\r|\x1b\[2K|\x1b\[1A", row)[-1] for row in text.replace("\r\n", "\n").split("\n")]
    assert any(row.startswith("done: ") for row in rows)
    assert any(row.startswith("step 1: ") for row in rows)
    assert not [row for row in rows if re.match(r"step \d/4  loss", row) and row.count("step ") > 1]
    assert "tokens  " not in text, "the lines of a pipe"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor stays hidden"


def logged_steps(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if re.match(r"step \d/4 ", line)]


@pytest.mark.slow
def test_lines_on_a_terminal_that_cannot_move_the_cursor(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "dumb")
    text = on_a_terminal(command(tiny_pipeline, tmp_path))
    assert logged_steps(text) == ["2/4", "4/4"]
    assert "\x1b" not in text


@pytest.mark.slow
def test_lines_in_a_pipe(tiny_pipeline: Path, tmp_path: Path):
    done = subprocess.run(command(tiny_pipeline, tmp_path), capture_output=True, text=True, check=True)
    assert logged_steps(done.stdout) == ["2/4", "4/4"]
    text = done.stdout + done.stderr
    assert "\x1b" not in text
    assert not re.search(r"wands\.\w+|DeepSpeed|Warning|\[INFO\]|\.py:\d", text), text


@pytest.mark.slow
def test_verbose_names_modules(tiny_pipeline: Path, tmp_path: Path):
    done = subprocess.run(command(tiny_pipeline, tmp_path, "-v"), capture_output=True, text=True, check=True)
    assert "INFO wands.model.files.loading: " in done.stderr
