"""The command `wands measure`: measure motion, sharpness and brightness of clips, find near-duplicates, and write a table.

A file such as measured.measures.jsonl, next to the table measured.csv, stores the results, so that a later call with the same
--out decodes only new and changed clips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from data_tools.footage.analysis import analyse_clips, identify
from wands.config.options import MeasureOptions
from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord
from wands.data.clips.tables import check_out, table_row, write_table
from wands.data.clips.video import decode_clip
from wands.errors import ConfigError, DataError
from wands.texts import plural, safe_lines

VERSION = 1
"""Version of `measure_clip`. Clips with stored results of another version are decoded again."""
AREA = 399_360
"""Area in pixels (832 x 480) to which frames are scaled before their sharpness is measured. Frames keep their aspect ratio."""
SPEC = ClipSpec(fps=8.0, max_pixels=AREA, max_frames=16, clip_mode="slide", frame_stride=1)
"""Frames that are decoded to measure a clip: 8 frames per second, in windows of 2 seconds."""
QUANTILES = (5, 10, 25, 50)
"""Percentages of the clips for which the summary names the value below which they are, to choose the threshold of a --where."""
EMPTY = dict.fromkeys(("motion", "sharpness", "brightness", "duplicate_of"))
"""Values of the measured columns for a clip that cannot be decoded."""


def measure_clip(clip: ClipRecord) -> dict[str, Any]:
    """Measure the first 10 seconds of a clip.

    Return "hashes", 64-bit perceptual hashes of three frames, and "columns": motion (mean optical flow in frame widths per
    second; None for an image), sharpness (mean variance of the Laplacian of the luma) and brightness (mean luma, 0 to 1). For a
    clip that cannot be decoded, return only "reason".

    Raises:
        ConfigError: if OpenCV is missing.
    """
    try:
        import cv2
    except ImportError:
        raise ConfigError('wands measure needs OpenCV; run pip install "wands[footage]"') from None
    cv2.setNumThreads(1)
    frames: list[np.ndarray] = []
    try:
        for window in islice(decode_clip(clip.path, SPEC, clip.start, clip.end, clip.crop), 5):
            frames += [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in window.frames]
    except DataError as error:
        if not frames:  # otherwise, the part before the damage is measured
            return {"reason": str(error)}
    scale = (AREA / frames[0].size) ** 0.5
    large = [cv2.resize(frame, None, fx=scale, fy=scale) for frame in frames]
    small = [cv2.resize(frame, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA) for frame in large]
    flow: Any = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    steps = [np.linalg.norm(flow.calc(*pair, None), axis=2).mean() for pair in pairwise(small)]
    hashes = []
    for sixth in (1, 3, 5):
        tiny = cv2.resize(frames[len(frames) * sixth // 6], (32, 32), interpolation=cv2.INTER_AREA)
        waves = cv2.dct(tiny.astype(np.float32))[:8, :8].ravel()
        hashes.append(int(np.packbits(waves > np.median(waves)).view(np.uint64)[0]))
    motion = round(float(np.mean(steps)) * SPEC.fps / small[0].shape[1], 4) if steps else None
    sharpness = round(float(np.mean([cv2.Laplacian(frame, cv2.CV_32F).var() for frame in large])), 1)
    columns = {"motion": motion, "sharpness": sharpness, "brightness": round(float(np.mean(frames)) / 255, 4)}
    return {"hashes": hashes, "columns": columns}


def find_duplicates(hashes: Mapping[str, Sequence[int]], max_bits: int) -> dict[str, str]:
    """Return the most similar earlier clip of each near-duplicate clip, by name.

    A clip is compared only with earlier clips that are not near-duplicates. Two clips are near-duplicates if each of their three
    hashes differs in at most `max_bits` bits.
    """
    names: list[str] = []
    kept = np.empty((len(hashes), 3), np.uint64)
    found = {}
    for name, row in hashes.items():
        kept[len(names)] = row
        distances = np.bitwise_count(kept[: len(names)] ^ kept[len(names)]).max(axis=1)
        if (distances <= max_bits).any():
            found[name] = names[distances.argmin()]
        else:
            names.append(name)
    return found


def describe_quantiles(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each measured number, such as "motion of the clips: 5 % below 0.004, 10 % below 0.012"."""
    lines = []
    for name in ("motion", "sharpness", "brightness"):
        values = [row[name] for row in columns if row[name] is not None]
        if values:
            numbers = zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)
            shares = ", ".join(f"{percent} % below {value:.3g}" for percent, value in numbers)
            lines.append(f"{name} of the clips: {shares}")
    return lines


def measure_clips(options: MeasureOptions) -> str:
    """Run `wands measure`: write the table, and return a summary with the reason of each clip that cannot be measured.

    Raises:
        ConfigError: if --out does not end in .csv or .jsonl, --out is the source, or OpenCV is missing.
        DataError: if the source has no clip.
    """
    out = options.out
    check_out(out, options.source)
    records, rejections = load_source(options.source, needs_caption=False)
    lines = [f"rejected: {item.path}: {item.reason}" for item in rejections]
    if not records:
        raise DataError(
            "\n".join([f"SOURCE={options.source} has no clip to measure; correct these files:", *lines])
        )
    names = [identify(record.path, VERSION, record.start, record.end, record.crop) for record in records]
    clips: dict[str, ClipRecord] = {}
    for name, record in zip(names, records, strict=True):
        clips.setdefault(name, replace(record, row={}))  # a clip with several captions is measured once
    store = out.with_suffix(".measures.jsonl")
    results, num_decoded = analyse_clips(measure_clip, clips, store, options.num_workers)
    for name, clip in clips.items():
        if reason := results[name].get("reason"):
            lines.append(f"not measured: {clip.key}: {reason}")
    # By time, because keys are in the order of texts: 11.5 before 2.7.
    in_order = sorted(clips, key=lambda name: (str(clips[name].path), clips[name].start or 0.0))
    hashes = {name: results[name]["hashes"] for name in in_order if "hashes" in results[name]}
    found = find_duplicates(hashes, options.duplicate_bits)
    for name, first in found.items():
        results[name]["columns"]["duplicate_of"] = clips[first].key
    columns = [EMPTY | results[name].get("columns", {}) for name in names]
    write_table(out, [table_row(record, out, **row) for record, row in zip(records, columns, strict=True)])
    lines += describe_quantiles(columns)
    counts = f"{plural(num_decoded, 'clip')} decoded now, {plural(len(found), 'near-duplicate')}"
    return safe_lines("\n".join([*lines, f"{plural(len(records), 'row')} in {out}: {counts}"]))
