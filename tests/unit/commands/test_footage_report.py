"""Reports of `wands check` and `wands preprocess` on footage: seconds used, cuts, still images, black borders, columns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.clip_files import write_clip
from tests.support.commands import check, preprocess
from tests.unit.data_tools.test_shots import FIXTURE
from wands.commands.check.clip_warnings import FrameWarnings
from wands.data.cache.shards import IndexEntry
from wands.data.clips.clip import ClipSpec
from wands.data.clips.tables import write_table
from wands.data.clips.video import decode_clip
from wands.preprocess.clip_rules import Footage
from wands.preprocess.preprocess_report import PreprocessReport
from wands.preprocess.scan import SourceScan

FPS = 16
SMALL = {"max_pixels": 64 * 96, "max_frames": 9}


def frames_of(path: Path) -> np.ndarray:
    return next(decode_clip(path, ClipSpec(FPS, max_pixels=144 * 256))).frames


@pytest.fixture(scope="module")
def man(clips_dir: Path) -> np.ndarray:
    """One shot of 65 frames, uint8 [F, 144, 192, 3]."""
    return frames_of(clips_dir / "carphone_pristine.mp4")


def warnings(*windows: np.ndarray) -> list[str]:
    facts = FrameWarnings()
    for number, frames in enumerate(windows):
        facts.add(np.ascontiguousarray(frames[:, ::4, ::4]), 10.0 * number, FPS)
    return facts.texts()


def cut_times(text: str) -> list[float]:
    return [float(word) for word in text.partition(" at ")[2].partition(";")[0].replace(" s", "").split(", ")]


# ---- hard cuts


def test_hard_cuts_are_those_of_a_film_marked_by_hand(clips_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wands.commands.check.clip_warnings.SHOWN", 9)
    marked = [frame / 25 for frame in json.loads(FIXTURE.read_text())["first_frames_of_shots"][1:]]
    (text,) = warnings(frames_of(clips_dir / "bikes.mp4"))
    # The frame for a time is the last frame before it, so a cut is at most one frame late.
    np.testing.assert_allclose(np.array(cut_times(text)) - marked, 0.5 / FPS, atol=0.5 / FPS + 0.005)


def test_one_shot_a_flash_and_fast_motion_are_no_cuts(clips_dir: Path, man: np.ndarray):
    bunny = frames_of(clips_dir / "bigbuckbunny.mp4")
    flash = man.copy()
    flash[30] = 255
    # 12 of 192 columns a frame; two fast frames move by 60 columns each
    pan = np.stack(
        [np.roll(man[0], 12 * number + 60 * min(max(number - 7, 0), 2), 1) for number in range(17)]
    )
    assert [warnings(frames) for frames in (bunny, man, flash, pan)] == [[]] * 4


def test_a_cut_is_named_in_the_seconds_of_the_file(man: np.ndarray):
    (text,) = warnings(man, np.concatenate([man[:20], man[20:40, ::-1]]))
    assert cut_times(text) == [10 + 20 / FPS]
    stills = np.concatenate([np.repeat(man[:1], 20, 0), np.repeat(man[:1, ::-1], 20, 0)])
    assert cut_times(warnings(stills)[0]) == [20 / FPS]  # two images without motion


# ---- images that do not change


def test_a_file_with_few_frames_is_near_frozen(tmp_path: Path, man: np.ndarray):
    """An AVI whose header counts packets, most of them empty, as of a known file: 444 in the header, 68 images in 29.5 s."""
    stamps = [437 * number for number in range(20)]
    for name, times in (("few", stamps), ("all", None)):
        write_clip(
            tmp_path / f"{name}.avi", [*man[::3]][:20], codec="mpeg4", options={}, fps=FPS, stamps_ms=times
        )
        (tmp_path / f"{name}.txt").write_text("a man")
    clips = {clip.key: clip for clip in check(tmp_path, max_pixels=144 * 192).clips}
    assert clips["all"].warnings == ()
    few = clips["few"]
    assert few.source is not None
    assert few.source.num_frames > 1000
    rate, text = sorted(few.warnings)
    assert rate.startswith("implausible frame rate: ")
    assert text.startswith("near-frozen: few frames show a change (12 of 81 from 0.00 s on); ")


def test_still_shots_are_near_frozen(man: np.ndarray):
    noisy = np.repeat(man[:1], 65, 0).astype(np.int16) + np.random.default_rng(0).integers(-3, 4, man.shape)
    (text,) = warnings(man, noisy.clip(0, 255).astype(np.uint8))
    assert text.startswith("near-frozen: few frames show a change (1 of 65 from 10.00 s on); ")
    assert warnings(np.repeat(man[::2], 2, 0)) == []  # half of the frame rate


# ---- black borders


def test_black_borders_until_a_crop_removes_them(tmp_path: Path, man: np.ndarray):
    for name, sides in (("wide", (18, 18)), ("low", (0, 36)), ("both", (18, 18))):
        framed = np.pad(man[:9], ((0, 0), sides, (0, 0), (0, 0)))
        framed = np.pad(framed, ((0, 0), (0, 0), (32, 32), (0, 0))) if name == "both" else framed
        write_clip(tmp_path / f"{name}.mp4", [*framed], fps=FPS)
    rows = [{"video": f"{name}.mp4", "caption": name} for name in ("both", "low", "wide")]
    write_table(tmp_path / "clips.csv", [*rows, rows[2] | {"start": 0.001, "crop": "0,18,192,144"}])
    report = check(tmp_path / "clips.csv", max_pixels=[256 * 192, 128 * 96])
    texts = {clip.key.partition("@")[::2]: [*clip.warnings] for clip in report.clips}
    assert texts["low", ""] == texts["wide", "0.001"] == []
    (wide,) = texts["wide", ""]
    (both,) = texts["both", ""]
    assert wide.startswith("black borders: 18% of the height are learned")
    assert both.startswith("black borders: 18% of the height, 25% of the width are learned")
    assert ("black borders", 2) in report.problems()


def test_a_night_shot_has_no_borders(man: np.ndarray):
    dark = (man // 8).astype(np.uint8)
    assert warnings(dark) == []
    bars = np.pad(man, ((0, 0), (24, 24), (0, 0), (0, 0)))
    bars[40, :4] = 200  # a frame without bars: there is no crop for the whole clip
    bars[40, -4:] = 200
    assert warnings(bars) == []


# ---- columns of the table


def test_json_has_the_measured_columns_of_each_clip(clips_dir: Path, tmp_path: Path):
    shutil.copy(clips_dir / "carphone_pristine.mp4", tmp_path / "a.mp4")
    shutil.copy(clips_dir / "carphone_distorted.mp4", tmp_path / "b.mp4")
    measured = {"motion": 0.25, "sharpness": 80.5, "duplicate_of": "", "source": "phone", "notes": "x" * 99}
    rows = [
        {"video": "a.mp4", "caption": "a", **measured},
        {"video": "b.mp4", "caption": "b", **measured, "motion": "", "duplicate_of": "a"},
    ]
    for name in ("clips.csv", "clips.jsonl"):
        write_table(tmp_path / name, rows)
        value = json.loads(check(tmp_path / name, **SMALL).to_json())
        columns = {clip["key"]: clip["columns"] for clip in value["clips"]}
        assert columns == {
            "a": {"motion": 0.25, "sharpness": 80.5, "source": "phone"},
            "b": {"sharpness": 80.5, "source": "phone", "duplicate_of": "a"},
        }


# ---- wands preprocess


def run(source: Path, out: Path, model: Path, **options) -> PreprocessReport:
    report = preprocess(source, out, model, device="cpu", **SMALL, **options)
    assert report is not None
    return report


def test_preprocess_says_what_it_uses_and_which_videos_became_stills(
    clips_dir: Path, tiny_pipeline: Path, tmp_path: Path, man: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "clips"
    folder.mkdir()
    shutil.copy(clips_dir / "bikes.mp4", folder / "bikes.mp4")
    write_clip(folder / "four.mp4", [*man[:4]], fps=FPS)
    (folder / "cut.mpg").write_bytes((clips_dir / "cityCC0.mpg").read_bytes()[:120_000])
    write_clip(folder / "image.png", [*man[:1]], codec="png", options={}, fmt="image2", pix_fmt="rgb24")
    for stem in ("bikes", "four", "cut", "image"):
        (folder / f"{stem}.txt").write_text(f"a caption of {stem}")
    told = check(folder, **SMALL)
    assert {clip.key for clip in told.clips if "becomes a still" in "".join(clip.warnings)} == {"four", "cut"}
    wanted = {clip.key: clip.footage for clip in told.clips if clip.key != "image"}
    done = run(folder, tmp_path / "cache", tiny_pipeline)
    again = run(folder, tmp_path / "cache", tiny_pipeline)  # nothing is decoded
    for report in (done, again):
        assert {key: pytest.approx(row) for key, row in report.footage.items()} == wanted
        assert sorted(report.still_clips) == ["cut", "four"]
        text = str(report)
        assert "\nuses 0.7 of 10.4 s; --clip-mode slide would use 10.0 s\n" in text
        assert "\n  bikes: uses 0.6 of 10.0 s; --clip-mode slide would use 9.9 s\n" in text
        assert "2 videos with one usable frame became still images: cut, four; use longer clips" in text
    assert again.num_reused == 4
    whole = SourceScan.footage

    def without_seconds(scan: SourceScan, entries: dict[str, IndexEntry]) -> dict[str, Footage]:
        return whole(scan, {key: replace(entry, clip_seconds=0.0) for key, entry in entries.items()})

    monkeypatch.setattr(SourceScan, "footage", without_seconds)  # as in imported samples
    assert not {"uses", "still"} & set(str(run(folder, tmp_path / "cache", tiny_pipeline)).split())
