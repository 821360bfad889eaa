"""How the processes that a launcher started share each video of `wands infer`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
import transformers

from wands import __version__
from wands.attention.varlen import choose_backend
from wands.config.recipe import ParallelConfig
from wands.distributed.bootstrap import accelerator_type, init_process_group, ranks_per_node
from wands.distributed.dims import ParallelDims, ProcessGroups, choose_degrees
from wands.errors import ConfigError
from wands.sampling.images import Pictures
from wands.sampling.pipeline import AnyPipeline, PipelineSource, takes_pictures
from wands.sampling.requests import SampleRequest
from wands.sampling.sharded import shard_transformer
from wands.train.consistency import check_agreement, tensor_checksum
from wands.variants import Variant

log = logging.getLogger(__name__)


def plan_ranks(
    variant: Variant, ulysses_degree: int | None = None, ring_degree: int | None = None
) -> tuple[ParallelDims, list[str]]:
    """Find this rank's place; all ranks, alone without a launcher, are one context-parallel group.

    Args:
        variant: whose heads are shared.
        ulysses_degree: ranks that share heads; None chooses as for a recipe with `parallel.cp_size` alone.
        ring_degree: ranks that share tokens; None is the rest.

    Returns:
        The place, and what is wrong with it: nothing, or one sentence.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    options = {"ulysses_degree": ulysses_degree, "ring_degree": ring_degree}
    asked = {name: value for name, value in options.items() if value is not None}
    assert min(asked.values(), default=1) > 0, asked
    known = (ulysses_degree or 1) * (ring_degree or 1)
    fits = known == world_size if ulysses_degree and ring_degree else world_size % known == 0
    if not fits:
        given = ", ".join(f"infer.{name}={value}" for name, value in asked.items())
        return ParallelDims(world_size, rank), [
            f"{given} must make up world_size={world_size}, because all processes share each video; start "
            f"{known} with a launcher, or leave the options out."
        ]
    parallel = ParallelConfig(cp_size=world_size, ulysses_degree=ulysses_degree, ring_degree=ring_degree)
    try:
        degrees = choose_degrees(
            parallel,
            num_heads=variant.dit.num_heads,
            ranks_per_node=ranks_per_node(),
            model=variant.name,
        )
    except ConfigError as error:
        text = str(error).replace("parallel.cp_size", "world_size").replace("parallel.", "infer.")
        return ParallelDims(world_size, rank), [text]
    return ParallelDims(world_size, rank, *degrees), []


def own_device(asked: str | None) -> tuple[str, list[str]]:
    """The device of one of several ranks, and what is wrong with it.

    Args:
        asked: what the user wants, which cannot be.
    """
    problems = []
    if asked is not None:
        problems.append(
            f"infer.device={asked} is one device for several processes; leave it out, each has its own."
        )
    if accelerator_type() == "cpu":
        return "cpu", problems
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}", problems


def check_commands(
    source: PipelineSource,
    requests: Sequence[SampleRequest],
    pictures: Sequence[Pictures],
    dtype: str,
    grid: ParallelDims,
) -> None:
    """Compare over all ranks what each was asked for; every rank must call it.

    Ranks with other seeds would write a mixture of their videos, and ranks with more prompts wait for the others for ever.

    Args:
        source: what was found; a checkpoint is its step folder, for each rank looked for the newest by itself.
        requests: every option spelled out.
        pictures: of each request; their contents are compared.
        dtype: of transformer and text encoder, "auto" resolved.
        grid: from `plan_ranks`.

    Raises:
        ConfigError: the same sentence on all ranks names the first thing that differs, and where.
    """
    _, _, device = init_process_group()
    software = {
        "wands": __version__,
        "torch": str(torch.__version__),
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }
    model: dict[str, Any] = {"pipeline": source.model}
    for part, dit in source.dits.items():
        model[part] = "from the checkpoint" if dit.checkpoint else f"{dit.folder}/{dit.subfolder}"
    model |= {
        "checkpoint": source.checkpoint
        and {"folder": str(source.checkpoint.parent), "step": source.checkpoint.name},
        "ema": source.ema,
        "config": _public(source.dit),
        "loras": [lora.record() for lora in source.loras],
    }
    command: dict[str, Any] = {
        "number of prompts": len(requests),
        "dtype": dtype,
        "ulysses_degree": grid.ulysses_degree,
        "ring_degree": grid.ring_degree,
    }
    for i, (request, given) in enumerate(zip(requests, pictures, strict=True), start=1):
        command[f"prompt {i}"] = request.model_dump() | {
            f"contents of {key}": hashlib.sha256(picture.tobytes()).hexdigest()[:16]
            for key, picture in vars(given).items()
            if picture is not None
        }
    parts = {"software": software, "model": model, "command": command}
    check_agreement({name: json.dumps(part, sort_keys=True) for name, part in parts.items()}, device)


def share_pipeline(pipeline: AnyPipeline, grid: ParallelDims) -> None:
    """Meet the other ranks and let their pipelines sample each video together.

    From here on every rank must make the same calls; all of them then have the same latents.

    Args:
        pipeline: from `load_pipeline`.
        grid: from `plan_ranks`.

    Raises:
        ConfigError: weights or scheduler of the ranks differ; the same sentence on all of them.
    """
    from wands.attention.ulysses import (
        context_attention,  # imports DeepSpeed, which one process does not need
    )

    assert grid.dp_size == 1, f"{grid.dp_size} groups would sample the same video"
    _, _, device = init_process_group()
    _check_pipelines(pipeline, device)
    groups = ProcessGroups.build(grid, device)
    log.info(
        "sampling on %d ranks: Ulysses %d x ring %d", grid.cp_size, grid.ulysses_degree, grid.ring_degree
    )
    for transformer in (pipeline.transformer, pipeline.transformer_2):
        if transformer is None:
            continue
        backend = choose_backend("auto", device, transformer.dtype, transformer.config.attention_head_dim)
        shard_transformer(
            transformer,
            context_attention(backend, groups.ulysses, groups.ring, groups.ring_grad),
            ulysses_degree=grid.ulysses_degree,
            ring_degree=grid.ring_degree,
            cp_rank=grid.cp_rank,
            group=groups.cp,
        )


def _check_pipelines(pipeline: AnyPipeline, device: torch.device) -> None:
    """Compare over all ranks what each loaded: a node's own copy of a folder may hold other bits under the same name.

    Of the VAE only where every rank encodes pictures: one rank decodes.
    """
    config = pipeline.config
    parts = {
        "pipeline": {
            "scheduler": _public(pipeline.scheduler.config),
            "boundary_ratio": config.boundary_ratio,
            "expand_timesteps": config.expand_timesteps,
        }
    }
    names = ["text_encoder", "image_encoder", "transformer", "transformer_2"]
    if config.expand_timesteps or takes_pictures(pipeline):
        names.append("vae")
    for name in names:
        if (module := getattr(pipeline, name, None)) is not None:
            parts[name] = _checksums(module, device)
    check_agreement({name: json.dumps(part, sort_keys=True) for name, part in parts.items()}, device)


@torch.no_grad()
def _checksums(module: torch.nn.Module, device: torch.device) -> dict[str, str]:
    """Name of each parameter -> 16 hex digits that change with its bits, wherever an offload keeps it."""
    sums = {}
    for place, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            sums[f"{place}.{name}".lstrip(".")] = tensor_checksum(_held(part, name, parameter).to(device))
    values = torch.stack(list(sums.values())).tolist()  # one wait for the device
    return {name: f"{value % (1 << 64):016x}" for name, value in zip(sums, values, strict=True)}


def _held(part: torch.nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """The values of a parameter, which accelerate's hooks hold where it is on the meta device between two calls."""
    if not parameter.is_meta:
        return parameter
    hooks = getattr(part._hf_hook, "hooks", [part._hf_hook])
    weights = next(found for hook in hooks if (found := getattr(hook, "weights_map", None)) is not None)
    return weights[name]


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what diffusers notes in it for itself, such as its own version."""
    return {key: value for key, value in config.items() if not key.startswith("_")}
