"""One sample at a time through diffusers' own pipelines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from wands.errors import WandsError
from wands.sampling.images import Pictures
from wands.sampling.pipeline import AnyPipeline, pipeline_for, takes_pictures
from wands.sampling.requests import SampleRequest
from wands.variants import TEXT_LEN

NO_PICTURES = Pictures()


def each_request(
    pipeline: AnyPipeline, requests: Sequence[SampleRequest], pictures: Sequence[Pictures]
) -> Iterator[tuple[AnyPipeline, SampleRequest, Pictures]]:
    """Go through the requests, each with the pipeline that samples it.

    Args:
        pipeline: from `load_pipeline`; where its model takes pictures at will, it is of one of two classes.
        requests: every option spelled out.
        pictures: of each request.

    Yields:
        (pipeline, request, pictures); the pipeline has a scheduler of its own, with the request's shift.
    """
    scheduler = pipeline.scheduler
    views: dict[bool, AnyPipeline] = {}
    for request, given in zip(requests, pictures, strict=True):
        with_image = given.image is not None
        if with_image not in views:
            views[with_image] = pipeline_for(pipeline, with_image=with_image)
        views[with_image].scheduler = with_shift(scheduler, request.flow_shift)
        yield views[with_image], request, given


def sample(
    pipeline: AnyPipeline, request: SampleRequest, pictures: Pictures = NO_PICTURES
) -> tuple[np.ndarray, torch.Tensor, float]:
    """Run the pipeline once.

    Args:
        pipeline: of the class that the request needs.
        request: every option spelled out.
        pictures: of the request.

    Returns:
        uint8 [F, H, W, 3], final normalised latents fp32 [C, f, h, w] and seconds.

    Raises:
        WandsError: the sample is not finite.
    """
    started = time.perf_counter()
    video, latents = call_pipeline(pipeline, request, pictures, output_type="np")
    return (video * 255).round().astype(np.uint8), latents, time.perf_counter() - started


def call_pipeline(
    pipeline: AnyPipeline, request: SampleRequest, pictures: Pictures = NO_PICTURES, *, output_type: str
) -> tuple[Any, torch.Tensor]:
    """Run the pipeline once, and keep the latents that it decodes.

    Args:
        pipeline: of the class that the request needs.
        request: every option spelled out.
        pictures: of the request.
        output_type: diffusers', "np" or "latent".

    Returns:
        What the pipeline returns for the one sample, and its final normalised latents, fp32 [C, f, h, w].

    Raises:
        WandsError: the sample is not finite.
    """
    last: dict[str, torch.Tensor] = {}

    def keep(
        _: AnyPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        last.update(tensors)
        return {}

    options: dict[str, Any] = {
        key: picture
        for key, picture in (("image", pictures.image), ("last_image", pictures.last_image))
        if picture is not None
    }
    if request.guidance_scale_2 is not None:
        options["guidance_scale_2"] = request.guidance_scale_2
    with _keeping_condition(pipeline, last):
        output = pipeline(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            max_sequence_length=TEXT_LEN,
            # Drawn on the CPU: CUDA's random numbers are others, and differ between devices.
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type=output_type,
            callback_on_step_end=keep,  # the latents that the pipeline decodes: no second decoder to keep equal
            **options,
        ).frames[0]
    latents = last["latents"][0].float().cpu()
    if "first_frame" in last:  # put back behind the last step, where no callback is made
        latents[:, :1] = last["first_frame"][0].float().cpu()
    if not torch.isfinite(latents).all():
        raise WandsError(
            f"infer.prompt={request.prompt!r}: the sample has values that are not finite; "
            "use infer.dtype=fp32, or other weights if that does not help.",
            agreed=True,
        )
    return output, latents


@contextmanager
def _keeping_condition(pipeline: AnyPipeline, kept: dict[str, torch.Tensor]) -> Iterator[None]:
    """Note the clean first frame of a TI2V sample, [1, C, 1, h, w], which only `prepare_latents` returns."""
    if not (takes_pictures(pipeline) and pipeline.config.expand_timesteps):
        yield
        return
    prepare = pipeline.prepare_latents

    def prepare_and_keep(*args: Any, **options: Any) -> Any:
        prepared = prepare(*args, **options)
        kept["first_frame"] = prepared[1]
        return prepared

    pipeline.prepare_latents = prepare_and_keep
    try:
        yield
    finally:
        del pipeline.prepare_latents


def with_shift(scheduler: Any, flow_shift: float | None) -> Any:
    """Give a fresh scheduler of the same kind, for solvers remember the sample before.

    Args:
        scheduler: a flow-matching one of diffusers.
        flow_shift: None keeps its own.
    """
    change = {} if flow_shift is None else {shift_key(scheduler): flow_shift}
    return type(scheduler).from_config(scheduler.config, **change)


def shift_key(scheduler: Any) -> str:
    """What a scheduler's config calls the shift."""
    # Solvers such as UniPC heed flow_shift only with flow sigmas; FlowMatchEuler calls it shift.
    return "flow_shift" if "use_flow_sigmas" in scheduler.config else "shift"
