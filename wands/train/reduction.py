"""The one sum over the ranks that each step needs: losses, losses by noise level, and the largest value of other numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wands.transfer import to_device


class StepSums(NamedTuple):
    """Numbers of a step over all ranks.

    Attributes:
        losses: loss of each trained DiT.
        of_sigmas: sum over the ranks of `sigma_sums`.
        largest: largest value over the ranks of each of the other numbers.
    """

    losses: list[float]
    of_sigmas: list[float]
    largest: dict[str, float]
    world_size: int


def sum_over_ranks(
    losses: Sequence[Tensor], of_sigmas: Tensor, own: Mapping[str, float], *, rank: int, world_size: int
) -> StepSums:
    """Sum the numbers of a step over the ranks. Every rank must call this function. The host waits for the device.

    `losses` has this rank's part of the logged loss of each trained DiT, as scalars on the device; `of_sigmas` is the result of
    `sigma_sums`. The largest value over the ranks is taken of the numbers in `own`, whose names are equal on all ranks.
    """
    # A row for each rank, 0 in the rows of other ranks: one sum over the ranks also collects what needs a maximum.
    table = torch.zeros(world_size, len(own), dtype=torch.float64)
    table[rank] = torch.tensor([*own.values()], dtype=torch.float64)
    own_losses = torch.stack(list(losses)).double()
    parts = (own_losses, of_sigmas, to_device(table, own_losses.device).flatten())
    sums = torch.cat(parts)
    dist.all_reduce(sums)
    total_losses, total_sigmas, rows = sums.cpu().split([*map(len, parts)])
    largest = rows.view(world_size, len(own)).amax(dim=0).tolist()
    return StepSums(
        losses=total_losses.tolist(),
        of_sigmas=total_sigmas.tolist(),
        largest=dict(zip(own, largest, strict=True)),
        world_size=world_size,
    )
