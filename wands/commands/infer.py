"""`wands infer`: prompts in; one mp4 each, a contact sheet and a record of what made them out.

Sampling is diffusers' own `WanPipeline` or `WanImageToVideoPipeline`, wherever the weights come from: what is seen here
is what every user of an exported folder gets. Started by a launcher, all its processes share each video; every one runs the
whole pipeline on the same latents but for the transformer, which they run together, and the first one decodes and writes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from wands.data.clips.video import save_video
from wands.distributed.bootstrap import start_together
from wands.files import atomic_path
from wands.sampling.contact_sheet import SheetRow, pick_frames, save_contact_sheet
from wands.sampling.images import Pictures, read_pictures
from wands.sampling.loras import find_loras
from wands.sampling.pipeline import AnyPipeline, PipelineSource, find_pipeline, load_pipeline
from wands.sampling.requests import (
    SampleRequest,
    SizeRule,
    build_requests,
    check_conditions,
    raise_problems,
    read_prompts,
)
from wands.sampling.sample import call_pipeline, each_request, sample, shift_key
from wands.sampling.sharing import check_commands, own_device, plan_ranks, share_pipeline

log = logging.getLogger(__name__)

T = TypeVar("T")
Several: TypeAlias = T | Sequence[T] | None
"""Not given, once for all prompts, or as many times as there are prompts."""
RECORD_FILE = "samples.jsonl"
SHEET_FRAMES = 4


@dataclass(frozen=True)
class InferResult:
    """One sample on disk.

    Attributes:
        request: what was asked for, every option spelled out.
        video: the mp4.
        latents: safetensors with `latents` fp32 [C, f, h, w], normalised as in a cache; None when not kept.
        contact_sheet: the PNG that shows all samples of the run.
        fps: frames per second of the mp4.
        flow_shift: the shift that the scheduler used.
        seconds: wall time of sampling and decoding.
    """

    request: SampleRequest
    video: Path
    latents: Path | None
    contact_sheet: Path
    fps: int
    flow_shift: float
    seconds: float


def infer(
    model: str | Path,
    prompts: Sequence[str | SampleRequest],
    *,
    out_dir: Path,
    prompts_file: Path | None = None,
    height: Several[int] = None,
    width: Several[int] = None,
    num_frames: Several[int] = None,
    num_inference_steps: Several[int] = None,
    guidance_scale: Several[float] = None,
    guidance_scale_2: Several[float] = None,
    flow_shift: Several[float] = None,
    seed: Several[int] = None,
    negative_prompt: Several[str] = None,
    image: Several[str | Path | None] = None,
    last_image: Several[str | Path | None] = None,
    transformer: Path | None = None,
    transformer_2: Path | None = None,
    checkpoint: Path | None = None,
    ema: bool = False,
    lora: Sequence[str | Path] = (),
    lora_2: Sequence[str | Path] = (),
    offload: Literal["none", "model", "sequential"] = "none",
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    device: str | None = None,
    fps: int | None = None,
    save_latents: bool = False,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
) -> list[InferResult]:
    """Sample every prompt and write the videos, one contact sheet and `samples.jsonl` into `out_dir`.

    Files are numbered on from those already there; no video or sheet of an earlier run is touched. The same
    request gives the same video, bit for bit on one machine, whatever stands before it. Under a launcher every
    rank calls this, and they sample each video together: the same one but for rounding.

    Args:
        model: diffusers pipeline folder or Hub id.
        prompts: texts, or requests (`read_prompts`) whose explicitly set fields win over the options below.
        out_dir: made when missing.
        prompts_file: more prompts, behind `prompts`; see `read_prompts`.
        height: pixels, default 480. This and the next ten: once for all prompts, or once per prompt.
        width: pixels, default 832.
        num_frames: 4k+1, default 81.
        num_inference_steps: default 50.
        guidance_scale: default 5; up to 1 runs without guidance.
        guidance_scale_2: of the low-noise expert of two; default: `guidance_scale`.
        flow_shift: default: that of the pipeline's scheduler.
        seed: default 0; given once, prompt i gets seed + i.
        negative_prompt: default ""; any other needs a `guidance_scale` above 1.
        image: picture that the video starts from, or a video, whose first frame is taken; cut to the size as clips are.
        last_image: picture that it ends at, or a video, whose last frame is taken.
        transformer: diffusers folder whose transformer takes the place of the pipeline's.
        transformer_2: the same for the low-noise expert of two.
        checkpoint: the DiTs straight from `wands train`: a run folder (newest step) or a step folder.
        ema: the moving average of their weights that the checkpoint holds.
        lora: "PATH" or "PATH=SCALE" each, PATH a folder, file or Hub id: LoRAs to add, in diffusers', PEFT's or ComfyUI's layout.
        lora_2: the same for the low-noise expert, where the files do not say so themselves.
        offload: "model" and "sequential" keep weights on the host and bring a model, or a layer, at a time.
        dtype: of DiTs and text encoder, the others are fp32; "auto": bf16 on CUDA, fp32 on the CPU.
        device: default: CUDA when there is one; under a launcher each rank takes the one of its own.
        fps: of the mp4; default: the variant's.
        save_latents: keep the final latents beside each mp4.
        ulysses_degree: ranks that share heads, as in a recipe's `parallel`; default: the most that can.
        ring_degree: ranks that share tokens; default: the rest of them all.

    Returns:
        One result per prompt, in order; none on ranks other than the first, which alone decodes and writes.

    Raises:
        ConfigError: the model cannot be used, options are wrong, a picture cannot be read, or the ranks that were started
            cannot share a video, or nothing can be written to `out_dir`: all at once, before weights are read. Also when the
            ranks were given different things.
        CheckpointError: the checkpoint is missing, incomplete, without an average, or of another model.
        WandsError: a file cannot be written.
    """
    options = {
        "height": height,
        "width": width,
        "num_frames": num_frames,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "guidance_scale_2": guidance_scale_2,
        "flow_shift": flow_shift,
        "seed": seed,
        "negative_prompt": negative_prompt,
        "image": _names(image),
        "last_image": _names(last_image),
    }
    with start_together():
        source = find_pipeline(
            model,
            transformer=transformer,
            transformer_2=transformer_2,
            checkpoint=checkpoint,
            ema=ema,
            loras=find_loras(lora, lora_2),
        )
        rule = SizeRule(source.vae_stride, source.variant.dit.patch_size)
        asked = [*prompts, *(read_prompts(prompts_file) if prompts_file else [])]
        requests, problems = build_requests(asked, options, rule)
        problems += check_conditions(requests, source.variant)
        grid, misfits = plan_ranks(source.variant, ulysses_degree, ring_degree)
        if grid.world_size > 1:
            device, refused = own_device(device)
            misfits += refused
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        pictures, unreadable = read_pictures([] if problems else requests)
        misfits += _out_problems(out_dir) if grid.rank == 0 else []  # the one that writes
        raise_problems([*problems, *misfits, *_run_problems(offload, device, fps), *unreadable])
    chosen = "bf16" if dtype == "bf16" or (dtype == "auto" and device != "cpu") else "fp32"
    if grid.world_size > 1:
        check_commands(source, requests, pictures, chosen, grid)
    log.info(
        "sampling %d videos on %s with %s", len(requests), device, source.checkpoint or transformer or model
    )
    with start_together():
        pipeline = load_pipeline(
            source,
            dtype=torch.bfloat16 if chosen == "bf16" else torch.float32,
            device=device,
            offload=offload,
        )
    if grid.world_size > 1:
        share_pipeline(pipeline, grid)
    if grid.rank > 0:
        _sample_along(pipeline, requests, pictures)
        return []
    return _run(
        pipeline,
        requests,
        pictures,
        out_dir,
        fps or source.variant.fps,
        save_latents,
        _origin(source, chosen),
    )


def _names(given: Several[str | Path | None]) -> Several[str | None]:
    if given is None:
        return None
    if isinstance(given, str | Path):
        return str(given)
    return [None if path is None else str(path) for path in given]


def _origin(source: PipelineSource, dtype: str) -> dict[str, Any]:
    """Where the weights of the samples come from, for the record."""
    origin: dict[str, Any] = {"model": source.model, "dtype": dtype}
    for part, dit in source.dits.items():
        if dit.checkpoint or dit.folder != source.model:
            origin[part] = str(dit.checkpoint or dit.folder)
    if source.ema:
        origin["ema"] = True
    if source.loras:
        origin["loras"] = [lora.record() for lora in source.loras]
    return origin


def _run(
    pipeline: AnyPipeline,
    requests: Sequence[SampleRequest],
    pictures: Sequence[Pictures],
    out_dir: Path,
    fps: int,
    save_latents: bool,
    origin: Mapping[str, Any],
) -> list[InferResult]:
    first = _next_number(out_dir)
    sheet = out_dir / f"contact_sheet_{first:03d}.png"
    results, rows = [], []
    for i, (one, request, given) in enumerate(each_request(pipeline, requests, pictures)):
        one.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
        frames, latents, seconds = sample(one, request, given)
        stem = f"{first + i:03d}_{_slug(request.prompt)}"
        result = InferResult(
            request=request,
            video=out_dir / f"{stem}.mp4",
            latents=out_dir / f"{stem}.safetensors" if save_latents else None,
            contact_sheet=sheet,
            fps=fps,
            flow_shift=float(one.scheduler.config[shift_key(one.scheduler)]),
            seconds=seconds,
        )
        _write(result, frames, latents, origin)
        log.info("sample %d of %d in %.1f s: %s", i + 1, len(requests), seconds, result.video)
        results.append(result)
        rows.append(SheetRow(_label(request), pick_frames(frames, SHEET_FRAMES)))
    save_contact_sheet(sheet, rows, frames_per_row=SHEET_FRAMES)
    return results


def _sample_along(
    pipeline: AnyPipeline, requests: Sequence[SampleRequest], pictures: Sequence[Pictures]
) -> None:
    """Do this rank's part of every sample; the first rank decodes them."""
    for one, request, given in each_request(pipeline, requests, pictures):
        one.set_progress_bar_config(disable=True)
        call_pipeline(one, request, given, output_type="latent")


def _out_problems(out_dir: Path) -> list[str]:
    """Why nothing could be written there, found out without leaving anything: what is refused later makes no folder."""
    try:
        if out_dir.exists() and not out_dir.is_dir():
            return [f"infer.out={out_dir} is a file; give a folder."]
        nearest = next(folder for folder in (out_dir, *out_dir.absolute().parents) if os.path.lexists(folder))
        with tempfile.TemporaryFile(dir=nearest):
            return []
    except OSError as error:
        return [f"infer.out={out_dir} cannot be written ({error.strerror or error}); choose another folder."]


def _run_problems(offload: str, device: str, fps: int | None) -> list[str]:
    problems = []
    present = {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    if device not in present | ({"cuda"} if len(present) > 1 else set()):
        problems.append(
            f"infer.device={device} is not on this machine; use one of {', '.join(sorted(present))}."
        )
    if offload != "none" and device == "cpu":
        problems.append(
            f"infer.offload={offload} brings weights to an accelerator, and infer.device={device} is none; "
            "use infer.offload=none."
        )
    if fps is not None and fps <= 0:
        problems.append(f"infer.fps={fps} must be above 0; leave it out for the model's own.")
    return problems


def _write(result: InferResult, frames: np.ndarray, latents: torch.Tensor, origin: Mapping[str, Any]) -> None:
    if result.latents:
        from safetensors.torch import save

        with atomic_path(
            result.latents
        ) as temporary:  # save_file would leave a file that only its owner may read
            temporary.write_bytes(save({"latents": latents.contiguous()}))
    with atomic_path(result.video) as temporary:
        save_video(temporary, frames, result.fps)
    record = result.request.model_dump() | {
        "flow_shift": result.flow_shift,
        "fps": result.fps,
        "file": result.video.name,
        "latents": result.latents.name if result.latents else None,
        "seconds": round(result.seconds, 3),
        **origin,
    }
    path = result.video.parent / RECORD_FILE
    earlier = path.read_text(encoding="utf-8") if path.is_file() else ""
    with atomic_path(path) as temporary:
        temporary.write_text(earlier + json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


def _next_number(out_dir: Path) -> int:
    """Return the first number that no file of an earlier run carries."""
    names = [path.name for path in out_dir.iterdir()] if out_dir.is_dir() else []
    taken = [int(match[1]) for name in names if (match := re.match(r"(?:contact_sheet_)?(\d{3,})[_.]", name))]
    return max(taken, default=-1) + 1


def _slug(prompt: str) -> str:
    words = re.sub(r"[\W_]+", "-", unicodedata.normalize("NFKC", prompt).lower())
    return words[:40].strip("-") or "sample"


def _label(request: SampleRequest) -> str:
    size = f"{request.width}x{request.height}, {request.num_frames} frames, seed {request.seed}"
    return f"{request.prompt or '(no prompt)'}  ({size})"
