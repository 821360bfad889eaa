"""`wands caption`: write captions for the clips of a source into a table.

Workers append the captions of each batch to logs in a folder next to the table, from which a killed command continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_tools.footage.caption_models import connect_captioner, load_captioner
from data_tools.footage.caption_text import clean_answer
from wands.config.options import CaptionOptions
from wands.data.clips.captions import add_trigger
from wands.data.clips.clip import ClipSpec
from wands.data.clips.filters import Filter
from wands.data.clips.isolated import Crash, map_isolated, run_in_threads
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord, Rejection
from wands.data.clips.tables import check_out, table_row, write_table
from wands.data.clips.video import decode_clip, probe
from wands.errors import ConfigError, DataError, WandsError
from wands.files import read_rows
from wands.lock import WriterLock
from wands.preprocess.clip_rules import LIMIT_SECONDS, crash_reason
from wands.preprocess.encoding import Devices
from wands.preprocess.progress import progress
from wands.preprocess.workers import Lost, WorkerPool
from wands.texts import plural

PROMPT = (
    "Describe this video in two to four sentences: the subjects, their actions, the place, the light and the camera. Write only "
    "the description."
)
_COLUMN = re.compile(r"\{([^{}]*)\}")


class CaptionSettings(NamedTuple):
    """Settings that all workers share. `work` is the folder of their log files."""

    options: CaptionOptions
    work: Path


def caption(options: CaptionOptions) -> str | None:
    """Caption the clips of a source, write the table, and return a summary. Return None on all ranks except rank 0.

    Raises:
        ConfigError: if an option is wrong, or the model or endpoint cannot be used.
        DataError: if the source contains no clip.
        WandsError: if a worker failed. The same command then continues with the remaining clips.
    """
    check_out(options.out, options.source)
    out = options.out.absolute()
    workers, device = (1, "cpu") if options.endpoint else (options.workers, options.device)
    with WorkerPool(workers, device, None) as pool:
        if pool.rank:
            pool.follow()
            return None
        with WriterLock(out.with_name(f".{out.name}.lock"), f"--out={options.out}") as lock:
            return _caption(options, pool, out, lock)


def _caption(options: CaptionOptions, pool: WorkerPool, out: Path, lock: WriterLock) -> str:
    records, rejections, num_left_out = _find_clips(options)
    rejected = _describe(rejections)
    is_inside = out.resolve().parent == Path(os.path.expanduser(options.source)).resolve()
    if is_inside and any(item.key.startswith(f"{out.name}:") for item in rejections):
        raise ConfigError(
            f"--out={options.out} is a table in the folder SOURCE, and replacing this table would delete its unreadable rows; "
            "choose another file"
        )
    _check_prompt(options.prompt, {name for record in records for name in record.row})
    earlier = load_source(str(out), needs_caption=False)[0] if out.exists() and not options.overwrite else []
    clips: dict[str, list[ClipRecord]] = {}
    for record in records:
        clips.setdefault(_identity(record), []).append(record)
    kept: dict[str, dict[str, None]] = {}
    for record in [] if options.overwrite else [*records, *earlier]:
        if record.caption:
            kept.setdefault(_identity(record), {})[record.caption] = None
    new = [group[0] for name, group in clips.items() if name not in kept]
    # Captions that differ only by these options belong together.
    exclude = {"source", "out", "where", "endpoint", "batch", "workers", "device", "timeout"}
    digest = hashlib.sha256(options.model_dump_json(exclude=exclude).encode()).hexdigest()[:16]
    settings = CaptionSettings(options, out.with_name(f".{out.name}.captions") / digest)
    settings.work.mkdir(parents=True, exist_ok=True)
    done = _read_logs(settings.work)
    size = 1 if options.endpoint else options.batch
    todo = [record for record in new if _identity(record) not in done]
    batches = [todo[index : index + size] for index in range(0, len(todo), size)]
    pool.limit(len(batches))
    reason = "a log is incomplete"
    with progress("clips", len(todo)) as advance:
        shares = {slot: batches[slot :: pool.size] for slot in range(pool.size)}
        for event in pool.run(caption_clips, settings, shares) if batches else ():
            reason = event.reason if isinstance(event, Lost) else reason
            advance()
    done = _read_logs(settings.work)
    if any(_identity(record) not in done for record in todo):
        raise WandsError(f"{reason}; finished captions are stored, so run the same command again")
    rows = []
    problems = Counter[str]()
    for name, group in clips.items():
        answer: Any = {"captions": kept[name]} if name in kept else done[name]
        problem = "" if answer["captions"] else answer["problem"]
        problems.update([problem.partition(" (")[0]] if problem else [])
        for index, text in enumerate(answer["captions"] or [""]):
            row = table_row(group[min(index, len(group) - 1)], out, caption=text)
            rows.append({**row, "caption_problem": problem})
    lock.check()
    write_table(out, rows)
    shutil.rmtree(settings.work.parent)
    num_new = len(new) - problems.total()
    counts = [f"{plural(num_new, 'clip')} captioned", f"{plural(len(clips) - len(new), 'caption')} kept"]
    counts += [f"{problems.total()} without caption", f"{len(rejections)} rows or files of SOURCE rejected"]
    counts += [] if options.where is None else [f"{num_left_out} left out by --where"]
    reasons = (f"{count} x {problem}" for problem, count in problems.most_common(10))
    return "\n".join([f"{out}: {', '.join(counts)}", *rejected, *reasons])


def _find_clips(options: CaptionOptions) -> tuple[list[ClipRecord], list[Rejection], int]:
    """Return the clips of SOURCE that meet --where, the rejections, and the number of clips that do not meet it."""
    where = None if options.where is None else Filter(options.where)
    columns = where.columns if where else ()
    found, rejections = load_source(options.source, needs_caption=False, other_columns=columns)
    if not found:
        lines = [
            f"SOURCE={options.source} has no clip to caption; correct these files:",
            *_describe(rejections),
        ]
        raise DataError("\n".join(lines))
    records = [record for record in where.mark(found) if not record.unmet] if where else found
    if not records:
        raise DataError(
            f"none of the {plural(len(found), 'clip')} of SOURCE meets --where {options.where}; change the condition"
        )
    return records, rejections, len(found) - len(records)


def _describe(rejections: Sequence[Rejection]) -> list[str]:
    return [f"rejected: {item.path}: {item.reason}" for item in rejections]


def _check_prompt(prompt: Sequence[str], columns: set[str]) -> None:
    if unknown := {*_COLUMN.findall("".join(prompt))} - columns:
        raise ConfigError(
            f"--prompt contains {{{min(unknown)}}}, which is not a column of SOURCE ({sorted(columns) or 'none'}); "
            "correct the name in braces"
        )


def _identity(record: ClipRecord) -> str:
    return f"{record.path}{record.range_suffix} {record.crop}"


def _read_logs(work: Path) -> dict[str, Any]:
    return {row["clip"]: row for log in sorted(work.glob("*.jsonl")) for row in read_rows(log)}


def caption_clips(
    settings: CaptionSettings, slot: int, devices: Devices, share: Sequence[Sequence[ClipRecord]]
) -> Iterator[str]:
    """Caption the batches in `share` as worker `slot`, append the results to a new log, and yield each clip's `_identity`."""
    options = settings.options
    batches = iter(share)
    prompts = options.prompt or (PROMPT,)
    ask = connect_captioner(options) if options.endpoint else load_captioner(options, devices.vae)

    def run() -> Iterator[list[dict[str, Any]]]:
        for batch in batches:  # shared by the threads: next() of a sequence's iterator is atomic
            items = [(record, options.frames, options.max_side) for record in batch]
            results = map_isolated(
                _read_spaced_frames, items, limit_seconds=LIMIT_SECONDS, preload=[__name__]
            )
            frames: dict[int, Any] = dict(results)
            rows: list[Any] = [{"clip": _identity(record), "captions": [], "problem": ""} for record in batch]
            for index, value in frames.items():
                if not isinstance(value, np.ndarray):
                    is_crash = isinstance(value, Crash)
                    rows[index]["problem"] = crash_reason(batch[index].path, value) if is_crash else value
            usable = [index for index, row in enumerate(rows) if not row["problem"]]
            for number in range(options.captions if usable else 0):
                name = f"{rows[usable[0]]['clip']} {number}"
                seed = zlib.crc32(name.encode()) if number >= len(prompts) else None
                texts = [_fill_prompt(prompts[number % len(prompts)], batch[index].row) for index in usable]
                answers = ask([frames[index] for index in usable], texts, seed)
                for index, answer in zip(usable, answers, strict=True):
                    row = rows[index]
                    text, row["problem"] = clean_answer(*answer)
                    text = add_trigger(text, options.trigger) if text and options.trigger else text
                    row["captions"] += [text] if text and text not in row["captions"] else []
            yield rows

    # Without an endpoint, one thread decodes while the model runs in the other.
    with (settings.work / f"{slot}-{time.time_ns()}.jsonl").open("a", encoding="utf-8") as log:
        for rows in run_in_threads([run() for _ in range(options.batch if options.endpoint else 2)]):
            log.write("".join(json.dumps(row) + "\n" for row in rows))
            log.flush()
            yield from (row["clip"] for row in rows)


def _fill_prompt(prompt: str, row: Mapping[str, object]) -> str:
    """Return the prompt with each column name in braces replaced by the value in `row`, or by "" if there is none."""
    return _COLUMN.sub(lambda match: "" if (value := row.get(match[1])) is None else str(value), prompt)


def _read_spaced_frames(item: tuple[ClipRecord, int, int]) -> np.ndarray | str:
    """Return evenly spaced frames of a clip, [F, H, W, 3], or the reason why it cannot be decoded.

    `item` is (clip, largest number of frames, square root of the largest number of pixels of a frame).
    """
    record, num_frames, max_side = item
    try:
        info = probe(record.path)
        seconds = (record.end or info.duration) - (record.start or 0.0)
        fps = min(info.fps, num_frames / seconds) if seconds > 0 else info.fps
        spec = ClipSpec(fps, max_pixels=max_side**2, max_frames=num_frames, size_multiple=2, frame_stride=1)
        return next(decode_clip(record.path, spec, record.start, record.end, crop=record.crop)).frames
    except DataError as error:
        return str(error)
