"""Findings of `wands check` in a set of clips: small frames, images alone, rows of one film, names with a number sign."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support.checked_clips import SMALL, clips, folder_of
from tests.support.commands import check
from wands.cli import main
from wands.commands.check import check as module
from wands.commands.check.check_report import render_check_page
from wands.config.recipe_loading import load_recipe

__all__ = ["clips"]  # fixtures


def test_a_film_is_used_if_only_some_of_its_relative_rows_are_rejected(
    clips_dir: Path, tmp_path: Path
) -> None:
    """Rows of a table of wands split: relative paths, and captions that are written later."""
    (tmp_path / "films").mkdir()
    shutil.copy(clips_dir / "bikes.mp4", tmp_path / "films" / "x.mp4")
    rows = ["films/x.mp4,0,1,a", "films/x.mp4,1,2,", "films/x.mp4,2,3,"]
    (tmp_path / "shots.csv").write_text("\n".join(["video,start,end,caption", *rows, ""]))
    report = check(str(tmp_path / "shots.csv"), **SMALL)
    assert sorted(clip.verdict for clip in report.clips) == ["fine", "rejected", "rejected"]
    assert {clip.path for clip in report.clips} == {str(tmp_path / "films" / "x.mp4")}
    assert "none of its" not in report.render()


def test_clips_far_below_the_trained_area_are_named(tmp_path: Path) -> None:
    for name, size in (("small", (96, 64)), ("large", (160, 96))):
        Image.new("RGB", size, 255).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a caption")
    report = check(str(tmp_path), max_pixels=160 * 160)
    told = {clip.key: clip.warnings for clip in report.clips}
    assert told["large"] == ()
    assert told["small"] == (
        "small frame: 96x64 is 24% of the area of --max-pixels 25600, and clips are not scaled up; use a larger clip",
    )
    assert dict(report.problems()) == {"small frame": 1}
    assert {clip.verdict for clip in check(str(tmp_path), **SMALL).clips} == {"fine"}


def test_a_set_of_images_alone_is_named(clips_dir: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "set", {"bad": "bikes.mp4"}, clips_dir)
    (folder / "bad.mp4").write_text("no video")
    Image.new("RGB", (96, 64), 255).save(folder / "a.png")
    (folder / "a.txt").write_text("a caption")
    note = "all clips are images, from which a model learns no motion and may forget it; add videos"
    report = check(str(folder), **SMALL)
    assert report.notes == (note,)
    assert note in report.render()
    shutil.copy(clips_dir / "bikes.mp4", folder / "bad.mp4")
    assert check(str(folder), **SMALL).notes == ()


def test_progress_counts_every_clip_of_the_report(
    clips: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"file_name": str(clips / "man.mp4"), "text": ["a man", "a man in a car"]},
        {"file_name": "", "text": "x"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    counts: list[int] = []

    @contextmanager
    def counted(label: str, total: int) -> Iterator[Callable[[], None]]:
        counts.append(total)
        yield lambda: counts.append(1)

    monkeypatch.setattr(module, "progress", counted)
    report = check(str(tmp_path), **SMALL)
    assert len(report.clips) == 3
    assert counts == [3, 1, 1, 1]


def test_a_number_sign_is_shown_as_it_is_in_the_file_name(tmp_path: Path) -> None:
    Image.new("RGB", (96, 64), 255).save(tmp_path / "#1.png")
    (tmp_path / "#1.txt").write_text("a caption")
    report = check(str(tmp_path), max_pixels=160 * 160)  # warns of the small frame
    assert [clip.key for clip in report.clips] == ["%231"]  # a "#" begins the suffix of a window
    for text in (report.render(), render_check_page(report)):
        assert "#1" in text.replace("#1f", "")
    assert "%231" not in report.render()


def test_the_terminal_has_a_summary_and_only_the_files_have_every_clip(tmp_path: Path) -> None:
    """Each kind of rejection and of warning is one line, however many clips it has."""
    for name in ("bad1", "bad2", "bad3", "bad4", "bad5"):
        (tmp_path / f"{name}.mp4").touch()
        (tmp_path / f"{name}.txt").write_text("a caption")
    for name, size in (("good", (96, 64)), ("small", (32, 32))):
        Image.new("RGB", size, 255).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"a {name} caption")
    report = check(str(tmp_path), **SMALL)
    lines = report.render().splitlines()
    (rejected,) = [line for line in lines if "bad" in line]
    assert rejected.startswith("        5 rejected: bad1, bad2, bad3, ...: ")
    assert "bad1.mp4 is empty" in rejected
    assert any(line.startswith("        1 warned: small: small frame: 32x32") for line in lines)
    assert not any("good" in line for line in lines)
    page = render_check_page(report)
    for name in ("bad4", "bad5", "good"):
        assert f"<b>{name}</b>" in page
        assert f'"key": "{name}"' in report.to_json()


def test_the_output_says_how_to_list_every_clip(tmp_path: Path) -> None:
    Image.new("RGB", (96, 64), 255).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a caption")
    command = ["check", str(tmp_path), "--max-pixels", "6144"]
    hint = "every clip: add --html"
    assert hint in CliRunner().invoke(main, command).output
    assert hint not in CliRunner().invoke(main, [*command, "--json", str(tmp_path / "clips.json")]).output


def test_bins_are_those_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (96, 64), 255).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a caption")
    settings = ["train.bins_per_step=3", "packing.max_tokens=500"]
    monkeypatch.setattr(module, "Recipe", lambda: load_recipe(None, settings))
    packing = check(str(tmp_path), **SMALL).packing
    assert packing is not None
    assert (packing.bins_per_step, packing.max_tokens) == (3, 500)
    chosen = check(str(tmp_path), **SMALL, bins_per_step=2, max_tokens=400).packing
    assert chosen is not None
    assert (chosen.bins_per_step, chosen.max_tokens) == (2, 400)
