"""From a film of ten minutes to samples: split, caption, measure, check, preprocess, train, infer. No second is lost."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from data_tools.footage import write_captions
from tests.launch.test_end_to_end import call, call_here
from tests.support.clip_files import write_clip
from tests.unit.data_tools.test_captions_models import build_model
from tests.unit.data_tools.test_shots import black, seconds_by_kind, single_shots  # noqa: F401, a fixture
from wands.data.cache.reader import LatentCache

FPS = 8
WHERE = "motion > .01 and duplicate_of is None"
SIZES = ("--max-pixels", 6144, "--max-frames", 9)


def read(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def seconds(rows: list[dict[str, str]]) -> float:
    return sum(float(row["end"]) - float(row["start"]) for row in rows)


def write_film(folder: Path, shots: list[np.ndarray]) -> float:
    """Write a film of shots, black parts and still parts, and a text. Return the seconds of the film."""
    dice = np.random.default_rng(0)
    frames = [black(2 * FPS)]
    while sum(map(len, frames)) < 600 * FPS:
        frames += [shots[number] for number in dice.permutation(len(shots))]
        frames += [black(2 * FPS), np.repeat(shots[0][:1], 3 * FPS, axis=0)]
    folder.mkdir()
    write_clip(folder / "film.mp4", [frame for shot in frames for frame in shot], fps=FPS)
    (folder / "notes.txt").write_text("a film")
    return sum(map(len, frames)) / FPS


@pytest.mark.slow
def test_a_film_of_ten_minutes_becomes_samples(
    single_shots: list[np.ndarray],  # noqa: F811
    tiny_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    length = write_film(Path("films"), single_shots)
    assert length >= 600

    # Every second of the film is kept or named.
    line = re.search(r"^film: .*$", call_here("split", "films", "--out", "shots.csv").output, re.M)
    assert line
    total, parts = seconds_by_kind(line[0])
    assert total == pytest.approx(length, abs=0.02)
    assert sum(parts.values()) == pytest.approx(total, abs=0.1)
    assert parts["black"] > 5
    assert parts["static"] > 5
    shots = read(Path("shots.csv"))
    assert seconds(shots) == pytest.approx(parts["kept"], abs=0.1)

    # Random models write no sentences: the rules for answers have tests of their own.
    monkeypatch.setattr(write_captions, "clean_answer", lambda text, is_cut: (f"clip {text!r}", ""))
    build_model(Path("llava"))
    few = ("--max-tokens", 4, "--max-side", 64, "--frames", 2, "--workers", 1)
    call_here("caption", "shots.csv", "--model", "llava", "--out", "captioned.csv", *few)
    captioned = read(Path("captioned.csv"))
    assert all(row["caption"].startswith("clip ") for row in captioned)
    call_here("measure", "captioned.csv", "--out", "measured.csv")
    measured = read(Path("measured.csv"))
    place = ("video", "start", "end", "crop")
    for rows in (captioned, measured):
        found, wanted = ([tuple(row[name] for name in place) for row in table] for table in (rows, shots))
        assert sorted(found) == sorted(wanted)

    # Clips that are used and clips that are rejected add up to the clips of the table.
    call_here("check", "measured.csv", "--where", WHERE, "--json", "check.json", *SIZES, exit_code=1)
    clips = json.loads(Path("check.json").read_text())["clips"]
    rejected = {clip["key"] for clip in clips if clip["reason"]}
    used = {clip["key"] for clip in clips} - rejected
    assert len(used) + len(rejected) == len(measured)
    wanted = [row for row in measured if float(row["motion"]) > 0.01 and not row["duplicate_of"]]
    assert len(used) == len(wanted) >= 5
    assert rejected
    left_out = seconds(measured) - seconds(wanted)
    assert seconds(wanted) + left_out + total - parts["kept"] == pytest.approx(length, abs=0.2)
    model = ("--model", tiny_pipeline)
    call_here("preprocess", "measured.csv", "--where", WHERE, "--out", "cache", *model, *SIZES)
    assert set(LatentCache("cache").keys) == used

    settings = [f"model.path={tiny_pipeline}", f"data.cache={tmp_path / 'cache'}", "train.max_steps=2"]
    settings += [f"output_dir={tmp_path / 'run'}"]
    call(
        *(sys.executable, "-m", "wands", "train", "--set", "lora.rank=4"),
        *(word for setting in settings for word in ("--set", setting)),
    )
    small = ("--height", 64, "--width", 96, "--frames", 5, "--steps", 2)
    call_here("infer", *model, "--checkpoint", "run", "--prompt", "a clip", "--out", "videos", *small)
    assert list(Path("videos").glob("*.mp4"))
