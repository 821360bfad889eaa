"""`wands measure`: scores of clips with known motion, sharpness and brightness, near-duplicates, resuming, and --where."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from click.testing import CliRunner

from data_tools.footage import analysis, measures
from tests.support.clip_files import write_clip
from wands.cli import main
from wands.commands.check.check import check
from wands.commands.check.check_report import render_check_page
from wands.config.options import CheckOptions, MeasureOptions
from wands.data.clips.filters import numeric_columns
from wands.data.clips.records import ClipRecord
from wands.errors import ConfigError, DataError

WIDTH = 192
HEIGHT = 112
FPS = 16


def texture(seed: int, blur: float = 2) -> np.ndarray:
    """Smooth noise, uint8 [112, 192, 3]."""
    noise = np.random.default_rng(seed).normal(size=(HEIGHT, WIDTH)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), blur)
    gray = np.clip(128 + 45 * smooth / smooth.std(), 0, 255).astype(np.uint8)
    return np.repeat(gray[..., None], 3, 2)


def moving_square(seed: int = 0, step: int = 3, count: int = 32) -> list[np.ndarray]:
    """A square of 96 x 96 pixels that moves `step` pixels a frame over a background that does not move."""
    square = texture(seed + 100)[:96, :96]
    frames = []
    for number in range(count):
        frame = texture(seed)
        frame[8:104, number * step : number * step + 96] = square
        frames.append(frame)
    return frames


def measured(path: Path, **part) -> dict[str, float]:
    """Return the columns of a clip."""
    return measures.measure_clip(ClipRecord("", path, "", **part))["columns"]


def run(source: Path, out: Path, **options) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the summary, and the rows by the name of the video."""
    summary = measures.measure_clips(MeasureOptions(source=str(source), out=out, num_workers=1, **options))
    with out.open(newline="") as table:
        return summary, {Path(row["video"]).name: row for row in csv.DictReader(table)}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measure in this process, and return the names of the clips that are decoded."""
    decoded: list[str] = []

    def measure_all(function, clips, **options):
        for index, clip in enumerate(clips):
            decoded.append(clip.path.name)
            yield index, function(clip)

    monkeypatch.setattr(analysis, "map_isolated", measure_all)
    return decoded


@pytest.mark.slow
def test_motion_of_a_moving_square(tmp_path: Path):
    path = write_clip(tmp_path / "a.mp4", moving_square(), fps=FPS)
    speed = 3 * FPS / WIDTH  # frame widths per second
    share = 96 * 96 / (WIDTH * HEIGHT)
    assert measured(path)["motion"] == pytest.approx(speed * share, rel=0.2)
    still = write_clip(tmp_path / "b.mp4", [texture(0)] * 32, fps=FPS)
    assert measured(still)["motion"] == pytest.approx(0, abs=0.002)
    # The same speed at another frame rate and size.
    large = [cv2.resize(frame, (2 * WIDTH, 2 * HEIGHT)) for frame in moving_square(count=28)]
    double = write_clip(tmp_path / "c.mp4", [frame for frame in large for _ in (0, 1)], fps=2 * FPS)
    assert measured(double)["motion"] == pytest.approx(speed * share, rel=0.2)


def test_sharpness_and_brightness(tmp_path: Path):
    picture = texture(0, blur=1)
    sharp = measured(write_clip(tmp_path / "a.mp4", [picture] * 4, fps=FPS))
    blurred = [cv2.GaussianBlur(picture, (0, 0), 1)] * 4
    assert measured(write_clip(tmp_path / "b.mp4", blurred, fps=FPS))["sharpness"] < 0.5 * sharp["sharpness"]
    # Frames are scaled to one size, so that a smaller copy has fewer details.
    small = [cv2.resize(picture, (96, 64), interpolation=cv2.INTER_AREA)] * 4
    assert measured(write_clip(tmp_path / "c.mp4", small, fps=FPS))["sharpness"] < 0.5 * sharp["sharpness"]
    for level in (51, 204):
        gray = [np.full((HEIGHT, WIDTH, 3), level, np.uint8)] * 4
        assert measured(write_clip(tmp_path / "d.mp4", gray, fps=FPS))["brightness"] == pytest.approx(
            level / 255, abs=0.01
        )


def test_only_the_time_range_and_the_crop_are_measured(tmp_path: Path):
    dark = [np.zeros((HEIGHT, WIDTH, 3), np.uint8)] * 16
    path = write_clip(tmp_path / "a.mp4", dark + moving_square(count=16), fps=FPS)
    whole = measured(path, start=1.0)
    assert whole["brightness"] > 0.4 > measured(path)["brightness"]
    right = measured(path, start=1.0, crop=(160, 0, 32, HEIGHT))  # of the square
    assert right["motion"] < 0.02 < whole["motion"]


def test_frames_of_unusual_shapes_and_single_frames(tmp_path: Path):
    for shape in ((16, 16), (16, 2048), (2048, 16), (34, 18)):
        frames = [np.full((*shape, 3), 40 * number, np.uint8) for number in range(3)]
        assert measured(write_clip(tmp_path / "a.mkv", frames, fps=FPS))["motion"] >= 0
    cv2.imwrite(str(tmp_path / "a.png"), texture(0))
    image = measured(tmp_path / "a.png")
    assert image["motion"] is None
    assert image["brightness"] == pytest.approx(0.5, abs=0.02)


def test_a_clip_is_measured_up_to_the_first_damage(tmp_path: Path):
    path = write_clip(tmp_path / "a.mkv", moving_square(step=1, count=80), fps=FPS)
    whole = measured(path)
    path.write_bytes(path.read_bytes()[: int(0.7 * path.stat().st_size)])
    assert measured(path)["motion"] == pytest.approx(whole["motion"], rel=0.2)
    path.write_bytes(path.read_bytes()[: int(0.2 * path.stat().st_size)])
    assert "replace the file" in measures.measure_clip(ClipRecord("", path, ""))["reason"]


def test_duplicates_of_duplicates_name_the_first_clip():
    hashes = {"a": [0] * 3, "b": [7, 0, 0], "c": [63, 0, 0], "d": [2**64 - 1] * 3, "e": [0, 0, 2**63]}
    # c is similar to b, but b is a duplicate itself.
    assert measures.find_duplicates(hashes, 3) == {"b": "a", "e": "a"}
    assert measures.find_duplicates(hashes, 6) == {"b": "a", "c": "a", "e": "a"}
    assert measures.find_duplicates(hashes, 0) == {}


def test_the_earlier_of_two_equal_shots_is_kept(tmp_path: Path, in_process: list[str]):
    """The times are compared as numbers: as texts, 10 would come before 2."""
    film = write_clip(tmp_path / "film.mkv", [texture(0)] * 12 * FPS, fps=FPS)
    (tmp_path / "list.csv").write_text(f"video,start,end\n{film},2,3\n{film},10,11\n")
    measures.measure_clips(
        MeasureOptions(source=str(tmp_path / "list.csv"), out=tmp_path / "out.csv", num_workers=1)
    )
    with (tmp_path / "out.csv").open(newline="") as table:
        rows = {float(row["start"]): row["duplicate_of"] for row in csv.DictReader(table)}
    assert rows[2.0] == ""
    assert "@2.000-3.000" in rows[10.0]


def test_quantiles_say_how_many_clips_a_threshold_rejects():
    rows = [
        dict(measures.EMPTY),
        *({"motion": i / 100, "sharpness": None, "brightness": 0.5} for i in range(101)),
    ]
    assert measures.describe_quantiles(rows) == [
        "motion of the clips: 5 % below 0.05, 10 % below 0.1, 25 % below 0.25, 50 % below 0.5",
        "brightness of the clips: 5 % below 0.5, 10 % below 0.5, 25 % below 0.5, 50 % below 0.5",
    ]


def test_table_of_a_folder(tmp_path: Path, in_process: list[str]):
    films = tmp_path / "films"
    films.mkdir()
    write_clip(films / "a.mp4", moving_square(0), fps=FPS)
    small = [cv2.resize(frame, (128, 80)) for frame in moving_square(0)]
    write_clip(films / "b.mkv", small, fps=FPS, options={"crf": "36"})
    write_clip(films / "c.mp4", moving_square(7), fps=FPS)
    (films / "d.mp4").write_bytes((films / "c.mp4").read_bytes()[:600])
    (films / "mask.png").write_bytes(b"")
    cv2.imwrite(str(films / "mask.png"), texture(0))
    names = ["video,caption,license,mood,motion,mask"]
    names += ["a.mp4,one,CC0,calm,9,mask.png", "a.mp4,two,CC0,calm,9,mask.png", "b.mkv,,MIT,wild,9,"]
    (films / "list.csv").write_text("\n".join([*names, "c.mp4,,,,,", "d.mp4,,,,,", "none.mp4,,,,,"]) + "\n")
    out = tmp_path / "out" / "measured.csv"
    summary, rows = run(films / "list.csv", out)
    assert in_process == ["a.mp4", "b.mkv", "c.mp4", "d.mp4"]  # a.mp4 has two captions
    assert {name: row["duplicate_of"] for name, row in rows.items()} == {
        **{"a.mp4": "", "b.mkv": "a", "c.mp4": "", "d.mp4": ""}
    }
    assert [rows["a.mp4"][name] for name in ("license", "mood", "mask")] == [
        *("CC0", "calm", str(films / "mask.png"))
    ]
    assert [rows["b.mkv"][name] for name in ("license", "mood", "caption")] == ["MIT", "wild", ""]
    assert 0.1 < float(rows["a.mp4"]["motion"]) < 0.2
    assert [rows["d.mp4"][name] for name in measures.EMPTY] == [""] * 4
    assert "not measured: d: video=" in summary
    assert "none.mp4: no such file" in summary
    assert "5 rows in" in summary
    assert "\nmotion of the clips: 5 % below 0" in summary
    assert "4 clips decoded now, 1 near-duplicate" in summary
    # A second call decodes what is new, changed or damaged. An interrupted call has left half a line.
    work = out.with_suffix(".measures.jsonl")
    work.write_text("".join(work.read_text().splitlines(keepends=True)[:2]) + '{"clip": "cut off')
    summary, again = run(films / "list.csv", out, duplicate_bits=0)
    assert in_process[4:] == ["c.mp4", "d.mp4"]
    assert again["b.mkv"]["duplicate_of"] == ""
    assert again["a.mp4"] == rows["a.mp4"]
    write_clip(films / "a.mp4", moving_square(3), fps=FPS)
    (films / "list.csv").write_text("video,end\na.mp4,\nb.mkv,1\nc.mp4,\n")  # and another time range of b.mkv
    run(films / "list.csv", out)
    assert in_process[6:] == ["a.mp4", "b.mkv"]
    status = (films / "c.mp4").stat()
    os.utime(films / "c.mp4", ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    run(films / "list.csv", out)
    assert in_process[8:] == ["c.mp4"]
    run(films / "list.csv", out)
    assert in_process[9:] == []


@pytest.mark.slow
def test_measure_then_check_where(tmp_path: Path):
    """In subprocesses, by the commands."""
    write_clip(tmp_path / "a.mp4", moving_square(0), fps=FPS)
    write_clip(tmp_path / "b.mp4", [texture(1)] * 32, fps=FPS)
    (tmp_path / "list.csv").write_text("video,caption,note\na.mp4,moves,x\nb.mp4,stands,y\n")
    out = tmp_path / "measured.jsonl"
    result = CliRunner().invoke(main, ["measure", str(tmp_path / "list.csv"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["video"], row["note"], row["duplicate_of"]) for row in rows] == [
        *(("a.mp4", "x", None), ("b.mp4", "y", None))
    ]
    assert isinstance(rows[0]["motion"], float)
    report = check(
        CheckOptions(source=str(out), num_workers=1, where="motion > 0.05 and duplicate_of is None")
    )
    reasons = {clip.key: clip.reason for clip in report.clips}
    assert reasons["a"] == ""
    assert "but --where requires motion > 0.05" in reasons["b"]
    low, high = sorted(row["motion"] for row in rows)
    assert f"motion: min {low:.4g}, median {high:.4g}, max {high:.4g}; 2 clips" in report.render()
    page = render_check_page(report)
    assert page.count("<svg") == 3  # motion, sharpness, brightness
    assert f"min {low:.4g}, median {high:.4g}" in page
    motion = page[page.index("histogram of motion") : page.index("histogram of sharpness")]
    assert motion.count('height="20.0"') == 2
    place = 30 * (0.05 - low) / (high - low)
    assert f'<path d="M{place:.5f}'[:16] in motion
    assert page.count("<path d=") == 1


def test_columns_with_hostile_numbers(tmp_path: Path):
    write_clip(tmp_path / "a.mp4", [texture(1)] * 8, fps=FPS)
    rows = [
        {"huge": 1.7e308, "tiny": 5e-324, "same": 3, "<b>name</b>\n": 1, "text": 1, "none": "", "start": 0.0},
        {"huge": -1.7e308, "tiny": 0, "same": "3", "<b>name</b>\n": 2, "text": "x", "end": 0.4},
        {"huge": 0, "tiny": 0, "same": None, "list": [1], "nan": float("nan"), "infinite": float("inf")},
    ]
    videos = [{"video": "a.mp4", "caption": f"{n}", **row} for n, row in enumerate(rows)]
    (tmp_path / "list.jsonl").write_text("\n".join(json.dumps(row) for row in videos))
    report = check(CheckOptions(source=str(tmp_path / "list.jsonl"), num_workers=1))
    assert list(report.columns) == ["caption", "huge", "tiny", "same", "_b_name__b_"]
    assert report.column_texts()["same"] == "min 3, median 3, max 3; 2 clips"
    assert "huge: min -1.7e+308, median 0, max 1.7e+308; 3 clips" in report.render()
    assert "<b>name" not in render_check_page(report)
    many = ClipRecord("", tmp_path, "", row={f"column{n}": n for n in range(10_000)})
    assert list(numeric_columns([many] * 2))[-1] == "column9999"
    assert len(numeric_columns([many])) == 16


def test_mistakes_end_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: list[str]):
    write_clip(tmp_path / "a.mp4", [texture(1)] * 4, fps=FPS)
    with pytest.raises(ConfigError, match=r"must end in .csv or .jsonl; change the extension"):
        run(tmp_path, tmp_path / "a.txt")
    assert not in_process  # the extension is checked before clips are decoded
    (tmp_path / "list.csv").write_text("video\nnone.mp4\n")
    with pytest.raises(ConfigError, match="is the file SOURCE; choose another file"):
        run(tmp_path / "list.csv", tmp_path / "list.csv")
    with pytest.raises(DataError, match="has no clip to measure"):
        run(tmp_path / "list.csv", tmp_path / "b.csv")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r'needs OpenCV; run pip install "wands\[footage\]"'):
        run(tmp_path / "a.mp4", tmp_path / "c.csv")
