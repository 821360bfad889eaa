"""The command `wands check`: predict the samples that `wands preprocess` will write, and report problems of the clips.

It needs no model. Both commands decode with the same function, so they accept the same clips. Decoding runs in subprocesses: a
clip that crashes its decoder or exceeds the time limit is rejected, and the check continues.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from wands.commands.check.check_report import (
    VERDICTS,
    CheckedClip,
    CheckedSample,
    CheckReport,
    PackingForecast,
)
from wands.commands.check.clip_warnings import FrameWarnings, file_warnings
from wands.conditions.arrays import ClipSize
from wands.conditions.condition import Condition
from wands.conditions.published import arrays_of, clip_files_of, conditions_of
from wands.config.options import CheckOptions
from wands.config.recipe import Recipe
from wands.data.clips.captions import clean_caption, estimate_tokens
from wands.data.clips.clip import ClipSpec
from wands.data.clips.file_kinds import CLIP_EXTENSIONS, IMAGE_EXTENSIONS
from wands.data.clips.filters import Filter, columns_of, numeric_columns, read_number
from wands.data.clips.isolated import Crash, map_isolated
from wands.data.clips.records import ClipRecord, Rejection
from wands.data.clips.video import decode_clip, probe
from wands.data.packing import plan_epoch
from wands.errors import DataError
from wands.patches import grid_size
from wands.plugin import load_plugins, plugin_importer
from wands.preprocess import clip_rules
from wands.preprocess.progress import progress
from wands.variants import TEXT_LEN, VARIANTS, Variant, variant_of

SAMPLE_OVERHEAD = 1250
"""Bytes of HDF5 groups and attributes in a shard for each sample, without its arrays, caption and path. Measured."""
PATH_COPIES = 3
"""Bytes that each character of a clip's path adds to a sample. HDF5 rounds the size of an attribute up. Measured."""
ARRAY_OVERHEAD = 300
"""Bytes of HDF5 structure in a shard for each array of a sample other than the latents and the text embeddings."""
TEXT_COLUMNS = ("duplicate_of", "license", "source")
"""Text columns in a report, in addition to all numeric columns of the source."""
SHOWN_CAPTION = 4000
"""Largest number of characters of a caption in a report. The text encoder reads about 2,000 characters."""
THUMBNAIL = (176, 120)  # largest width and largest height in pixels
DUPLICATE = "duplicate: the same images as {}; keep one of the two clips"
ONLY_IMAGES = "all clips are images, from which a model learns no motion and may forget it; add videos"
KEPT_THUMBNAILS = 20_000  # 100 MB; an HTML page shows fewer


def check(
    options: CheckOptions,
    variant: Variant | None = None,
    max_clips: int | None = None,
    conditions: Sequence[Condition] = (),
) -> CheckReport:
    """Decode the clips of a source as `wands preprocess` does, and report their samples and warnings, or rejection reasons.

    Args:
        options: options of the command. Thumbnails are made only for --html.
        variant: None reads it from the pipeline `options.model`, and without one uses Wan 2.1 text-to-video.
        max_clips: largest number of clips to decode, spread evenly over the source; None decodes all clips.
        conditions: conditions of outside code, in addition to those of `--import`. They are not used if `variant` is given.

    Raises:
        ConfigError: if options exclude each other or the model does not exist.
        DataError: if the source does not exist or contains no clip.
    """
    started = time.monotonic()
    conditions = (*conditions, *load_plugins(options.imports).conditions)
    variant = variant or _find_variant(options.model, conditions)
    checked_conditions = conditions_of(variant)
    spec = clip_rules.plan_samples(options, variant)
    notes: list[str] = []
    rows, rejections = _read_clips(options, checked_conditions, notes)
    num_clips = len(rows) + len(rejections)
    step = max(-(-num_clips // max_clips), 1) if max_clips else 1
    rows = rows[::step]
    rejections = rejections[::step]
    # Without the conditions of outside code, which may import torch in every worker process.
    decode = partial(_decode, spec, replace(variant, extra=()), options.html_path is not None)
    tasks = [
        *((row.path, *row.part) for row in rows),
        *((Path(item.path),) if _is_clip(item.path) else None for item in rejections),
    ]
    findings = _decode_all(decode, tasks, options.num_workers, plugin_importer(options.imports))
    clips = _rejected_clips(rejections, findings[len(rows) :])
    count_tokens = cache(_token_counter(options.model))
    cache_bytes = 0
    columns = numeric_columns(rows)
    first_rows: dict[tuple[str, ...], ClipRecord] = {}
    stored: set[str] = set()
    for row, finding in zip(rows, findings, strict=False):  # the findings of rejections follow
        caption = clean_caption(row.caption)
        clip = replace(finding, key=row.key, caption=caption, text_tokens=count_tokens(caption))
        _apply_conditions(clip, checked_conditions)
        if row.unmet or not caption:
            _reject(clip, row.unmet or clip_rules.EMPTY_CAPTION)
        first = first_rows.setdefault(clip.digests, row) if clip.digests else row
        clip.samples = tuple(replace(sample, key=row.key + sample.key) for sample in clip.samples)
        clip.columns = _cells(row, columns)
        cache_bytes += _added_cache_bytes(clip, variant, stored)
        _warn_of_text(clip, is_estimate=not options.model)
        if first.path != row.path:  # one file may have several captions or ranges
            clip.warnings = (DUPLICATE.format(first.key), *clip.warnings)
        clip.caption = _shown_caption(caption)
        clips.append(clip)
    clips.sort(key=lambda clip: (VERDICTS.index(clip.verdict), clip.key))
    return CheckReport(
        source=options.source,
        variant=variant.name if options.model else "Wan 2.1 text-to-video",
        spec=spec,
        clips=tuple(clips),
        exact_text=options.model is not None,
        cache_bytes=cache_bytes,
        packing=_forecast(options, clips, variant),
        num_skipped=num_clips - len(clips),
        seconds=time.monotonic() - started,
        notes=(*notes, *_notes_of(clips)),
        columns=columns,
        thresholds=Filter(options.where).thresholds if options.where else (),
    )


def _find_variant(model: str | None, conditions: Sequence[Condition]) -> Variant:
    """Read the variant of a pipeline, or return Wan 2.1 text-to-video."""
    if model:
        from wands.encoders.components import read_variant

        return read_variant(model, conditions)
    # All Wan 2.1 variants have the same strides and frame rate.
    return variant_of(VARIANTS["wan2.1-t2v-1.3b"].dit.to_config(), conditions=conditions)


def _read_clips(
    options: CheckOptions, conditions: Sequence[Condition], notes: list[str]
) -> tuple[list[ClipRecord], list[Rejection]]:
    """Return the clips and the rejected files or rows of the source, and append what the user should know to `notes`."""
    rows, rejections = clip_rules.read_source(options, log=notes.append, files=clip_files_of(conditions))
    if num_masked := sum(row.mask is not None for row in rows):
        notes.append(f"{num_masked:,} of {len(rows):,} clips have a mask")
    return rows, rejections


def _notes_of(clips: Sequence[CheckedClip]) -> list[str]:
    paths = [clip.path.lower() for clip in clips if not clip.reason]
    return [ONLY_IMAGES] if paths and all(path.endswith(IMAGE_EXTENSIONS) for path in paths) else []


def _rejected_clips(rejections: Sequence[Rejection], findings: Sequence[CheckedClip]) -> list[CheckedClip]:
    return [
        CheckedClip(item.key, item.path, source=clip.source, reason=item.reason, thumbnail=clip.thumbnail)
        for item, clip in zip(rejections, findings, strict=True)
    ]


def _shown_caption(caption: str) -> str:
    if len(caption) > SHOWN_CAPTION:
        return f"{caption[:SHOWN_CAPTION]}... ({len(caption):,} characters)"
    return caption


def _reject(clip: CheckedClip, reason: str) -> None:
    clip.samples = ()
    clip.digests = ()
    clip.warnings = ()
    clip.reason = reason


def _cells(row: ClipRecord, columns: Iterable[str]) -> dict[str, float | str]:
    """Return the cells of a row that a report shows: the numbers of `columns`, and the texts of `TEXT_COLUMNS`."""
    cells = columns_of(row)
    numbers = {name: number for name in columns if (number := read_number(cells.get(name))) is not None}
    texts = {name: text for name in TEXT_COLUMNS if isinstance(text := cells.get(name), str) and text}
    return {**numbers, **texts}


def _warn_of_text(clip: CheckedClip, is_estimate: bool) -> None:
    """Warn of a caption that the text encoder cuts."""
    if clip.text_tokens > TEXT_LEN:
        count = f"{'about ' if is_estimate else ''}{clip.text_tokens:,}"
        clip.warnings = (f"caption too long: {count} tokens, cut after {TEXT_LEN}", *clip.warnings)


# ---- decoding of one clip in a worker process


_Task = tuple[Path, *tuple[Any, ...]]
"""A clip to decode: the path and `ClipRecord.part`, which a rejected clip lacks."""


def _decode(spec: ClipSpec, variant: Variant, thumbnails: bool, task: _Task) -> CheckedClip:
    """Decode a clip, and return its samples and warnings, or the reason for its rejection.

    `check` later fills its `key` and `caption`, and prepends the key to those of its samples, which are suffixes such as "#0001".
    """
    file_path, *part = task
    path = str(file_path)
    if not part:  # of a rejected clip, only the thumbnail and the facts about the file are shown
        spec = replace(spec, max_frames=1, clip_mode="head")
    result = CheckedClip("", path)
    last = None
    images = FrameWarnings()
    try:
        with file_path.open("rb") as file:  # raises for the same files as `wands preprocess`
            file.seek(0, 2)
            file.seek(0)
            file.read(1 << 16)
        for clip in decode_clip(file_path, spec, *part):
            frames = clip.frames
            # Every 16th pixel of every frame: different clips do not agree in all of them.
            small = np.ascontiguousarray(frames[:, ::4, ::4])
            content = repr(frames.shape).encode() + small.tobytes()
            result.digests += (hashlib.blake2b(content, digest_size=16).hexdigest(),)
            num_frames, height, width, _ = frames.shape
            tokens = variant.num_tokens(num_frames, height, width)
            sample = CheckedSample(
                key=clip.suffix,
                start_seconds=clip.start_seconds,
                num_frames=num_frames,
                height=height,
                width=width,
                num_tokens=tokens,
            )
            result.samples += (sample,)
            if thumbnails and not result.thumbnail:
                result.thumbnail = _thumbnail(frames[len(frames) // 2])
            if last is None or clip.start_seconds != last.start_seconds:  # the first size of a window
                images.add(small, clip.start_seconds, clip.fps)
            last = replace(clip, frames=np.empty(0))  # frees the memory of the frames
    except DataError as error:
        result.reason = str(error)
    except OSError as error:
        result.reason = clip_rules.no_access_reason(path, str(error.strerror))
    except MemoryError:
        result.reason = clip_rules.NO_MEMORY
    if last is None:
        with suppress(DataError):  # then the report has no facts about the file
            result.source = probe(file_path)
        return result
    lengths = {sample.start_seconds: sample.num_frames for sample in result.samples}  # of the windows
    largest = max((sample.width, sample.height) for sample in result.samples)
    result.source = last.source
    result.warnings = (*file_warnings(path, last, max(lengths.values()), largest, spec), *images.texts())
    if not path.lower().endswith(IMAGE_EXTENSIONS):
        result.footage = clip_rules.measure_footage(spec, lengths.values(), last.span[1] - last.span[0])
    return result


def _apply_conditions(clip: CheckedClip, conditions: Sequence[Condition]) -> None:
    """Reject a decoded clip if a condition cannot be made from one of its samples. Earlier samples stay."""
    for number, sample in enumerate(clip.samples):
        try:
            for condition in conditions:
                condition.check_clip(clip.path, sample.num_frames)
        except DataError as error:
            clip.reason = str(error)
            clip.samples = clip.samples[:number]
            clip.digests = clip.digests[:number]
            clip.warnings = clip.warnings if number else ()
            clip.footage = clip.footage if number else CheckedClip.footage
            return


def _thumbnail(frame: np.ndarray) -> bytes:
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail(THUMBNAIL)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    return buffer.getvalue()


def _decode_all(
    decode: Callable[[_Task], CheckedClip],
    tasks: Sequence[_Task | None],
    num_workers: int | None,
    initialize: Callable[[], object] | None,
) -> list[CheckedClip]:
    """Decode clips in worker processes, and return one result for each task, an empty clip for None.

    Equal tasks, such as those of a clip with several captions, are decoded once. Each worker calls `initialize` at its start.
    """
    counts = Counter(tasks)
    distinct = list(filter(None, counts))
    findings: dict[_Task | None, CheckedClip] = {None: CheckedClip("", "")}
    with progress("clips", len(tasks)) as advance:
        for _ in range(counts[None]):
            advance()
        limit = clip_rules.LIMIT_SECONDS
        for index, result in map_isolated(
            decode,
            distinct,
            num_workers=num_workers,
            limit_seconds=limit,
            preload=[__name__],
            initialize=initialize,
        ):
            task = distinct[index]
            if isinstance(result, Crash):
                result = CheckedClip("", str(task[0]), reason=clip_rules.crash_reason(task[0], result))
            findings[task] = result if index < KEPT_THUMBNAILS else replace(result, thumbnail=b"")
            for _ in range(counts[task]):
                advance()
    return [findings[task] for task in tasks]


def _is_clip(path: str) -> bool:
    return os.path.isabs(path) and path.lower().endswith(CLIP_EXTENSIONS) and os.path.isfile(path)


# ---- totals


def _added_cache_bytes(clip: CheckedClip, variant: Variant, stored: set[str]) -> int:
    """Estimate the bytes that the samples of a clip add to the cache of `wands preprocess`.

    Samples with the same frames share their latents. `stored` has the hashes of all frames that were counted before; those of
    this clip are added.
    """
    specs = [spec for spec in arrays_of(variant) if not spec.optional]
    patch_size = variant.dit.patch_size
    text_len = min(clip.text_tokens, TEXT_LEN)
    total = len(clip.digests) * (
        len(clip.caption.encode())
        + PATH_COPIES * len(os.path.abspath(clip.path))
        + SAMPLE_OVERHEAD
        + ARRAY_OVERHEAD * (len(specs) - 2)
    )
    for sample, digest in zip(clip.samples, clip.digests, strict=True):
        is_new = digest not in stored
        stored.add(digest)
        size = ClipSize(variant.latent_size(sample.num_frames, sample.height, sample.width), patch_size)
        for spec in specs:
            if is_new or spec.name == "text_embeds":
                total += spec.num_bytes(spec.shape(size, [text_len] * spec.num_free))
    return total


def _forecast(options: CheckOptions, clips: list[CheckedClip], variant: Variant) -> PackingForecast | None:
    samples = [sample for clip in clips for sample in clip.samples]
    if not samples:
        return None
    lengths = np.array([sample.num_tokens for sample in samples])
    cost: Any = variant.dit.forward_flops
    if options.chunk_frames is not None:
        from wands.objectives.causal import teacher_forcing_costs
        from wands.run.sizes import flops_of_clips

        latents = [variant.latent_size(s.num_frames, s.height, s.width) for s in samples]
        grids = np.array([grid_size(size, variant.dit.patch_size) for size in latents])
        costs = teacher_forcing_costs(grids, options.chunk_frames)
        lengths = costs.tokens
        cost = flops_of_clips(variant.dit, costs)
    keys = [sample.key for sample in samples]
    recipe = Recipe()
    max_tokens = options.max_tokens or recipe.packing.max_tokens
    bins_per_step = options.bins_per_step or recipe.train.bins_per_step
    forecast = PackingForecast(max_tokens, bins_per_step)
    try:
        plan = plan_epoch(
            lengths,
            max_tokens=max_tokens,
            bins_per_step=bins_per_step,
            seed=0,
            epoch=0,
            cost=cost,
            keys=keys,
        )
    except DataError as error:
        return replace(forecast, problem=str(error))
    return replace(forecast, fill=plan.fill, steps_per_epoch=plan.num_steps)


def _token_counter(model: str | None) -> Callable[[str], int]:
    """Return a function that counts the text tokens of a cleaned caption, or estimates them without a model."""
    if model is None:
        return estimate_tokens
    from transformers import AutoTokenizer

    from wands.encoders.components import CONFIG_FILES, find_part, load_part

    folder = find_part(model, "tokenizer", CONFIG_FILES)
    load = partial(AutoTokenizer.from_pretrained, folder, trust_remote_code=False)
    tokenizer = load_part(model, "tokenizer", load)
    return lambda caption: len(tokenizer(caption, verbose=False).input_ids)  # no warning above 512 tokens
