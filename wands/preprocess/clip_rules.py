"""Settings, limits and messages with which `wands check` and `wands preprocess` accept and reject the same clips."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from wands.config.options import ClipOptions
from wands.data.clips.captions import add_trigger
from wands.data.clips.clip import ClipSpec, plan_windows
from wands.data.clips.filters import Filter
from wands.data.clips.isolated import Crash
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord, Rejection
from wands.variants import Variant

LIMIT_SECONDS = 300.0
"""Decoding time after which a clip is rejected: of the whole clip in `wands check`, of each window in `wands preprocess`."""
NO_MEMORY = "clip does not fit into memory; lower --max-frames or --max-pixels"
Footage = tuple[float, float, float]
"""Three lengths of a clip in seconds: used by its samples, whole, and used by samples of --clip-mode slide."""
EMPTY_CAPTION = "caption is empty after cleaning; write a caption"


def crash_reason(path: object, crash: Crash) -> str:
    """Return the rejection reason for a clip whose decoder crashed or exceeded the time limit."""
    return f"video={path} cannot be decoded: {crash}; replace or re-encode the file"


def no_access_reason(path: object, error: str) -> str:
    """Return the rejection reason for a clip whose file cannot be opened. `error` is the system's text."""
    return f"video={path} cannot be read ({error}); fix the permissions of the file"


def read_source(options: ClipOptions, **more: object) -> tuple[list[ClipRecord], list[Rejection]]:
    """List the clips of the source that `options` names. `more` are keyword arguments of `load_source`.

    Returns:
        (records, rejections). A usable clip has one record for each of its captions, with the word of --trigger. A clip that
        fails --where has records, too, with the reason in their attribute `unmet`.

    Raises:
        ConfigError: if the condition of --where is invalid, or names a column that no clip has.
        DataError: if the source does not exist or contains no clip.
    """
    where = None if options.where is None else Filter(options.where)
    columns = where.columns if where else ()
    chosen = options.model_dump(include={"split", "video_column", "caption_column"})
    records, rejections = load_source(options.source, other_columns=columns, **chosen, **more)
    records = where.mark(records) if where else records
    if options.trigger:
        records = [replace(row, caption=add_trigger(row.caption, options.trigger)) for row in records]
    return records, rejections


def plan_samples(options: ClipOptions, variant: Variant) -> ClipSpec:
    """Return frame rate, size and length of the samples that the options request.

    Raises:
        ConfigError: if an option is invalid or options exclude each other.
    """
    first, *more = options.max_pixels or (None,)
    others = options.model_dump(include={"fps", "height", "width", "center_crop", "max_frames", "clip_mode"})
    return ClipSpec.of_variant(variant, max_pixels=first, more_pixels=tuple(more), **others)


def measure_footage(spec: ClipSpec, num_frames: Iterable[int], present: float) -> Footage:
    """Return how much of a clip of `present` seconds becomes samples, whose windows have `num_frames` frames."""
    used = sum(num_frames) / spec.fps
    windows = plan_windows(replace(spec, clip_mode="slide"), 0.0, present) if spec.max_frames else ()
    with_slide = max(used, sum(frames for _, frames in windows) / spec.fps)
    return min(used, present), present, min(with_slide, present)


def describe_footage(footage: Sequence[float]) -> str:
    """Return a text such as "uses 5.1 of 55.1 s; --clip-mode slide would use 54.9 s".

    The second part is left out if --clip-mode slide would not use more.
    """
    used, present, with_slide = footage
    more = f"; --clip-mode slide would use {with_slide:,.1f} s" if with_slide > used else ""
    return f"uses {used:,.1f} of {present:,.1f} s{more}"


def count_problems(problems: Iterable[tuple[str, str]]) -> list[tuple[str, int]]:
    """Return (kind of problem, number) for each kind in (path of the clip, text) pairs, the most frequent first."""
    return Counter(problem_kind(*problem) for problem in problems).most_common()


def problem_kind(path: str, text: str) -> str:
    """Return the text of a warning or rejection of a clip without numbers and names, which differ between clips."""
    if "--where requires " in text:
        return text[text.index("--where requires ") :]  # without the cells of the clip
    text = re.sub(r"=\S+", "", text.removeprefix(f"video={path} "))
    return re.split(r"[;:(]|\s(?=\S*\d)", text)[0].strip()
