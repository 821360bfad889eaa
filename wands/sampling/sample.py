"""Sample one video with a diffusers pipeline: prepare the pipeline, run the denoising loop, decode the latents."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import WanPipeline

from wands.errors import WandsError
from wands.sampling.images import ConditionImages
from wands.sampling.pipeline import AnyPipeline
from wands.sampling.requests import SampleRequest
from wands.variants import TEXT_LEN

NO_IMAGES = ConditionImages()


def takes_images(pipeline: AnyPipeline) -> bool:
    """Return whether a pipeline is a `WanImageToVideoPipeline`, the diffusers class for sampling from images."""
    return not isinstance(pipeline, WanPipeline)


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
    name = "WanPipeline" if images.image is None else "WanImageToVideoPipeline"
    pipeline_class: Any = getattr(diffusers, name)
    parameters = inspect.signature(pipeline_class.__init__).parameters
    parts = {key: part for key, part in pipeline.components.items() if key in parameters}
    parts["scheduler"] = with_shift(pipeline.scheduler, request.flow_shift)
    options = {key: pipeline.config[key] for key in ("boundary_ratio", "expand_timesteps")}
    view = pipeline_class(**parts, **options)
    if getattr(pipeline, "_all_hooks", None):  # model offload: each pipeline frees the modules that it moved
        view.enable_model_cpu_offload(device=pipeline._offload_device)
    return view


def sample_latents(
    pipeline: AnyPipeline, request: SampleRequest, images: ConditionImages = NO_IMAGES
) -> torch.Tensor:
    """Run the denoising loop of a pipeline for one request.

    Args:
        pipeline: result of `pipeline_for` for this request.
        request: request to sample.
        images: images of the request.

    Returns:
        The final normalised latents, fp32 [latent channels, latent frames, latent rows, latent columns] on the CPU.

    Raises:
        WandsError: if the latents are not finite.
    """
    others = {"seed", "flow_shift", "image", "last_image"}
    options = request.model_dump(exclude=others, exclude_none=True)
    options |= {key: image for key, image in vars(images).items() if image is not None}
    latents: torch.Tensor = pipeline(
        max_sequence_length=TEXT_LEN,
        # The generator is on the CPU, because CUDA's random numbers differ between devices and from the CPU's.
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="latent",
        **options,
    ).frames[0]
    if not torch.isfinite(latents).all():
        raise WandsError(
            f"--prompt={request.prompt!r}: the sample has values that are not finite. Use --dtype=fp32. If the error remains, "
            "use the weights of another checkpoint.",
            agreed=True,
        )
    return latents.float().cpu()


@torch.no_grad()
def decode_latents(pipeline: AnyPipeline, latents: torch.Tensor) -> np.ndarray:
    """Decode latents to frames with exactly the operations of diffusers' Wan pipelines.

    Args:
        pipeline: pipeline whose VAE decodes the latents.
        latents: normalised latents, fp32 [latent channels, latent frames, latent rows, latent columns].

    Returns:
        Frames of the video, uint8 [frames, rows, columns, 3].
    """
    vae = pipeline.vae
    latents = latents[None].to(pipeline._execution_device, vae.dtype)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    inverse_std = 1.0 / std.to(latents.device, latents.dtype)
    video = vae.decode(latents / inverse_std + mean.to(latents.device, latents.dtype), return_dict=False)[0]
    frames = pipeline.video_processor.postprocess_video(video, output_type="np")[0]
    pipeline.maybe_free_model_hooks()
    return (frames * 255).round().astype(np.uint8)


def with_shift(scheduler: Any, flow_shift: float | None) -> Any:
    """Return a copy of a scheduler with a new shift of the noise schedule. The copy has no state of earlier samples.

    Args:
        scheduler: flow-matching scheduler of diffusers.
        flow_shift: shift of the new scheduler; None keeps the shift of `scheduler`.
    """
    change = {} if flow_shift is None else {shift_key(scheduler): flow_shift}
    return type(scheduler).from_config(scheduler.config, **change)


def shift_key(scheduler: Any) -> str:
    """Return the key for the shift of the noise schedule in a scheduler's config: "flow_shift" or "shift"."""
    # Solvers with flow sigmas, such as UniPC, call the shift flow_shift. FlowMatchEuler calls it shift.
    return "flow_shift" if "use_flow_sigmas" in scheduler.config else "shift"
