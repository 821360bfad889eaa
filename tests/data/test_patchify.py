"""Patchify is the patch convolution's own cut, and unpatchify its inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wands.data.patchify import grid_size, patchify, unpatchify

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
    patch, channels, dim = (1, 2, 2), 16, 24
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
