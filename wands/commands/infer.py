"""`wands infer`: sample videos from prompts. Write an mp4 for each video, a contact sheet, and a record of all options.

Sampling uses diffusers' own `WanPipeline` or `WanImageToVideoPipeline`, so a user who samples an exported folder with diffusers
gets the same video. Under a launcher, every rank runs the whole pipeline on the same latents, but the ranks divide the work of
the transformer. Only the first rank decodes the latents and writes files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from wands.checkpoint.checkpoint_files import find_checkpoint, load_full_weights
from wands.commands.infer_causal import CHUNK_OPTIONS, causal_config, causal_problems, make_causal
from wands.commands.infer_files import SHEET_FRAMES, InferResult, Sampler, label_of, next_number
from wands.conditions.condition import Condition
from wands.config.options import InferOptions
from wands.distributed.bootstrap import accelerator_type, init_process_group, start_together
from wands.distributed.consistency import check_agreement
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.encoders.image import PipelineEncoders
from wands.errors import ConfigError, one_line
from wands.model.files.hashes import check_files
from wands.plugin import load_plugins
from wands.sampling.contact_sheet import SheetRow, save_contact_sheet
from wands.sampling.extra_inputs import (
    NO_INPUTS,
    ExtraInputs,
    Files,
    encode_inputs,
    parse_inputs,
    read_inputs,
)
from wands.sampling.images import ConditionImages, read_images
from wands.sampling.loras import find_loras
from wands.sampling.pipeline import (
    AnyPipeline,
    DiTSource,
    PipelineSource,
    apply_options,
    find_pipeline,
    load_pipeline,
)
from wands.sampling.requests import SampleRequest, build_requests, read_prompts
from wands.sampling.sample import pipeline_for
from wands.sampling.sharing import plan_ranks, public_config, set_attention, share_pipeline
from wands.texts import plural
from wands.version import __version__

log = logging.getLogger(__name__)

SPEED_OPTIONS = {"attention_backend", "guidance_mode", "scheduler", "vae_dtype", "vae_tiling", "compile"}
"""Options of `InferOptions` that change how a video is computed. `samples.jsonl` records values other than the default."""


def infer(
    options: InferOptions,
    more_requests: Sequence[SampleRequest] = (),
    conditions: Sequence[Condition] = (),
) -> list[InferResult]:
    """Sample every prompt, and write the videos, one contact sheet and `samples.jsonl` into the folder `options.out_dir`.

    `more_requests` follow the prompts of `options`, and their set fields override `options`. `conditions` of outside code are
    added to those of --import. File names are numbered after the largest number in the folder, so no earlier file is replaced. On
    one machine, a request always gives the same video bit for bit, regardless of earlier ones. Under a launcher, every rank calls
    this function, and the video equals that of one process up to rounding.

    Returns:
        One result per request, in order; [] on ranks other than the first.

    Raises:
        ConfigError: before weights are read, if the model, an option, an image or the folder cannot be used, or ranks differ.
        CheckpointError: if the checkpoint is missing, incomplete, does not fit its config, or lacks the moving average of --ema.
        WandsError: if a file cannot be written, or a sample has values that are not finite.
    """
    with start_together():
        conditions = (*conditions, *load_plugins(options.imports).conditions)
        source, requests, images, files, dims, device = _check_requests(options, more_requests, conditions)
        causal = causal_config(options, source)
    is_bf16 = options.dtype == "bf16" or (options.dtype == "auto" and device != "cpu")
    origin = _describe_weights(source, options, "bf16" if is_bf16 else "fp32")
    if causal is not None:
        origin["causal"] = causal.model_dump(include=set(CHUNK_OPTIONS))
    if dims.world_size > 1:
        check_ranks(source, origin, requests, images, files, dims)
    _log_sources(source, plural(len(requests), "video"), device)
    with start_together():
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        extra = _encode_inputs(source, requests, files, device)
        pipeline = load_pipeline(source, dtype=dtype, device=device, offload=options.offload)
    apply_options(pipeline, options)
    sampler = Sampler(
        options=options,
        source=source,
        origin=origin,
        number=next_number(options.out_dir),
        count=len(requests),
        causal=causal,
        rank=dims.rank,
        guidance=_set_attention(pipeline, options, dims, torch.device(device), causal is not None, is_bf16),
    )
    results = []
    rows = []
    for i, (request, request_images, inputs) in enumerate(zip(requests, images, extra, strict=True)):
        view = pipeline_for(pipeline, request, request_images)
        view.set_progress_bar_config(disable=dims.rank > 0 or not sys.stderr.isatty(), leave=False)
        sampled = sampler.sample(i, view, request, request_images, inputs)
        if sampled is not None:
            result, shown = sampled
            results.append(result)
            rows.append(SheetRow(label_of(request), [shown]))
    if results:
        save_contact_sheet(results[0].contact_sheet, rows, frames_per_row=SHEET_FRAMES)
    return results


def _set_attention(
    pipeline: AnyPipeline,
    options: InferOptions,
    dims: ParallelDims,
    device: torch.device,
    is_causal: bool,
    is_bf16: bool,
) -> Any:
    """Change the attention of a pipeline's transformers for the ranks and options. Return `guidance` of `sample_latents`."""
    guidance = "batched" if options.guidance_mode == "batched" else None
    if is_causal:
        make_causal(pipeline, dims, device, is_bf16)
    elif dims.world_size > 1:
        return share_pipeline(pipeline, dims, options.attention_backend) or guidance
    else:
        set_attention(pipeline, device, ProcessGroups(dims), options.attention_backend)
    return guidance


def _log_sources(source: PipelineSource, videos: str, device: str) -> None:
    if source.variant.boundary_ratio is not None:
        for lora in source.loras:
            log.info("%s: %s", lora.label, "; ".join(map(str, lora.files)))
    log.info("sampling %s on %s with %s", videos, device, source.dits["transformer"].label)


def _encode_inputs(
    source: PipelineSource, requests: Sequence[SampleRequest], files: Sequence[Files], device: str
) -> list[ExtraInputs]:
    """Encode the inputs of conditions of outside code for all requests, and free the encoders."""
    if not source.variant.extra:
        return [NO_INPUTS] * len(requests)
    encoders = PipelineEncoders(source.model, device)
    inputs = [
        encode_inputs(request, given, source.variant, encoders)
        for request, given in zip(requests, files, strict=True)
    ]
    del encoders
    clear_device_cache(garbage_collection=True)
    return inputs


def _check_requests(
    options: InferOptions, more_requests: Sequence[SampleRequest], conditions: Sequence[Condition]
) -> tuple[PipelineSource, list[SampleRequest], list[ConditionImages], list[Files], ParallelDims, str]:
    """Check all requests before any weight is read; return (pipeline, requests, their images and files, dimensions, device)."""
    source = find_source(options, conditions)
    prompts: list[str | SampleRequest] = list(options.prompts)
    prompts += read_prompts(options.prompts_file) if options.prompts_file else []
    fields = {key: getattr(options, key) for key in SampleRequest.model_fields if hasattr(options, key)}
    fields["inputs"] = parse_inputs(options.inputs)
    requests, problems = build_requests([*prompts, *more_requests], fields, source.variant)
    split = (
        options.guidance_mode == "auto" and not options.causal and all(r.guidance_scale > 1 for r in requests)
    )
    dims = plan_ranks(source.variant, options.ulysses_degree, options.ring_degree, split)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dims.world_size > 1:
        device = "cpu" if accelerator_type() == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    images, image_problems = read_images([] if problems else requests)
    files, file_problems = read_inputs([] if problems else requests, source.variant)
    problems += [*_option_problems(options, device, dims), *image_problems, *file_problems]
    problems += causal_problems(options, requests, source.variant)
    if problems:
        raise ConfigError(problems)
    return source, requests, images, files, dims, device


def find_source(options: InferOptions, conditions: Sequence[Condition] = ()) -> PipelineSource:
    """Return a checked description of the pipeline, DiTs and LoRAs that the options name. Do not read any weight.

    Raises:
        ConfigError: if the pipeline or a folder cannot be used, or two options replace the same DiT.
        CheckpointError: if there is no complete checkpoint, or --ema is set and it contains no moving average.
    """
    dits = {}
    for part, folder in (("transformer", options.transformer), ("transformer_2", options.transformer_2)):
        if folder is not None:
            subfolder = part if (folder / part).is_dir() else ""
            dits[part] = DiTSource(str(folder), subfolder, f"--{part.replace('_', '-')}={folder}")
    if options.checkpoint is not None:
        found = find_checkpoint(options.checkpoint, verify=True)
        step, state = found
        if options.ema:
            found.check_average()
        # The checkpoint of a LoRA run does not contain the base weights. They come from the pipeline, unless the run
        # initialized them at random.
        base = None if state.recipe["model"]["init"] == "random" else str(options.model)
        label = f"--checkpoint={options.checkpoint}"
        for part in state.parts:
            if part in dits:
                raise ConfigError(f"{dits[part].label} and {label} replace the same DiT; remove one option.")
            load = partial(load_full_weights, step, part, base, options.ema, "--model")
            dits[part] = DiTSource(
                folder=str(step), subfolder=part, label=label, config=state.transformer_config, load=load
            )
    elif options.ema:
        raise ConfigError(
            "--ema needs --checkpoint; add --checkpoint, or leave --ema out if the weights are from wands export --ema."
        )
    loras = find_loras(options.lora, options.lora_1, options.lora_2)
    source = find_pipeline(options.model, dits, loras, conditions)
    if Path(options.model).is_dir():
        check_files(Path(options.model), f"--model={options.model}")
    return source


def _option_problems(options: InferOptions, device: str, dims: ParallelDims) -> list[str]:
    problems = []
    present = {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    if dims.world_size > 1 and options.device is not None:
        problems.append(
            f"--device={options.device} is one device for several processes; leave --device out to use one device per process."
        )
    elif device not in present | ({"cuda"} if len(present) > 1 else set()):
        problems.append(f"--device={device} is not on this machine; use one of {', '.join(sorted(present))}.")
    if options.offload != "none" and device == "cpu":
        problems.append(
            f"--offload={options.offload} needs an accelerator, and sampling runs on the CPU; use --offload=none."
        )
    if options.compile and options.offload == "sequential":
        problems.append("--compile needs whole blocks on the GPU; use --offload=model or --offload=none.")
    if options.fps is not None and options.fps <= 0:
        problems.append(f"--fps={options.fps} must be above 0; leave --fps out for the model's frame rate.")
    return problems + (_out_problems(options.out_dir) if dims.rank == 0 else [])


def _out_problems(out_dir: Path) -> list[str]:
    """Return error texts if `out_dir` is not writable, otherwise []. The check leaves no file and no folder."""
    try:
        nearest = next(folder for folder in (out_dir, *out_dir.absolute().parents) if os.path.lexists(folder))
        with tempfile.TemporaryFile(dir=nearest):
            return []
    except OSError as error:
        return [f"--out={out_dir} cannot be written ({one_line(error)}); choose another folder."]


def _describe_weights(source: PipelineSource, options: InferOptions, dtype: str) -> dict[str, Any]:
    """Return facts about the weights for `samples.jsonl`: model, dtype, LoRAs, and the DiTs that are not from the model."""
    origin: dict[str, Any] = {"model": source.model, "dtype": dtype}
    origin |= {part: dit.folder for part, dit in source.dits.items() if dit.folder != source.model}
    origin |= options.model_dump(include={"ema", *SPEED_OPTIONS}, exclude_defaults=True)
    for lora in source.loras:
        for part in (part for file in lora.files for part in file.experts):
            entry = {"path": lora.path, "part": part, "scale": lora.scale}
            origin.setdefault("loras", []).append(entry)
    return origin


def check_ranks(
    source: PipelineSource,
    origin: Mapping[str, Any],
    requests: Sequence[SampleRequest],
    images: Sequence[ConditionImages],
    files: Sequence[Files],
    dims: ParallelDims,
) -> None:
    """Check that all ranks have the same software, model and requests. Every rank must call this function.

    Ranks with different seeds would mix their videos, and ranks with more prompts than others would wait forever. The pipeline is
    compared because each rank searches for the newest checkpoint separately. Of `images` and `files`, the contents are compared.

    Raises:
        ConfigError: on every rank, if the ranks differ. The message names the first difference and the ranks.
    """
    _, _, device = init_process_group()
    model = {**origin, "config": public_config(source.config)}
    model |= {part: f"{dit.folder}/{dit.subfolder}" for part, dit in source.dits.items()}
    degrees = {"ulysses_degree": dims.ulysses_degree, "ring_degree": dims.ring_degree}
    command: dict[str, Any] = {"number of prompts": len(requests), "dtype": model.pop("dtype"), **degrees}
    for i, (request, given, own) in enumerate(zip(requests, images, files, strict=True), start=1):
        contents = {key: image.tobytes() for key, image in given.items()}
        contents |= {key: file.tobytes() for key, file in own.items()}
        command[f"prompt {i}"] = request.model_dump() | {
            f"contents of {key}": hashlib.sha256(content).hexdigest()[:16]
            for key, content in contents.items()
        }
    packages = {name: version(name) for name in ("torch", "diffusers", "transformers")}
    parts = {"software": {"wands": __version__, **packages}, "model": model, "command": command}
    check_agreement({name: json.dumps(part, sort_keys=True) for name, part in parts.items()}, device)
