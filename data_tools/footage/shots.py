"""The command `wands split`: find the shots of films, and write a table with one row for each shot.

A shot longer than --max-seconds gets several rows, one shorter than --min-seconds none. Films are never re-encoded. A file such
as shots.films.jsonl, next to the table shots.csv, stores the parts of each film (see `KINDS`), so that a later call with the same
--out decodes only new and changed films.
"""

from __future__ import annotations

import base64
import io
import itertools
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.footage.analysis import analyse_clips, identify
from wands.config.options import SplitOptions
from wands.data.clips.file_kinds import IMAGE_EXTENSIONS
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord
from wands.data.clips.tables import check_out, table_row, write_table
from wands.data.clips.video_file import open_video
from wands.errors import ConfigError, DataError
from wands.files import write_text
from wands.texts import plural, safe_lines

Part = dict[str, Any]
VERSION = 1
"""Version of the results of `find_parts`. Films with stored results of another version are decoded again."""
KINDS = ("kept", "transition", "black", "static", "unreadable", "too short", "left over")
"""Kinds of parts of a film. A kept part becomes a row of the table. A transition is a dissolve or a fade. "left over" is the rest
of a shot after windows of --max-seconds, if it is shorter than --min-seconds; "too short" is a whole shot that is shorter."""
# a frame is black if this share of its pixels is darker
BLACK_LUMA = 32
BLACK_SHARE = 0.98
# a part is static if no pixel of its small frames changes by more
STATIC_SECONDS = 1.0
STATIC_CHANGE = 3
LINEAR_SECONDS = (0.16, 0.32, 0.64)  # half of the lengths over which a dissolve changes each pixel linearly
# smallest change over such a length, and largest deviation from a line
MIN_CHANGE = 10.0
MAX_BEND = 0.15
BORDER_LUMA = 32
BORDER_FILM_SECONDS = 3.0  # shortest total length of the shots with equal borders
BORDER_SECONDS = 0.5  # seconds between two frames that are searched for black borders


def find_parts(film: ClipRecord) -> Iterator[Part]:
    """Decode a film, and find its shots, transitions, and black, static and unreadable parts.

    Yield {} after every 100 frames, to show progress, and at the end {"parts": list}, or {"reason": text} if the film cannot be
    decoded. A part has start and end in seconds, kind ("shot", "transition", "black", "static" or "unreadable") and crop, the
    area without black borders as "x,y,width,height", or "". A shot also has an image (JPEG in base64).

    Raises:
        ConfigError: if PySceneDetect is missing.
    """
    try:
        from scenedetect import AdaptiveDetector, FrameTimecode
    except ImportError:
        raise ConfigError("wands split needs PySceneDetect; run pip install 'wands[footage]'") from None
    # The default, 15, misses cuts of black-and-white films, in which only one of three color components changes.
    detector = AdaptiveDetector(min_scene_len=1, min_content_val=8.0)
    cuts: set[int] = set()
    times: list[float] = []
    small: list[np.ndarray] = []
    bad: list[bool] = []
    # Frame number, largest luma of each column, largest luma of each row, small image.
    samples: list[tuple[int, Any, Any, Any]] = []
    try:
        with open_video(film.path) as reader:
            info = reader.info
            for index, frame in enumerate(reader.frames(0)):
                rgb = frame.image.reformat(128, 72, "rgb24", interpolation="AREA", threads=1).to_ndarray()
                new_cuts = detector.process_frame(FrameTimecode(index, 25.0), rgb[..., ::-1])
                cuts.update(cut.frame_num for cut in new_cuts)
                if frame.after_loss and bad:
                    bad[-1] = True
                size = frame.image.width, frame.image.height
                bad.append(frame.damaged or size != (info.width, info.height))
                small.append(rgb.reshape(18, 4, 32, 4, 3).mean((1, 3)).astype(np.uint8))
                # A timestamp that runs backwards: `wands check` rejects the clip with this reason.
                times.append(max(frame.time, times[-1] if times else frame.time))
                if not bad[-1] and (not samples or frame.time >= times[samples[-1][0]] + BORDER_SECONDS):
                    luma = np.rot90(frame.image.reformat(format="gray").to_ndarray(), info.rotation // 90)
                    luma = luma[:, ::-1] if info.mirrored else luma
                    samples.append((index, luma.max(0), luma.max(1), rgb))
                end = max(frame.end, times[-1])
                if index % 100 == 99:
                    yield {}
    except DataError as error:
        yield {"reason": str(error)}
        return
    labels = _label_frames(np.stack(small), [*times, end], bad)
    if info.duration > end + reader.tolerance(info.duration):  # the file is truncated
        labels = [*labels, "unreadable"]
        times = [*times, end]
        end = info.duration
    times.append(end)
    parts = []
    first = 0
    shots = np.cumsum([index in cuts for index in range(len(labels))])
    for (kind, _), group in itertools.groupby(zip(labels, shots, strict=True)):
        last = first + len(list(group))
        part: Part = {"start": times[first], "end": times[last], "kind": kind, "crop": ""}
        if kind == "shot" and (inside := [sample for sample in samples if first <= sample[0] < last]):
            sides = [np.max([sample[axis] for sample in inside], axis=0) for axis in (1, 2)]
            scale = (info.sar, 1)[:: -1 if info.rotation % 180 else 1]
            Image.fromarray(inside[len(inside) // 2][3]).save(jpeg := io.BytesIO(), "JPEG")
            part |= {"crop": _crop(*sides, *scale), "image": base64.b64encode(jpeg.getvalue()).decode()}
        parts.append(part)
        first = last
    _keep_frequent_crops(parts, times[-1] - times[0])
    yield {"parts": parts}


def _keep_frequent_crops(parts: Sequence[Part], film_seconds: float) -> None:
    """Remove the crop of parts whose borders are rare in the film."""
    # A dark shot may look like a shot with borders; a film has the same borders for some time.
    lengths: Counter[str] = Counter()
    for part in parts:
        lengths[part["crop"]] += part["end"] - part["start"]
    for part in parts:
        if lengths[part["crop"]] < min(BORDER_FILM_SECONDS, film_seconds / 2):
            part["crop"] = ""


def _label_frames(small: np.ndarray, times: Sequence[float], bad: Sequence[bool]) -> list[str]:
    """Return the kind of each frame, as in `find_parts`.

    `small` are the frames, scaled down, uint8 [F, 18, 32, 3]; `times` their starts in seconds, and the end of the last frame.
    """
    labels = np.full(len(small), "shot", dtype="<U10")
    rate = len(small) / (times[len(small)] - times[0])
    for half in {max(2, round(seconds * rate)) for seconds in LINEAR_SECONDS}:
        for middle in range(half, len(small) - half):
            steps = np.array([-half, -(half // 2), 0, half // 2, half])
            begin, *between, end = small[middle + steps].astype(np.float32)
            change = np.abs(end - begin).mean()
            if change < MIN_CHANGE:
                continue
            places = (steps[1:-1] + half) / (2 * half)
            line = begin + (end - begin) * places[:, None, None, None]
            if np.abs(between - line).mean((1, 2, 3)).max() < MAX_BEND * change:
                labels[middle - half : middle + half + 1] = "transition"
    first = 0
    for last in range(1, len(small) + 1):
        if last == len(small) or np.abs(small[last].astype(np.int16) - small[first]).max() > STATIC_CHANGE:
            if times[last] - times[first] >= STATIC_SECONDS:
                labels[first:last] = "static"
            first = last
    is_dark = small @ np.array([0.299, 0.587, 0.114], np.float32) < BLACK_LUMA
    labels[is_dark.mean((1, 2)) >= BLACK_SHARE] = "black"
    labels[np.array(bad)] = "unreadable"
    return [str(label) for label in labels]


def _crop(columns: np.ndarray, rows: np.ndarray, *scale: Any) -> str:
    """Return the crop that removes black borders, as "x,y,width,height" in displayed pixels; "" if no border is removed.

    Opposite borders are removed only if their widths are about equal. `columns` and `rows` are the largest luma of each over the
    upright frames of a shot; `scale` is the displayed width and height of a pixel.
    """
    spans = []
    for luma, factor in zip((columns, rows), scale, strict=True):
        bright = np.flatnonzero(luma > BORDER_LUMA)
        first, last = (int(bright[0] + 1) // 2 * 2, int(bright[-1] + 1) // 2 * 2) if len(bright) else (0, 0)
        if abs(first - (len(luma) - last)) > 0.02 * len(luma) or last - first > 0.98 * len(luma):
            first = 0
            last = len(luma)
        spans.append((round(first * factor), int((last - first) * factor), last - first == len(luma)))
    (x, width, all_columns), (y, height, all_rows) = spans
    return "" if all_columns and all_rows else f"{x},{y},{width},{height}"


def split(options: SplitOptions) -> str:
    """Run `wands split`: write the table of shots, and return a summary with the seconds of each kind of part for each film.

    Raises:
        ConfigError: if an option is invalid.
        DataError: if the source has no film, or no film has a shot.
    """
    out = options.out
    check_out(out, options.source)
    if options.min_seconds > options.max_seconds:
        raise ConfigError(
            f"--min-seconds={options.min_seconds:g} is more than --max-seconds={options.max_seconds:g}; lower --min-seconds"
        )
    records, rejections = load_source(options.source, needs_caption=False)
    ranges = {(r.path, r.start, r.end): r for r in records if not r.name.lower().endswith(IMAGE_EXTENSIONS)}
    names = {record.path: identify(record.path, VERSION) for record in ranges.values()}
    whole_films = {names[record.path]: replace(record, row={}) for record in ranges.values()}
    store = out.with_suffix(".films.jsonl")
    results, _ = analyse_clips(find_parts, whole_films, store, options.num_workers)
    failed = {item.path: item.reason for item in rejections}
    rows = []
    lines = []
    films = []
    for record in sorted(ranges.values(), key=lambda record: record.key):
        result = results[names[record.path]]
        if "reason" in result:
            failed[str(record.path)] = result["reason"]
            continue
        pieces = list(_pieces(result["parts"], record, options))
        totals = dict.fromkeys(KINDS, 0.0)
        for piece in pieces:
            totals[piece["kind"]] += piece["end"] - piece["start"]
            if piece["kind"] == "kept":
                # Rounded down: no frame of the next shot may begin before `end`.
                columns = {name: int(piece[name] * 1e6) / 1e6 for name in ("start", "end")}
                crop = ",".join(map(str, record.crop)) if record.crop else piece["crop"]
                rows.append(table_row(record, out, **columns, crop=crop, caption=""))
        seconds = sum(totals.values())
        films.append({"key": record.key, "seconds": seconds, "totals": totals, "pieces": pieces})
        text = ", ".join(f"{length:.2f} {kind}" for kind, length in totals.items() if length)
        lines.append(f"{record.key}: {seconds:.2f} s = {text}")
    lines += [f"rejected: {path}: {reason}" for path, reason in failed.items()]
    if not rows:
        reason = f"SOURCE={options.source} gives no shot; lower --min-seconds, or use other films"
        raise DataError("\n".join([reason, *lines]))
    # The user may have edited the table of an earlier call.
    earlier = next(
        path for n in itertools.count(1) if not (path := out.with_stem(f"{out.stem}.{n}")).exists()
    )
    if out.is_file():
        shutil.copyfile(out, earlier)
    write_table(out, rows)
    if earlier.exists() and earlier.read_bytes() == out.read_bytes():
        earlier.unlink()
    lines += [f"{out} has changed; its earlier version is {earlier}"] if earlier.exists() else []
    if options.html_path is not None:
        from wands.report.page import render

        values = {"source": options.source, "films": films, "kinds": KINDS, "failed": failed}
        write_text(options.html_path, render(Path(__file__).parent, "shots.html", **values))
    return safe_lines("\n".join([*lines, f"{plural(len(rows), 'clip')} in {out}"]))


def _pieces(parts: Sequence[Part], record: ClipRecord, options: SplitOptions) -> Iterator[Part]:
    """Yield the windows of at most --max-seconds of each shot in `parts`, and all other parts, within the range of `record`.

    A window gets the kind "kept", or, if it is shorter than --min-seconds, "too short" or "left over".
    """
    for part in parts:
        start = max(part["start"], record.start or 0.0)
        end = part["end"]
        rest = "too short"
        end = min(end, record.end or end)
        while start < end and part["kind"] == "shot":
            window = min(end - start, options.max_seconds)
            kind = "kept" if window > options.min_seconds - 1e-6 else rest
            yield part | {"start": start, "end": start + window, "kind": kind}
            start = start + window
            rest = "left over"
        if start < end:
            yield part | {"start": start, "end": end}
