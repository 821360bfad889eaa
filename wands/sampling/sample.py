"""Sample one video with a diffusers pipeline: encode the text, run the denoising loop, decode the latents."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import diffusers
import numpy as np
import torch
import torch.distributed as dist
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor

from wands.errors import WandsError
from wands.sampling.extra_inputs import NO_INPUTS, ExtraInputs, appended
from wands.sampling.images import NO_IMAGES, ConditionImages
from wands.sampling.pipeline import AnyPipeline
from wands.sampling.requests import SampleRequest
from wands.sampling.schedulers import with_shift
from wands.variants import TEXT_LEN

Texts: TypeAlias = tuple[Tensor, Tensor | None]
"""Embeddings of the prompt and of the negative prompt (None without guidance), each [1, tokens, channels]."""


def pipeline_for(
    pipeline: AnyPipeline, request: SampleRequest, images: ConditionImages = NO_IMAGES
) -> AnyPipeline:
    """Return a pipeline for one request, with the models of `pipeline` and a new scheduler with the request's `flow_shift`.

    A scheduler keeps state of the previous sample. For the TI2V model, diffusers has one pipeline class for requests with an
    image, and one for requests without.
    """
    # Imported only if used, because the class for images requires torchvision.
    name = "WanImageToVideoPipeline" if "image" in images else "WanPipeline"
    pipeline_class: Any = getattr(diffusers, name)
    parameters = inspect.signature(pipeline_class.__init__).parameters
    parts = {key: part for key, part in pipeline.components.items() if key in parameters}
    parts["scheduler"] = with_shift(pipeline.scheduler, request.flow_shift)
    options = {key: pipeline.config[key] for key in ("boundary_ratio", "expand_timesteps")}
    view = pipeline_class(**parts, **options)
    if getattr(pipeline, "_all_hooks", None):  # model offload: each pipeline frees the modules that it moved
        view.enable_model_cpu_offload(device=pipeline._offload_device)
    return view


@torch.no_grad()
def encode_texts(pipeline: AnyPipeline, request: SampleRequest) -> Texts:
    """Encode the prompt of a request, and its negative prompt if the request uses guidance. `pipeline` is from `pipeline_for`."""
    both = request.prompt, request.negative_prompt
    texts: Texts = pipeline.encode_prompt(*both, request.guidance_scale > 1, max_sequence_length=TEXT_LEN)
    return texts


def encode_all_texts(pipeline: AnyPipeline, request: SampleRequest, stride: int) -> list[tuple[int, Texts]]:
    """Return (first latent frame, embedded texts) for the prompt and each later prompt of a request.

    `stride` is the number of frames in a latent frame.
    """
    prompts = [request.prompt, *(prompt for _, prompt in request.later_prompts or ())]
    texts = [encode_texts(pipeline, request.model_copy(update={"prompt": prompt})) for prompt in prompts]
    return list(zip(first_frames(request, stride), texts, strict=True))


def first_frames(request: SampleRequest, stride: int) -> list[int]:
    """Return the first latent frame of the prompt and of each later prompt of a request.

    `stride` is the number of frames in a latent frame. Latent frame 0 is a single frame.
    """
    return [0, *(-(-(frame - 1) // stride) + 1 for frame, _ in request.later_prompts or ())]


def sample_latents(
    pipeline: AnyPipeline,
    request: SampleRequest,
    images: ConditionImages = NO_IMAGES,
    texts: Texts | None = None,
    guidance: dist.ProcessGroup | Literal["batched"] | None = None,
    extra: ExtraInputs = NO_INPUTS,
) -> Tensor:
    """Return the final normalized latents of a request, fp32 [channels, frames, rows, columns] on the CPU.

    `pipeline` is the result of `pipeline_for`. `texts` None encodes the texts. `guidance` is as in `predict_together`; None
    computes the two predictions of a step one after the other, as diffusers does.

    Raises:
        WandsError: if the latents are not finite.
    """
    options = call_options(request)
    prompt, negative = texts or encode_texts(pipeline, request)
    # The generator is on the CPU, because CUDA's random numbers differ between devices and from the CPU's.
    generator = torch.Generator("cpu").manual_seed(request.seed)
    with ExitStack() as patches:
        if extra.channels is not None:
            # The pipelines take the number of noisy channels from the channels of the transformer's input.
            channels = pipeline.transformer.config.out_channels
            shape = (1, channels, *extra.channels.shape[2:])
            options["latents"] = torch.randn(shape, generator=generator)
            patches.enter_context(appended(pipeline, extra))
        elif extra.tokens is not None:
            patches.enter_context(appended(pipeline, extra))
        if guidance is not None and negative is not None:
            patches.enter_context(predict_together(pipeline, (prompt, negative), guidance))
        latents: Tensor = pipeline(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            generator=generator,
            output_type="latent",
            **options,
            **images,
        ).frames[0]
    if not torch.isfinite(latents).all():
        raise WandsError(
            f"--prompt={request.prompt!r}: the sample has values that are not finite. Use --dtype=fp32. If the error remains, "
            "use the weights of another checkpoint.",
            agreed=True,
        )
    return latents.float().cpu()


def call_options(request: SampleRequest) -> dict[str, Any]:
    """Return the options of a request that diffusers' pipelines take as arguments."""
    others = {
        "seed",
        "flow_shift",
        "image",
        "last_image",
        "inputs",
        "prompt",
        "negative_prompt",
        "later_prompts",
    }
    return request.model_dump(exclude=others, exclude_none=True)


@contextmanager
def predict_together(
    pipeline: AnyPipeline, texts: Sequence[Tensor], guidance: dist.ProcessGroup | Literal["batched"]
) -> Iterator[None]:
    """Make a pipeline compute both predictions of classifier-free guidance in one call of the transformer, inside a `with` block.

    In each denoising step, diffusers calls the transformer with the prompt, and then with the negative prompt. The first call now
    computes both predictions, and the second call returns the stored one.

    `guidance` "batched" computes both on this rank, with batch size 2. With a process group of two ranks, the first computes the
    prediction for the prompt and the second that for the negative prompt, and both ranks get both.
    """
    waiting: list[Tensor] = []

    def forward(own_forward: Callable[..., tuple[Tensor]], **inputs: Any) -> tuple[Tensor]:
        if waiting:
            return (waiting.pop(),)
        text = torch.cat([*texts]).to(inputs["encoder_hidden_states"].dtype)
        if guidance == "batched":
            inputs = {key: torch.cat([x, x]) if isinstance(x, Tensor) else x for key, x in inputs.items()}
            both = list(own_forward(**inputs | {"encoder_hidden_states": text})[0].chunk(2))
        else:
            own = own_forward(**inputs | {"encoder_hidden_states": text[guidance.rank()][None]})[0]
            both = [torch.empty_like(own) for _ in texts]
            dist.all_gather(both, own, group=guidance)
        waiting.append(both[1])
        return (both[0],)

    with ExitStack() as patches:
        for model in filter(None, (pipeline.transformer, pipeline.transformer_2)):
            patches.enter_context(patch.object(model, "forward", partial(forward, model.forward)))
        yield


@torch.no_grad()
def decode_chunks(pipeline: AnyPipeline, chunks: Iterable[Tensor]) -> Iterator[np.ndarray]:
    """Yield the frames of consecutive parts of a video, each uint8 [rows, columns, 3], equal to those of `decode_latents`.

    `chunks` are normalized latents [latent channels, latent frames, latent rows, latent columns]. The memory does not grow with
    the length of the video: as in diffusers' `AutoencoderKLWan._decode`, the decoder's cache has all that later frames need.
    """
    vae: Any = pipeline.vae
    device = pipeline._execution_device
    statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std]).to(device, vae.dtype)
    mean, std = statistics.view(2, -1, 1, 1, 1)
    vae.clear_cache()
    is_first = True
    for chunk in chunks:
        latents = chunk[None].to(device, vae.dtype) / (1.0 / std) + mean
        hidden = vae.post_quant_conv(latents.to(vae.post_quant_conv.weight.dtype))
        for number in range(hidden.shape[2]):
            options = {"first_chunk": True} if is_first else {}
            part = hidden[:, :, number : number + 1]
            video = vae.decoder(part, feat_cache=vae._feat_map, feat_idx=[0], **options)
            is_first = False
            if vae.config.patch_size is not None:
                video = unpatchify(video, patch_size=vae.config.patch_size)
            frames = pipeline.video_processor.postprocess_video(
                video.clamp(-1.0, 1.0).float(), output_type="np"
            )
            yield from (frames[0] * 255).round().astype(np.uint8)
    vae.clear_cache()


@torch.no_grad()
def decode_latents(pipeline: AnyPipeline, latents: Tensor, *, tiled: bool = False) -> np.ndarray:
    """Decode normalized latents to frames, uint8 [frames, rows, columns, 3], exactly as diffusers' Wan pipelines.

    `latents` are fp32 [latent channels, latent frames, latent rows, latent columns]. `tiled` decodes overlapping tiles of each
    frame, with diffusers' tile sizes.
    """
    vae = pipeline.vae
    latents = latents[None].to(pipeline._execution_device, vae.dtype)
    statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std]).to(latents)
    mean, std = statistics.view(2, -1, 1, 1, 1)
    latents = latents / (1.0 / std) + mean
    vae.use_tiling = tiled
    video = vae.decode(latents.to(vae.post_quant_conv.weight.dtype), return_dict=False)[0].float()
    vae.use_tiling = False  # images are encoded without tiles
    frames = pipeline.video_processor.postprocess_video(video, output_type="np")[0]
    pipeline.maybe_free_model_hooks()
    return (frames * 255).round().astype(np.uint8)
