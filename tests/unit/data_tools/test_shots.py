"""`wands split`: cuts of joined films and of a film marked by hand, sums of seconds, borders, resuming."""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from click.testing import CliRunner

from data_tools.footage import analysis, shots
from tests.support.clip_files import write_clip
from wands.cli import main
from wands.commands.check.check import check
from wands.config.options import CheckOptions, SplitOptions
from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord
from wands.data.clips.tables import write_table
from wands.data.clips.video import decode_clip
from wands.errors import ConfigError, DataError
from wands.texts import safe_lines

FIXTURE = Path(__file__).parents[2] / "fixtures" / "bikes_cuts.json"
FPS = 25
# Frames of single shots in the clips of scripts/fetch_clips.py.
SHOTS = {
    "bikes.mp4": ((0, 30), (30, 76), (76, 137), (137, 187), (187, 242)),
    "bigbuckbunny.mp4": ((0, 132),),
    "carphone_pristine.mp4": ((0, 120),),
    "cityCC0.mpg": ((0, 115), (117, 190)),
}


@pytest.fixture(scope="session")
def single_shots(clips_dir: Path) -> list[np.ndarray]:
    """Frames of each shot, uint8 [F, 144, 256, 3]."""
    known = []
    for name, ranges in SHOTS.items():
        with av.open(str(clips_dir / name)) as clip:
            frames = [f.reformat(256, 144, "rgb24").to_ndarray() for f in clip.decode(video=0)]
        known += [np.stack(frames[first:last]) for first, last in ranges]
    return known


def join(shots_of_film: list[np.ndarray], path: Path) -> list[int]:
    """Write a film, and return the numbers of the first frames of its shots, and the number of frames."""
    write_clip(path, [frame for shot in shots_of_film for frame in shot])
    return [0, *np.cumsum([len(shot) for shot in shots_of_film]).tolist()]


def dissolve(first: np.ndarray, second: np.ndarray, length: int) -> list[np.ndarray]:
    """Three pieces: the first shot, the mixed frames, the second shot."""
    weight = (np.arange(1, length + 1) / (length + 1))[:, None, None, None]
    mixed = first[-length:] * (1 - weight) + second[:length] * weight
    return [first[:-length], mixed.round().astype(np.uint8), second[length:]]


def black(count: int) -> np.ndarray:
    return np.zeros((count, 144, 256, 3), np.uint8)


def parts_of(path: Path) -> list[dict]:
    *_, film = shots.find_parts(ClipRecord("", path, ""))
    return film["parts"]


def split(source: Path, out: Path, **options) -> tuple[str, list[dict[str, str]]]:
    summary = shots.split(SplitOptions(source=str(source), out=out, num_workers=1, **options))
    with out.open(newline="") as table:
        return summary, list(csv.DictReader(table))


def seconds_by_kind(film: str) -> tuple[float, dict[str, float]]:
    """Read a line such as "a: 3.00 s = 2.00 kept, 1.00 black"."""
    total, parts = film.split(": ")[1].split(" s = ")
    return float(total), {kind: float(n) for n, kind in (part.split(" ", 1) for part in parts.split(", "))}


def test_cuts_of_a_film_marked_by_hand(clips_dir: Path):
    marked = json.loads(FIXTURE.read_text())
    parts = parts_of(clips_dir / marked["film"])
    assert [round(part["start"] * FPS) for part in parts] == marked["first_frames_of_shots"]
    assert {part["kind"] for part in parts} == {"shot"}


@pytest.mark.slow
def test_hard_cuts_of_a_joined_film(single_shots: list[np.ndarray], tmp_path: Path):
    dice = np.random.default_rng(0)
    order = [number for _ in range(6) for number in dice.permutation(len(single_shots))]
    order = [number for n, number in enumerate(order) if n == 0 or number != order[n - 1]]
    first = [int(dice.integers(0, len(single_shots[number]) - 18)) for number in order]
    film = [single_shots[n][start : start + 40] for n, start in zip(order, first, strict=True)]
    wanted = set(join(film, tmp_path / "film.mp4")[1:-1])
    found = {round(part["start"] * FPS) for part in parts_of(tmp_path / "film.mp4")[1:]}
    assert len(wanted) > 45
    assert len(found & wanted) >= 0.97 * len(wanted)
    assert len(found & wanted) >= 0.97 * len(found)


@pytest.mark.slow
def test_dissolves_fades_black_and_static_parts_are_left_out(single_shots: list[np.ndarray], tmp_path: Path):
    bunny = single_shots[5]
    man = single_shots[6]
    city = single_shots[7]
    still = np.repeat(city[-1:], 40, 0)
    first, mixed, second = dissolve(bunny, man, 20)
    film = [first, mixed, *dissolve(second, black(60), 20), city, still]
    edges = [edge / FPS for edge in join(film, tmp_path / "film.mp4")]
    parts = parts_of(tmp_path / "film.mp4")
    kinds = ["shot", "transition", "shot", "transition", "black", "shot", "static"]
    assert [part["kind"] for part in parts] == kinds
    np.testing.assert_allclose([part["start"] for part in parts], edges[:-1], atol=0.25)
    for part, later in pairwise(parts):
        assert part["end"] == later["start"]  # no gap
    assert (parts[0]["start"], parts[-1]["end"]) == (0, pytest.approx(edges[-1]))


def test_samples_never_contain_a_frame_of_the_next_shot(tmp_path: Path):
    """Shots of one gray level each: the decoded level names the shot, at frame rates that do not divide evenly."""
    levels = np.resize([10, 220, 120, 200, 70], 24)
    wave = (15 + 14.9 * np.sin(np.arange(64) / 64 * 2 * np.pi))[None, :, None] + np.zeros((48, 1, 3))
    frames = [(level + np.roll(wave, 3 * step, 1)).astype(np.uint8) for level in levels for step in range(37)]
    write_clip(tmp_path / "film.mp4", frames, fps=Fraction(24000, 1001))
    _, rows = split(tmp_path / "film.mp4", tmp_path / "shots.csv")
    assert len(rows) == 24
    for level, row in zip(levels, rows, strict=True):
        place = float(row["start"]), float(row["end"])
        for spec in (ClipSpec(16), ClipSpec(24), ClipSpec(60)):
            means = next(decode_clip(tmp_path / "film.mp4", spec, *place)).frames.mean((1, 2, 3))
            np.testing.assert_allclose(means, level + 14.5, atol=5)


def test_every_second_is_counted_and_long_shots_become_windows(
    single_shots: list[np.ndarray], tmp_path: Path
):
    film = [single_shots[5], single_shots[6][:20], single_shots[7], black(30)]
    seconds = join(film, tmp_path / "film.mp4")[-1] / FPS
    summary, rows = split(
        tmp_path / "film.mp4", tmp_path / "shots.csv", max_seconds=2.4, html_path=tmp_path / "a.html"
    )
    total, kinds = seconds_by_kind(summary.splitlines()[0])
    assert total == pytest.approx(seconds, abs=0.01) == sum(kinds.values())
    # 132 frames: 2.4 + 2.4 + .48 s; 20 frames: too short; 115 frames: 2.4 + 2.2 s; 30 black frames
    assert kinds == {"kept": 9.4, "black": 1.2, "too short": 0.8, "left over": 0.48}
    assert [float(row["end"]) - float(row["start"]) for row in rows] == pytest.approx([2.4, 2.4, 2.4, 2.2])
    page = (tmp_path / "a.html").read_text()
    assert page.count("<i class=") == 7 + 7  # legend and timeline
    assert page.count("<img") == 4
    table = tmp_path / "shots.csv"
    write_table(table, [{**row, "caption": "a caption"} for row in rows])
    report = check(CheckOptions(source=str(table), num_workers=1))
    assert {clip.key for clip in report.clips} >= {"film@0.000-2.400"}
    # The captions that a user wrote into the table are not lost.
    for number in (1, 2):
        edited = table.read_bytes()
        summary, again = split(tmp_path / "film.mp4", table, max_seconds=2.4)
        assert [row["caption"] for row in again] == [""] * 4
        assert (safe_lines(f"its earlier version is {tmp_path / 'shots.1.csv'}") in summary) == (number == 1)
        assert (tmp_path / "shots.1.csv").read_bytes() == edited or number == 2
        assert not (tmp_path / "shots.2.csv").exists()


@pytest.mark.slow
def test_letterbox_becomes_a_crop(single_shots: list[np.ndarray], tmp_path: Path):
    boxed = np.pad(single_shots[6], ((0, 0), (24, 24), (0, 0), (0, 0)))
    join([boxed, np.pad(single_shots[7], ((0, 0), (0, 0), (32, 32), (0, 0)))[:, :, :256]], tmp_path / "a.mp4")
    join([np.pad(single_shots[7], ((0, 0), (0, 0), (32, 32), (0, 0)))], tmp_path / "b.mp4")
    _, rows = split(tmp_path, tmp_path / "shots.csv", max_seconds=10)
    crops = {(row["video"], row["start"]): row["crop"] for row in rows}
    assert crops["a.mp4", "0.0"] == "0,24,256,144"
    assert crops["b.mp4", "0.0"] == "32,0,256,144"
    tables = [tmp_path / "b.csv", tmp_path / "b.jsonl"]
    for table in tables:
        shots.split(SplitOptions(source=str(tmp_path / "b.mp4"), out=table, num_workers=1))
    of_csv, of_jsonl = (load_source(str(table), needs_caption=False)[0] for table in tables)
    assert of_csv == of_jsonl != []


def test_a_second_call_decodes_only_new_films(tmp_path: Path, single_shots, monkeypatch: pytest.MonkeyPatch):
    decoded: list[str] = []

    def analyse(function, films, **options):
        for index, film in enumerate(films):
            decoded.append(film.path.name)
            yield index, list(function(film))[-1]

    monkeypatch.setattr(analysis, "map_isolated", analyse)
    (tmp_path / "films").mkdir()
    out = tmp_path / "out" / "shots.csv"
    for name in "ab":
        join([single_shots[5][:50]], tmp_path / "films" / f"{name}.mp4")
    (tmp_path / "films" / "metadata.csv").write_text("video,license,mood\na.mp4,CC0,calm\nb.mp4,MIT,wild\n")
    _, rows = split(tmp_path / "films", out)
    assert [(row["license"], row["mood"], row["caption"]) for row in rows] == [
        ("CC0", "calm", ""),
        ("MIT", "wild", ""),
    ]
    assert [Path(row["video"]).is_absolute() for row in rows] == [True, True]
    work = out.with_suffix(".films.jsonl")
    work.write_text(
        "".join(work.read_text().splitlines(keepends=True)[:1]) + '{"clip": "cut off'
    )  # interrupted
    _, again = split(tmp_path / "films", out, min_seconds=0.5)
    assert again == rows
    assert decoded == ["a.mp4", "b.mp4", "b.mp4"]
    join([single_shots[5][:40]], tmp_path / "films" / "a.mp4")  # another film of this name
    split(tmp_path / "films", out)
    assert decoded == ["a.mp4", "b.mp4", "b.mp4", "a.mp4"]


def test_bad_films_are_named_and_the_others_are_used(tmp_path: Path, single_shots: list[np.ndarray]):
    join([single_shots[5][:50]], tmp_path / "good.mp4")
    (tmp_path / "bad.mp4").write_text("no video")
    summary, rows = split(tmp_path, tmp_path / "shots.jsonl.csv")
    assert [row["video"] for row in rows] == ["good.mp4"]
    assert "rejected: " in summary
    assert "bad.mp4" in summary.split("rejected: ")[1]


@pytest.mark.slow
def test_mistakes_end_in_one_sentence(tmp_path: Path, clips_dir: Path):
    film = str(clips_dir / "bikes.mp4")
    for options, error, text in (
        ({"out": tmp_path / "shots.txt"}, ConfigError, "must end in .csv or .jsonl;"),
        (
            {"out": tmp_path / "a.csv", "min_seconds": 9},
            ConfigError,
            "--min-seconds=9 is more than --max-seconds",
        ),
        (
            {"out": tmp_path / "a.csv", "min_seconds": 20, "max_seconds": 30},
            DataError,
            "gives no shot; lower --min-seconds",
        ),
    ):
        with pytest.raises(error, match=text):
            shots.split(SplitOptions(source=film, num_workers=1, **options))
    result = CliRunner().invoke(main, ["split", film, "--out", str(tmp_path / "b.csv"), "--min-seconds", "2"])
    assert result.exit_code == 0, result.output
    assert "bikes: 10.00 s = " in result.output
    assert len(load_source(str(tmp_path / "b.csv"), needs_caption=False)[0]) == 3
