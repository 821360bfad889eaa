"""Generate sample videos while a run trains, with the weights in its DeepSpeed engines.

If a video cannot be generated, the failure is reported, and the training continues.

During training, the DiT takes packed sequences and may be divided among ranks, so no rank has diffusers' transformer.
`DiTAdapter` gives the packed DiT the interface of diffusers' transformer. The pipelines and schedulers of diffusers then
generate the videos as in `wands infer`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from wands.data.patchify import grid_size, patchify, unpatchify
from wands.distributed.bootstrap import gather_objects, start_together
from wands.encoders.components import quiet_loading
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError, one_line
from wands.files import atomic_path
from wands.report.page import write_report
from wands.run.append_log import continue_rows, to_line
from wands.run.run import TrainingRun
from wands.sampling.contact_sheet import CELL, SheetRow, save_contact_sheet
from wands.sampling.images import ConditionImages, read_images
from wands.sampling.pipeline import find_pipeline, load_components
from wands.sampling.requests import SampleRequest, build_requests, flag_of, read_prompts
from wands.sampling.sample import decode_latents, encode_texts, pipeline_for, sample_latents
from wands.sampling.sharing import join_tokens, token_index
from wands.train.trainer import Trainer
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

    Args:
        recipe: the recipe of a run. Without a `sample` section, the result is empty.
        variant: variant of the model.
        experts: DiTs that the recipe trains.
        has_model: whether the files of the model are on this machine and can be checked.
        has_images: whether the input images of the videos are on this machine and can be checked.

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
            find_pipeline(recipe.model.path)
        if has_images:
            problems = problems or read_images(requests)[1]
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        # The checks of wands infer name its flags.
        texts = [re.sub(r"--[a-z0-9-]+", lambda m: _KEYS.get(m[0], m[0]), text) for text in error.problems]
        raise ConfigError(texts) from None
    return tuple(requests)


def encode_samples(run: TrainingRun, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the encoded prompts and images of a run's samples. Every rank must call this function.

    Rank 0 reads the tensors from a file in the run folder. If this file does not exist, or prompts, images or encoders have
    changed, rank 0 loads the encoders, encodes, writes the file, and frees the encoders.

    Args:
        run: the checked training run.
        rank: rank of this process.
        device: device of this process.

    Returns:
        A dict of CPU tensors, with keys such as "0.prompt_embeds": the index of the video in `run.samples`, a dot, and
        "prompt_embeds", "negative_prompt_embeds", "image_embeds" (hidden states of CLIP) or "image_latents" (the VAE's latents
        before normalization). Tensors that sampling does not need are missing.

    Raises:
        WandsError: on all ranks, if the encoders cannot be loaded.
    """
    with start_together():
        tensors = [_read_or_encode(run, device) if run.samples and rank == 0 else {}]
    dist.broadcast_object_list(tensors)
    return tensors[0]


def _read_or_encode(run: TrainingRun, device: torch.device) -> dict[str, Tensor]:
    path, images = run.output_dir / "samples" / "prompts.safetensors", read_images(run.samples)[0]
    # As for wands infer, so that both give the same video.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    facts = repr((dtype, run.samples, fingerprint_pipeline(run.recipe.model.path))).encode()
    pixels = [image.tobytes() for given in images for image in given.values()]
    fingerprint = hashlib.sha256(b"".join([facts, *pixels])).hexdigest()
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:  # missing or damaged
        if (file.metadata() or {}).get("fingerprint") == fingerprint:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    source = find_pipeline(run.recipe.model.path)
    with quiet_loading():
        pipeline = load_components(source, dict.fromkeys(source.dits), dtype).to(device)
    tensors = _encode(pipeline, run.samples, images)
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
        tensors[f"{i}.prompt_embeds"], tensors[f"{i}.negative_prompt_embeds"] = encode_texts(view, request)
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


class DiTAdapter(nn.Module):
    """Adapter with the interface of diffusers' transformer, so that a pipeline can call the DiT of a training run.

    The inputs of this DiT are packed sequences. The ranks of a context-parallel group share the tokens of a video.

    Args:
        engine: DeepSpeed engine of the DiT.
        trainer: objects of the training process.
    """

    def __init__(self, engine: Any, trainer: Trainer) -> None:
        super().__init__()
        self.config, self.device, self.dtype = engine.module.config, trainer.device, torch.float32
        self.cache_context = lambda *_, **__: contextlib.nullcontext()
        self._call, self._groups = engine.__call__, trainer.groups  # the engine is not a submodule

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **more: Any
    ) -> tuple[Tensor]:
        """Predict the velocity of a video. All ranks of a context-parallel group must call this method with equal tensors.

        Letters: C channels of the DiT's input, f latent frames, h latent rows, w latent columns, N tokens of the video, D width
        of the text encoder, I CLIP tokens of an image, E width of CLIP.

        Args:
            hidden_states: [1, C, f, h, w], noisy latents, and the conditioning channels after them.
            timestep: [1], or [1, N] with a timestep for each token.
            encoder_hidden_states: [1, 512, D], text with padding.
            more: "encoder_hidden_states_image" is [number of images, I, E], or None without CLIP. Other keys are not used.

        Returns:
            A tuple with one item: the velocity, fp32 [1, noisy channels, f, h, w], equal on all ranks of the group.
        """
        config, image = self.config, more.get("encoder_hidden_states_image")
        grid = grid_size(tuple(hidden_states.shape[2:]), config.patch_size)
        meta, index, order = token_index(grid, self._groups.dims, self.device)
        timesteps = timestep.float().flatten()
        if len(timesteps) > 1:
            own = index[: max(sum(meta.local_seq_lens), 1)]  # a rank may have only padding
            timesteps, lens = timesteps[own].unique_consecutive(return_counts=True)
            if len(lens) > 1:
                meta = replace(meta, timestep_lens=tuple(lens.tolist()), timestep_samples=(0,) * len(lens))
        tokens = patchify(hidden_states[0], config.patch_size)[index]
        image = image if image is None else image.flatten(0, 1)[None]
        velocity = self._call(tokens, meta, timesteps, encoder_hidden_states[0], image)
        velocity = join_tokens(velocity[None], order, self._groups.cp)[0]
        return (unpatchify(velocity, grid, config.out_channels, config.patch_size)[None],)


class _StoredVae(nn.Module):
    """Replacement for the VAE of a diffusers pipeline. `encode` returns stored latents instead of encoding its input."""

    def __init__(self, config: Any, device: torch.device, latents: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.device, self.dtype = config, device, torch.float32
        self.encode = lambda _: SimpleNamespace(latents=latents)  # where diffusers looks for them


class RunSamples:
    """Generator of a training run's sample videos, and writer of their files.

    The videos are generated in rounds. In a round, each context-parallel group generates a different video. At ZeRO-3, all
    groups must make the same number of forward passes, because all ranks gather the weights together. So all videos of a round
    need the same number of forward passes. If a round has fewer videos than groups, each remaining group generates the first
    video of the round again, and discards the result.

    Args:
        trainer: objects of the training process.
        tensors: encoded prompts and images of the sample videos, result of `encode_samples`.
        watchdog: watchdog of the process.

    Raises:
        WandsError: on all ranks, if the VAE or the scheduler cannot be loaded.
    """

    def __init__(self, trainer: Trainer, tensors: Mapping[str, Tensor], watchdog: Watchdog) -> None:
        self._trainer, self._tensors, self._watchdog = trainer, tensors, watchdog
        run, device, size = trainer.run, trainer.device, trainer.groups.dims.dp_size
        self._folder = run.output_dir / "samples"
        if trainer.rank == 0:
            self._rows, self._log = continue_rows(self._folder / "samples.jsonl", trainer.events.step)
        with start_together(), quiet_loading():
            source = find_pipeline(run.recipe.model.path)
            pipeline_class = getattr(diffusers, source.class_name)
            index = pipeline_class.load_config(source.model)
            absent = {part: None for part in index if isinstance(index[part], list) and part != "scheduler"}
            self._pipeline = pipeline_class.from_pretrained(
                source.model, **absent, use_safetensors=True, trust_remote_code=False
            )
            self._vae = WanVideoEncoder.load(source.model).vae
        self._home = "meta" if trainer.groups.dims.cp_rank else "cpu"  # the first rank of a group decodes
        self._vae.to(self._home)
        adapters = {part: DiTAdapter(engine, trainer) for part, engine in trainer.engines.items()}
        self._pipeline.register_modules(vae=_StoredVae(self._vae.config, device), **adapters)
        by_schedule = defaultdict[tuple[Any, ...], list[int]](list)
        for i, r in enumerate(run.samples):
            by_schedule[r.num_inference_steps, r.flow_shift, r.guidance_scale > 1].append(i)
        self._rounds = [own[i : i + size] for own in by_schedule.values() for i in range(0, len(own), size)]

    def is_due(self, step: int) -> bool:
        """Return whether to generate sample videos after a step. Step 0 means before the first step."""
        section, total_steps = self._trainer.run.recipe.sample, self._trainer.run.sampler.total_steps
        return section is not None and (step % section.every == 0 or step == total_steps)

    def write(self, step: int) -> None:
        """Generate all sample videos with the current weights and with their moving average. Every rank must call this method.

        If a video cannot be generated, print a warning and write the event "sample failed". The training continues.

        Args:
            step: number of optimizer steps that the run has made.
        """
        trainer, started, rows = self._trainer, time.perf_counter(), []
        kinds = trainer.weights_at(step)
        for kind in kinds:
            with trainer.inference(kind):
                for numbers in self._rounds:
                    self._watchdog.begin_work(f"sampling at step {step}")
                    results = list(filter(None, gather_objects(self._try(step, kind, numbers))))
                    rows += [row for row in results if "reason" not in row]
                    failures = {row["number"]: row for row in results if "reason" in row}
                    for failure in failures.values():
                        trainer.events.write("sample failed", **failure)
                        trainer.log(_FAILURE.format(step=step, **failure))
        if trainer.rank:
            return
        self._log.append(*map(to_line, rows))
        self._rows += rows
        root = trainer.run.output_dir
        videos = {f"samples/{Path(row['video']).stem}": str(root / row["video"]) for row in rows}
        trainer.trackers.log_media(step, "Video", videos)
        try:
            self._draw_sheet(step, kinds)
        except Exception as error:  # the error of any library, such as a full disk, must not end the run
            trainer.log(f"step {step}: the contact sheet could not be made: {one_line(error)}.")
        seconds, folder = time.perf_counter() - started, self._folder / step_name(step)
        trainer.log(f"step {step}: {len(rows)} samples in {seconds:.1f} s in {folder}")
        write_report(trainer.run.output_dir)

    def _try(self, step: int, kind: str, numbers: Sequence[int]) -> dict[str, Any] | None:
        """Generate the video of this rank's context-parallel group. The first rank of the group writes the files.

        Args:
            step: number of optimizer steps that the run has made.
            kind: "raw" for the trained weights, "ema" for their moving average.
            numbers: indices in `run.samples` of the videos to generate. The first group generates the first video, and so on.
                If there are more groups than videos, each remaining group generates the first video and discards the result.

        Returns:
            On a rank that failed, a dict with the keys `number`, `weights` and `reason` for the event "sample failed".
            Otherwise, on the first rank of a group that keeps its video, the row of samples.jsonl. None on all other ranks.
        """
        run, dims, device = self._trainer.run, self._trainer.groups.dims, self._trainer.device
        has_video, started = dims.dp_rank < len(numbers), time.perf_counter()
        number = numbers[dims.dp_rank if has_video else 0]
        request, stem = run.samples[number], self._folder / step_name(step) / f"{number:03d}_{kind}"
        try:
            view, images = self._view(number, request)
            latents = sample_latents(view, request, images)
            if dims.cp_rank or not has_video:
                return None
            view.vae = self._vae.to(device)
            frames = decode_latents(view, latents)
            save_video(stem.with_suffix(".mp4"), frames, run.variant.fps)
            with atomic_path(stem.with_suffix(".webp")) as temporary:
                ImageOps.contain(Image.fromarray(frames[len(frames) // 2]), CELL).save(temporary, "WEBP")
        except Exception as error:  # the error of any library, such as out of memory, must not end the run
            return {"number": number, "weights": kind, "reason": one_line(error)}
        finally:
            self._vae.to(self._home)
        video, seconds = str(stem.relative_to(run.output_dir)), round(time.perf_counter() - started, 3)
        row = {"step": step, "weights": kind, "number": number, **request.model_dump(), "seconds": seconds}
        return row | {"video": f"{video}.mp4", "thumbnail": f"{video}.webp"}

    def _view(self, number: int, request: SampleRequest) -> tuple[Any, ConditionImages]:
        """Return (pipeline, input images) to generate the video of a request.

        The pipeline uses stored encodings of the request's prompts and images instead of encoders. So the returned images
        are blank placeholders.

        Args:
            number: index of the request in `run.samples`.
            request: the request.
        """
        device, blank = self._trainer.device, Image.new("RGB", (request.width, request.height))
        stored = [self._tensors.get(f"{number}.{name}") for name in _NAMES]
        *texts, embeds, latents = [x if x is None else x.to(device) for x in stored]
        images = {key: blank for key in ("image", "last_image") if getattr(request, key)}
        view: Any = pipeline_for(self._pipeline, request, images)
        view.set_progress_bar_config(disable=True)
        view.encode_prompt, view.encode_image = lambda *_, **__: texts, lambda *_: embeds
        view.vae = _StoredVae(self._vae.config, device, latents)
        return view, images

    def _draw_sheet(self, step: int, kinds: Sequence[str]) -> None:
        """Draw a contact sheet with the videos of the base model, the trained weights and their moving average.

        Args:
            step: number of optimizer steps that the run has made.
            kinds: kinds of weights with which videos were generated at this step: "raw", "ema".
        """
        run, path = self._trainer.run, self._folder / step_name(step) / "contact_sheet.png"
        columns = {(0, "raw"): "base"} | {(step, kind): _COLUMNS[kind] for kind in kinds if step}
        sheet = []
        for request in run.samples:
            # A resumed run may have other prompts.
            own = [row for row in self._rows if all(row.get(k) == v for k, v in request.model_dump().items())]
            files = {(row["step"], row["weights"]): run.output_dir / row["video"] for row in own}
            spec = ClipSpec(run.variant.fps, size_multiple=2)
            videos = [next(decode_clip(files[key], spec)).frames if key in files else None for key in columns]
            sheet.append(SheetRow(request.prompt, videos))
        save_contact_sheet(path, sheet, _FRAMES, tuple(columns.values()))
        self._trainer.trackers.log_media(step, "Image", {"samples": np.asarray(Image.open(path))})
