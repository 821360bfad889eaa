"""`wands check`: predict clip by clip what `wands preprocess` will make of a source, without a model.

Both commands decode with the same function, so they cannot disagree. Decoding runs in subprocesses, so that a file that
crashes or hangs a decoder is one more rejected clip.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from wands.commands.check.check_report import (
    VERDICTS,
    CheckedClip,
    CheckedSample,
    CheckReport,
    PackingForecast,
)
from wands.commands.progress import progress
from wands.data.clips.captions import clean_caption, estimate_tokens
from wands.data.clips.clip import ClipSpec, check_frames, further_specs, split_bounds
from wands.data.clips.isolated import Crash, map_isolated
from wands.data.clips.layouts import load_source
from wands.data.clips.records import CLIP_EXTENSIONS, IMAGE_EXTENSIONS, ClipRecord
from wands.data.clips.video import decode_clip, probe
from wands.data.clips.video_file import VideoInfo
from wands.data.packing import plan_epoch
from wands.errors import ConfigError, DataError, one_line
from wands.files import write_text
from wands.variants import TEXT_LEN, VARIANTS, Variant

ASSUMED = "wan2.1-t2v-1.3b"
"""Variant whose strides and frame rate are used if no model is given; all Wan 2.1 variants share them."""
LIMIT_SECONDS = 300.0
"""Time limit of decoding one clip; a decoder that hangs is stopped."""
SAMPLE_OVERHEAD = 1350
"""Bytes per sample in a shard without arrays and caption: HDF5's groups, attributes, paths. Measured: 1.2 to 1.4 kB."""
ARRAY_OVERHEAD = 300
"""Bytes in a shard for each further array of a sample."""
TO_SDR = "zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,tonemap=hable,zscale=t=bt709:m=bt709:r=tv,format=yuv420p"
"""FFmpeg filter that maps HDR to SDR, which the VAE was trained on."""
THUMBNAIL = (176, 120)  # pixels, width and height at most
KEPT_THUMBNAILS = 20_000  # 100 MB; a page shows fewer


def check(
    source: str,
    *,
    model: str | Path | None = None,
    height: int | None = None,
    width: int | None = None,
    center_crop: bool = False,
    max_pixels: int | Sequence[int] | None = None,
    max_frames: int | None = 81,
    clip_mode: Literal["head", "middle", "slide"] = "head",
    fps: float | None = None,
    split: str = "train",
    video_column: str | None = None,
    caption_column: str | None = None,
    max_tokens: int = 32760,
    bins_per_step: int = 1,
    num_workers: int | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    thumbnails: bool = True,
) -> CheckReport:
    """Decode every clip of a source as `wands preprocess` with the same options will.

    Args:
        source: folder, table or Hugging Face dataset, see `wands.data.clips.layouts.load_source`.
        model: diffusers pipeline folder or Hub id. The config of its DiT names the variant, its tokenizer counts caption
            tokens. Default: strides and frame rate of Wan 2.1, and an estimate of caption tokens.
        height: exact height in pixels, with `width`.
        width: exact width in pixels.
        center_crop: fill height x width by cropping instead of stretching.
        max_pixels: scale larger clips down to this area. Default: 399,360; no limit with `height` and `width`.
            Several areas: every clip at every resulting size.
        max_frames: longest sample; None keeps whole clips.
        clip_mode: which frames of a longer clip to take.
        fps: frames per second of the samples. Default: the variant's frame rate.
        split: split of a dataset.
        video_column: column of the clips in a table or dataset.
        caption_column: column of the captions in a table or dataset.
        max_tokens: capacity of a bin, as `packing.max_tokens` of a recipe.
        bins_per_step: bins of an optimizer step, as `train.bins_per_step` of a recipe.
        num_workers: number of decoding processes. Default: one per core.
        limit_seconds: time limit for one clip.
        thumbnails: make thumbnails for the page, of the first 20,000 clips at most.

    Raises:
        ConfigError: if options exclude each other or the model does not exist.
        DataError: if the source does not exist or contains no clip.
    """
    started = time.monotonic()
    for name, value in (("max_tokens", max_tokens), ("bins_per_step", bins_per_step)):
        if value < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}={value} must be at least 1; use the recipe's value."
            )
    variant = VARIANTS[ASSUMED]
    if model:
        from wands.encoders.components import read_variant

        variant = read_variant(model)
    bound, more_pixels = split_bounds(max_pixels)
    spec = ClipSpec.of_variant(
        variant,
        fps=fps,
        height=height,
        width=width,
        center_crop=center_crop,
        max_pixels=bound,
        max_frames=max_frames,
        clip_mode=clip_mode,
    )
    further_specs(spec, more_pixels)  # raises if a limit is invalid
    rows, rejections = load_source(
        source, split=split, video_column=video_column, caption_column=caption_column
    )
    captions = [clean_caption(row.caption) for row in rows]
    count = _counter(model)
    lengths = {caption: count(caption) for caption in sorted(set(captions))}
    base = _Task(Path(), spec, None, None, more_pixels, thumbnails, variant.conditions)
    tasks: list[_Task | None] = [
        *(replace(base, path=row.path, start=row.start, end=row.end) for row in rows),
        *(replace(base, path=Path(item.path)) if _is_clip(item.path) else None for item in rejections),
    ]
    looks = _look_at_all(tasks, num_workers, limit_seconds)
    clips = [
        CheckedClip(item.key, item.path, source=look.source, reason=item.reason, thumbnail=look.thumbnail)
        for item, look in zip(rejections, looks[len(rows) :], strict=True)
    ]
    first_with: dict[str, ClipRecord] = {}
    digests: set[str] = set()
    cache_bytes = 0
    for row, caption, look in zip(rows, captions, looks, strict=False):  # looks of rejections follow
        if not caption:
            look = replace(look, windows=(), digest="", reason="empty caption once cleaned; write one")
        clip = CheckedClip(row.key, str(row.path), caption, lengths[caption], look.source, reason=look.reason)
        first = first_with.setdefault(look.digest, row) if look.digest else row
        duplicate = (
            "" if first.path == row.path else first.key
        )  # one file may have several captions or ranges
        cache_bytes += _cache_bytes(clip, look.windows, variant, digests)
        clips.append(
            replace(
                clip,
                samples=tuple(_sample(row.key, window, variant) for window in look.windows),
                warnings=tuple(_warnings(clip, look, spec, duplicate, exact=model is not None)),
                thumbnail=look.thumbnail,
            )
        )
    clips.sort(key=lambda clip: (VERDICTS.index(clip.verdict), clip.key))
    return CheckReport(
        source=source,
        variant=variant.name if model else "Wan 2.1 text-to-video",
        spec=spec,
        more_pixels=more_pixels,
        clips=tuple(clips),
        exact_text=model is not None,
        cache_bytes=cache_bytes,
        packing=_forecast(clips, variant, max_tokens, bins_per_step),
        seconds=time.monotonic() - started,
    )


def save_report(report: CheckReport, json_path: Path | None = None, html_path: Path | None = None) -> None:
    """Write the report as JSON, as an HTML page, or both; each file appears complete or not at all.

    Raises:
        WandsError: if a file cannot be written.
    """
    from wands.commands.check.html_page import render_page

    if json_path is not None:
        write_text(json_path, report.to_json())
    if html_path is not None:
        write_text(html_path, render_page(report))


# ---- one clip, in a worker


@dataclass(frozen=True)
class _Task:
    path: Path
    spec: ClipSpec
    start: float | None
    end: float | None
    more_pixels: tuple[int, ...]
    thumbnails: bool
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class _Window:
    suffix: str
    start_seconds: float
    num_frames: int
    height: int
    width: int
    digest: str


@dataclass(frozen=True)
class _Look:
    """Result of decoding a clip; `digest` identifies the images of all its samples and is empty if there are none."""

    windows: tuple[_Window, ...] = ()
    source: VideoInfo | None = None
    variable_fps: bool = False
    interlaced: bool = False
    digest: str = ""
    thumbnail: bytes = b""
    reason: str = ""


def _look_at(task: _Task) -> _Look:
    look, windows = _Look(), list[_Window]()
    try:
        with task.path.open("rb") as file:  # raises for the same files as `wands preprocess`
            file.seek(0, 2)
            file.seek(0)
            file.read(1 << 16)
        for clip in decode_clip(task.path, task.spec, task.start, task.end, task.more_pixels):
            frames = clip.frames
            check_frames(str(task.path), len(frames), task.conditions)
            # Every 16th pixel of every frame: different clips do not agree in all of them.
            content = repr(frames.shape).encode() + frames[:, ::4, ::4].tobytes()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            num_frames, height, width, _ = frames.shape
            windows.append(_Window(clip.suffix, clip.start_seconds, num_frames, height, width, digest))
            look = replace(
                look, source=clip.source, variable_fps=clip.variable_fps, interlaced=clip.interlaced
            )
            if task.thumbnails and not look.thumbnail:
                look = replace(look, thumbnail=_thumbnail(frames[len(frames) // 2]))
    except DataError as error:
        look = replace(look, reason=str(error))
    except OSError as error:
        reason = f"video={task.path} cannot be read ({error.strerror}); fix its permissions"
        look = replace(look, reason=reason)
    except MemoryError:
        look = replace(look, reason="does not fit into memory; lower --max-frames or --max-pixels")
    if look.source is None:
        with suppress(DataError, MemoryError):  # then the report has no facts about the file
            look = replace(look, source=probe(task.path))
    return replace(look, windows=tuple(windows), digest=" ".join(window.digest for window in windows))


def _thumbnail(frame: np.ndarray) -> bytes:
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail(THUMBNAIL)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    return buffer.getvalue()


def _look_at_all(tasks: Sequence[_Task | None], num_workers: int | None, limit_seconds: float) -> list[_Look]:
    """Decode each clip once, in worker processes; the result for None is empty."""
    looks = [_Look()] * len(tasks)
    numbers: dict[_Task, list[int]] = {}  # a clip with several captions is several rows
    for number, task in enumerate(tasks):
        if task:
            numbers.setdefault(task, []).append(number)
    distinct = list(numbers)
    with progress("clips", len(distinct)) as advance:
        for index, look in map_isolated(
            _look_at, distinct, num_workers=num_workers, limit_seconds=limit_seconds, preload=[__name__]
        ):
            task = distinct[index]
            if isinstance(look, Crash):
                look = _Look(
                    reason=f"video={task.path} cannot be decoded: {look}; replace or re-encode the file"
                )
            for number in numbers[task]:
                looks[number] = look if number < KEPT_THUMBNAILS else replace(look, thumbnail=b"")
            advance()
    return looks


def _is_clip(path: str) -> bool:
    """Return whether a rejection, for example for a missing caption, names a file that can be decoded."""
    try:
        return os.path.isabs(path) and path.lower().endswith(CLIP_EXTENSIONS) and os.path.isfile(path)
    except ValueError:  # a name that no system accepts
        return False


# ---- results


def _sample(key: str, window: _Window, variant: Variant) -> CheckedSample:
    tokens = int(np.prod(_latent_size(window, variant))) // int(np.prod(variant.dit.patch_size))
    return CheckedSample(
        key + window.suffix, window.start_seconds, window.num_frames, window.height, window.width, tokens
    )


def _latent_size(window: _Window, variant: Variant) -> tuple[int, int, int]:
    stride = variant.vae_stride
    return (window.num_frames - 1) // stride[0] + 1, window.height // stride[1], window.width // stride[2]


def _warnings(clip: CheckedClip, look: _Look, spec: ClipSpec, duplicate: str, *, exact: bool) -> list[str]:
    warnings = []
    if duplicate:
        warnings.append(f"duplicate: the same images as {duplicate}; keep one of them")
    if clip.text_tokens > TEXT_LEN:
        count = f"{clip.text_tokens:,}" if exact else f"about {clip.text_tokens:,}"
        warnings.append(f"caption too long: {count} tokens, cut after {TEXT_LEN}")
    source = look.source
    if source is None or not look.windows:
        return warnings
    is_image = clip.path.lower().endswith(IMAGE_EXTENSIONS)
    if look.variable_fps:
        warnings.append(f"variable frame rate (mean {source.fps:.5g}): frames are taken by their time")
    if source.fps < 0.95 * spec.fps and not is_image:
        warnings.append(f"low frame rate: {source.fps:.4g} fps, frames are repeated to reach {spec.fps:g}")
    if look.interlaced:
        warnings.append(
            "interlaced: moving edges come out combed; convert it with ffmpeg -i IN -vf bwdif OUT"
        )
    if source.hdr:
        warnings.append(
            f"HDR: {source.hdr} brightness is kept as stored, which looks grey; convert it with "
            f"ffmpeg -i IN -vf {TO_SDR} OUT"
        )
    if source.rotation or source.mirrored:
        warnings.append(_describe_turn(source))
    if source.sar != 1:
        shown = "x".join(f"{float(side):.0f}" for side in source.display_size)
        warnings.append(f"pixel aspect: {source.sar.numerator}:{source.sar.denominator}, taken as {shown}")
    if max(window.num_frames for window in look.windows) == 1 and not is_image:
        warnings.append("becomes a still: one frame")
    return warnings


def _describe_turn(source: VideoInfo) -> str:
    if not source.mirrored:
        return f"rotation flag: turned upright by {source.rotation} degrees"
    if source.rotation % 180:
        return f"rotation flag: turned upright by {source.rotation} degrees, then mirrored left to right"
    return f"mirror flag: mirrored {'top to bottom' if source.rotation else 'left to right'}"


def _cache_bytes(clip: CheckedClip, windows: Sequence[_Window], variant: Variant, stored: set[str]) -> int:
    """Return the bytes that the samples of a clip add to the cache.

    Args:
        clip: the clip and its caption.
        windows: its samples.
        variant: variant of the model.
        stored: digests of the windows whose latents the cache already contains; updated.
    """
    text = 2 * min(clip.text_tokens, TEXT_LEN) * variant.dit.text_dim + len(clip.caption.encode())
    dit, image, clip_states = variant.dit, "image" in variant.conditions, "clip" in variant.conditions
    total = len(windows) * (text + SAMPLE_OVERHEAD + ARRAY_OVERHEAD * (image + clip_states))
    for window in windows:
        if window.digest not in stored:
            stored.add(window.digest)
            latents = 2 * dit.out_channels * int(np.prod(_latent_size(window, variant)))
            total += latents * (1 + image) + 2 * dit.image_len * (dit.image_dim or 0)
    return total


def _forecast(
    clips: Sequence[CheckedClip], variant: Variant, max_tokens: int, bins_per_step: int
) -> PackingForecast | None:
    samples = [sample for clip in clips for sample in clip.samples]
    if not samples:
        return None
    try:
        plan = plan_epoch(
            np.array([sample.num_tokens for sample in samples]),
            max_tokens=max_tokens,
            bins_per_step=bins_per_step,
            seed=0,
            epoch=0,
            cost=variant.dit.forward_flops,
            keys=[sample.key for sample in samples],
        )
    except DataError as error:
        return PackingForecast(max_tokens, bins_per_step, 0.0, 0, str(error))
    return PackingForecast(max_tokens, bins_per_step, plan.fill, plan.num_steps)


def _counter(model: str | Path | None) -> Callable[[str], int]:
    """Return the function that counts the tokens of a cleaned caption."""
    if model is None:
        return estimate_tokens
    from transformers import AutoTokenizer

    from wands.encoders.components import CONFIG_FILES, find_part

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_part(model, "tokenizer", CONFIG_FILES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model={model}: its tokenizer cannot be loaded ({one_line(error)}); check the folder tokenizer."
        ) from None
    return lambda caption: len(tokenizer(caption, verbose=False).input_ids)  # it would warn beyond 512
