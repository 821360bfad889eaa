"""Patchify is the patch convolution's own cut, and unpatchify its inverse."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wands.patches import blank_other_frames, frames_of_tokens, grid_size, patchify, unpatchify

sizes = st.integers(1, 3)


@given(grid=st.tuples(sizes, sizes, sizes), patch=st.tuples(sizes, sizes, sizes), channels=st.integers(1, 4))
def test_round_trip(grid: tuple[int, int, int], patch: tuple[int, int, int], channels: int):
    shape = tuple(n * p for n, p in zip(grid, patch, strict=True))
    latents = torch.randn(channels, *shape)
    tokens = patchify(latents, patch)
    assert tokens.shape == (grid[0] * grid[1] * grid[2], channels * patch[0] * patch[1] * patch[2])
    assert grid_size(shape, patch) == grid
    assert torch.equal(unpatchify(tokens, grid, channels, patch), latents)


def test_a_convolution_with_kernel_equal_to_stride_is_a_matmul_on_tokens():
    patch = (1, 2, 2)
    channels = 16
    dim = 24
    conv = torch.nn.Conv3d(channels, dim, kernel_size=patch, stride=patch).double()
    latents = torch.randn(channels, 3, 6, 8, dtype=torch.float64)
    expected = conv(latents[None])[0].flatten(1).T  # (frame, row, column) order
    found = patchify(latents, patch) @ conv.weight.flatten(1).T + conv.bias
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_the_order_written_out():
    latents = torch.arange(2 * 1 * 2 * 4).reshape(2, 1, 2, 4)
    assert patchify(latents, (1, 2, 2)).tolist() == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]


def test_the_dtype_stays():
    assert patchify(torch.zeros(16, 1, 2, 2, dtype=torch.bfloat16), (1, 2, 2)).dtype == torch.bfloat16


def test_a_shape_that_does_not_divide_is_a_programmer_mistake():
    with pytest.raises(AssertionError):
        patchify(torch.zeros(16, 1, 3, 2), (1, 2, 2))


@pytest.mark.parametrize("patch", [(1, 1, 1), (1, 2, 2), (2, 1, 3)])
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 2, 3), (4, 1, 1), (5, 2, 1), (3, 2, 3)])
def test_frames_of_tokens_are_enough_and_the_fewest(grid: tuple[int, int, int], patch: tuple[int, int, int]):
    """Every range of tokens: with its frames alone its tokens are whole, with a frame less they are not."""
    latents = torch.rand(2, *(n * p for n, p in zip(grid, patch, strict=True))) + 1
    wanted = patchify(latents, patch)

    def survive(start: int, stop: int, first: int, end: int) -> bool:
        found = patchify(blank_other_frames(latents.clone(), (first, end)), patch)
        return torch.equal(found[start:stop], wanted[start:stop])

    for start, stop in combinations_with_replacement(range(len(wanted) + 1), 2):
        first, end = frames_of_tokens((start, stop), grid, patch)
        assert survive(start, stop, first, end)
        if start == stop:
            assert (first, end) == (0, 0)
        else:
            assert not survive(start, stop, first + 1, end)
            assert not survive(start, stop, first, end - 1)


def test_blank_other_frames_keeps_the_frames_named():
    for first, end in product(range(4), range(4)):
        if first > end:
            with pytest.raises(AssertionError):
                blank_other_frames(torch.ones(2, 3, 1, 1), (first, end))
        else:
            kept = blank_other_frames(torch.ones(2, 3, 1, 1), (first, end))[1, :, 0, 0].tolist()
            assert kept == [float(first <= frame < end) for frame in range(3)]


@pytest.mark.parametrize("tokens", [(-1, 2), (3, 2), (0, 13)])
def test_tokens_outside_the_sample_are_a_programmer_mistake(tokens: tuple[int, int]):
    with pytest.raises(AssertionError):
        frames_of_tokens(tokens, (3, 2, 2), (1, 2, 2))
