"""8-bit AdamW on fragments of parameters: bitsandbytes on whole parameters is the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor

from wands.checkpoint.engine_state import Fragment
from wands.config.optimizer_kinds import BLOCK_8BIT, MIN_8BIT
from wands.engine.adamw8bit import FragmentAdamW8bit, _table, cut_states, dequantize, quantize

SHAPES = {"matrix": [70, 100], "gain": [300], "table": [4200], "bias": [5]}
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 6


def sizes() -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in SHAPES.items()}


def cut(bounds: Sequence[int]) -> list[FragmentAdamW8bit]:
    """One optimizer for each rank; the flat tensor of a rank is a range of all parameters in a row."""
    row = torch.cat([value.flatten() for value in start_values().values()])
    ranks = []
    for first, last in zip([0, *bounds], [*bounds, len(row)], strict=True):
        flat = row[first:last].clone()
        fragments = []
        begin = 0
        for name, size in sizes().items():
            lower = max(begin, first)
            upper = min(begin + size, last)
            if lower < upper:
                fragments.append(
                    Fragment(
                        name=name,
                        start=lower - begin,
                        numel=upper - lower,
                        shape=SHAPES[name],
                        tensor=flat,
                        offset=lower - first,
                    )
                )
            begin += size
        optimizer = FragmentAdamW8bit([flat.requires_grad_()], **SETTINGS)
        optimizer.fragments = {flat: fragments}
        ranks.append(optimizer)
    return ranks


def flat_of(optimizer: torch.optim.Optimizer) -> Tensor:
    return optimizer.param_groups[0]["params"][0]


def start_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients() -> list[Tensor]:
    """Gradients of all parameters in a row. Those of the gain are far smaller than its neighbors'."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.cat(
        [torch.full((size,), 1e-4 if name == "gain" else 1.0) for name, size in sizes().items()]
    )
    return [torch.randn(len(scales), generator=generator) * scales for _ in range(STEPS)]


def step(ranks: Sequence[FragmentAdamW8bit], gradient: Tensor) -> None:
    for optimizer, part in zip(ranks, gradient.split([flat_of(one).numel() for one in ranks]), strict=True):
        flat_of(optimizer).grad = part.clone()
        optimizer.step()


def whole() -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Weights and states of bitsandbytes' own optimizer."""
    parameters = {name: torch.nn.Parameter(value) for name, value in start_values().items()}
    optimizer = bitsandbytes.optim.AdamW8bit(parameters.values(), **SETTINGS)
    for gradient in gradients():
        for parameter, part in zip(parameters.values(), gradient.split(list(sizes().values())), strict=True):
            parameter.grad = part.reshape(parameter.shape).clone()
        optimizer.step()
    return {name: (value.detach().flatten(), optimizer.state[value]) for name, value in parameters.items()}


def joined(ranks: Sequence[FragmentAdamW8bit]) -> dict[str, Tensor]:
    row = torch.cat([flat_of(optimizer).detach() for optimizer in ranks])
    return dict(zip(SHAPES, row.split(list(sizes().values())), strict=True))


# 100 and 300 values of the matrix before and after a boundary inside a block, a block in three parts, a gain in two parts.
@pytest.mark.parametrize("bounds", [(), (256,), (100,), (3940, 3950, 7100, 9000)])
def test_every_whole_block_is_that_of_bitsandbytes(bounds: tuple[int, ...]):
    ranks = cut(bounds)
    wanted = whole()
    for number, gradient in enumerate(gradients()):
        if number == 2:  # as offloading does
            for optimizer in ranks:
                flat_of(optimizer).data = flat_of(optimizer).data.clone()
        step(ranks, gradient)
    found = joined(ranks)
    begin = 0
    for name, size in sizes().items():
        value, _ = wanted[name]
        different = {int(i) // 256 for i in (found[name] != value).nonzero()}
        is_quantized = size >= 4096
        inside = [bound - begin for bound in bounds if begin < bound < begin + size]
        assert different <= ({bound // 256 for bound in inside if bound % 256} if is_quantized else set())
        start = start_values()[name].flatten()
        assert float((found[name] - value).norm()) <= 5e-3 * float((value - start).norm())
        begin += size


def test_the_states_are_those_of_bitsandbytes():
    (optimizer,) = cut(())
    for gradient in gradients():
        step([optimizer], gradient)
    state = optimizer.state[flat_of(optimizer)]
    assert state.pop("step") == STEPS
    for name, (_, wanted) in whole().items():
        found = state.pop(name)
        assert found.keys() == wanted.keys() - {"step", "qmap1", "qmap2"}
        assert all(torch.equal(found[key], wanted[key].flatten()) for key in found)
    assert not state
    assert list(optimizer.state) == [flat_of(optimizer)]


def test_saved_and_loaded_states_continue_bitwise():
    ranks = cut((3940,))
    for gradient in gradients()[:3]:
        step(ranks, gradient)
    again = cut((3940,))
    for one, other in zip(ranks, again, strict=True):
        other.load_state_dict(one.state_dict())
        flat_of(other).data.copy_(flat_of(one).data)
    for gradient in gradients()[3:]:
        step(ranks, gradient)
        step(again, gradient)
    assert all(torch.equal(value, joined(again)[name]) for name, value in joined(ranks).items())


@pytest.mark.parametrize("start", [0, 300])
def test_quantized_moments_are_read_back(start: int):
    """And a range of them is the same range of the moments."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3000, generator=generator)
    moments = {"state1": values[0], "state2": values[1].square() * 1e-6}
    states = quantize(moments, [10_000], start)
    again = dequantize(states, start)
    for key, value in moments.items():
        assert float((again[key] - value).abs().max()) <= float(value.abs().max()) / 64
    for first, last in ((0, 3000), (100, 101), (700, 1700)):
        part = cut_states(states, start, start + first, start + last)
        assert all(torch.equal(dequantize(part, start + first)[key], again[key][first:last]) for key in again)
    assert quantize(moments, [3000], start) is moments
    assert dequantize(moments, start) is moments


def test_fp32_moments_are_quantized_when_they_are_loaded():
    """A reader may have dequantized the moments of other ranks' ranges."""
    (optimizer,) = cut(())
    for gradient in gradients():
        step([optimizer], gradient)
    states = optimizer.state_dict()
    wanted = {name: dequantize(states["state"][0][name], 0) for name in SHAPES}
    states["state"][0] |= wanted
    optimizer.load_state_dict(states)
    found = optimizer.state[flat_of(optimizer)]
    for name, size in sizes().items():
        assert ("absmax1" in found[name]) == (size >= 4096)
        for key, value in dequantize(found[name], 0).items():
            assert float((value - wanted[name][key]).abs().max()) <= float(value.abs().max()) / 64


# ---- other ranks


def moments_of(ranks: Sequence[FragmentAdamW8bit]) -> dict[str, dict[str, Tensor]]:
    """The moments of each parameter as fp32 values, over all ranks."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    for rank in ranks:
        flat = flat_of(rank)
        for fragment in rank.fragments[flat]:
            for key, value in dequantize(rank.state[flat][fragment.name], fragment.start).items():
                found.setdefault(fragment.name, {}).setdefault(key, []).append(value)
    return {name: {key: torch.cat(parts) for key, parts in keys.items()} for name, keys in found.items()}


@pytest.mark.parametrize("bounds", [[], [3500], [1000, 7001, 9300], [7300]])
def test_moments_move_to_other_ranks_within_one_code(bounds: list[int]):
    """Only blocks that a boundary between ranks cuts are quantized again, each value to a neighboring code at most."""
    ranks = cut([3000, 7100])
    others = cut(bounds)
    for gradient in gradients():
        step(ranks, gradient)
    stored: dict[str, list[tuple[int, Mapping[str, Tensor]]]] = {}
    for rank in ranks:
        for fragment in rank.fragments[flat_of(rank)]:
            stored.setdefault(fragment.name, []).append(
                (fragment.start, rank.state[flat_of(rank)][fragment.name])
            )
    for rank in others:
        values: dict[str, Any] = {"step": STEPS}
        for fragment in rank.fragments[flat_of(rank)]:
            end = fragment.start + fragment.numel
            overlapping = [
                (start, states)
                for start, states in stored[fragment.name]
                if start < end and fragment.start < start + len(states["state1"])
            ]
            values[fragment.name] = rank.join_states(fragment, overlapping)
        rank.load_state_dict({"state": {0: values}, "param_groups": rank.state_dict()["param_groups"]})
    before = moments_of(ranks)
    after = moments_of(others)
    for name, keys in before.items():
        for moment, key in (("1", "state1"), ("2", "state2")):
            if sizes()[name] < MIN_8BIT:
                assert torch.equal(after[name][key], keys[key])
                continue
            widest = float(_table(moment, torch.device("cpu")).diff().max())
            for block_before, block_after in zip(
                keys[key].split(BLOCK_8BIT), after[name][key].split(BLOCK_8BIT), strict=True
            ):
                gap = widest * float(block_before.abs().max())
                assert float((block_before - block_after).abs().max()) <= gap
