"""Parallel dimensions and their process groups: world size = data parallel x ring x Ulysses x tensor.

Tensor parallelism is the innermost dimension, because it sends the most. Ulysses follows. The exchanges of both stay inside a
node if the product of their degrees divides the number of ranks of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from wands.attention.layout import ContextLayout
from wands.attention.units import Unit
from wands.config.recipe import ParallelConfig
from wands.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel dimensions, and this rank's index in each dimension.

    DeepSpeed knows only the tensor degree: ZeRO partitions parameters and averages gradients over the ranks with the same
    `tensor_rank`, which have the same part of each weight.
    """

    world_size: int
    rank: int
    ulysses_degree: int = 1
    ring_degree: int = 1
    tensor_degree: int = 1

    @property
    def cp_size(self) -> int:
        return self.ulysses_degree * self.ring_degree

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.cp_size * self.tensor_degree)

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.cp_size * self.tensor_degree)

    @property
    def cp_rank(self) -> int:
        """Index of this rank in its context-parallel group: ring rank * ulysses_degree + Ulysses rank."""
        return self.rank // self.tensor_degree % self.cp_size

    @property
    def tensor_rank(self) -> int:
        """Index of this rank in its tensor-parallel group, and of its part of each divided weight."""
        return self.rank % self.tensor_degree

    @property
    def zero_size(self) -> int:
        """Number of ranks that have the same part of each weight, and among which ZeRO partitions this part."""
        return self.world_size // self.tensor_degree

    @property
    def is_first_of_bin(self) -> bool:
        """Whether this rank is the first of the ranks that share its bin."""
        return self.cp_rank == 0 and self.tensor_rank == 0

    def layout(self, seq_lens: Sequence[int], units: Sequence[Sequence[Unit]] | None = None) -> ContextLayout:
        """Return the tokens of a bin on this rank. `seq_lens` is the number of tokens of each sample, `units` are its units."""
        return ContextLayout.build(
            seq_lens,
            ulysses_degree=self.ulysses_degree,
            ring_degree=self.ring_degree,
            cp_rank=self.cp_rank,
            units=units,
        )


class ContextDegrees(NamedTuple):
    """Degrees of context parallelism: their product is the number of ranks that share a bin."""

    ulysses: int
    ring: int


def check_world(parallel: ParallelConfig, world_size: int) -> None:
    """Raise a ConfigError if the world size is not a multiple of the number of ranks that share a bin."""
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

    A degree that is not set is `cp_size` / the other degree, or 1 without `cp_size`. If only `cp_size` is set, the Ulysses degree
    is the largest divisor of `cp_size` that divides the heads of a tensor rank and, times the tensor degree, `ranks_per_node`: an
    all-to-all always sends less than a ring of the same degree. `model` is named in errors.

    Raises:
        ConfigError: if the tensor degree or the Ulysses degree does not divide the number of heads.
    """
    size = parallel.context_size
    ulysses = parallel.ulysses_degree
    ring = parallel.ring_degree
    tensor = parallel.tensor_degree
    if num_heads % tensor:
        raise ConfigError(
            f"parallel.tensor_degree={tensor} must divide num_heads={num_heads} of {model}. Use one of {_divisors(num_heads)}."
        )
    heads = num_heads // tensor
    if ulysses is None and ring is not None:
        ulysses = size // ring
    elif ulysses is None:
        degrees = [
            n for n in range(1, size + 1) if not (heads % n or size % n or ranks_per_node % (n * tensor))
        ]
        ulysses = max(degrees, default=1)
    if heads % ulysses:
        degree = f"parallel.ulysses_degree={ulysses}"
        if parallel.ulysses_degree is None:
            degree = f"{_given_keys(parallel)} leads to {degree}, which"
        shared = "" if tensor == 1 else f" / parallel.tensor_degree={tensor}"
        raise ConfigError(
            f"{degree} must divide num_heads={num_heads} of {model}{shared}. Use one of {_divisors(heads)}."
        )
    return ContextDegrees(ulysses, size // ulysses)


def check_ffn(parallel: ParallelConfig, *, ffn_dim: int, model: str) -> None:
    """Raise a ConfigError if the tensor degree does not divide the hidden channels of the feed-forward."""
    if ffn_dim % parallel.tensor_degree:
        raise ConfigError(
            f"parallel.tensor_degree={parallel.tensor_degree} must divide ffn_dim={ffn_dim} of {model}. Use a divisor of "
            f"{ffn_dim} and of the number of heads."
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _given_keys(parallel: ParallelConfig) -> str:
    names = ("cp_size", "ulysses_degree", "ring_degree")
    given = [f"parallel.{n}={value}" for n in names if (value := getattr(parallel, n))]
    if parallel.tensor_degree > 1:
        given.append(f"parallel.tensor_degree={parallel.tensor_degree}")
    return ", ".join(given)


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of a rank. A group is None if it would contain only this rank.

    Attributes:
        ring_grad: a second communicator over the ranks of `ring`, for the gradients of keys and values. With a single one,
            transfers of keys and values would wait for transfers of gradients.
        cp: the context-parallel group.
        zero: ranks with the same part of each weight, among which ZeRO partitions this part. None if the tensor degree is 1,
            because these are all ranks then. If the tensor degree is the number of all ranks, the group has one rank.
    """

    dims: ParallelDims
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    ring_grad: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    zero: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, dims: ParallelDims, device: torch.device | str = "cpu") -> ProcessGroups:
        """Create the process groups, in the same order on every rank, and run one collective in each group.

        The first collective of a group sets up its communicator and needs all members at the same time; inside ring attention, it
        would deadlock. `device` is that of the tensors to send. A second call with equal arguments returns the same groups.
        """
        return _build_groups(dims, torch.device(device), dist.group.WORLD)


# A process can make several runs, and communicators are never freed.
@cache
def _build_groups(dims: ParallelDims, device: torch.device, world: dist.ProcessGroup | None) -> ProcessGroups:
    cp = dims.cp_size
    ulysses = dims.ulysses_degree
    tensor = dims.tensor_degree
    world_size = dims.world_size
    cp_groups = [
        range(start + part, start + cp * tensor, tensor)
        for start in range(0, world_size, cp * tensor)
        for part in range(tensor)
    ]
    ulysses_groups = [ranks[i : i + ulysses] for ranks in cp_groups for i in range(0, cp, ulysses)]
    rings = [ranks[i::ulysses] for ranks in cp_groups for i in range(ulysses)]
    return ProcessGroups(
        dims=dims,
        ulysses=new_group(ulysses_groups, device),
        ring=new_group(rings, device),
        ring_grad=new_group(rings, device),
        cp=new_group(cp_groups, device),
        tensor=new_group([range(start, start + tensor) for start in range(0, world_size, tensor)], device),
        zero=_make_groups([range(part, world_size, tensor) for part in range(tensor)], device)
        if tensor > 1
        else None,
    )


def new_group(partition: list[range], device: torch.device | str) -> dist.ProcessGroup | None:
    """Create one process group for each range of ranks, and return this rank's group; None if a range has only one rank.

    The ranges have equal lengths and contain every rank once. `device` is that of the tensors to send.
    """
    return None if len(partition[0]) == 1 else _make_groups(partition, device)


def _make_groups(partition: list[range], device: torch.device | str) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition])
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    assert int(ones.item()) == len(partition[0])
    return group
