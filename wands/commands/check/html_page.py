"""HTML page of `wands check --html`.

The page is one file that needs no network access. The browser sorts and filters the clips.
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
from markupsafe import Markup
from rich import filesize

from wands.commands.check.check_report import SHOWN_PROBLEMS, VERDICTS, CheckReport, describe_source
from wands.commands.length_histogram import count_lengths
from wands.report.page import render
from wands.texts import format_seconds

NUM_BARS = 30
"""Number of bars of the histogram of a column."""
MAX_ROWS = 5000
"""Largest number of clips on the page. Rejected clips are first, then clips with warnings.

The JSON file of `wands check --json` contains all clips.
"""


def render_page(report: CheckReport) -> str:
    """Return the text of an HTML page with the report and its thumbnails.

    File names and captions are escaped, so that they cannot contain HTML. In paths, the name of the user is removed.
    """
    exact = "counted by the model's tokenizer"
    totals, bars = report.totals(), count_lengths(report.tokens) if report.samples else []
    return render(
        Path(__file__).parent,
        "check.html",
        report=report,
        settings=_settings(report),
        cards=[
            (f"{totals['clips']:,}", "clips"),
            (f"{totals['rejected']:,}", "rejected"),
            (f"{totals['warned']:,}", "with warnings"),
            (f"{totals['samples']:,}", "samples"),
            (format_seconds(totals["seconds_of_video"]), "of video"),
            (f"{totals['tokens']:,}", "tokens"),
            (filesize.decimal(totals["cache_bytes"]), "cache, about"),
        ],
        bars=bars,
        most=max((count for _, count in bars), default=1),
        columns=[(name, text, *_histogram(report, name)) for name, text in report.column_texts().items()],
        training=[
            ("caption tokens", exact if report.exact_text else "estimated; --model counts them exactly"),
            ("packing", report.packing_text()),
        ],
        problems=report.problems()[:SHOWN_PROBLEMS],
        buttons=[("all", len(report.clips)), *((verdict, totals[verdict]) for verdict in VERDICTS)],
        verdicts=VERDICTS,
        clips=report.clips[:MAX_ROWS],
        num_omitted=len(report.clips) - MAX_ROWS,
        describe_source=describe_source,
        base64=lambda data: Markup(base64.b64encode(data).decode()),
    )


def _histogram(report: CheckReport, name: str) -> tuple[list[float], list[float]]:
    """Return the histogram of a numeric column of the clips' table.

    Args:
        report: report that contains the column.
        name: name of the column.

    Returns:
        A pair. The first list contains the height of each bar, from 0 to 1. The second list contains the horizontal position,
        from 0 to `NUM_BARS`, of each number in `report.thresholds` for this column. The second list may be empty.
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
