"""The rank grid and its process groups: world = dp x ring x ulysses.

Ulysses is innermost, so that its all-to-all stays inside a node.
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
    """Where one rank stands. DeepSpeed is told nothing of it: ZeRO shards and averages over the whole world.

    Attributes:
        world_size: all ranks.
        rank: this one.
        ulysses_degree: ranks that share heads, neighbours in the world.
        ring_degree: ranks that share each sample's tokens.
    """

    world_size: int
    rank: int
    ulysses_degree: int = 1
    ring_degree: int = 1

    @property
    def cp_size(self) -> int:
        """Ranks that share one bin."""
        return self.ulysses_degree * self.ring_degree

    @property
    def dp_size(self) -> int:
        """Groups of ranks that hold different bins."""
        return self.world_size // self.cp_size

    @property
    def dp_rank(self) -> int:
        """Which of them this rank belongs to."""
        return self.rank // self.cp_size

    @property
    def cp_rank(self) -> int:
        """Place inside the group that shares a bin: ring rank * ulysses_degree + Ulysses rank."""
        return self.rank % self.cp_size

    @property
    def ring_rank(self) -> int:
        """Which chunk of every sample this rank attends for."""
        return self.cp_rank // self.ulysses_degree

    @property
    def ulysses_rank(self) -> int:
        """Which heads, and which slice of the ring row, this rank has."""
        return self.cp_rank % self.ulysses_degree


class ContextDegrees(NamedTuple):
    """How many ranks share heads, and how many share each sample's tokens."""

    ulysses: int
    ring: int


def check_world(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a world that the context-parallel groups do not divide.

    Raises:
        ConfigError: as that.
    """
    if world_size % parallel.group_size:
        raise ConfigError(
            f"{_asked(parallel)}: {parallel.group_size} ranks share a bin, which must divide world_size={world_size}; start a "
            f"multiple of {parallel.group_size} processes, or let another number share."
        )


def choose_degrees(
    parallel: ParallelConfig, *, num_heads: int, ranks_per_node: int, model: str
) -> ContextDegrees:
    """Turn what the recipe asks for into the two degrees.

    `cp_size` alone takes the largest Ulysses degree that divides the heads, the group and the node, because an
    all-to-all sends less than a ring as soon as it is allowed, and puts the rest in the ring.

    Args:
        parallel: checked by `load_recipe`.
        num_heads: of the DiT.
        ranks_per_node: processes that the launcher started on each node.
        model: what to call it in an error.

    Raises:
        ConfigError: the Ulysses degree does not divide the heads.
    """
    size, ulysses, ring = parallel.group_size, parallel.ulysses_degree, parallel.ring_degree
    if ulysses is None:
        if ring is not None:
            ulysses = size // ring
        else:
            fits = [n for n in range(1, size + 1) if not (num_heads % n or size % n or ranks_per_node % n)]
            ulysses = max(fits)
    if num_heads % ulysses:
        legal = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        degree = f"parallel.ulysses_degree={ulysses}"
        found = degree if parallel.ulysses_degree else f"{_asked(parallel)} leaves {degree}, which"
        raise ConfigError(f"{found} must divide num_heads={num_heads} of {model}; use one of {legal}.")
    return ContextDegrees(ulysses, size // ulysses)


def _asked(parallel: ParallelConfig) -> str:
    names = ("cp_size", "ulysses_degree", "ring_degree")
    return ", ".join(f"parallel.{n}={value}" for n in names if (value := getattr(parallel, n)))


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of one rank; None where the degree is 1 and there is nobody to talk to.

    Attributes:
        dims: where this rank stands.
        ulysses: all-to-all of heads.
        ring: keys and values on their way round.
        ring_grad: their gradients; a communicator of its own, or the two would wait for each other.
        cp: all ranks that share a bin.
    """

    dims: ParallelDims
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    ring_grad: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, grid: ParallelDims, device: torch.device | str = "cpu") -> ProcessGroups:
        """Make the groups, on every rank in the same order, and use each once.

        A communicator is set up at its first use, by all its members: in the middle of a ring that would be a deadlock.

        Args:
            grid: this rank's place.
            device: where the tensors will be.
        """
        cp, ulysses = grid.cp_size, grid.ulysses_degree
        bins = [range(start, start + cp) for start in range(0, grid.world_size, cp)]
        rows = [ranks[i : i + ulysses] for ranks in bins for i in range(0, cp, ulysses)]
        rings = [ranks[i::ulysses] for ranks in bins for i in range(ulysses)]
        return cls(
            grid,
            ulysses=_make(rows, device),
            ring=_make(rings, device),
            ring_grad=_make(rings, device),
            cp=_make(bins, device),
        )


def _make(partition: list[range], device: torch.device | str) -> dist.ProcessGroup | None:
    if len(partition[0]) == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition])
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    assert int(ones.item()) == len(partition[0])
    return group
