"""`wands caption`: write captions for the clips of a source into a table.

Workers append the captions of each batch to logs in a folder next to the table. After a kill, the same command reads the logs
and captions only the missing clips. The logs are removed when the table is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.footage.caption_models import connect_captioner, load_captioner
from data_tools.footage.caption_text import clean_answer
from wands.commands.clip_rules import LIMIT_SECONDS, crash_reason
from wands.commands.preprocess.encoding import Devices
from wands.commands.preprocess.workers import Lost, WorkerPool
from wands.commands.progress import progress
from wands.config.options import CaptionOptions
from wands.data.clips.captions import add_trigger
from wands.data.clips.clip import ClipSpec
from wands.data.clips.isolated import Crash, map_isolated, run_in_threads
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord
from wands.data.clips.tables import check_out, table_row, write_table
from wands.data.clips.video import decode_clip, probe
from wands.errors import ConfigError, DataError, WandsError
from wands.files import iter_rows
from wands.lock import WriterLock


@dataclass(frozen=True)
class CaptionSettings:
    """Settings that all workers share.

    Attributes:
        options: options of the command.
        work: folder of the workers' logs.
    """

    options: CaptionOptions
    work: Path


def caption(options: CaptionOptions) -> str | None:
    """Caption the clips of a source, write the table, and return a summary; None on other ranks than rank 0.

    Raises:
        ConfigError: if an option is wrong, or the model or endpoint cannot be used.
        DataError: if the source contains no clip.
        WandsError: if a worker failed. The same command then continues.
    """
    check_out(options.out, options.source)
    out = options.out.absolute()
    workers, device = (1, "cpu") if options.endpoint else (options.workers, options.device)
    with WorkerPool(workers, device, None) as pool:
        if pool.rank:
            pool.follow()
            return None
        with WriterLock(out.with_name(f".{out.name}.lock"), f"--out={options.out}"):
            return _caption(options, pool, out)


def _caption(options: CaptionOptions, pool: WorkerPool, out: Path) -> str:
    records, rejections = load_source(options.source, needs_caption=False)
    known = {name for record in records for name in record.row}
    for name in re.findall(r"\{([^{}]*)\}", "".join(options.prompt)):
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"--prompt contains {{{name}}}, which is not a column of SOURCE (columns: {names}); correct the name"
            )
    earlier = load_source(str(out), needs_caption=False)[0] if out.exists() and not options.overwrite else []
    clips: dict[str, list[ClipRecord]] = {}
    for record in records:
        clips.setdefault(_identity(record), []).append(record)
    kept: dict[str, list[str]] = {}
    for record in [] if options.overwrite else [*records, *earlier]:
        texts = kept.setdefault(_identity(record), [])
        if record.caption and record.caption not in texts:
            texts.append(record.caption)
    new = [group[0] for name, group in clips.items() if not kept.get(name)]
    size = 1 if options.endpoint else options.batch
    batches = [new[index : index + size] for index in range(0, len(new), size)]
    exclude = {"source", "out", "workers", "device", "timeout"}
    digest = hashlib.sha256(options.model_dump_json(exclude=exclude).encode()).hexdigest()[:16]
    settings = CaptionSettings(options, out.with_name(f".{out.name}.{digest}"))
    settings.work.mkdir(parents=True, exist_ok=True)
    done = _read_logs(settings.work)
    batches = [batch for batch in batches if any(_identity(record) not in done for record in batch)]
    pool.limit(len(batches))
    lost: list[Lost] = []
    with progress("clips", sum(map(len, batches))) as advance:
        shares = {slot: batches[slot :: pool.size] for slot in range(pool.size)}
        for event in pool.run(caption_clips, settings, shares) if batches else ():  # type: ignore[arg-type]
            lost += [event] if isinstance(event, Lost) else []
            advance()
    if lost:
        raise WandsError(f"{lost[0].reason}; run the same command again, finished captions are stored")
    done = _read_logs(settings.work)
    rows, problems = [], Counter[str]()
    for name, group in clips.items():
        answer = done.get(name, {}) if not kept.get(name) else {}
        problem = str(answer.get("problem", ""))
        problems[problem.partition(" (")[0]] += bool(problem)
        for index, text in enumerate(kept.get(name) or answer.get("captions") or [""]):
            row = table_row(group[min(index, len(group) - 1)], out, caption=text)
            rows.append({**row, "caption_problem": "" if text else problem})
    write_table(out, rows)
    shutil.rmtree(settings.work)
    num_new = sum(bool(done.get(_identity(record), {}).get("captions")) for record in new)
    counts = [f"{len(new) - num_new} without caption", f"{len(rejections)} rows or files of SOURCE rejected"]
    lines = [f"{out}: {num_new} clips captioned, {len(clips) - len(new)} captions kept, {', '.join(counts)}"]
    return "\n".join(
        [*lines, *(f"{count} x {problem}" for problem, count in problems.most_common(10) if count)]
    )


def _identity(record: ClipRecord) -> str:
    return f"{record.path}{record.range_suffix} {record.crop}"


def _read_logs(work: Path) -> dict[str, Any]:
    return {row["clip"]: row for log in sorted(work.glob("*.jsonl")) for row in iter_rows(log)}


def caption_clips(
    settings: CaptionSettings, slot: int, devices: Devices, share: Sequence[Sequence[ClipRecord]]
) -> Iterator[str]:
    """Caption batches of clips, append the results to a new log, and yield the identity of each finished clip."""
    options, batches = settings.options, iter(share)
    ask = connect_captioner(options) if options.endpoint else load_captioner(options, devices.vae)

    def run() -> Iterator[list[dict[str, Any]]]:
        for batch in batches:  # shared by the threads: next() of a sequence's iterator is atomic
            items = [(record, options.frames, options.max_side) for record in batch]
            frames: dict[int, Any] = dict(
                map_isolated(_read_frames, items, limit_seconds=LIMIT_SECONDS, preload=[__name__])
            )
            rows: list[dict[str, Any]] = [
                {"clip": _identity(record), "captions": [], "problem": ""} for record in batch
            ]
            for index, value in frames.items():
                if not isinstance(value, np.ndarray):
                    is_crash = isinstance(value, Crash)
                    rows[index]["problem"] = crash_reason(batch[index].path, value) if is_crash else value
            usable = [index for index, row in enumerate(rows) if not row["problem"]]
            for number in range(options.captions if usable else 0):
                prompt = options.prompt[number % len(options.prompt)]
                name = f"{rows[usable[0]]['clip']} {number}"
                seed = zlib.crc32(name.encode()) if number >= len(options.prompt) else None
                prompts = [_fill(prompt, batch[index].row) for index in usable]
                answers = ask([frames[index] for index in usable], prompts, seed)
                for index, answer in zip(usable, answers, strict=True):
                    row = rows[index]
                    text, row["problem"] = clean_answer(*answer)
                    text = add_trigger(text, options.trigger) if text and options.trigger else text
                    row["captions"] += [text] if text and text not in row["captions"] else []
            yield rows

    # Without an endpoint, one thread decodes while the model runs in the other.
    num_threads = options.batch if options.endpoint else 2
    with (settings.work / f"{slot}-{time.time_ns()}.jsonl").open("a", encoding="utf-8") as log:
        for rows in run_in_threads([run() for _ in range(num_threads)]):
            log.write("".join(json.dumps(row) + "\n" for row in rows))
            log.flush()
            yield from (row["clip"] for row in rows)


def _fill(prompt: str, row: Mapping[str, object]) -> str:
    """Replace names of columns in braces by the values of a row. Nothing else in the prompt is interpreted."""
    return re.sub(r"\{([^{}]*)\}", lambda match: str(row.get(match[1]) or ""), prompt)


def _read_frames(item: tuple[ClipRecord, int, int]) -> np.ndarray | str:
    """Return frames [F, H, W, 3] at equal distances over the time range of a clip, or the reason why it cannot be decoded."""
    record, num_frames, max_side = item
    try:
        info = probe(record.path)
        seconds = (record.end or info.duration) - (record.start or 0.0)
        fps = min(info.fps, num_frames / seconds) if seconds > 0 else info.fps
        spec = ClipSpec(fps, max_pixels=max_side**2, max_frames=num_frames, size_multiple=2, frame_stride=1)
        return next(decode_clip(record.path, spec, record.start, record.end, crop=record.crop)).frames
    except DataError as error:
        return str(error)
