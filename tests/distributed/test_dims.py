"""Parallel dimensions, the degrees that `cp_size` leads to, and the ranks of each process group."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.support.world import WorldPool
from wands.config.recipe import ParallelConfig
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ParallelDims, ProcessGroups, check_ffn, check_world, choose_degrees
from wands.errors import ConfigError


def degrees(num_heads: int, ranks_per_node: int = 8, **parallel: int) -> tuple[int, int]:
    return choose_degrees(
        ParallelConfig(**parallel), num_heads=num_heads, ranks_per_node=ranks_per_node, model="wan"
    )


@pytest.mark.parametrize(
    ("num_heads", "cp_size", "ranks_per_node", "expected"),
    [
        (40, 8, 8, (8, 1)),
        (12, 8, 8, (4, 2)),
        (24, 8, 8, (8, 1)),
        (40, 16, 8, (8, 2)),
        (12, 16, 8, (4, 4)),
        (12, 6, 8, (2, 3)),  # 6 and 3 divide the heads, but such groups would lie across nodes of 8
        (12, 6, 6, (6, 1)),
        (40, 64, 8, (8, 8)),
        (7, 4, 8, (1, 4)),
        (12, 1, 8, (1, 1)),
    ],
)
def test_cp_size_takes_the_largest_ulysses_that_heads_and_node_allow(
    num_heads: int, cp_size: int, ranks_per_node: int, expected: tuple[int, int]
):
    assert degrees(num_heads, ranks_per_node, cp_size=cp_size) == expected


def test_a_degree_that_is_given_is_kept():
    assert degrees(40) == (1, 1)
    assert degrees(40, ulysses_degree=4) == (4, 1)
    assert degrees(40, ring_degree=4) == (1, 4)
    assert degrees(40, cp_size=8, ulysses_degree=2) == (2, 4)
    assert degrees(40, cp_size=8, ring_degree=2) == (4, 2)
    assert degrees(40, cp_size=8, ring_degree=2, ulysses_degree=4) == (4, 2)


@pytest.mark.parametrize(
    ("parallel", "blamed"),
    [
        ({"ulysses_degree": 8}, "^parallel.ulysses_degree=8 "),
        (
            {"cp_size": 16, "ring_degree": 2},
            "cp_size=16, parallel.ring_degree=2 leads to parallel.ulysses_degree=8, which ",
        ),
    ],
)
def test_ulysses_must_divide_the_heads(parallel: dict[str, int], blamed: str):
    with pytest.raises(
        ConfigError, match=blamed + "must divide num_heads=12 of wan. Use one of 1, 2, 3, 4, 6, 12"
    ):
        degrees(12, **parallel)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("cp_size=4", "ulysses_degree=2", "ring_degree=3"),
            r"cp_size=4 must equal parallel.ulysses_degree=2 x",
        ),
        (("cp_size=4", "ring_degree=3"), r"cp_size=4 must be a multiple of parallel.ring_degree=3"),
        (("ring_degree=0",), "ring_degree=0 is invalid"),
    ],
)
def test_contradicting_degrees_are_refused_with_the_recipe(overrides: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, [f"parallel.{one}" for one in overrides])


def test_ulysses_divides_the_heads_that_tensor_parallelism_leaves():
    assert degrees(12, cp_size=8, tensor_degree=2) == (2, 4)
    assert degrees(40, cp_size=8, tensor_degree=2) == (4, 2)  # 4 x 2 ranks fill a node
    assert degrees(32, cp_size=4, tensor_degree=16) == (1, 4)  # a tensor-parallel group over two nodes
    assert degrees(40, ulysses_degree=5, tensor_degree=8) == (5, 1)
    with pytest.raises(
        ConfigError,
        match=r"^parallel.ulysses_degree=4 must divide num_heads=12 of wan / parallel.tensor_degree=2. Use one of 1, 2, 3, 6",
    ):
        degrees(12, ulysses_degree=4, tensor_degree=2)
    with pytest.raises(
        ConfigError, match=r"^parallel.tensor_degree=5 must divide num_heads=12 of wan. Use one of 1, 2, 3"
    ):
        degrees(12, tensor_degree=5)
    with pytest.raises(ConfigError, match=r"^parallel.tensor_degree=4 must divide ffn_dim=90 of wan"):
        check_ffn(ParallelConfig(tensor_degree=4), ffn_dim=90, model="wan")


def test_a_world_that_groups_do_not_divide():
    check_world(ParallelConfig(cp_size=4), 8)
    with pytest.raises(
        ConfigError,
        match=r"parallel.ring_degree=3: 3 ranks share each packed sequence, but world_size=8 is not a multiple",
    ):
        check_world(ParallelConfig(ring_degree=3), 8)
    check_world(ParallelConfig(ring_degree=3, tensor_degree=2), 12)
    with pytest.raises(
        ConfigError,
        match=r"parallel.ring_degree=3, parallel.tensor_degree=2: 6 ranks share each packed sequence, but world_size=9",
    ):
        check_world(ParallelConfig(ring_degree=3, tensor_degree=2), 9)


def test_every_rank_has_its_own_place_and_ulysses_is_innermost():
    grids = [ParallelDims(12, rank, ulysses_degree=2, ring_degree=3) for rank in range(12)]
    assert {(g.dp_size, g.cp_size) for g in grids} == {(2, 6)}
    places = [(g.dp_rank, *divmod(g.cp_rank, g.ulysses_degree)) for g in grids]
    assert places == [(d, r, u) for d in range(2) for r in range(3) for u in range(2)]
    assert [g.cp_rank for g in grids[:6]] == list(range(6))


def test_tensor_parallelism_is_innermost():
    grids = [ParallelDims(16, rank, ulysses_degree=2, ring_degree=2, tensor_degree=2) for rank in range(16)]
    assert {(g.dp_size, g.cp_size, g.zero_size) for g in grids} == {(2, 4, 8)}
    places = [(g.dp_rank, *divmod(g.cp_rank, g.ulysses_degree), g.tensor_rank) for g in grids]
    assert places == [(d, r, u, t) for d in range(2) for r in range(2) for u in range(2) for t in range(2)]
    assert [g.rank for g in grids if g.is_first_of_bin] == [0, 8]


def _members(ring: int, ulysses: int, tensor: int = 1) -> dict[str, list[int] | None]:
    init_process_group()
    grid = ParallelDims(
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
        ulysses_degree=ulysses,
        ring_degree=ring,
        tensor_degree=tensor,
    )
    groups = ProcessGroups.build(grid)
    return {
        name: dist.get_process_group_ranks(group) if (group := getattr(groups, name)) else None
        for name in ("ulysses", "ring", "ring_grad", "cp", "tensor", "zero")
    }


@pytest.mark.parametrize(
    ("ring", "ulysses", "expected"),
    [
        (1, 1, [{"ulysses": None, "ring": None, "cp": None}] * 4),
        (1, 2, [{"ulysses": pair, "ring": None, "cp": pair} for pair in ([0, 1], [0, 1], [2, 3], [2, 3])]),
        (2, 1, [{"ulysses": None, "ring": pair, "cp": pair} for pair in ([0, 1], [0, 1], [2, 3], [2, 3])]),
        (
            2,
            2,
            [
                {"ulysses": [r // 2 * 2, r // 2 * 2 + 1], "ring": [r % 2, r % 2 + 2], "cp": [0, 1, 2, 3]}
                for r in range(4)
            ],
        ),
    ],
)
def test_groups_hold_the_ranks_of_the_grid(ring: int, ulysses: int, expected: list, run_world):
    found = run_world(4, _members, ring, ulysses)
    assert found == [{**one, "ring_grad": one["ring"], "tensor": None, "zero": None} for one in expected]


@pytest.mark.parametrize(
    ("ring", "ulysses", "tensor", "cp", "zero"),
    [
        (1, 1, 4, [None] * 4, [[0], [1], [2], [3]]),
        (1, 1, 2, [None] * 4, [[0, 2], [1, 3]] * 2),
        (1, 2, 2, [[0, 2], [1, 3]] * 2, [[0, 2], [1, 3]] * 2),
        (2, 1, 2, [[0, 2], [1, 3]] * 2, [[0, 2], [1, 3]] * 2),
    ],
)
def test_groups_with_tensor_parallelism(
    ring: int, ulysses: int, tensor: int, cp: list, zero: list, worlds: WorldPool
):
    found = worlds[4].run(_members, ring, ulysses, tensor)
    assert [one["tensor"] for one in found] == [
        list(range(rank // tensor * tensor, rank // tensor * tensor + tensor)) for rank in range(4)
    ]
    assert [one["cp"] for one in found] == cp
    assert [one["ulysses" if ulysses > 1 else "ring"] for one in found] == cp
    assert [one["zero"] for one in found] == zero
