"""The rank grid: world = dp x ring x ulysses, Ulysses innermost so that its all-to-all stays inside a node."""

from __future__ import annotations

from dataclasses import dataclass

from wands.config import ParallelSection
from wands.errors import ConfigError


@dataclass(frozen=True)
class RankGrid:
    """Where one rank stands. DeepSpeed is told nothing of it: ZeRO shards and averages over the whole world.

    Attributes:
        world_size: all ranks.
        rank: this one.
        cp_size: ranks that share one bin.
    """

    world_size: int
    rank: int
    cp_size: int

    @classmethod
    def build(cls, world_size: int, rank: int, parallel: ParallelSection) -> RankGrid:
        """Place a rank.

        Raises:
            ConfigError: the context-parallel degrees do not divide the world.
        """
        if world_size % parallel.cp_size:
            raise ConfigError(
                f"parallel.ulysses_degree={parallel.ulysses_degree} x parallel.ring_degree={parallel.ring_degree} must divide "
                f"world_size={world_size}; start a multiple of {parallel.cp_size} processes."
            )
        return cls(world_size, rank, parallel.cp_size)

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
        """Place inside the group that shares a bin."""
        return self.rank % self.cp_size
