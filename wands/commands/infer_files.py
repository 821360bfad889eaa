"""Sample a request of `wands infer`, and write its files."""

from __future__ import annotations

import json
import logging
import re
import time
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from wands.config.options import InferOptions
from wands.config.recipe import ObjectiveConfig
from wands.data.clips.video import save_video
from wands.files import atomic_path, write_text
from wands.sampling.contact_sheet import pick_frames
from wands.sampling.extra_inputs import ExtraInputs
from wands.sampling.images import ConditionImages
from wands.sampling.pipeline import AnyPipeline, PipelineSource
from wands.sampling.requests import SampleRequest
from wands.sampling.rollout import roll_out
from wands.sampling.sample import decode_chunks, decode_latents, encode_all_texts, sample_latents
from wands.sampling.schedulers import shift_key

log = logging.getLogger(__name__)

RECORD_FILE = "samples.jsonl"
SHEET_FRAMES = 4


@dataclass(frozen=True)
class InferResult:
    """Result of one sample request.

    Attributes:
        request: prompt and options. Its `flow_shift` is the shift of the scheduler that sampled the video.
        latents: safetensors file with fp32 `latents` [channels, frames, height, width], normalized as in a cache, or None.
        contact_sheet: PNG that shows all videos from the same call of `infer`.
        seconds: time for sampling and decoding.
    """

    request: SampleRequest
    video: Path
    latents: Path | None
    contact_sheet: Path
    fps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples requests and writes their files.

    Attributes:
        number: number of the first file.
        count: number of requests.
        causal: chunks of causal sampling; None samples all frames together.
        guidance: see `sample_latents`.
    """

    options: InferOptions
    source: PipelineSource
    origin: Mapping[str, Any]
    number: int
    count: int
    causal: ObjectiveConfig | None
    rank: int
    guidance: Any

    def sample(
        self,
        i: int,
        pipeline: AnyPipeline,
        request: SampleRequest,
        images: ConditionImages,
        inputs: ExtraInputs,
    ) -> tuple[InferResult, np.ndarray] | None:
        """Sample request number `i`. Return its result and frames for the contact sheet on the first rank, else None."""
        options = self.options
        times = [time.perf_counter()]
        texts = encode_all_texts(pipeline, request, self.source.variant.vae_stride[0])
        texts[0][1][0].sum().item()  # waits for the GPU
        times.append(time.perf_counter())
        waits: list[float] = []
        if self.causal is None:
            latents = sample_latents(pipeline, request, images, texts[0][1], self.guidance, inputs)
            parts: Iterable[torch.Tensor] = [latents]
        else:
            parts = _timed(
                roll_out(pipeline, request, self.causal, texts, images), waits
            )  # decoded as they come
        times.append(time.perf_counter())
        if self.rank > 0:
            deque(parts, maxlen=0)  # denoises with the other ranks
            return None
        kept: list[torch.Tensor] = []
        parts = _kept(parts, kept, options.save_latents)
        frames: Iterable[np.ndarray] = decode_chunks(pipeline, parts)
        if self.causal is None:
            frames = _decode_whole(pipeline, parts, tiled=options.vae_tiling)
        shown: list[np.ndarray] = []
        stem = f"{self.number + i:03d}_{_slug(request.prompt)}"
        fps = options.fps or self.source.variant.fps
        save_video(options.out_dir / f"{stem}.mp4", _shown(frames, request.num_frames, shown), fps)
        times.append(time.perf_counter())
        times[2] += sum(waits)
        shift = pipeline.scheduler.config[shift_key(pipeline.scheduler)]
        result = InferResult(
            request=request.model_copy(update={"flow_shift": shift}),
            video=options.out_dir / f"{stem}.mp4",
            latents=options.out_dir / f"{stem}.safetensors" if options.save_latents else None,
            contact_sheet=options.out_dir / f"contact_sheet_{self.number:03d}.png",
            fps=fps,
            seconds=times[-1] - times[0],
        )
        _write_result(result, kept, self.origin)
        _log_times(result, i + 1, self.count, np.diff(times))
        return result, np.stack(shown)


def _decode_whole(
    pipeline: AnyPipeline, parts: Iterable[torch.Tensor], *, tiled: bool
) -> Iterable[np.ndarray]:
    [latents] = parts
    return decode_latents(pipeline, latents, tiled=tiled)


def _timed(parts: Iterable[torch.Tensor], waits: list[float]) -> Iterator[torch.Tensor]:
    """Yield the parts, and append the seconds that each took to `waits`."""
    began = time.perf_counter()
    for part in parts:
        waits.append(time.perf_counter() - began)
        yield part
        began = time.perf_counter()


def _kept(chunks: Iterable[torch.Tensor], latents: list[torch.Tensor], keeps: bool) -> Iterator[torch.Tensor]:
    """Yield the chunks, and append them to `latents` if `keeps` is set."""
    for chunk in chunks:
        if keeps:
            latents.append(chunk)
        yield chunk


def _shown(frames: Iterable[np.ndarray], num_frames: int, shown: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the frames, and append those of the contact sheet to `shown`."""
    picked = set(pick_frames(np.arange(num_frames), SHEET_FRAMES).tolist())
    for number, frame in enumerate(frames):
        if number in picked:
            shown.append(frame)
        yield frame


def _log_times(result: InferResult, number: int, count: int, parts: np.ndarray) -> None:
    values = number, count, result.seconds, *parts, result.video
    log.info("sample %d of %d in %.1f s (text %.1f s, denoising %.1f s, decoding %.1f s): %s", *values)


def _write_result(result: InferResult, latents: Sequence[torch.Tensor], origin: Mapping[str, Any]) -> None:
    if result.latents:
        with atomic_path(result.latents) as temporary:
            # save_file would make the file readable by its owner only.
            temporary.write_bytes(save({"latents": torch.cat([*latents], dim=1).contiguous()}))
    record = result.request.model_dump() | {
        "fps": result.fps,
        "file": result.video.name,
        "latents": result.latents.name if result.latents else None,
        "seconds": round(result.seconds, 3),
        **origin,
    }
    path = result.video.parent / RECORD_FILE
    earlier = path.read_text(encoding="utf-8") if path.is_file() else ""
    write_text(path, earlier + json.dumps(record, ensure_ascii=False) + "\n")


def next_number(out_dir: Path) -> int:
    """Return one more than the largest number in the folder's file names, or 0."""
    names = [path.name for path in out_dir.iterdir()] if out_dir.is_dir() else []
    used = [int(match[1]) for name in names if (match := re.match(r"(?:contact_sheet_)?(\d{3,})[_.]", name))]
    return max(used, default=-1) + 1


def _slug(prompt: str) -> str:
    words = re.sub(r"[\W_]+", "-", unicodedata.normalize("NFKC", prompt).lower())
    return words[:40].strip("-") or "sample"


def label_of(request: SampleRequest) -> str:
    """Return the text above a video in the contact sheet: prompt, size and seed."""
    size = f"{request.width}x{request.height}, {request.num_frames} frames, seed {request.seed}"
    return f"{request.prompt or '(no prompt)'}  ({size})"
