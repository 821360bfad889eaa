"""`wands check`: what `wands preprocess` will make of a source, clip by clip, without a model.

Every clip is decoded by the same function as in `wands preprocess`, so the two cannot disagree; it runs in processes of
its own, so that a file which crashes or hangs a decoder is one more rejected clip.
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

from wands.commands.check.check_report import CheckedClip, CheckedSample, CheckReport, PackingForecast
from wands.commands.progress import progress
from wands.data.clips.captions import clean_caption, estimate_tokens
from wands.data.clips.clip import ClipSpec, check_frames, further_specs, split_bounds
from wands.data.clips.isolated import Crash, map_isolated
from wands.data.clips.layouts import load_source
from wands.data.clips.records import CLIP_EXTENSIONS, IMAGE_EXTENSIONS, ClipRecord
from wands.data.clips.video import decode_clip, probe
from wands.data.clips.video_file import VideoInfo
from wands.data.packing import plan_epoch
from wands.errors import ConfigError, DataError
from wands.files import write_text
from wands.variants import TEXT_LEN, VARIANTS, Variant

ASSUMED = "wan2.1-t2v-1.3b"
"""Variant whose strides and rate count where no model is given; all of Wan 2.1 share them."""
LIMIT_SECONDS = 300.0
"""One clip may be decoded for so long; a decoder that hangs is ended then."""
SAMPLE_OVERHEAD = 1350
"""Bytes of a shard per sample beside its numbers and caption: HDF5's groups, attributes, paths. Measured: 1.2 to 1.4 kB."""
ARRAY_OVERHEAD = 300
"""Likewise for each further array of a sample."""
TO_SDR = "zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,tonemap=hable,zscale=t=bt709:m=bt709:r=tv,format=yuv420p"
"""FFmpeg's filter that maps HDR to what the VAE was trained on."""
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
    """Look at every clip of a source as `wands preprocess` with the same options will.

    Args:
        source: folder, table or Hugging Face dataset, see `wands.data.clips.layouts.load_source`.
        model: diffusers pipeline folder or Hub id: its DiT's config names the variant and its tokenizer counts
            caption tokens. Default: Wan 2.1's strides and rate, and an estimate.
        height: exact height in pixels, with `width`.
        width: exact width in pixels.
        center_crop: fill height x width by cutting rather than by stretching.
        max_pixels: scale larger clips down to this area. Default: 399,360; no bound with `height` and `width`.
            Several: each clip at every size that comes of it.
        max_frames: longest sample; None keeps whole clips.
        clip_mode: which frames of a longer clip.
        fps: frames per second of the samples. Default: the variant's own.
        split: of a dataset.
        video_column: of a table or dataset.
        caption_column: of a table or dataset.
        max_tokens: capacity of a bin, as `packing.max_tokens` of a recipe.
        bins_per_step: as `train.bins_per_step` of a recipe.
        num_workers: processes that decode. Default: one per core.
        limit_seconds: longest time for one clip.
        thumbnails: make pictures for the page, of the first 20,000 clips at most.

    Raises:
        ConfigError: options that exclude each other, or a model that is not there.
        DataError: the source does not exist or holds no clip at all.
    """
    started = time.monotonic()
    for name, value in (("max_tokens", max_tokens), ("bins_per_step", bins_per_step)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1; give what the recipe has.")
    variant = _read_variant(model) if model else VARIANTS[ASSUMED]
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
    further_specs(spec, more_pixels)  # refuses what cannot be
    rows, rejections = load_source(
        source, split=split, video_column=video_column, caption_column=caption_column
    )
    captions = [clean_caption(row.caption) for row in rows]
    count = _counter(model)
    lengths = {caption: count(caption) for caption in sorted(set(captions))}
    tasks: list[_Task | None] = [
        _Task(row.path, spec, row.start, row.end, more_pixels, thumbnails, variant.conditions) for row in rows
    ]
    for item in rejections:
        clip_path = Path(item.path) if _is_clip(item.path) else None
        tasks.append(
            _Task(
                *(clip_path, spec),
                more_pixels=more_pixels,
                thumbnails=thumbnails,
                conditions=variant.conditions,
            )
            if clip_path
            else None
        )
    looks = _look_at_all(tasks, num_workers, limit_seconds)
    clips = [
        CheckedClip(item.key, item.path, source=look.source, reason=item.reason, thumbnail=look.thumbnail)
        for item, look in zip(rejections, looks[len(rows) :], strict=True)
    ]
    first_with: dict[str, ClipRecord] = {}
    digests: set[str] = set()
    cache_bytes = 0
    for row, caption, look in zip(rows, captions, looks, strict=False):  # looks go on
        if not caption:
            look = replace(look, windows=(), digest="", reason="empty caption once cleaned; write one")
        clip = CheckedClip(row.key, str(row.path), caption, lengths[caption], look.source, reason=look.reason)
        first = first_with.setdefault(look.digest, row) if look.digest else row
        twin = "" if first.path == row.path else first.key  # one file has several captions, or ranges
        cache_bytes += _cache_bytes(clip, look.windows, variant, digests)
        clips.append(
            replace(
                clip,
                samples=tuple(_sample(row.key, window, variant) for window in look.windows),
                warnings=tuple(_warnings(clip, look, spec, twin, exact=model is not None)),
                thumbnail=look.thumbnail,
            )
        )
    order = ("rejected", "warned", "fine")
    clips.sort(key=lambda clip: (order.index(clip.verdict), clip.key))
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
    """Write the report as JSON, as a page for a browser, or both; each file whole or not at all.

    Raises:
        WandsError: a file cannot be written.
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
    start: float | None = None
    end: float | None = None
    more_pixels: tuple[int, ...] = ()
    thumbnails: bool = True
    conditions: tuple[str, ...] = ("text",)


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
    """What decoding a clip showed. `digest` names the pictures of all its samples, "" where there are none."""

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
        with task.path.open("rb") as file:  # as `wands preprocess` does before it decodes
            file.seek(0, 2)
            file.seek(0)
            file.read(1 << 16)
        for clip in decode_clip(task.path, task.spec, task.start, task.end, task.more_pixels):
            frames = clip.frames
            check_frames(str(task.path), len(frames), task.conditions)
            # Every 16th pixel of every frame: no two clips that differ agree in all of them.
            seen = repr(frames.shape).encode() + frames[:, ::4, ::4].tobytes()
            digest = hashlib.blake2b(seen, digest_size=16).hexdigest()
            num_frames, height, width, _ = frames.shape
            windows.append(_Window(clip.suffix, clip.start_seconds, num_frames, height, width, digest))
            look = replace(
                look,
                source=clip.source,
                variable_fps=clip.variable_fps,
                interlaced=clip.interlaced,
            )
            if task.thumbnails and not look.thumbnail:
                look = replace(look, thumbnail=_thumbnail(frames[len(frames) // 2]))
    except DataError as error:
        look = replace(look, reason=str(error))
    except OSError as error:
        reason = f"video={task.path} cannot be read ({error.strerror}); mend its permissions"
        look = replace(look, reason=reason)
    except MemoryError:
        look = replace(look, reason="does not fit into memory; lower --max-frames or --max-pixels")
    if look.source is None:
        with suppress(DataError, MemoryError):  # then there is nothing to tell of it
            look = replace(look, source=probe(task.path))
    return replace(look, windows=tuple(windows), digest=" ".join(window.digest for window in windows))


def _thumbnail(frame: np.ndarray) -> bytes:
    from PIL import Image

    picture = Image.fromarray(frame)
    picture.thumbnail(THUMBNAIL)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=72)
    return buffer.getvalue()


def _look_at_all(tasks: Sequence[_Task | None], num_workers: int | None, limit_seconds: float) -> list[_Look]:
    """Decode each clip once, in worker processes; what is no task is not looked at."""
    looks = [_Look()] * len(tasks)
    numbers: dict[_Task, list[int]] = {}  # a clip of several captions is several rows
    for number, task in enumerate(tasks):
        if task:
            numbers.setdefault(task, []).append(number)
    wanted = list(numbers)
    with progress("clips", len(wanted)) as advance:
        for place, look in map_isolated(
            _look_at, wanted, num_workers=num_workers, limit_seconds=limit_seconds, preload=[__name__]
        ):
            if isinstance(look, Crash):
                path = wanted[place].path
                look = _Look(
                    reason=f"video={path} cannot be decoded: {look.reason}; replace or re-encode the file"
                )
            for number in numbers[wanted[place]]:
                looks[number] = look if number < KEPT_THUMBNAILS else replace(look, thumbnail=b"")
            advance()
    return looks


def _is_clip(path: str) -> bool:
    """Whether what was rejected, for want of a caption for example, is a file that can be looked at."""
    try:
        return os.path.isabs(path) and path.lower().endswith(CLIP_EXTENSIONS) and os.path.isfile(path)
    except ValueError:  # a name that no system takes
        return False


# ---- what follows from it


def _sample(key: str, window: _Window, variant: Variant) -> CheckedSample:
    tokens = int(np.prod(_latent_size(window, variant))) // int(np.prod(variant.dit.patch_size))
    return CheckedSample(
        key + window.suffix, window.start_seconds, window.num_frames, window.height, window.width, tokens
    )


def _latent_size(window: _Window, variant: Variant) -> tuple[int, int, int]:
    stride = variant.vae_stride
    return (window.num_frames - 1) // stride[0] + 1, window.height // stride[1], window.width // stride[2]


def _warnings(clip: CheckedClip, look: _Look, spec: ClipSpec, twin: str, *, exact: bool) -> list[str]:
    warnings = []
    if twin:
        warnings.append(f"duplicate: the same pictures as {twin}; keep one of them")
    if clip.text_tokens > TEXT_LEN:
        count = f"{clip.text_tokens:,}" if exact else f"about {clip.text_tokens:,}"
        warnings.append(f"caption too long: {count} tokens, all beyond {TEXT_LEN} is cut")
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
            "interlaced: what moves comes out combed; give what ffmpeg -i IN -vf bwdif OUT makes of it"
        )
    if source.hdr:
        warnings.append(
            f"HDR: {source.hdr} brightness is kept as stored, which looks grey; give what "
            f"ffmpeg -i IN -vf {TO_SDR} OUT makes of it"
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
    """What the samples of a clip add to the cache; `stored` has the digests of those whose latents it holds already."""
    own = 2 * min(clip.text_tokens, TEXT_LEN) * variant.dit.text_dim + len(clip.caption.encode())
    dit, image, clip_states = variant.dit, "image" in variant.conditions, "clip" in variant.conditions
    total = len(windows) * (own + SAMPLE_OVERHEAD + ARRAY_OVERHEAD * (image + clip_states))
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
    """How the tokens of a cleaned caption are counted."""
    if model is None:
        return estimate_tokens
    from transformers import AutoTokenizer

    from wands.encoders.components import CONFIG_FILES, find_part

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_part(model, "tokenizer", CONFIG_FILES))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"model={model}: its tokenizer cannot be loaded ({reason}).") from None
    return lambda caption: len(tokenizer(caption, verbose=False).input_ids)  # it would warn beyond 512


def _read_variant(model: str | Path) -> Variant:
    from wands.encoders.components import read_variant

    return read_variant(model)
