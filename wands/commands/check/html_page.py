"""The page of `wands check --html`: one file without network access, sorted and filtered in the browser."""

from __future__ import annotations

import base64
import itertools

import jinja2
import numpy as np

from wands.commands.check.check_report import SHOWN_PROBLEMS, VERDICTS, CheckReport, describe_source

MAX_ROWS = 5000
"""Clips on one page. Rejected clips come first, then clips with warnings. The JSON file contains all clips."""


def render_page(report: CheckReport) -> str:
    """Return the report as one HTML file with its thumbnails. File names and captions are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    totals = report.totals()
    return environment.get_template("report.html").render(
        report=report,
        settings=_settings(report),
        cards=[
            (f"{totals['clips']:,}", "clips"),
            (f"{totals['rejected']:,}", "rejected"),
            (f"{totals['warned']:,}", "with warnings"),
            (f"{totals['samples']:,}", "samples"),
            (_duration(totals["seconds_of_video"]), "of video"),
            (f"{totals['tokens']:,}", "tokens"),
            (_size(totals["cache_bytes"]), "cache, about"),
        ],
        bars=_bars(report.tokens) if report.samples else [],
        training=_training(report),
        problems=report.problems()[:SHOWN_PROBLEMS],
        buttons=[("all", len(report.clips)), *((verdict, totals[verdict]) for verdict in VERDICTS)],
        verdicts=VERDICTS,
        clips=report.clips[:MAX_ROWS],
        num_omitted=len(report.clips) - MAX_ROWS,
        describe_source=describe_source,
        number="{:,}".format,
        base64=lambda data: base64.b64encode(data).decode(),
    )


def _settings(report: CheckReport) -> str:
    spec = report.spec
    bounds = " and ".join(f"{pixels:,}" for pixels in (spec.max_pixels or 0, *report.more_pixels))
    size = f"{spec.width}x{spec.height}" if spec.height else f"at most {bounds} pixels"
    frames = f"at most {spec.max_frames} frames" if spec.max_frames else "whole clips"
    return f"{spec.fps:g} fps, {size}, {frames}, {spec.clip_mode}"


def _training(report: CheckReport) -> list[tuple[str, str]]:
    exact = "counted by the model's tokenizer"
    rows = [("caption tokens", exact if report.exact_text else "estimated; --model counts them exactly")]
    plan = report.packing
    if plan is None or plan.problem:
        return [*rows, ("packing", plan.problem if plan else "no sample")]
    return [
        *rows,
        ("bins", f"{plan.max_tokens:,} tokens, {plan.bins_per_step:,} per step"),
        ("fill", f"{plan.fill:.1%}"),
        ("steps per epoch", f"{plan.steps_per_epoch:,}"),
    ]


def _bars(tokens: np.ndarray) -> list[tuple[str, str, int]]:
    """Return label, width in percent, and number of samples of each histogram bar."""
    counts, edges = np.histogram(tokens, bins=min(12, max(1, len(np.unique(tokens)))))
    labels = [f"{low:,.0f} - {high:,.0f}" for low, high in itertools.pairwise(edges)]
    if len(counts) == 1:
        labels = [f"{tokens[0]:,}"]
    return [
        (label, f"{100 * count / counts.max():.1f}", int(count))
        for label, count in zip(labels, counts, strict=True)
    ]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.4g} TB"
