"""Causal sampling in `wands infer`: the chunks of the training, checks, and the change of the transformers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from wands.attention.kernels.registry import choose_backend
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.config.base import invalid_reason
from wands.config.options import InferOptions
from wands.config.recipe import ObjectiveConfig
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.errors import ConfigError, WandsError
from wands.export.export_record import RECORD_FILE
from wands.files import read_json_object
from wands.sampling.pipeline import AnyPipeline, PipelineSource
from wands.sampling.requests import SampleRequest
from wands.sampling.rollout import packed_adapters, rollout_problems
from wands.sampling.sharing import check_pipelines
from wands.variants import Variant

log = logging.getLogger(__name__)

CHUNK_OPTIONS = (
    "chunk_frames",
    "independent_first_frame",
    "window_frames",
    "sink_frames",
    "context_noise",
)
"""Options of `InferOptions` that replace settings of the training."""


def causal_config(options: InferOptions, source: PipelineSource) -> ObjectiveConfig | None:
    """Return the chunks with which to sample, or None without --causal.

    They are those of the training, from the checkpoint or from the `wands_export.json` of the model or of a LoRA, with the
    options that are given. Without --causal, a warning says if the model was trained for it.

    Raises:
        ConfigError: if neither the model nor the options tell the chunks, or options do not fit each other.
    """
    trained = _trained_config(options, source)
    is_trained = trained.get("name", "flow_matching") != "flow_matching"
    if not options.causal:
        if is_trained:
            log.warning(
                "the model was trained with objective.name=%s; add --causal to sample chunk by chunk",
                trained["name"],
            )
        return None
    given = {key: value for key in CHUNK_OPTIONS if (value := getattr(options, key)) is not None}
    if not is_trained and options.chunk_frames is None:
        raise ConfigError(
            "--causal needs the chunks of the training, and the model has no checkpoint or wands_export.json of a causal "
            "training; add --chunk-frames."
        )
    # Sampling is the same for both causal objectives. Diffusion forcing has no context noise in training.
    settings = {key: trained[key] for key in CHUNK_OPTIONS if is_trained and key in trained}
    try:
        return ObjectiveConfig(**{**settings, **given, "name": "teacher_forcing"})
    except ValidationError as error:
        raise ConfigError(f"--causal: {invalid_reason(error.errors()[0])}.") from None


def _trained_config(options: InferOptions, source: PipelineSource) -> dict[str, Any]:
    """Return the section `objective` of the training's recipe; empty if it is not known.

    The first causal one of the model, its transformers and its LoRAs: a LoRA may have another base.
    """
    if options.checkpoint is not None:
        found: dict[str, Any] = find_checkpoint(options.checkpoint).state.recipe.get("objective") or {}
        return found
    folders = [Path(source.model), *(Path(dit.folder) for dit in source.dits.values())]
    folders += [file.path.parent for lora in source.loras for file in lora.files]
    for folder in folders:
        with suppress(WandsError, OSError):
            recipe = read_json_object(folder / RECORD_FILE).get("recipe")
            section = recipe.get("objective") if isinstance(recipe, dict) else None
            if isinstance(section, dict) and section.get("name", "flow_matching") != "flow_matching":
                return section
    return {}


def causal_problems(options: InferOptions, requests: Sequence[SampleRequest], variant: Variant) -> list[str]:
    """Return error texts for options and prompts that do not fit causal sampling, or that need it."""
    if not options.causal:
        flags = [f"--{key.replace('_', '-')}" for key in CHUNK_OPTIONS if getattr(options, key) is not None]
        problems = [f"{', '.join(flags)} needs causal sampling; add --causal."] if flags else []
        return problems + rollout_problems(requests, variant, is_causal=False)
    problems = rollout_problems(requests, variant, is_causal=True)
    unused = {"offload": "none", "compile": False, "vae_tiling": False, "attention_backend": "auto"}
    for key, value in {**unused, "guidance_mode": "auto"}.items():
        if getattr(options, key) != value:
            problems.append(f"--{key.replace('_', '-')} does not work with --causal; leave it out.")
    return problems


def make_causal(pipeline: AnyPipeline, dims: ParallelDims, device: torch.device, is_bf16: bool) -> None:
    """Replace the transformers of a pipeline by adapters that sample chunk by chunk, on all ranks of a launcher.

    Raises:
        ConfigError: on every rank, if the weights or the scheduler differ between ranks.
    """
    groups = ProcessGroups(dims)
    if dims.world_size > 1:
        _, _, device = init_process_group()
        check_pipelines(pipeline, device)
        groups = ProcessGroups.build(dims, device)
    parts = {name: getattr(pipeline, name) for name in ("transformer", "transformer_2")}
    transformers = {name: part for name, part in parts.items() if part is not None}
    head_dim = transformers["transformer"].config.attention_head_dim
    backend = choose_backend("auto", device, torch.bfloat16 if is_bf16 else torch.float32, head_dim)
    pipeline.register_modules(**packed_adapters(transformers, groups, device, backend))
