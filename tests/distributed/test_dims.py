"""Parallel dimensions, the degrees that `cp_size` leads to, and the ranks of each process group."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from wands.config.recipe import ParallelConfig
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ParallelDims, ProcessGroups, check_world, choose_degrees
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


def test_a_world_that_groups_do_not_divide():
    check_world(ParallelConfig(cp_size=4), 8)
    with pytest.raises(
        ConfigError,
        match=r"parallel.ring_degree=3: 3 ranks share each packed sequence, but world_size=8 is not a multiple",
    ):
        check_world(ParallelConfig(ring_degree=3), 8)


def test_every_rank_has_its_own_place_and_ulysses_is_innermost():
    grids = [ParallelDims(12, rank, ulysses_degree=2, ring_degree=3) for rank in range(12)]
    assert {(g.dp_size, g.cp_size) for g in grids} == {(2, 6)}
    places = [(g.dp_rank, *divmod(g.cp_rank, g.ulysses_degree)) for g in grids]
    assert places == [(d, r, u) for d in range(2) for r in range(3) for u in range(2)]
    assert [g.cp_rank for g in grids[:6]] == list(range(6))


def _members(ring: int, ulysses: int) -> dict[str, list[int] | None]:
    init_process_group()
    grid = ParallelDims(
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
        ulysses_degree=ulysses,
        ring_degree=ring,
    )
    groups = ProcessGroups.build(grid)
    return {
        name: dist.get_process_group_ranks(group) if (group := getattr(groups, name)) else None
        for name in ("ulysses", "ring", "ring_grad", "cp")
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
    assert found == [{**one, "ring_grad": one["ring"]} for one in expected]
