"""Parallel dimensions and their process groups: world size = data parallel x ring x Ulysses.

Ulysses is the innermost dimension: the ranks of a Ulysses group are consecutive. The all-to-all of Ulysses therefore stays
inside a node if the Ulysses degree divides the number of ranks of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from wands.attention.layout import ContextLayout
from wands.config.recipe import ParallelConfig
from wands.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel dimensions, and this rank's index in each dimension.

    DeepSpeed does not use these dimensions: ZeRO partitions parameters and averages gradients over all ranks.

    Attributes:
        world_size: number of ranks.
        rank: global rank.
        ulysses_degree: number of consecutive ranks that divide the attention heads among themselves.
        ring_degree: number of ranks in a ring. These ranks exchange keys and values.
    """

    world_size: int
    rank: int
    ulysses_degree: int = 1
    ring_degree: int = 1

    @property
    def cp_size(self) -> int:
        """Number of ranks in a context-parallel group. These ranks divide the tokens of one packed sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def dp_size(self) -> int:
        """Number of context-parallel groups. Each group processes different samples."""
        return self.world_size // self.cp_size

    @property
    def dp_rank(self) -> int:
        """Data-parallel index of this rank: the index of its context-parallel group."""
        return self.rank // self.cp_size

    @property
    def cp_rank(self) -> int:
        """Index of this rank in its context-parallel group: ring rank * ulysses_degree + Ulysses rank."""
        return self.rank % self.cp_size

    def layout(self, seq_lens: Sequence[int]) -> ContextLayout:
        """Return the layout of a bin (the samples packed into one sequence), which lists the tokens of the bin on this rank.

        Args:
            seq_lens: number of tokens of each sample of the bin.
        """
        return ContextLayout.build(
            seq_lens, ulysses_degree=self.ulysses_degree, ring_degree=self.ring_degree, cp_rank=self.cp_rank
        )


class ContextDegrees(NamedTuple):
    """Degrees of context parallelism.

    `ulysses` is the number of ranks that divide the attention heads among themselves. `ring` is the number of ranks that
    exchange keys and values.
    """

    ulysses: int
    ring: int


def check_world(parallel: ParallelConfig, world_size: int) -> None:
    """Check that the number of processes is a multiple of the number of ranks in a context-parallel group.

    Raises:
        ConfigError: if the world size is not divisible by the number of ranks in a group.
    """
    size = parallel.group_size
    if world_size % size:
        raise ConfigError(
            f"{_given_keys(parallel)}: {size} ranks share each packed sequence, but {world_size=} is not a multiple of {size}. "
            f"Start a multiple of {size} processes, or set parallel.cp_size (and no other degree) to a divisor of {world_size}."
        )


def choose_degrees(
    parallel: ParallelConfig, *, num_heads: int, ranks_per_node: int, model: str
) -> ContextDegrees:
    """Choose the Ulysses degree and the ring degree for the recipe's `parallel` section.

    If the recipe sets both degrees, both are used. If the recipe sets `cp_size` and one degree, the other degree is `cp_size`
    divided by the given degree. If the recipe sets one degree only, the other degree is 1. If the recipe sets only `cp_size`,
    the Ulysses degree is the largest number that divides `cp_size`, the number of heads and `ranks_per_node`. The ring degree
    is then `cp_size` divided by the Ulysses degree. A large Ulysses degree is best, because an all-to-all always sends less
    than a ring of the same degree.

    Args:
        parallel: `parallel` section of a recipe that `load_recipe` has checked.
        num_heads: number of attention heads of the DiT.
        ranks_per_node: number of processes per node.
        model: name of the model, for error messages.

    Raises:
        ConfigError: if the Ulysses degree does not divide the number of heads.
    """
    size, ulysses, ring = parallel.group_size, parallel.ulysses_degree, parallel.ring_degree
    if ulysses is None and ring is not None:
        ulysses = size // ring
    elif ulysses is None:
        ulysses = max(n for n in range(1, size + 1) if not (num_heads % n or size % n or ranks_per_node % n))
    if num_heads % ulysses:
        valid = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        degree = f"parallel.ulysses_degree={ulysses}"
        if parallel.ulysses_degree is None:
            degree = f"{_given_keys(parallel)} leads to {degree}, which"
        raise ConfigError(f"{degree} must divide num_heads={num_heads} of {model}. Use one of {valid}.")
    return ContextDegrees(ulysses, size // ulysses)


def _given_keys(parallel: ParallelConfig) -> str:
    names = ("cp_size", "ulysses_degree", "ring_degree")
    return ", ".join(f"parallel.{n}={value}" for n in names if (value := getattr(parallel, n)))


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of a rank. A group is None if it would contain only this rank.

    Attributes:
        dims: parallel dimensions of this rank.
        ulysses: ranks that divide the attention heads among themselves, for the all-to-all.
        ring: ranks that exchange keys and values, for send and receive.
        ring_grad: a second communicator over the ranks of `ring`, for the gradients of keys and values. With a single
            communicator, transfers of keys and values would wait for transfers of gradients.
        cp: all ranks of the context-parallel group. These ranks divide the tokens of one packed sequence.
    """

    dims: ParallelDims
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    ring_grad: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, dims: ParallelDims, device: torch.device | str = "cpu") -> ProcessGroups:
        """Create the process groups, in the same order on every rank, and run one collective in each group.

        A second call with equal arguments returns the groups of the first call.

        The first collective of a group sets up the group's communicator, and needs all members at the same time. If it ran inside
        ring attention, the set-up would deadlock.

        Args:
            dims: parallel dimensions of this rank.
            device: device of the tensors that the groups send.
        """
        return _build_groups(dims, torch.device(device), dist.group.WORLD)


# A process can make several runs, and communicators are never freed.
@cache
def _build_groups(dims: ParallelDims, device: torch.device, world: dist.ProcessGroup | None) -> ProcessGroups:
    cp = dims.cp_size
    ulysses = dims.ulysses_degree
    cp_groups = [range(start, start + cp) for start in range(0, dims.world_size, cp)]
    ulysses_groups = [ranks[i : i + ulysses] for ranks in cp_groups for i in range(0, cp, ulysses)]
    rings = [ranks[i::ulysses] for ranks in cp_groups for i in range(ulysses)]
    return ProcessGroups(
        dims=dims,
        ulysses=new_group(ulysses_groups, device),
        ring=new_group(rings, device),
        ring_grad=new_group(rings, device),
        cp=new_group(cp_groups, device),
    )


def new_group(partition: list[range], device: torch.device | str) -> dist.ProcessGroup | None:
    """Create one process group for each range of ranks, and return this rank's group.

    If each range contains only one rank, create no group, and return None.

    Args:
        partition: ranks of each group. The ranges have equal lengths and contain every rank once.
        device: device of the tensors that the group sends.
    """
    if len(partition[0]) == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition])
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    assert int(ones.item()) == len(partition[0])
    return group
