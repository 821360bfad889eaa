"""Parallel dimensions and their process groups: world = dp x ring x ulysses.

Ulysses is the innermost dimension, so that its all-to-all stays inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from wands.config.recipe import ParallelConfig
from wands.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel dimensions, and this rank's position in each of them.

    DeepSpeed does not know these dimensions: ZeRO partitions and averages over the whole world.

    Attributes:
        world_size: number of ranks.
        rank: global rank.
        ulysses_degree: number of consecutive ranks that share attention heads.
        ring_degree: number of ranks that share the tokens of each sample.
    """

    world_size: int
    rank: int
    ulysses_degree: int = 1
    ring_degree: int = 1

    @property
    def cp_size(self) -> int:
        """Number of ranks that share one bin."""
        return self.ulysses_degree * self.ring_degree

    @property
    def dp_size(self) -> int:
        """Number of context-parallel groups; each group processes different bins."""
        return self.world_size // self.cp_size

    @property
    def dp_rank(self) -> int:
        """Index of this rank's context-parallel group."""
        return self.rank // self.cp_size

    @property
    def cp_rank(self) -> int:
        """Position inside the context-parallel group: ring rank * ulysses_degree + Ulysses rank."""
        return self.rank % self.cp_size

    @property
    def ring_rank(self) -> int:
        """Index of this rank's ring row."""
        return self.cp_rank // self.ulysses_degree

    @property
    def ulysses_rank(self) -> int:
        """Index of this rank's heads, and of its slice of the ring row."""
        return self.cp_rank % self.ulysses_degree


class ContextDegrees(NamedTuple):
    """Degrees of context parallelism: ranks that share heads, and ranks that share the tokens of each sample."""

    ulysses: int
    ring: int


def check_world(parallel: ParallelConfig, world_size: int) -> None:
    """Check that context-parallel groups of the recipe's size fill the world.

    Raises:
        ConfigError: if the world size is not divisible by the group size.
    """
    size = parallel.group_size
    if world_size % size:
        raise ConfigError(
            f"{_given_keys(parallel)}: {size} ranks share each bin, but world_size={world_size} is not a multiple of "
            f"{size}. Start a multiple of {size} processes, or change the degrees."
        )


def choose_degrees(
    parallel: ParallelConfig, *, num_heads: int, ranks_per_node: int, model: str
) -> ContextDegrees:
    """Choose the Ulysses and ring degrees for the recipe's `parallel` section.

    If only `cp_size` is set, the Ulysses degree is the largest one that divides the heads, the group and the node, and the ring
    degree is the rest. An all-to-all sends less than a ring at every degree.

    Args:
        parallel: section checked by `load_recipe`.
        num_heads: attention heads of the DiT.
        ranks_per_node: number of processes per node.
        model: name of the model for errors.

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
    """Process groups of a rank; a group is None if its degree is 1.

    Attributes:
        dims: parallel dimensions of this rank.
        ulysses: all-to-all of heads.
        ring: send and receive of keys and values.
        ring_grad: send and receive of the gradients of keys and values. With one communicator for both, the two directions of a
            ring would wait for each other.
        cp: all ranks that share a bin.
    """

    dims: ParallelDims
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    ring_grad: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, dims: ParallelDims, device: torch.device | str = "cpu") -> ProcessGroups:
        """Create the groups, in the same order on every rank, and run one collective in each group.

        All members set up a communicator at its first use. If the first use were inside a ring, the set-up would deadlock.

        Args:
            dims: parallel dimensions of this rank.
            device: device of the tensors to communicate.
        """
        cp, ulysses = dims.cp_size, dims.ulysses_degree
        cp_groups = [range(start, start + cp) for start in range(0, dims.world_size, cp)]
        ulysses_groups = [ranks[i : i + ulysses] for ranks in cp_groups for i in range(0, cp, ulysses)]
        rings = [ranks[i::ulysses] for ranks in cp_groups for i in range(ulysses)]
        return cls(
            dims,
            ulysses=_new_group(ulysses_groups, device),
            ring=_new_group(rings, device),
            ring_grad=_new_group(rings, device),
            cp=_new_group(cp_groups, device),
        )


def _new_group(partition: list[range], device: torch.device | str) -> dist.ProcessGroup | None:
    if len(partition[0]) == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition])
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    assert int(ones.item()) == len(partition[0])
    return group
