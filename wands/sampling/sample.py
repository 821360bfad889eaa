"""Sample one video with a diffusers pipeline: encode the text, run the denoising loop, decode the latents."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import diffusers
import numpy as np
import torch
import torch.distributed as dist

from wands.errors import WandsError
from wands.sampling.guidance import predict_together
from wands.sampling.images import NO_IMAGES, ConditionImages
from wands.sampling.pipeline import AnyPipeline
from wands.sampling.requests import SampleRequest
from wands.sampling.schedulers import with_shift
from wands.variants import TEXT_LEN

Texts: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Embeddings of the prompt and of the negative prompt, each [1, tokens, channels]. None without guidance."""


def pipeline_for(
    pipeline: AnyPipeline, request: SampleRequest, images: ConditionImages = NO_IMAGES
) -> AnyPipeline:
    """Return a pipeline for one request, with the models of `pipeline` and a new scheduler.

    A scheduler keeps state of the previous sample, so every request needs a new scheduler. For the TI2V model,
    diffusers has two pipeline classes: one for requests with an image, and one for requests without an image.

    Args:
        pipeline: pipeline of the model, of either class.
        request: sample request. Its `flow_shift` is set in the new scheduler.
        images: images of the request, which decide the class of the result.
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
    """Encode the prompt of a request, and its negative prompt if the request uses guidance.

    Args:
        pipeline: result of `pipeline_for` for this request.
        request: request to sample.

    Returns:
        (embedding of the prompt, embedding of the negative prompt), each [1, tokens, channels]. The second embedding is
        None without guidance.
    """
    both = request.prompt, request.negative_prompt
    texts: Texts = pipeline.encode_prompt(*both, request.guidance_scale > 1, max_sequence_length=TEXT_LEN)
    return texts


def sample_latents(
    pipeline: AnyPipeline,
    request: SampleRequest,
    images: ConditionImages = NO_IMAGES,
    texts: Texts | None = None,
    guidance: dist.ProcessGroup | Literal["batched"] | None = None,
) -> torch.Tensor:
    """Run the denoising loop of a pipeline for one request.

    Args:
        pipeline: result of `pipeline_for` for this request.
        request: request to sample.
        images: images of the request.
        texts: result of `encode_texts`; None encodes the texts.
        guidance: how to compute the two predictions of a step with guidance, see `predict_together`. None computes them one
            after the other, as diffusers does.

    Returns:
        The final normalised latents, fp32 [latent channels, latent frames, latent rows, latent columns] on the CPU.

    Raises:
        WandsError: if the latents are not finite.
    """
    others = {"seed", "flow_shift", "image", "last_image", "prompt", "negative_prompt"}
    options = request.model_dump(exclude=others, exclude_none=True)
    prompt, negative = texts or encode_texts(pipeline, request)
    together = guidance is not None and negative is not None
    with predict_together(pipeline, (prompt, negative), guidance) if together else nullcontext():
        latents: torch.Tensor = pipeline(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            # The generator is on the CPU, because CUDA's random numbers differ between devices and from the CPU's.
            generator=torch.Generator("cpu").manual_seed(request.seed),
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


@torch.no_grad()
def decode_latents(pipeline: AnyPipeline, latents: torch.Tensor, *, tiled: bool = False) -> np.ndarray:
    """Decode latents to frames with exactly the operations of diffusers' Wan pipelines.

    Args:
        pipeline: pipeline whose VAE decodes the latents.
        latents: normalised latents, fp32 [latent channels, latent frames, latent rows, latent columns].
        tiled: decode overlapping tiles of each frame, with diffusers' tile sizes.

    Returns:
        Frames of the video, uint8 [frames, rows, columns, 3].
    """
    vae = pipeline.vae
    latents = latents[None].to(pipeline._execution_device, vae.dtype)
    mean, std = (
        torch.tensor([vae.config.latents_mean, vae.config.latents_std]).to(latents).view(2, -1, 1, 1, 1)
    )
    latents = latents / (1.0 / std) + mean
    vae.use_tiling = tiled
    video = vae.decode(latents.to(vae.post_quant_conv.weight.dtype), return_dict=False)[0].float()
    vae.use_tiling = False  # images are encoded without tiles
    frames = pipeline.video_processor.postprocess_video(video, output_type="np")[0]
    pipeline.maybe_free_model_hooks()
    return (frames * 255).round().astype(np.uint8)
