"""HTML page of one or several training runs: one file that needs no network access, with SVG charts and embedded videos.

The template `page.html` decides which values of a run (see `read_run`) each chart shows.
"""

from __future__ import annotations

import base64
import io
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np
import yaml
from markupsafe import Markup
from PIL import Image

from wands.config.options import ReportOptions
from wands.data.clips.clip import ClipSpec
from wands.data.clips.isolated import IsolatedWorker
from wands.data.clips.video import decode_clip
from wands.errors import ConfigError, one_line
from wands.files import write_text
from wands.report.run_data import (
    IMAGE_KINDS,
    VIDEO_KINDS,
    column,
    describe_start,
    extremes,
    find_file,
    is_learning,
    read_run,
    smooth,
    thin,
)
from wands.texts import format_seconds, safe_lines, without_paths

_log = logging.getLogger(__name__)
PAGE_NAME = "report.html"
MAX_POINTS = 600
"""Largest number of points of a curve. `extremes` chooses the points of longer curves."""
MAX_VIDEO_BYTES = 20_000_000
"""Largest total size of the embedded videos as base64, in bytes. The page links to the other videos."""
MAX_COLUMNS = 8
"""Largest number of columns, one for each step and run, in the table of sample videos."""


def report(options: ReportOptions) -> Path:
    """Run `wands report`: write the page of a run, or a page that compares runs, and return its path.

    Raises:
        ConfigError: if a folder is not a run folder.
    """
    runs = [read_run(folder) for folder in options.runs]
    for run in runs:
        if not (run["recipe"] or run["events"] or run["metrics"]):
            raise ConfigError(
                f"RUNS {run['folder']} is not a run folder (it contains none of recipe.yaml, events.jsonl and metrics.jsonl); "
                "give the output_dir of a training run."
            )
    runs = [run | {"thumbnails": _clip_thumbnails(run)} for run in runs]
    out = options.out or options.runs[0] / (PAGE_NAME if len(runs) == 1 else "comparison.html")
    write_text(out, render_page(runs, out.resolve().parent))
    return out


def write_report(run_folder: Path) -> None:
    """Write `report.html` into a run folder. A failure is only logged as a warning.

    Rank 0 calls this function after each evaluation, after sample videos are made, and when the training ends or stops.
    """
    page = run_folder / PAGE_NAME
    try:
        write_text(page, render_page([read_run(run_folder)], run_folder))
    except Exception as error:  # a page is never worth a run
        _log.warning("%s cannot be written (%s); the training continues.", page, one_line(error))


def render(folder: Path, template: str, **values: Any) -> str:
    """Render a Jinja template with the variables `values`. They are HTML-escaped; secrets and user names are removed.

    The template is in `folder`, and may include templates of this module's folder.
    """
    return _template(folder, template).render(number="{:,}".format, **values)


@cache
def _template(folder: Path, name: str) -> jinja2.Template:
    """Return a cached template: a run renders its page many times, and compiling takes longer than rendering."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: safe_lines(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    return environment.get_template(name)


def render_page(runs: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Return the HTML page of the given results of `read_run`. It links only to videos inside `folder`, where it will be.

    A result may also have the key `thumbnails`: a WebP image in base64 for each sample id in events.jsonl.
    """
    return render(
        Path(__file__).parent,
        "page.html",
        runs=runs,
        verdicts=list(map(is_learning, runs)),
        recipes=[yaml.safe_dump(without_paths(run["recipe"]), sort_keys=False) for run in runs],
        grid=_sample_grid(runs, folder),
        chart=_chart,
        column=column,
        smooth=smooth,
        thin=thin,
        duration=format_seconds,
        clean=without_paths,
    )


def _chart(curves: Sequence[tuple[Any, ...]]) -> dict[str, Any] | None:
    """Compute the coordinates and labels of an SVG chart of 1000 x 300 units; None if no curve has a finite y.

    Args:
        curves: (name, CSS classes, x, y) or, with a band, (name, CSS classes, x, y, low, high) of each curve. For a curve with
            the class "clipped", the y axis ignores the lowest and the highest 2 % of the values.

    Returns:
        "start" and "end" (range of x), "steps" and "ticks" (labels of the x and the y axis), and "lines": (name, CSS classes, SVG
            points, SVG outline of the band or "", x texts, y texts) of each curve. The texts are the values at the points.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = []
    for name, style, *values in curves:
        x, y, *band = (np.asarray(part, np.float64) for part in values)
        if (known := np.isfinite(y)).any():
            drawn.append((name, style, x[known], y[known], [part[known] for part in band]))
    if not drawn:
        return None
    shown = [np.quantile(y, (0.02, 0.98)) if "clipped" in style else y for _, style, _, y, _ in drawn]
    limits = np.concatenate([*shown, *(part[np.isfinite(part)] for *_, band in drawn for part in band)])
    ticks = MaxNLocator(4).tick_values(limits.min(), limits.max())
    start, end = (float(pick([pick(x) for _, _, x, *_ in drawn])) for pick in (min, max))
    end = end if end > start else start + 1

    def place(x: np.ndarray, y: np.ndarray) -> Markup:
        down = np.clip(300 * (ticks[-1] - y) / (ticks[-1] - ticks[0]), -300, 600)
        points = zip(1000 * (x - start) / (end - start), down, strict=True)
        return Markup(" ".join(f"{across:.1f},{down:.1f}" for across, down in points if down == down))

    lines = []
    for name, style, x, y, band in drawn:
        at = extremes(y, MAX_POINTS)
        x = x[at]
        y = y[at]
        outline = place(np.append(x, x[::-1]), np.append(band[0][at], band[1][at][::-1])) if band else ""
        texts = (Markup(" ".join(map(form.format, part))) for part, form in ((x, "{:.9g}"), (y, "{:.5g}")))
        lines.append((name, style, place(x, y), outline, *texts))
    steps = [tick for tick in MaxNLocator(5).tick_values(start, end) if start <= tick <= end]
    return {"start": start, "end": end, "ticks": ticks, "steps": steps, "lines": lines}


def _sample_grid(runs: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the table of sample videos, in which several runs are side by side at each step.

    Videos are embedded up to `MAX_VIDEO_BYTES`, those of the last step first.

    Returns:
        "steps": the columns. Several runs have those that all runs have sampled, if there are two or more.
        "prompts": key and text of each row.
        "start": description of the weights at step 0.
        "cells": maps (key of the prompt, step, index of the run) to the rows of samples.jsonl, each with a "label" of the
            weights, an "image" (data URI or None) and a "link" (URI of the video, or "" if it is neither embedded nor inside
            `folder`).
    """
    starts = [describe_start(run["recipe"]) for run in runs]
    of_runs = [{row["step"] for row in run["samples"]} for run in runs]
    common = set.intersection(*of_runs)
    found = sorted(common if len(common) > 1 else set.union(*of_runs))
    steps = thin(found, max(MAX_COLUMNS // len(runs), 2))
    rows = [(row, i) for i, run in enumerate(runs) for row in run["samples"] if row["step"] in steps]
    prompts = {_prompt_key(row): row.get("prompt") or "" for row, _ in rows}
    cells: dict[Any, dict[str, Any]] = defaultdict(dict)
    left = MAX_VIDEO_BYTES
    place = folder.resolve()
    for row, i in sorted(rows, key=lambda item: (item[0]["step"] != steps[-1], item[0]["step"])):
        root = runs[i]["folder"]
        image = find_file(root, row.get("thumbnail"), IMAGE_KINDS)
        video = find_file(root, row.get("video"), VIDEO_KINDS)
        size = video.stat().st_size * 4 // 3 if video else 0
        link = ""
        if video and size <= left:
            link = _data_uri(video)
            left = left - size
        elif video and video.is_relative_to(place):
            link = quote(video.relative_to(place).as_posix())
        label = starts[i][0] if row["step"] == 0 else {"ema": "EMA"}.get(row["weights"], "weights")
        shown = {"label": label, "image": image and _data_uri(image), "link": link}
        cells[_prompt_key(row), row["step"], i][row["weights"]] = row | shown
    texts = list(dict.fromkeys(text for _, text in starts))
    start = texts[0] if len(texts) == 1 else "each run before its training"
    return {"steps": steps, "prompts": prompts, "cells": cells, "start": start}


def _prompt_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("number"), row.get("prompt"), repr(row.get("seed"))


def _clip_thumbnails(run: Mapping[str, Any]) -> dict[str, Markup]:
    """Return the first frame, as WebP in base64, of at most 24 clips of the latest bad updates and spikes, by sample id.

    Clips that are not on this machine or cannot be read are left out. A damaged file may crash or hang the decoder, so the files
    are decoded in a subprocess.
    """
    from wands.data.cache.reader import LatentCache  # imports torch, which `wands check` does not need

    clips = (clip for event in reversed(run["events"]) for clip in event.get("clips", ()))
    names = {*list(dict.fromkeys(clip.get("sample_id") for clip in clips))[:24]} - {None}
    data = run["recipe"].get("data") or {}
    metas = dict[str, Any]()
    images = dict[str, Markup]()
    sources: list[Any] = [{"path": data.get("cache")}]
    if isinstance(data.get("sources"), list):
        sources = data["sources"]
    for source in sources if names else ():
        with suppress(Exception):  # thumbnails are never worth an error
            cache = LatentCache(source["path"])
            for i, key in enumerate(cache.keys):
                # If several caches have the key, the first cache has the sample id without a checksum (`CombinedDataset`).
                for name in names & {key, f"{key}#{cache.checksums[i]:08x}"}:
                    metas.setdefault(name, cache.meta(i))
    with closing(IsolatedWorker([decode_clip.__module__])) as worker:
        for name, meta in metas.items():
            with suppress(Exception):
                video = Path(meta["source"]), ClipSpec(fps=meta["fps"], max_pixels=256 * 144, max_frames=1)
                (clip,) = worker.run(decode_clip, *video, meta["start_seconds"], limit_seconds=10.0)
                Image.fromarray(clip.frames[0]).save(file := io.BytesIO(), "webp")
                images[name] = Markup(base64.b64encode(file.getvalue()).decode())
    return images


def _data_uri(path: Path) -> Markup:
    kind = {**IMAGE_KINDS, **VIDEO_KINDS}[path.suffix]
    return Markup(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")
