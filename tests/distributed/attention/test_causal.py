"""Causal attention of packed units on 1 to 4 ranks equals a dense mask, clip by clip."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.causal import Grid, dense_attention, dense_mask, pack_index, units_of
from tests.support.context import groups_of, make_inputs, meta_of, whole
from wands.attention import ring, units
from wands.attention.layout import ContextLayout, ContextPlan
from wands.attention.ulysses import context_attention
from wands.attention.units import Unit, join_visible, num_pairs
from wands.attention.varlen import choose_backend
from wands.config.recipe import ObjectiveConfig

GRIDS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]  # (ring, ulysses)
# A long clip, one whose last chunk is short, an image, and frames of one token, which are fewer than the ranks of a ring.
CLIPS: list[Grid] = [(7, 2, 3), (5, 1, 4), (1, 2, 5), (6, 1, 1), (2, 3, 1)]
RULES = {
    "teacher": {"name": "teacher_forcing", "chunk_frames": 2},
    "teacher, first frame": {
        **{"name": "teacher_forcing", "chunk_frames": 3, "independent_first_frame": True},
    },
    "teacher, window": {
        **{"name": "teacher_forcing", "chunk_frames": 1, "window_frames": 2, "sink_frames": 2},
    },
    "diffusion": {"name": "diffusion_forcing", "chunk_frames": 2},
    "diffusion, window": {
        **{"name": "diffusion_forcing", "chunk_frames": 1, "window_frames": 3, "sink_frames": 1},
        "independent_first_frame": True,
    },
}
NAMES = ("out", "dq", "dk", "dv")


def attend(inputs: list[Tensor], bin: list[tuple[Unit, ...]], grid: tuple[int, int]) -> list[Tensor]:
    """Attend and differentiate on this rank; return out, dq, dk and dv of all ranks, in the order of the units."""
    groups = groups_of(*grid)
    layout = ContextLayout.build(
        [max(unit.stop for unit in own) for own in bin],
        ulysses_degree=grid[1],
        ring_degree=grid[0],
        cp_rank=groups.dims.cp_rank,
        units=bin,
    )
    kernel = choose_backend("cpu", "cpu", inputs[0].dtype)
    attention = context_attention(kernel, groups.ulysses, groups.ring, groups.ring_grad)
    index = pack_index(layout)
    *leaves, dout = [
        torch.cat([x[index], x.new_full((layout.num_tokens - len(index), *x.shape[1:]), 3.0)]) for x in inputs
    ]
    leaves = [x.requires_grad_() for x in leaves]
    dout[len(index) :] = 0
    out = attention(*leaves, meta_of(layout))
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    joined = []
    for result in results:
        whole = torch.zeros(inputs[0].shape, dtype=torch.float64)
        whole[index] = result[: len(index)].double()
        if groups.cp is not None:
            dist.all_reduce(whole, group=groups.cp)
        joined.append(whole)
    return joined


def results(
    settings: dict, grid: tuple[int, int], dtype: torch.dtype, factor: float = 1.0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return (out, dq, dk, dv), those of a dense mask in float64, and the inputs. q and k are multiplied by `factor`."""
    config = ObjectiveConfig(**settings)
    bin = units_of(CLIPS, config)
    num_tokens = sum(unit.num_tokens for own in bin for unit in own)
    inputs = make_inputs((num_tokens,), dtype)
    inputs[:2] = [x * factor for x in inputs[:2]]
    *leaves, dout = [x.double().requires_grad_() for x in inputs]
    out = dense_attention(*leaves, CLIPS, config)
    right = [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]
    return attend(inputs, bin, grid), right, inputs


def worst_errors(grid: tuple[int, int], large: int) -> dict[str, float]:
    """Largest difference from the dense mask over out, dq, dk and dv in float64, for every rule."""
    if large:
        ring.pieces_of = partial(units.pieces_of, large=large)
    errors = {}
    for name, settings in RULES.items():
        found, right, _ = results(settings, grid, torch.float64)
        errors[name] = max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True))
    return errors


def relative_errors(grid: tuple[int, int], factor: float) -> dict[str, tuple[float, float]]:
    """Relative error in fp32 against float64: ours, and that of the kernel alone, where all units see each other."""
    errors = {}
    for name, settings in RULES.items():
        found, right, inputs = results(settings, grid, torch.float32, factor)
        lens = (len(inputs[0]),)
        truths = whole([x.double() for x in inputs], lens)
        alone = whole(inputs, lens, "cpu")
        for result, *pairs in zip(NAMES, found, right, alone, truths, strict=True):
            errors[f"{result}, {name}"] = tuple(
                float((x.double() - truth).norm() / truth.norm()) for x, truth in (pairs[:2], pairs[2:])
            )
    return errors


@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, marks=() if grid == (2, 2) else pytest.mark.slow) for grid in GRIDS],
    ids=lambda g: f"ring{g[0]}-ulysses{g[1]}",
)
@pytest.mark.parametrize(
    "large", [pytest.param(1, marks=pytest.mark.full), 12, pytest.param(0, marks=pytest.mark.full)]
)
def test_units_see_what_a_dense_mask_allows(grid: tuple[int, int], large: int, run_world):
    """`large` 1: a call for each piece; 12: calls of both kinds; 0: one call for all of these small pieces."""
    for errors in run_world(grid[0] * grid[1], worst_errors, grid, large):
        assert errors.keys() == RULES.keys()
        assert max(errors.values()) <= 1e-12, errors
        print(errors)


@pytest.mark.parametrize("factor", [1.0, 16.0])
@pytest.mark.parametrize("grid", [(1, 1), (2, 1)], ids=lambda g: f"ring{g[0]}-ulysses{g[1]}")
def test_in_fp32_it_is_as_exact_as_the_kernel_alone(grid: tuple[int, int], factor: float, run_world):
    for errors in run_world(grid[0] * grid[1], relative_errors, grid, factor):
        assert len(errors) == 4 * len(RULES)
        for name, (ours, kernel) in errors.items():
            print(f"{name} {ours:.1e} {ours / kernel:.2f} x the kernel alone")
            assert 0 < ours <= 1.5 * kernel, (name, ours, kernel)


def test_the_pairs_are_those_of_the_mask():
    for settings in RULES.values():
        config = ObjectiveConfig(**settings)
        for grid, own in zip(CLIPS, units_of(CLIPS, config), strict=True):
            lens = [unit.num_tokens for unit in own]
            assert num_pairs(lens, lens, join_visible([own])) == int(dense_mask(grid, config).sum())


def test_the_pairs_of_a_ring_are_balanced():
    clips: list[Grid] = [(21, 5, 8), (7, 4, 6), (1, 6, 10), (13, 5, 8)]
    bin = units_of(clips, ObjectiveConfig(name="teacher_forcing"))
    lens = [unit.num_tokens for own in bin for unit in own]
    visible = join_visible(bin)
    assert num_pairs(lens, lens, visible) < 0.5 * sum(2 * prod(grid) for grid in clips) ** 2
    for degree in (2, 3, 4):
        plan = ContextPlan.build(lens, ring_degree=degree, visible=visible)
        assert 1.0 <= plan.cost_balance() < 1.03


def test_copies_of_keys_are_bounded():
    """Eighty chunks of one frame: without the bound, forty times the keys would be copied."""
    [own] = units_of([(80, 1, 4)], ObjectiveConfig(name="diffusion_forcing", chunk_frames=1))
    lens = tuple(unit.num_tokens for unit in own)
    pieces = units.pieces_of(lens, lens, join_visible([own]), torch.device("cpu"))
    copied = sum(len(piece.keys) for piece in pieces if isinstance(piece.keys, Tensor))
    assert 0 < copied <= 4 * sum(lens)
    seen = torch.zeros(sum(lens), sum(lens))
    for piece in pieces:
        index = torch.arange(sum(lens))
        rows = index[piece.queries]
        keys = index[piece.keys]
        for of_q, of_k in piece.segments.pairs():
            seen[rows[of_q][:, None], keys[of_k]] += 1
    assert torch.equal(
        seen, dense_mask((80, 1, 4), ObjectiveConfig(name="diffusion_forcing", chunk_frames=1)).float()
    )


def test_a_ring_turns_for_units_that_no_rank_shares():
    """Units with fewer tokens than ranks lie whole on one rank, but see units on others."""
    bin = units_of([(3, 1, 1)], ObjectiveConfig(name="diffusion_forcing", chunk_frames=1))
    plan = ContextPlan.build([1, 1, 1], ring_degree=2, visible=join_visible(bin))
    assert ring.ring_rounds(plan.chunk_lens) == 1
    assert ring.ring_rounds(plan.chunk_lens, plan.visible) == 2


def test_one_chunk_is_bidirectional_attention():
    for name in ("teacher_forcing", "diffusion_forcing"):
        config = ObjectiveConfig(name=name, chunk_frames=30)
        assert units_of(CLIPS, config) == [(Unit(0, prod(grid)),) for grid in CLIPS]
        assert join_visible(units_of(CLIPS, config)) == ()
