"""Broken files and 500 mutations of real clips: for each a sample or a reason; no crash, no hang, no silent skip."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import check
from tests.support.corpus import SAMPLE, build_corpus, mutate
from wands.commands.check.check_report import CheckReport
from wands.data.clips.clip import ClipSpec
from wands.data.clips.isolated import Crash, map_isolated
from wands.data.clips.video import decode_clip
from wands.errors import DataError

SMALL = {"max_pixels": 64 * 96, "max_frames": 9}


@pytest.fixture(scope="module")
def checked(clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], CheckReport]:
    folder = tmp_path_factory.mktemp("corpus") / "clips"
    return build_corpus(folder, clips_dir), check(str(folder), **SMALL)


def complaints(expected: dict[str, str], report: CheckReport) -> list[str]:
    """List the mistakes in a report on the corpus."""
    clips = {clip.key: clip for clip in report.clips}
    wrong = [key for key, count in Counter(clip.key for clip in report.clips).items() if count > 1]
    wrong += [f"{key} is skipped in silence" for key in expected.keys() - clips.keys()]
    wrong += [f"{key} is not in the corpus" for key in clips.keys() - expected.keys()]
    for key in expected.keys() & clips.keys():
        clip = clips[key]
        reason = expected[key]
        if bool(clip.samples) == bool(clip.reason):
            wrong.append(f"{key} gives both a sample and a reason, or neither")
        elif reason == SAMPLE and clip.reason:
            wrong.append(f"{key} is rejected: {clip.reason}")
        elif reason != SAMPLE and not re.search(f"{reason}.*; ", clip.reason):
            wrong.append(f"{key} should be rejected for {reason}, with a cure: {clip.reason}")
    return wrong


@pytest.mark.slow
def test_each_file_gives_a_sample_or_its_reason(checked: tuple[dict[str, str], CheckReport]) -> None:
    expected, report = checked
    assert complaints(expected, report) == []
    assert len(expected) >= 40
    assert all(sample.num_frames % 4 == 1 for sample in report.samples)


@pytest.mark.slow
def test_a_silent_skip_would_be_seen(checked: tuple[dict[str, str], CheckReport]) -> None:
    expected, report = checked
    assert complaints(expected, replace(report, clips=report.clips[1:]))
    mute = replace(report.clips[0], reason="", samples=())
    assert complaints(expected, replace(report, clips=(mute, *report.clips[1:])))


def test_oddities_are_told(checked: tuple[dict[str, str], CheckReport]) -> None:
    warnings = {clip.key: " ".join(clip.warnings) for clip in checked[1].clips}
    for key, words in {
        "turned": "rotation flag: turned upright by 90 degrees",
        "variable fps": "variable frame rate",
        "leap in time": "variable frame rate",
        "slow": "5 fps, frames are repeated to get 16 fps",
        "fast": "implausible frame rate: 875 fps",
        "wide pixels": "pixel aspect ratio: 4/3, used as 128x64",
        "one frame": "becomes a still",
        "whole": "duplicate: the same images as UPPER",
        "endless caption": "cut after 512",
    }.items():
        assert words in warnings[key], key
    assert [key for key in ("UPPER", "odd size", "ten bit", "alpha.mov") if warnings[key]] == []


def decode_mutation(task: tuple[Path, Path, int]) -> str:
    """The reason why a mutated clip is refused, "" where it gives samples."""
    clip, folder, seed = task
    path = folder / f"{seed}{clip.suffix}"
    path.write_bytes(mutate(clip.read_bytes(), seed))
    try:
        shapes = [clip.frames.shape for clip in decode_clip(path, ClipSpec(fps=16, **SMALL))]
    except DataError as error:
        return str(error)
    finally:
        path.unlink()
    assert len(shapes) == 1
    assert shapes[0][0] % 4 == 1
    return ""


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.full)])
def test_mutations_of_real_clips(clips_dir: Path, tmp_path: Path, count: int) -> None:
    names = ("bikes.mp4", "carphone_distorted.mp4", "cityCC0.mpg")
    tasks = [(clips_dir / names[seed % 3], tmp_path, seed) for seed in range(count)]
    # The bound is for a decoder that hangs; a mutation takes a fraction of a second.
    reasons = dict(map_isolated(decode_mutation, tasks, limit_seconds=60.0))
    assert sorted(reasons) == list(range(count))
    assert [reason for reason in reasons.values() if isinstance(reason, Crash)] == []
    assert all("; " in reason for reason in reasons.values() if reason)
    assert all(sum(not reasons[i] for i in range(kind, count, 5)) for kind in range(5)), (
        "no kind is always fatal"
    )
    assert len([reason for reason in reasons.values() if reason]) > count // 3
