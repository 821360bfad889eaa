"""Result of `wands check`, as a summary for terminals, JSON for programs, and an HTML page, one file without network access."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wands.data.clips.clip import ClipSpec
from wands.data.clips.records import shown_key
from wands.data.clips.video_file import VideoInfo
from wands.files import write_text
from wands.preprocess.clip_rules import Footage, count_problems, describe_footage, problem_kind
from wands.preprocess.length_histogram import count_lengths, token_histogram
from wands.texts import format_seconds, plural, printable, safe_lines

SHOWN_PROBLEMS = 12
SHOWN_NAMES = 3
"""Largest number of clips that a line of the summary names."""
VERDICTS = ("rejected", "warned", "fine")
"""Possible verdicts on a clip, from the most severe to the least severe."""
NUM_BARS = 30
"""Number of bars of the histogram of a column."""
MAX_ROWS = 5000
"""Largest number of clips on the HTML page. Rejected clips are first, then clips with warnings. --json contains all clips."""


@dataclass(frozen=True)
class CheckedSample:
    """One sample that `wands preprocess` will write.

    Attributes:
        key: key in the cache.
        start_seconds: time of the first frame, from the start of the clip's file.
        num_frames: 1 + k * temporal stride of the VAE, for an integer k >= 0.
    """

    key: str
    start_seconds: float
    num_frames: int
    height: int
    width: int
    num_tokens: int


@dataclass
class CheckedClip:
    """One clip with one caption, and the findings of `wands check`.

    Attributes:
        key: path without extension, with suffixes for the time range and the caption.
        caption: cleaned caption, or the start of a very long one.
        text_tokens: tokens of the whole caption with the end token, estimated without a tokenizer.
        source: None if the file cannot be read or was not decoded.
        samples: one for each time range and size. A rejected clip may have samples from before the error.
        digests: digest of the frames of each sample. Clips with equal digests are duplicates.
        footage: seconds of the clip that the samples use, of the whole clip, and that samples of --clip-mode slide would use.
            Zeros for an image and for a clip that cannot be decoded.
        columns: numbers of all numeric columns of the table of clips, and texts of `TEXT_COLUMNS`.
        reason: reason for the rejection, and the fix; empty for an accepted clip.
        thumbnail: JPEG of the middle frame of the first sample, or empty.
    """

    key: str
    path: str
    caption: str = ""
    text_tokens: int = 0
    source: VideoInfo | None = None
    samples: tuple[CheckedSample, ...] = ()
    digests: tuple[str, ...] = ()
    footage: Footage = (0.0, 0.0, 0.0)
    columns: Mapping[str, float | str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    reason: str = ""
    thumbnail: bytes = b""

    @property
    def verdict(self) -> Literal["rejected", "warned", "fine"]:
        """Verdict: "rejected" with a reason, else "warned" with a warning, else "fine"."""
        return "rejected" if self.reason else "warned" if self.warnings else "fine"


@dataclass(frozen=True)
class PackingForecast:
    """Prediction of the bins that the samples fill in training.

    Attributes:
        max_tokens: capacity of a bin in video tokens.
        fill: tokens of the samples / capacity of the bins.
        problem: reason why the samples cannot be packed, or empty.
    """

    max_tokens: int
    bins_per_step: int
    fill: float = 0.0
    steps_per_epoch: int = 0
    problem: str = ""


@dataclass(frozen=True)
class CheckReport:
    """Result of `wands check`.

    Attributes:
        variant: name of the model variant whose VAE strides and frame rate were used.
        clips: sorted by verdict, most severe first, and key.
        exact_text: whether the model's tokenizer counted the caption tokens; otherwise they are estimates.
        cache_bytes: expected size of the shards that `wands preprocess` will write.
        packing: None if there is no sample.
        seconds: duration of the check.
        num_skipped: clips that were not decoded because of `max_clips`.
        columns: the sorted numbers of each numeric column of the source's table.
        thresholds: (column, number) for each comparison in --where, such as ("motion", 0.2), except inside `or` and `not`.
        notes: messages about masks and about settings of another trainer's configuration that are not applied.
    """

    source: str
    variant: str
    spec: ClipSpec
    clips: tuple[CheckedClip, ...]
    exact_text: bool
    cache_bytes: int
    packing: PackingForecast | None
    seconds: float
    num_skipped: int = 0
    notes: tuple[str, ...] = ()
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    thresholds: Sequence[tuple[str, float]] = ()

    @property
    def samples(self) -> list[CheckedSample]:
        """Samples of all clips, in the order of `clips`."""
        return [sample for clip in self.clips for sample in clip.samples]

    @property
    def tokens(self) -> np.ndarray:
        """Number of video tokens of each sample, int64 [number of samples]."""
        return np.array([sample.num_tokens for sample in self.samples], np.int64)

    def problems(self) -> list[tuple[str, int]]:
        """Return (problem, number of clips), the most frequent first.

        A problem is a warning or the reason of a rejection, without the numbers and names that differ between clips.
        """
        texts = ((clip.path, text) for clip in self.clips for text in (clip.reason, *clip.warnings) if text)
        return count_problems(texts)

    def totals(self) -> dict[str, Any]:
        """Return the numbers of clips by verdict, totals of the samples, `footage()`, and the expected bytes of the cache."""
        verdicts = Counter[str](clip.verdict for clip in self.clips)
        frames = sum(sample.num_frames for sample in self.samples)
        return {
            "clips": len(self.clips),
            **{verdict: verdicts[verdict] for verdict in reversed(VERDICTS)},
            "samples": len(self.samples),
            "frames": frames,
            "seconds_of_video": round(frames / self.spec.fps, 3),
            "footage": self.footage(),
            "tokens": int(self.tokens.sum()),
            "cache_bytes": self.cache_bytes,
        }

    def footage(self) -> list[float]:
        """Return the sums of the `footage` of the accepted clips, in seconds. A clip with several captions counts once."""
        seconds = {(clip.path, clip.digests): clip.footage for clip in self.clips if not clip.reason}
        return np.array([*seconds.values()]).reshape(-1, 3).sum(axis=0).round(1).tolist()

    def column_texts(self) -> dict[str, str]:
        """Return minimum, median, maximum and number of values of each numeric column as text."""
        return {
            name: f"min {row[0]:.4g}, median {row[len(row) // 2]:.4g}, max {row[-1]:.4g}; {len(row):,} clips"
            for name, row in self.columns.items()
        }

    def to_json(self) -> str:
        """Return the report as JSON, without thumbnails."""
        clips = [{"verdict": clip.verdict} | asdict(clip) for clip in self.clips]
        for row in clips:
            del row["thumbnail"], row["digests"]
        value = {
            "source": self.source,
            "variant": self.variant,
            "exact_text": self.exact_text,
            "settings": asdict(self.spec),
            "totals": self.totals(),
            "notes": self.notes,
            "packing": asdict(self.packing) if self.packing else None,
            "clips": clips,
        }
        return json.dumps(value, indent=1, default=str)  # a pixel aspect ratio is a Fraction

    def render(self) -> str:
        """Return a summary for the terminal. Only the page and the JSON file list every clip."""
        lines = [*self.notes]
        totals = self.totals()
        lines.append(
            f"{plural(totals['clips'], 'clip')}: {totals['fine']:,} fine, {totals['warned']:,} with warnings, "
            f"{totals['rejected']:,} rejected; checked in {self.seconds:.1f} s"
        )
        lines += _problem_lines("rejected", [(clip, clip.reason) for clip in self.clips if clip.reason])
        lines += _problem_lines("warned", [(clip, text) for clip in self.clips for text in clip.warnings])
        used = {clip.path for clip in self.clips if not clip.reason}
        numbers = Counter(clip.path for clip in self.clips if clip.path not in used)
        unused = [
            f"{path}: none of its {number:,} clips is used" for path, number in numbers.items() if number > 1
        ]
        lines += unused[:SHOWN_PROBLEMS]
        lines += [f"{name}: {text}" for name, text in self.column_texts().items()]
        if not self.samples:
            lines.append("no sample: wands preprocess would reject this source")
            return safe_lines("\n".join(lines))
        lines.append(
            f"{plural(totals['samples'], 'sample')} for {self.variant}, {totals['seconds_of_video']:,.1f} s of video"
        )
        lines.append(describe_footage(totals["footage"]))
        lines.append(token_histogram(self.tokens))
        text = "" if self.exact_text else " (text tokens are estimated; --model counts them exactly)"
        lines.append(f"cache: about {self.cache_bytes:,} bytes{text}")
        lines.append(f"packing: {self.packing_text()}")
        return safe_lines("\n".join(lines))

    def packing_text(self) -> str:
        """Return a text about the bins and steps of a training epoch, or the reason why the samples cannot be packed."""
        plan = self.packing
        if plan is None or plan.problem:
            return plan.problem if plan else "no sample"
        bins = f"bins of {plan.max_tokens:,} tokens are {plan.fill:.1%} full"
        return (
            f"{bins}, {plural(plan.steps_per_epoch, 'step')} of {plural(plan.bins_per_step, 'bin')} per epoch"
        )


def describe_source(clip: CheckedClip) -> str:
    """Return frame size, frame rate, duration, number of frames and codec of a clip's file as text; "" if they are unknown.

    The text of an image contains only its size and codec.
    """
    info = clip.source
    if info is None:
        return ""
    if info.container.endswith(("_pipe", "image2")):  # FFmpeg reports a rate for images
        return f"{info.width}x{info.height}, {info.codec} image"
    frames = f", {plural(info.num_frames, 'frame')}" if info.num_frames else ""
    return f"{info.width}x{info.height} {info.fps:.5g} fps, {info.duration:.2f} s{frames}, {info.codec}"


def _problem_lines(label: str, found: Iterable[tuple[CheckedClip, str]]) -> Iterator[str]:
    """Yield a line for each kind of problem, the most frequent first: number, names of clips, and the text of the first clip."""
    kinds: dict[str, list[tuple[CheckedClip, str]]] = {}
    for clip, text in found:
        kinds.setdefault(problem_kind(clip.path, text), []).append((clip, text))
    ordered = sorted(kinds.values(), key=len, reverse=True)
    for examples in ordered[:SHOWN_PROBLEMS]:
        names = [shown_key(clip.key) for clip, _ in examples[:SHOWN_NAMES]]
        names += ["..."] * (len(examples) > SHOWN_NAMES)
        yield printable(f"  {len(examples):7,} {label}: {', '.join(names)}: {examples[0][1]}")
    if len(ordered) > SHOWN_PROBLEMS:
        yield f"  ... and {len(ordered) - SHOWN_PROBLEMS:,} more kinds"


# ---- files


def save_report(report: CheckReport, json_path: Path | None = None, html_path: Path | None = None) -> None:
    """Write the report to the given paths, atomically. Raise WandsError if a file cannot be written."""
    if json_path is not None:
        write_text(json_path, report.to_json())
    if html_path is not None:
        write_text(html_path, render_check_page(report))


def render_check_page(report: CheckReport) -> str:
    """Return an HTML page with the report and its thumbnails. Values are escaped, and paths have no user names."""
    from markupsafe import Markup
    from rich import filesize

    from wands.report.page import render

    totals = report.totals()
    bars = count_lengths(report.tokens) if report.samples else []
    return render(
        Path(__file__).parent,
        "check.html",
        report=report,
        settings=_settings(report),
        totals=totals,
        format_seconds=format_seconds,
        format_bytes=filesize.decimal,
        bars=bars,
        most=max((count for _, count in bars), default=1),
        columns=[(name, text, *_histogram(report, name)) for name, text in report.column_texts().items()],
        problems=report.problems()[:SHOWN_PROBLEMS],
        buttons=[("all", len(report.clips)), *((verdict, totals[verdict]) for verdict in VERDICTS)],
        verdicts=VERDICTS,
        clips=report.clips[:MAX_ROWS],
        num_omitted=len(report.clips) - MAX_ROWS,
        describe_source=describe_source,
        describe_footage=describe_footage,
        shown_key=shown_key,
        base64=lambda data: Markup(base64.b64encode(data).decode()),
    )


def _histogram(report: CheckReport, name: str) -> tuple[list[float], list[float]]:
    """Return (heights of the bars from 0 to 1, positions of the thresholds) of a numeric column.

    A threshold is a number with which --where compares the column; its position is from 0 to `NUM_BARS`.
    """
    values = report.columns[name]
    marks = [number for column, number in report.thresholds if column == name]
    # Halves: the difference of two large numbers may be infinite.
    places = np.array([*values, *marks]) / 2 - values[0] / 2
    places *= NUM_BARS / (max(values[-1] / 2 - values[0] / 2, 1e-290))
    bars = np.bincount(places[: len(values)].astype(int).clip(0, NUM_BARS - 1), minlength=NUM_BARS)
    return (bars / bars.max()).tolist(), places[len(values) :].clip(0, NUM_BARS).tolist()


def _settings(report: CheckReport) -> str:
    spec = report.spec
    bounds = " and ".join(f"{pixels:,}" for pixels in (spec.max_pixels or 0, *spec.more_pixels))
    size = f"{spec.width}x{spec.height}" if spec.height else f"at most {bounds} pixels"
    frames = f"at most {spec.max_frames} frames" if spec.max_frames else "whole clips"
    return f"{spec.fps:g} fps, {size}, {frames}, {spec.clip_mode}"
