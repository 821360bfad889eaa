"""Calls of the command line, and recipes for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from wands.cli import main

MOCK = "data.mock={num_samples: 6, shapes: [[2,4,4],[3,4,4]], text_lens: [5, 9]}"


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def refused(*args: object) -> str:
    """The one message of a refused command."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    message = result.stderr.strip()
    assert message.count("wands: ") == 1, message
    return message.removeprefix("wands: ")


@pytest.fixture(scope="module")
def cache(tiny_pipeline: Path, clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two short real clips made by the command itself."""
    source = tmp_path_factory.mktemp("source")
    for name in ("bikes", "carphone_pristine"):
        shutil.copy(clips_dir / f"{name}.mp4", source)
        (source / f"{name}.txt").write_text(f"a clip called {name}")
    out = tmp_path_factory.mktemp("caches") / "cache"
    result = invoke(
        "preprocess",
        source,
        "--out",
        out,
        "--model",
        tiny_pipeline,
        "--max-pixels",
        64 * 96,
        "--max-frames",
        9,
    )
    assert result.exit_code == 0, result.output
    return out
