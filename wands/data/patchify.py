"""Latents to tokens and back. A token's channels lie in the patch convolution's order: (C, pt, ph, pw)."""

from __future__ import annotations

from torch import Tensor


def patchify(latents: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Cut latents into patches: a convolution with kernel = stride becomes one matmul on the result.

    Args:
        latents: [C, f, h, w]; each axis a multiple of the patch.
        patch_size: latent (frames, height, width) of one token.

    Returns:
        [n, C * pt * ph * pw], tokens in (frame, row, column) order.
    """
    channels, f, h, w = latents.shape
    pt, ph, pw = patch_size
    assert (f % pt, h % ph, w % pw) == (0, 0, 0), (tuple(latents.shape), patch_size)
    blocks = latents.reshape(channels, f // pt, pt, h // ph, ph, w // pw, pw)
    return blocks.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, channels * pt * ph * pw)


def unpatchify(
    tokens: Tensor, grid: tuple[int, int, int], channels: int, patch_size: tuple[int, int, int]
) -> Tensor:
    """The inverse of `patchify`.

    Args:
        tokens: [n, channels * pt * ph * pw].
        grid: tokens along (frame, row, column); their product is n.
        channels: latent channels C.
        patch_size: latent (frames, height, width) of one token.

    Returns:
        [C, f, h, w].
    """
    nf, nh, nw = grid
    pt, ph, pw = patch_size
    blocks = tokens.reshape(nf, nh, nw, channels, pt, ph, pw)
    return blocks.permute(3, 0, 4, 1, 5, 2, 6).reshape(channels, nf * pt, nh * ph, nw * pw)


def grid_size(latent_shape: tuple[int, int, int], patch_size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tokens along (frame, row, column) of latents (f, h, w)."""
    (f, h, w), (pt, ph, pw) = latent_shape, patch_size
    return f // pt, h // ph, w // pw
