"""The page of a stranger's run runs no script and loads nothing, whatever the fields of its files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hostile_run import MARK, TEXTS, HostileParts, hostile_files, hostile_runs, write_small_run
from wands.report import page as module
from wands.report.page import render_page
from wands.report.run_data import read_run, sample_strips


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "every"),
    [(TEXTS[0], 45), *(pytest.param(text, 1, marks=pytest.mark.slow) for text in TEXTS)],
)
def test_a_hostile_text_in_any_field_is_only_text(tmp_path: Path, text: str, every: int) -> None:
    run = write_small_run(tmp_path / "run")
    num_shown = 0
    for number, field in enumerate(hostile_runs(run, tmp_path / "fox", text)):
        if number % every:
            continue
        page = render_page([read_run(tmp_path / "fox")], tmp_path / "fox")
        assert HostileParts(page).found == [], field
        num_shown += MARK in page
    assert num_shown >= 40 // every


def test_the_suffix_of_a_video_or_thumbnail_is_only_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_small_run(tmp_path / "fox")
    hostile_files(run)
    for limit in (0, module.MAX_VIDEO_BYTES):  # links, and embedded files
        monkeypatch.setattr(module, "MAX_VIDEO_BYTES", limit)
        assert HostileParts(render_page([read_run(run)], run)).found == []


def test_hostile_parts_would_be_found() -> None:
    for text in (
        "<script></script><script></script>",
        '<img src="http://x/">',
        f"<{MARK}>",
        "<p onclick=a>",
        "<a>",
    ):
        assert HostileParts(text).found


def test_only_images_of_the_run_are_exported(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "fox")
    hostile_files(run)
    assert sample_strips(read_run(run), "raw", 4) == {}
