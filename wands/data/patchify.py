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


def frames_of_tokens(
    tokens: tuple[int, int], grid: tuple[int, int, int], patch_size: tuple[int, int, int]
) -> tuple[int, int]:
    """The latent frames that a range of a sample's tokens is cut from.

    Args:
        tokens: (start, stop) in the order of `patchify`.
        grid: tokens along (frame, row, column).
        patch_size: latent (frames, height, width) of one token.

    Returns:
        (first, end) in latent frames, the fewest that hold all the tokens; (0, 0) for no tokens.
    """
    start, stop = tokens
    per_frame = grid[1] * grid[2]
    assert 0 <= start <= stop <= grid[0] * per_frame, (tokens, grid)
    if start == stop:
        return 0, 0
    return start // per_frame * patch_size[0], -(-stop // per_frame) * patch_size[0]


def blank_other_frames(latents: Tensor, frames: tuple[int, int]) -> Tensor:
    """Zero, in place, all of `latents` [C, f, h, w] but the frames [first, end) of `frames`."""
    first, end = frames
    assert 0 <= first <= end <= latents.shape[1], (frames, tuple(latents.shape))
    latents[:, :first] = 0
    latents[:, end:] = 0
    return latents
