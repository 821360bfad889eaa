"""How the processes that a launcher started share each video of `wands infer`."""

from __future__ import annotations

import logging
import os

import torch
from diffusers import WanPipeline

from wands.attention.hybrid import ContextAttention
from wands.attention.varlen import choose_backend
from wands.config import ParallelSection
from wands.errors import ConfigError
from wands.model.sharded import shard_transformer
from wands.parallel.mesh import ContextGroups, RankGrid, choose_degrees
from wands.train.engine import accelerator_type, init_process_group, ranks_per_node
from wands.variants import Variant

log = logging.getLogger(__name__)


def plan_ranks(
    variant: Variant,
    cp_size: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
) -> tuple[RankGrid, list[str]]:
    """Find this rank's place; all ranks, alone without a launcher, are one context-parallel group.

    Args:
        variant: whose heads are shared.
        cp_size: ranks that the user wants in the group; None is all.
        ulysses_degree: ranks that share heads; None chooses as for a recipe with `parallel.cp_size` alone.
        ring_degree: ranks that share tokens; None is the rest.

    Returns:
        The place, and what is wrong with it: nothing, or one sentence.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    options = {"cp_size": cp_size, "ulysses_degree": ulysses_degree, "ring_degree": ring_degree}
    asked = {name: value for name, value in options.items() if value is not None}
    assert min(asked.values(), default=1) > 0, asked
    known = (ulysses_degree or 1) * (ring_degree or 1)
    fits = known == world_size if ulysses_degree and ring_degree else world_size % known == 0
    if cp_size not in (None, world_size) or not fits:
        given = ", ".join(f"infer.{name}={value}" for name, value in asked.items())
        return RankGrid(world_size, rank), [
            f"{given} must make up world_size={world_size}, because all processes share each video; start "
            f"{cp_size or known} with a launcher, or leave the options out."
        ]
    parallel = ParallelSection(cp_size=world_size, ulysses_degree=ulysses_degree, ring_degree=ring_degree)
    try:
        degrees = choose_degrees(
            parallel,
            num_heads=variant.dit.num_heads,
            ranks_per_node=ranks_per_node(),
            model=variant.name,
        )
    except ConfigError as error:
        return RankGrid(world_size, rank), [str(error).replace("parallel.", "infer.")]
    return RankGrid(world_size, rank, *degrees), []


def own_device(asked: str | None) -> tuple[str, list[str]]:
    """The device of one of several ranks, and what is wrong with it, which all ranks of a node find alike.

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
    # torchrun calls it LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE.
    started = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    present = torch.cuda.device_count()
    if started > present:
        problems.append(f"{started} processes on this node have {present} GPUs; start one for each GPU.")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}", problems


def share_pipeline(pipeline: WanPipeline, grid: RankGrid) -> None:
    """Meet the other ranks and let their pipelines sample each video together.

    From here on every rank must make the same calls; all of them then have the same latents.

    Args:
        pipeline: from `load_pipeline`, with the same weights on every rank.
        grid: from `plan_ranks`.
    """
    assert grid.dp_size == 1, f"{grid.dp_size} groups would sample the same video"
    _, _, device = init_process_group()
    groups = ContextGroups.build(grid, device)
    log.info(
        "sampling on %d ranks: Ulysses %d x ring %d", grid.cp_size, grid.ulysses_degree, grid.ring_degree
    )
    for transformer in (pipeline.transformer, pipeline.transformer_2):
        if transformer is None:
            continue
        backend = choose_backend("auto", device, transformer.dtype, transformer.config.attention_head_dim)
        shard_transformer(
            transformer,
            ContextAttention(backend, groups.ulysses, groups.ring, groups.ring_grad),
            ulysses_degree=grid.ulysses_degree,
            ring_degree=grid.ring_degree,
            cp_rank=grid.cp_rank,
            group=groups.cp,
        )
