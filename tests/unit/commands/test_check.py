"""`wands check`: it says what `wands preprocess` then does, clip for clip; its files; its exit code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import ExifTags, Image

from tests.support import deadly
from tests.support.checked_clips import SMALL, clips, folder_of
from tests.support.clip_files import numbered, write_clip
from tests.support.commands import check
from wands.cli import main
from wands.commands.check import check as module
from wands.commands.check.check_report import CheckReport, render_check_page, save_report
from wands.data.clips.captions import estimate_tokens
from wands.data.packing import plan_epoch
from wands.patches import grid_size
from wands.texts import safe_lines
from wands.variants import VARIANTS

__all__ = ["clips"]  # fixtures


@pytest.fixture(scope="module")
def report(clips: Path) -> CheckReport:
    return check(str(clips), **SMALL)


# ---- what it tells


def test_the_report(report: CheckReport, clips: Path) -> None:
    by_key = {clip.key: clip for clip in report.clips}
    assert [clip.key for clip in report.clips] == ["text", "b", "man", "a", "city"]  # the worst first
    assert [clip.verdict for clip in report.clips] == ["rejected", "warned", "warned", "fine", "fine"]
    assert by_key["b"].warnings == ("duplicate: the same images as a; keep one of the two clips",)
    assert by_key["man"].warnings == ("pixel aspect ratio: 128/117, used as 193x144 square pixels",)
    city = by_key["city"]
    assert city.source is not None
    assert (city.source.fps, city.source.width, city.source.height) == (25, 720, 405)
    (sample,) = city.samples
    assert (sample.num_frames, sample.height, sample.width) == (9, 48, 96)
    assert sample.num_tokens == 3 * 3 * 6
    assert city.thumbnail[:3] == b"\xff\xd8\xff"
    assert check(str(clips), **SMALL, thumbnails=False).clips[-1].thumbnail == b""
    totals = report.totals()
    assert (totals["clips"], totals["samples"], totals["rejected"]) == (5, 4, 1)
    assert totals["tokens"] == sum(sample.num_tokens for sample in report.samples)
    assert dict(report.problems()) == {
        "is a text file, despite its name": 1,
        "pixel aspect ratio": 1,
        "duplicate": 1,
    }
    text = report.render()
    for words in (
        f"1 rejected: text: {safe_lines(by_key['text'].reason)}",
        "1 warned: b: duplicate: the same images as a; keep one of the two clips",
        "5 clips: 2 fine, 2 with warnings, 1 rejected",
    ):
        assert words in text
    assert "text tokens are estimated" in text


TURNS = {
    6: "rotation flag: turned upright by 270 degrees",
    2: "mirror flag: mirrored left to right",
    4: "mirror flag: mirrored top to bottom",
    5: "rotation flag: turned upright by 270 degrees, then mirrored left to right",
}


def test_a_long_caption_is_shortened_in_reports(clips: Path, clips_dir: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "clips", {"a": "bikes.mp4"}, clips_dir)
    row = {"video": "a.mp4", "caption": "word " * 3_900}
    (folder / "metadata.jsonl").write_text(json.dumps(row))
    report = check(str(folder), **SMALL)
    (clip,) = report.clips
    assert clip.caption.endswith("word ... (19,499 characters)")
    assert clip.text_tokens > 4_000  # all of it is counted
    assert len(report.to_json()) < 10_000


def test_captions_have_the_trigger_word(clips_dir: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "clips", {"a": "bikes.mp4", "ohwx": "bikes.mp4"}, clips_dir)
    captions = {clip.key: clip.caption for clip in check(str(folder), **SMALL, trigger="ohwx").clips}
    assert captions == {"a": "ohwx, a caption of a", "ohwx": "a caption of ohwx"}


def test_a_mask_that_does_not_fit_rejects_its_clip(clips_dir: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "clips", {"a": "bikes.mp4", "b": "bikes.mp4", "c": "bikes.mp4"}, clips_dir)
    Image.new("L", (640, 272), 255).save(folder / "a.mask.png")
    Image.new("L", (272, 640), 255).save(folder / "b.mask.png")
    report = check(str(folder), **SMALL)
    reasons = {clip.key: clip.reason for clip in report.clips}
    assert report.notes == ("2 of 3 clips have a mask",)
    assert reasons["a"] == reasons["c"] == ""
    assert "b.mask.png is a mask of aspect ratio 0.425 for a clip of aspect ratio 2.353" in reasons["b"]


def test_it_says_how_much_footage_is_used(clips_dir: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "clips", {"a": "bikes.mp4"}, clips_dir)
    for mode in ("head", "slide"):
        report = check(str(folder), **SMALL, clip_mode=mode)
        (clip,) = report.clips
        assert clip.source is not None
        used, present, with_slide = clip.footage
        assert used == pytest.approx(sum(sample.num_frames for sample in clip.samples) / 16)
        assert present == pytest.approx(clip.source.duration, abs=0.1)
        if mode == "head":
            text = f"uses 0.6 of {present:.1f} s; --clip-mode slide would use"
            expected = with_slide
        else:
            text = f"uses {used:.1f} of {present:.1f} s\n"
            assert used == with_slide == pytest.approx(expected)
        assert text in report.render()
    assert report.footage() == [round(seconds, 1) for seconds in clip.footage]


def test_a_row_of_the_terminal_is_one_row(tmp_path: Path) -> None:
    folder = tmp_path / "a\nfolder"
    folder.mkdir()
    (folder / "a.mp4").touch()
    (folder / "a.txt").write_text("a caption")
    text = check(str(folder), **SMALL).render()
    assert r"a\nfolder/a.mp4 is empty" in text


def test_it_says_how_clips_are_turned(tmp_path: Path) -> None:
    for exif in (1, *TURNS):
        picture = np.full((64, 96, 3), 20 * exif, np.uint8)
        (tmp_path / f"{exif}.txt").write_text("a caption")
        tags = Image.Exif()
        tags[ExifTags.Base.Orientation] = exif
        Image.fromarray(picture).save(tmp_path / f"{exif}.png", exif=tags.tobytes())
    told = {clip.key: clip.warnings for clip in check(str(tmp_path), **SMALL).clips}
    assert told == {"1": (), **{str(exif): (warning,) for exif, warning in TURNS.items()}}


def test_it_warns_of_pictures_that_need_a_filter_first(tmp_path: Path) -> None:
    hdr = "colorprim=bt2020:colormatrix=bt2020nc:transfer="
    options = {
        "plain": "",
        "fields": "interlaced=1:tff=1",
        "pq": f"{hdr}smpte2084",
        "hlg": f"{hdr}arib-std-b67",
        "wide": "colorprim=bt2020:colormatrix=bt2020nc:transfer=bt2020-10",  # but not HDR
    }
    for number, (name, parameters) in enumerate(options.items()):
        pictures = [numbered(16 * number + i) for i in range(9)]
        write_clip(tmp_path / f"{name}.mp4", pictures, options={"crf": "10", "x264-params": parameters})
        (tmp_path / f"{name}.txt").write_text("a caption")
    told = {clip.key: clip for clip in check(str(tmp_path), **SMALL).clips}
    assert {key: clip.verdict for key, clip in told.items()} == {
        "plain": "fine",
        "fields": "warned",
        "pq": "warned",
        "hlg": "warned",
        "wide": "fine",
    }
    assert all(len(clip.samples) == 1 and len(clip.warnings) <= 1 for clip in told.values())
    assert re.match(r"interlaced: .* -vf bwdif ", told["fields"].warnings[0])
    for name in ("pq", "hlg"):
        assert re.match(rf"HDR: {name.upper()} .* -vf zscale=.*tonemap=", told[name].warnings[0])


def test_the_same_pictures_in_another_container_are_a_duplicate(clips_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    for name, title in (("a.mp4", ""), ("b.mkv", "another file"), ("c.mp4", "third")):
        write_clip(folder / name, num_frames=15 if name == "c.mp4" else 25, title=title)
        (folder / name).with_suffix(".txt").write_text("numbers")
    found = {clip.key: clip.warnings for clip in check(str(folder), max_pixels=64 * 128).clips}
    cut = "hard cut inside a sample"  # each number is another image
    assert ["the same images as a;" in text for text in found["b"] if not text.startswith(cut)] == [True]
    assert all(text.startswith(cut) for text in (*found["a"], *found["c"]))  # c has fewer frames


def test_several_captions_of_one_clip_are_no_duplicates(
    clips_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(clips_dir / "carphone_pristine.mp4", tmp_path / "man.mp4")
    lines = [{"file_name": "man.mp4", "text": ["a man", "a man in a car"]}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tasks: list[Any] = []
    whole = module.map_isolated

    def counted(function: Any, items: Any, **options: Any) -> Any:
        tasks.extend(items)
        return whole(function, items, **options)

    monkeypatch.setattr(module, "map_isolated", counted)
    found = check(str(tmp_path), **SMALL)
    assert [clip.caption for clip in found.clips] == ["a man", "a man in a car"]
    assert not any("duplicate" in warning for clip in found.clips for warning in clip.warnings)
    assert len(tasks) == 1  # decoded once


def test_packing_of_teacher_forcing(report: CheckReport, clips: Path) -> None:
    """Chunks of one frame: all frames but the last twice."""
    told = check(str(clips), **SMALL, max_tokens=220, bins_per_step=2, chunk_frames=1).packing
    variant = VARIANTS["wan2.1-t2v-1.3b"]
    grids = [
        grid_size(variant.latent_size(s.num_frames, s.height, s.width), (1, 2, 2)) for s in report.samples
    ]
    tokens = np.array([(2 * f - 1) * h * w for f, h, w in grids])
    pairs = np.array([(f * (f - 1) // 2 + f * (f + 1) // 2) * (h * w) ** 2 for f, h, w in grids])
    linear = float(variant.dit.linear_flops_per_token())
    attention = float(variant.dit.attention_flops_per_squared_token())
    cost = linear * tokens + attention * pairs
    plan = plan_epoch(tokens, max_tokens=220, bins_per_step=2, seed=3, epoch=5, cost=cost)
    assert told is not None
    assert (told.steps_per_epoch, told.problem) == (plan.num_steps, "")
    assert max(sample.num_tokens for sample in report.samples) < tokens.max()


def test_packing_is_that_of_training(report: CheckReport, clips: Path) -> None:
    told = check(str(clips), **SMALL, max_tokens=110, bins_per_step=2).packing
    plan = plan_epoch(
        np.array([sample.num_tokens for sample in report.samples]),
        max_tokens=110,
        bins_per_step=2,
        seed=3,
        epoch=5,
        cost=VARIANTS["wan2.1-t2v-1.3b"].dit.forward_flops,
    )
    assert told is not None
    assert told.steps_per_epoch == plan.num_steps
    assert 0.3 < told.fill <= 1
    short = check(str(clips), **SMALL, max_tokens=50)
    assert short.packing is not None
    assert "max_tokens=50 is less than sample" in short.packing.problem
    assert short.packing.problem in short.render()
    assert short.packing.problem.replace("'", "&#x27;") in render_check_page(short)


def test_captions_beyond_512_tokens(clips_dir: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "clips", {"long": "carphone_pristine.mp4"}, clips_dir)
    (folder / "long.txt").write_text("a man rides a bicycle " * 400)
    guess, count = (check(str(folder), **SMALL, model=model).clips[0] for model in (None, tiny_pipeline))
    assert any("caption too long: about 2,201 tokens, cut after 512" in warning for warning in guess.warnings)
    assert any(f"caption too long: {count.text_tokens:,} tokens" in warning for warning in count.warnings)
    assert count.text_tokens > 512


def test_estimates_of_tokens() -> None:
    assert estimate_tokens("") == 1  # the end token
    assert estimate_tokens("a man   rides &amp; rests") == estimate_tokens("a man rides & rests")
    assert estimate_tokens("一只猫在草地上奔跑") == 7
    assert 15 <= estimate_tokens("Street scenes of cyclists and parked bicycles, seen from a car.") <= 18


# ---- a file that takes its decoder down


def test_a_decoder_that_crashes_costs_one_clip(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = module.map_isolated
    monkeypatch.setattr(
        module,
        "map_isolated",
        lambda decode, items, **options: whole(partial(deadly.decode, decode), items, **options),
    )
    found = {clip.key: clip for clip in check(str(clips), **SMALL).clips}
    assert found["a"].reason.endswith(
        "a.mp4 cannot be decoded: the process ended with signal SIGABRT; replace or re-encode the file"
    )
    assert [found[key].verdict for key in ("b", "city")] == ["fine", "fine"]


# ---- files


class Page(HTMLParser):
    """Tags with what they point to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_needs_nothing_else(report: CheckReport, tmp_path: Path) -> None:
    save_report(report, html_path=tmp_path / "new" / "page.html")
    page = Page(text := (tmp_path / "new" / "page.html").read_text())
    assert len(page.links) == 4  # a thumbnail for each sample
    assert all(link.startswith("data:image/jpeg;base64,") for link in page.links)
    assert "http" not in text
    assert page.opened.count("script") == 1  # the caption's is text
    assert page.opened.count("tr") == 1 + len(report.clips)
    assert "<script>alert('a caption')</script>" in page.words
    for clip in report.clips:
        assert clip.key in page.words
        assert safe_lines(clip.reason) in page.words
        assert all(warning in page.words for warning in clip.warnings)


def test_a_large_page_says_what_it_leaves_out(report: CheckReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wands.commands.check.check_report.MAX_ROWS", 2)
    page = Page(render_check_page(report))
    assert page.opened.count("tr") == 1 + 2
    assert "3 more clips" in page.words


def test_json_has_everything(report: CheckReport, tmp_path: Path) -> None:
    save_report(report, json_path=tmp_path / "report.json")
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["totals"] == report.totals()
    assert told["settings"]["max_frames"] == 9
    assert told["packing"]["fill"] == report.packing.fill
    rows = {row["key"]: row for row in told["clips"]}
    assert len(rows) == len(report.clips)
    assert rows["text"]["verdict"] == "rejected"
    assert rows["text"]["reason"] == report.clips[0].reason
    assert rows["man"]["source"]["sar"] == "128/117"
    assert rows["city"]["samples"][0]["num_tokens"] == 54
    assert "thumbnail" not in rows["city"]


def test_clips_that_do_not_meet_a_condition_are_counted_together(clips_dir: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "set", {name: "carphone_pristine.mp4" for name in "ab"}, clips_dir)
    for name, score in (("a", 1), ("b", 2)):
        (folder / f"{name}.txt").unlink(missing_ok=True)
        (folder / f"{name}.json").write_text(json.dumps({"caption": name, "score": score}))
    found = check(str(folder), where="score > 2.5", max_frames=5)
    assert found.problems() == [("--where requires score > 2.5", 2)]


def test_a_film_without_a_used_clip_is_named(
    clips_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bikes = clips_dir / "bikes.mp4"
    city = clips_dir / "cityCC0.mpg"
    rows = [f"{bikes},0,1,a", f"{bikes},1,2,b", f"{city},0,1,c", f"{city},1,2,d"]
    (tmp_path / "shots.csv").write_text("\n".join(["video,start,end,caption", *rows, ""]))
    text = check(
        str(tmp_path / "shots.csv"), where='"bikes" not in path or caption == "b"', max_frames=5
    ).render()
    assert "none of its" not in text
    report = check(str(tmp_path / "shots.csv"), where='"city" in path', max_frames=5)
    for home in (tmp_path, clips_dir.parent):
        monkeypatch.setenv("HOME", str(home))
        text = report.render()
        assert safe_lines(f"{bikes}: none of its 2 clips is used") in text.splitlines()
        assert "cityCC0.mpg: none of its" not in text
    assert f"$HOME/{clips_dir.name}/bikes.mp4: none" in text


# ---- the command line


def test_exit_codes(clips: Path, clips_dir: Path, tmp_path: Path) -> None:
    options = ["--max-pixels", "6144", "--max-frames", "9"]
    bad = CliRunner().invoke(main, ["check", str(clips), *options, "--json", str(tmp_path / "a.json")])
    assert bad.exit_code == 1
    assert (tmp_path / "a.json").is_file()
    good = folder_of(tmp_path / "good", {"a": "carphone_pristine.mp4"}, clips_dir)
    fine = CliRunner().invoke(main, ["check", str(good), *options])
    assert fine.exit_code == 0  # with a warning
    assert "pixel aspect" in fine.output
    for wrong in (
        [str(tmp_path / "nowhere")],
        [str(good), "--height", "480"],
        [str(good), "--max-tokens", "0"],
    ):
        assert CliRunner().invoke(main, ["check", *wrong]).exit_code == 2
    assert "The exit code is 0 if" in " ".join(CliRunner().invoke(main, ["check", "--help"]).output.split())


@pytest.mark.slow
def test_no_model_and_no_torch(clips: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom wands.commands.check.check import check\nfrom pathlib import Path\n"
        "from wands.commands.check.check_report import save_report\n"
        "from wands.config.options import CheckOptions\n"
        f"report = check(CheckOptions(source={str(clips)!r}, max_pixels=[6144], max_frames=9, html_path='a.html'))\n"
        f"save_report(report, html_path=Path({str(tmp_path / 'a.html')!r}))\n"
        "print(report.render())\n"
        "print([name for name in ('torch', 'transformers', 'diffusers', 'datasets') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
