"""Tokens, FLOPs and memory of the sample videos that a run generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wands.config.recipe import ObjectiveConfig
from wands.sampling.requests import SampleRequest
from wands.variants import Variant


def sampling_load(
    requests: Sequence[SampleRequest], variant: Variant, objective: ObjectiveConfig | None = None
) -> dict[str, Any]:
    """Return the tokens, FLOPs and memory of a run's sample videos, as keyword arguments of `Workload`; {} without videos.

    `objective` is that of the run; None samples all frames together.
    """
    if not requests:
        return {}
    # Tensors of the published VAEs while they decode in fp32, a few frames at a time. The pixels of all frames stay.
    per_pixel, vae_bytes = {16: (19_500, 508e6), 48: (21_800, 2.82e9)}[variant.dit.out_channels]
    decoding = [r.height * r.width * (per_pixel + 12.5 * r.num_frames) for r in requests]
    tokens = [variant.num_tokens(r.num_frames, r.height, r.width) for r in requests]
    forwards = [r.num_inference_steps * (1 + (r.guidance_scale > 1)) for r in requests]
    flops = sum(n * variant.dit.forward_flops([length]) for n, length in zip(forwards, tokens, strict=True))
    sizes = {"vae_bytes": vae_bytes, "decoding_bytes": vae_bytes + max(decoding)}
    cached = 0
    if objective is not None and objective.name != "flow_matching":
        cached = max(_cached_tokens(request, variant, objective) for request in requests)
    return {"video_tokens": max(tokens), "video_flops": flops, "cached_tokens": cached, **sizes}


def _cached_tokens(request: SampleRequest, variant: Variant, objective: ObjectiveConfig) -> int:
    """Return the largest number of tokens whose keys a rollout caches at a time, for all predictions of a DiT together."""
    frames = (request.num_frames - 1) // variant.vae_stride[0] + 1
    of_frame = variant.num_tokens(1, request.height, request.width)
    seen = frames
    if objective.window_frames is not None:
        # The chunks that are seen, and the one that is written.
        seen = min(frames, objective.window_frames + objective.sink_frames + objective.chunk_frames)
    return seen * of_frame * (1 + (request.guidance_scale > 1))
