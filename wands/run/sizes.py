"""The sizes of a run: FLOPs of a step, and the workload from which memory and step time are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wands.config.recipe import Recipe
from wands.data.cache.reader import LatentCache
from wands.data.datasets import Dataset
from wands.distributed.dims import ContextDegrees
from wands.objectives.objective import ClipCosts, Objective
from wands.planning.sampling_load import sampling_load
from wands.planning.workload import Workload
from wands.run.run_model import RunModel
from wands.run.schedule import Schedule
from wands.sampling.requests import SampleRequest
from wands.variants import TEXT_LEN, DiTShape


def step_flops(model: RunModel, schedule: Schedule, bins: Sequence[Sequence[int]]) -> int:
    """Return the matmul FLOPs of one step over all ranks, for all passes of each trained DiT. Recomputation is not counted.

    A backward pass counts as two forward passes. A frozen weight needs no weight gradient, which saves a third of the FLOPs of
    its linear layer. Each bin is given as the rows of its samples.
    """
    costs = schedule.costs
    forward = 0
    pairs = 0
    for bin in bins:
        own_pairs = sum(int(costs.pairs[i]) for i in bin)
        forward += forward_flops(model.shape, [int(costs.tokens[i]) for i in bin], own_pairs)
        pairs += own_pairs
    linear = forward - pairs * model.shape.attention_flops_per_squared_token()
    frozen = 1.0 - min(model.num_trained / model.shape.num_params, 1.0)
    with_gradient, without_gradient = schedule.objective.forwards
    of_dit = with_gradient * (3 * forward - round(frozen * linear)) + without_gradient * forward
    return len(model.experts) * of_dit


def forward_flops(shape: DiTShape, tokens: Sequence[int], pairs: int) -> int:
    """Return the matmul FLOPs of a forward pass of clips with these numbers of tokens, and of attention pairs together."""
    squares = sum(length * length for length in tokens)
    return shape.forward_flops(tokens) + (pairs - squares) * shape.attention_flops_per_squared_token()


def flops_of_clips(shape: DiTShape, costs: ClipCosts) -> np.ndarray:
    """Return the matmul FLOPs of each clip in a forward pass, float64 [N], by which the packer balances."""
    linear = float(shape.linear_flops_per_token())
    attention = float(shape.attention_flops_per_squared_token())
    return linear * costs.tokens + attention * costs.pairs


def objective_load(objective: Objective, costs: ClipCosts) -> dict[str, Any]:
    """Return the passes and the attention of an objective, as keyword arguments of `Workload`."""
    squares = (costs.tokens.astype(np.float64) ** 2).sum()
    return {"forwards": objective.forwards, "pair_share": float(costs.pairs.sum() / squares)}


def run_workload(
    recipe: Recipe,
    ds_config: Mapping[str, Any],
    model: RunModel,
    data: Dataset,
    schedule: Schedule,
    samples: Sequence[SampleRequest],
    *,
    world_size: int,
    degrees: ContextDegrees,
    device_type: str,
) -> Workload:
    """Return the sizes of a run that determine its memory and step time. `device_type` is "cuda" or "cpu"."""
    sampler = schedule.sampler
    packs = recipe.packing.enabled
    bins = [bin for step in sampler.epoch_plan(sampler.start[0]).steps for bin in step if bin]
    forwards = bins if packs else [(i,) for bin in bins for i in bin]
    text_len = TEXT_LEN
    if recipe.data.mock is not None:
        text_len = max(recipe.data.mock.text_lens)
    elif isinstance(data, LatentCache):
        text_len = int(data.index.text_lens.max())
    dp_size = world_size // recipe.parallel.group_size
    return Workload(
        recipe=recipe,
        shape=model.shape,
        weights=model.weights,
        num_models=len(model.experts),
        world_size=world_size,
        device_type=device_type,
        text_len=text_len,
        ds_config=ds_config,
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        micro_steps=recipe.train.bins_per_step // dp_size if packs else 2,
        max_tokens=max(int(schedule.costs.tokens[list(bin)].sum()) for bin in forwards),
        max_samples=max(map(len, forwards)),
        **objective_load(schedule.objective, schedule.costs),
        **sampling_load(samples, model.variant, recipe.objective),
    )
