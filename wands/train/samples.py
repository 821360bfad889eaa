"""Generate sample videos while a run trains, with the weights in its DeepSpeed engines.

The DiT of a run takes packed sequences and may be divided among ranks; `DiTAdapter` gives it the interface of diffusers'
transformer, whose pipelines and schedulers then generate the videos as in `wands infer`. A video that fails is reported, and the
training continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from wands.checkpoint.step_folders import step_name
from wands.config.recipe import Recipe
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, save_video, to_pixels
from wands.distributed.bootstrap import gather_objects, start_together
from wands.distributed.engine_protocol import TrainingEngine
from wands.encoders.components import quiet_loading
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.image import PipelineEncoders
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError, one_line
from wands.files import atomic_path
from wands.report.page import write_report
from wands.report.run_data import describe_start
from wands.run.append_log import continue_rows, to_line
from wands.sampling.contact_sheet import CELL, SheetRow, save_contact_sheet
from wands.sampling.dit_adapter import DiTAdapter
from wands.sampling.extra_inputs import ExtraInputs, encode_inputs, read_inputs
from wands.sampling.images import ConditionImages, read_images
from wands.sampling.pipeline import find_pipeline, load_components
from wands.sampling.requests import SampleRequest, build_requests, flag_of, read_prompts
from wands.sampling.rollout import ChunkAdapter, roll_out, rollout_problems
from wands.sampling.sample import (
    Texts,
    decode_latents,
    encode_all_texts,
    encode_texts,
    first_frames,
    pipeline_for,
    sample_latents,
)
from wands.texts import plural
from wands.train.jobs import FinishedStep, Job
from wands.train.training import Training
from wands.variants import Expert, Variant
from wands.watch.watchdog import Watchdog

_FRAMES = 3
"""Number of frames of each video on the contact sheet."""
_COLUMNS = {"raw": "now", "ema": "EMA"}
_FAILURE = (
    "step {step}: sample {number} ({weights} weights) could not be made: {reason}. The training continues without it. "
    "If memory is short, lower height, width or num_frames in the sample section."
)
_NAMES = ("prompt_embeds", "negative_prompt_embeds", "image_embeds", "image_latents")
_KEYS = {flag_of(key): f"sample.{key}" for key in SampleRequest.model_fields}
_KEYS |= {"--model": "model.path", "--prompts-file": "sample.prompts_file", "--prompt": "sample.prompts"}


def plan_videos(
    recipe: Recipe,
    variant: Variant,
    experts: Sequence[Expert],
    has_model: bool = True,
    has_images: bool = True,
) -> tuple[SampleRequest, ...]:
    """Return the requests for the videos of a recipe's `sample` section, after all checks that need no weights.

    `has_model` and `has_images` say whether the files of the model and the input images are on this machine and can be checked.

    Raises:
        ConfigError: if a prompt, an image or an option is invalid, `model.path` is not a complete pipeline, or the recipe trains
            only one of two experts.
    """
    section = recipe.sample
    if section is None:
        return ()
    if len(experts) < len(variant.experts):
        raise ConfigError(
            f"sample: videos need both experts of {variant.name}, but model.experts={recipe.model.experts} loads only one. Train "
            "both experts, or remove the section `sample` from the recipe and make videos with wands infer --checkpoint."
        )
    try:
        prompts = [*section.prompts, *(read_prompts(Path(file)) if (file := section.prompts_file) else ())]
        options = section.model_dump(exclude={"every", "prompts", "prompts_file"})
        requests, problems = build_requests(prompts, options, variant)
        if has_model:
            find_pipeline(recipe.model.path, conditions=variant.extra, is_base=True)
        if has_images:
            problems = problems or read_images(requests)[1] + read_inputs(requests, variant)[1]
        problems += rollout_problems(requests, variant, recipe.objective.name != "flow_matching")
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        # The checks of wands infer name its flags.
        texts = [re.sub(r"--[a-z0-9-]+", lambda m: _KEYS.get(m[0], m[0]), text) for text in error.problems]
        raise ConfigError(texts) from None
    return tuple(requests)


def encode_samples(
    requests: Sequence[SampleRequest],
    model_path: str,
    output_dir: Path,
    variant: Variant,
    *,
    rank: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the encoded prompts and images of a run's samples. Every rank must call this function.

    Rank 0 reads the tensors from a file in the run folder. If this file does not exist, or prompts, images or encoders have
    changed, rank 0 loads the encoders, encodes, writes the file, and frees the encoders.

    Returns:
        CPU tensors with keys such as "0.prompt_embeds": the index of the request, a dot, and "prompt_embeds",
        "negative_prompt_embeds", "image_embeds" (hidden states of CLIP), "image_latents" (the VAE's latents before
        normalization), or "input_channels" and "input_tokens" (`ExtraInputs`). Tensors that sampling does not need are missing.

    Raises:
        WandsError: on all ranks, if the encoders cannot be loaded.
    """
    with start_together():
        encodes = requests and rank == 0
        tensors = [_read_or_encode(requests, model_path, output_dir, variant, device) if encodes else {}]
    dist.broadcast_object_list(tensors)
    return tensors[0]


def _read_or_encode(
    requests: Sequence[SampleRequest],
    model_path: str,
    output_dir: Path,
    variant: Variant,
    device: torch.device,
) -> dict[str, Tensor]:
    path = output_dir / "samples" / "prompts.safetensors"
    images = read_images(requests)[0]
    files = read_inputs(requests, variant)[0]
    # As for wands infer, so that both give the same video.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    conditions = [(condition.name, condition.fingerprint()) for condition in variant.extra]
    facts = repr((dtype, tuple(requests), fingerprint_pipeline(model_path), conditions)).encode()
    pixels = [image.tobytes() for given in images for image in given.values()]
    pixels += [file.tobytes() for given in files for file in given.values()]
    fingerprint = hashlib.sha256(b"".join([facts, *pixels])).hexdigest()
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:  # missing or damaged
        if (file.metadata() or {}).get("fingerprint") == fingerprint:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    source = find_pipeline(model_path, conditions=variant.extra, is_base=True)
    with quiet_loading():
        pipeline = load_components(source, dict.fromkeys(source.dits), dtype).to(device)
    tensors = _encode(pipeline, requests, images)
    del pipeline
    if variant.extra:
        encoders = PipelineEncoders(source.model, device)
        for i, (request, given) in enumerate(zip(requests, files, strict=True)):
            inputs = encode_inputs(request, given, variant, encoders)._asdict()
            tensors |= {f"{i}.input_{name}": value for name, value in inputs.items() if value is not None}
    with atomic_path(path) as temporary:
        temporary.write_bytes(save(tensors, {"fingerprint": fingerprint}))
    return tensors


@torch.no_grad()
def _encode(
    pipeline: Any, requests: Sequence[SampleRequest], images: Sequence[ConditionImages]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {}
    for i, (request, given) in enumerate(zip(requests, images, strict=True)):
        view = pipeline_for(pipeline, request, given)
        (_, texts), *later = encode_all_texts(view, request, 1)
        tensors |= {f"{i}.{name}": text for name, text in zip(_NAMES, texts, strict=False)}
        for number, (_, texts) in enumerate(later):
            tensors |= {f"{i}.later{number}.{name}": text for name, text in zip(_NAMES, texts, strict=False)}
        if not (both := list(given.values())):
            continue
        if getattr(view, "image_encoder", None) is not None:
            tensors[f"{i}.image_embeds"] = view.encode_image(both)
        pixels = to_pixels(np.stack([np.asarray(image) for image in both]))
        if not pipeline.config.expand_timesteps:  # the other frames are gray
            video = pixels.new_zeros(3, request.num_frames, request.height, request.width)
            video[:, [0, -1][: len(both)]] = pixels
            pixels = video
        tensors[f"{i}.image_latents"] = view.vae.encode(pixels[None].to(view.device)).latent_dist.mode()
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}


class _StoredVae(nn.Module):
    """VAE of a diffusers pipeline whose `encode` returns stored latents."""

    def __init__(self, config: Any, device: torch.device, latents: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.device = device
        self.dtype = torch.float32
        self.encode = lambda _: SimpleNamespace(latents=latents)  # where diffusers looks for them


class RunSamples(Job):
    """Job that generates the sample videos of a run, and writes their files.

    In a round, each context-parallel group generates a different video. At ZeRO-3, all groups gather the weights together and
    must make the same number of forward passes, so a round only has videos with the same number of passes, and a group without a
    video generates the first one again and discards it.

    Args:
        tensors: result of `encode_samples`.

    Raises:
        WandsError: on all ranks, if the VAE or the scheduler cannot be loaded.
    """

    def __init__(
        self,
        training: Training,
        requests: Sequence[SampleRequest],
        tensors: Mapping[str, Tensor],
        watchdog: Watchdog,
    ) -> None:
        self._training = training
        self._requests = requests
        self._tensors = tensors
        self._watchdog = watchdog
        device = training.device
        size = training.groups.dims.dp_size
        self._folder = training.output_dir / "samples"
        if training.rank == 0:
            path = self._folder / "samples.jsonl"
            self._rows, self._log = continue_rows(path, training.start_step, "weights", "video")
        with start_together(), quiet_loading():
            extra = training.variant.extra
            source = find_pipeline(training.recipe.model.path, conditions=extra, is_base=True)
            pipeline_class = getattr(diffusers, source.class_name)
            index = pipeline_class.load_config(source.model)
            absent = {part: None for part in index if isinstance(index[part], list) and part != "scheduler"}
            self._pipeline = pipeline_class.from_pretrained(
                source.model, **absent, use_safetensors=True, trust_remote_code=False
            )
            self._vae = WanVideoEncoder.load(source.model).vae
        is_decoder = training.groups.dims.is_first_of_bin
        self._home = "cpu" if is_decoder else "meta"
        self._vae.to(self._home)
        objective = training.recipe.objective
        self._causal = objective if objective.name != "flow_matching" else None
        adapters = {part: self._adapter(engine) for part, engine in training.engines.items()}
        self._pipeline.register_modules(vae=_StoredVae(self._vae.config, device), **adapters)
        by_schedule = defaultdict[tuple[Any, ...], list[int]](list)
        for i, r in enumerate(requests):
            schedule = r.num_inference_steps, r.flow_shift, r.guidance_scale > 1
            by_schedule[*schedule, r.num_frames if self._causal else None].append(i)
        self._rounds = [own[i : i + size] for own in by_schedule.values() for i in range(0, len(own), size)]

    def _adapter(self, engine: TrainingEngine) -> DiTAdapter:
        model: Any = engine.module
        groups = self._training.groups
        device = self._training.device
        if self._causal is None:
            return DiTAdapter(model, engine.__call__, groups, device)
        backend = model.blocks[0].attn2.processor.backend
        return ChunkAdapter(model, engine.__call__, groups, device, backend)

    def start(self, training: Training) -> None:
        if training.start_step == 0:
            self.write(0)

    def is_due(self, step: FinishedStep) -> bool:
        section = self._training.recipe.sample
        is_due = section is not None and (step.number % section.every == 0 or step.is_last)
        return is_due and not step.stops

    def run(self, step: FinishedStep) -> None:
        self.write(step.number)

    def write(self, step: int) -> None:
        """Generate all sample videos with the current weights and their moving average. Every rank must call this method.

        A video that fails gives a warning and the event "sample failed".
        """
        training = self._training
        started = time.perf_counter()
        rows = []
        kinds = training.weights_at(step)
        for kind in kinds:
            with training.inference(kind):
                for numbers in self._rounds:
                    self._watchdog.begin_work(f"sampling at step {step}")
                    results = list(filter(None, gather_objects(self._try(step, kind, numbers))))
                    rows += [row for row in results if "reason" not in row]
                    failures = {row["number"]: row for row in results if "reason" in row}
                    for failure in failures.values():
                        training.events.write("sample failed", **failure)
                        training.log(_FAILURE.format(step=step, **failure))
        if training.rank:
            return
        self._log.append(*map(to_line, rows))
        self._rows += rows
        root = training.output_dir
        videos = {f"samples/{Path(row['video']).stem}": str(root / row["video"]) for row in rows}
        training.trackers.log_media(step, "Video", videos)
        try:
            self._draw_sheet(step, kinds)
        except Exception as error:  # the error of any library, such as a full disk, must not end the run
            training.log(f"step {step}: the contact sheet could not be made: {one_line(error)}.")
        seconds = time.perf_counter() - started
        folder = self._folder / step_name(step)
        training.log(f"step {step}: {plural(len(rows), 'sample')} in {seconds:.1f} s in {folder}")
        write_report(training.output_dir)

    def _try(self, step: int, kind: str, numbers: Sequence[int]) -> dict[str, Any] | None:
        """Generate the video of this rank's context-parallel group; the first rank of the group writes the files.

        The groups take the videos `numbers` in order; a group without a video generates the first one and discards it. Return the
        row of `samples.jsonl` on the first rank of a group that keeps its video, the values of the event "sample failed" on a
        rank that failed, and None on other ranks.
        """
        dims = self._training.groups.dims
        started = time.perf_counter()
        has_video = dims.dp_rank < len(numbers)
        number = numbers[dims.dp_rank if has_video else 0]
        request = self._requests[number]
        stem = self._folder / step_name(step) / f"{number:03d}_{kind}"
        try:
            view, images = self._view(number, request)
            inputs = ExtraInputs(
                channels=self._tensors.get(f"{number}.input_channels"),
                tokens=self._tensors.get(f"{number}.input_tokens"),
            )
            if self._causal is None:
                latents = sample_latents(view, request, images, extra=inputs)
            else:
                texts = self._texts(view, number, request)
                latents = torch.cat([*roll_out(view, request, self._causal, texts, images)], dim=1)
            if not (dims.is_first_of_bin and has_video):
                return None
            view.vae = self._vae.to(self._training.device)
            frames = decode_latents(view, latents)
            save_video(stem.with_suffix(".mp4"), frames, self._training.variant.fps)
            with atomic_path(stem.with_suffix(".webp")) as temporary:
                ImageOps.contain(Image.fromarray(frames[len(frames) // 2]), CELL).save(temporary, "WEBP")
        except Exception as error:  # the error of any library, such as out of memory, must not end the run
            return {"number": number, "weights": kind, "reason": one_line(error)}
        finally:
            self._vae.to(self._home)
        video = str(stem.relative_to(self._training.output_dir))
        seconds = round(time.perf_counter() - started, 3)
        options = request.model_dump(mode="json")
        row = {"step": step, "weights": kind, "number": number, **options, "seconds": seconds}
        return row | {"video": f"{video}.mp4", "thumbnail": f"{video}.webp"}

    def _view(self, number: int, request: SampleRequest) -> tuple[Any, ConditionImages]:
        """Return (pipeline, input images) for a request. Stored encodings replace the encoders, so the images are blank."""
        device = self._training.device
        blank = Image.new("RGB", (request.width, request.height))
        stored = [self._tensors.get(f"{number}.{name}") for name in _NAMES]
        *texts, embeds, latents = [x if x is None else x.to(device) for x in stored]
        images = {key: blank for key in ("image", "last_image") if getattr(request, key)}
        view: Any = pipeline_for(self._pipeline, request, images)
        view.set_progress_bar_config(disable=True)
        view.encode_prompt = lambda *_, **__: texts
        view.encode_image = lambda *_: embeds
        view.vae = _StoredVae(self._vae.config, device, latents)
        return view, images

    def _texts(self, view: Any, number: int, request: SampleRequest) -> list[tuple[int, Texts]]:
        """Return the stored texts of a request and of its later prompts, as `encode_all_texts`."""
        texts = [encode_texts(view, request)]
        for later in range(len(request.later_prompts or ())):
            stored = [self._tensors.get(f"{number}.later{later}.{name}") for name in _NAMES[:2]]
            prompt, negative = [x if x is None else x.to(self._training.device) for x in stored]
            assert prompt is not None
            texts.append((prompt, negative))
        stride = self._training.variant.vae_stride[0]
        return list(zip(first_frames(request, stride), texts, strict=True))

    def _draw_sheet(self, step: int, kinds: Sequence[str]) -> None:
        """Draw a contact sheet with the videos of the start of the run, the trained weights and their moving average."""
        path = self._folder / step_name(step) / "contact_sheet.png"
        fps = self._training.variant.fps
        label, _ = describe_start(self._training.recipe.model_dump())
        columns = {(0, "raw"): label} | {(step, kind): _COLUMNS[kind] for kind in kinds if step}
        sheet = []
        for request in self._requests:
            wanted = request.model_dump(mode="json")
            # A resumed run may have other prompts.
            own = [row for row in self._rows if all(row.get(k) == v for k, v in wanted.items())]
            files = {(row["step"], row["weights"]): self._training.output_dir / row["video"] for row in own}
            spec = ClipSpec(fps, size_multiple=2)
            videos = [next(decode_clip(files[key], spec)).frames if key in files else None for key in columns]
            sheet.append(SheetRow(request.prompt, videos))
        save_contact_sheet(path, sheet, _FRAMES, tuple(columns.values()))
        self._training.trackers.log_media(step, "Image", {"samples": np.asarray(Image.open(path))})
