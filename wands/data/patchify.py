"""Convert latents to tokens and tokens to latents.

The channels of a token are in the order of the patch convolution: (C, pt, ph, pw). C is the number of latent channels,
and (pt, ph, pw) is the patch size in latent frames, rows and columns.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor


def patchify(latents: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Split latents into patches, one token per patch.

    In the model's patch convolution, the kernel size equals the stride. The model can therefore compute this
    convolution as one matrix product with the tokens.

    Args:
        latents: [C, f, h, w] (channels, frames, rows, columns). f, h and w are multiples of the patch size.
        patch_size: (pt, ph, pw), latent frames, rows and columns of one token.

    Returns:
        [n, C * pt * ph * pw], n tokens in (frame, row, column) order.
    """
    channels, f, h, w = latents.shape
    pt, ph, pw = patch_size
    assert (f % pt, h % ph, w % pw) == (0, 0, 0), (tuple(latents.shape), patch_size)
    blocks = latents.reshape(channels, f // pt, pt, h // ph, ph, w // pw, pw)
    return blocks.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, channels * pt * ph * pw)


def unpatchify(
    tokens: Tensor, grid: tuple[int, int, int], channels: int, patch_size: tuple[int, int, int]
) -> Tensor:
    """Convert tokens back to latents. Inverse of `patchify`.

    Args:
        tokens: [n, channels * pt * ph * pw], n tokens in the order of `patchify`.
        grid: number of tokens along (frame, row, column). Their product is n.
        channels: number of latent channels C.
        patch_size: (pt, ph, pw), latent frames, rows and columns of one token.

    Returns:
        Latents [C, f, h, w] (channels, frames, rows, columns).
    """
    nf, nh, nw = grid
    pt, ph, pw = patch_size
    blocks = tokens.reshape(nf, nh, nw, channels, pt, ph, pw)
    return blocks.permute(3, 0, 4, 1, 5, 2, 6).reshape(channels, nf * pt, nh * ph, nw * pw)


def grid_size(latent_shape: tuple[int, int, int], patch_size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the number of tokens along (frame, row, column) for latents with the given (frames, rows, columns)."""
    (f, h, w), (pt, ph, pw) = latent_shape, patch_size
    return f // pt, h // ph, w // pw


class SampleFacts:
    """Shapes and checksums of the samples of a cache, of mock data, or of a combination of sources.

    Attributes:
        latent_shapes: int [N, 3], latent (frames, rows, columns) of each sample.
        checksums: uint32 [N], CRC-32 of all arrays of each sample. Zeros for mock data.
    """

    latent_shapes: np.ndarray
    checksums: np.ndarray

    def num_tokens(self, patch_size: tuple[int, int, int]) -> np.ndarray:
        """Return the number of video tokens of every sample, int64 [N]."""
        shapes = self.latent_shapes.astype(np.int64)
        assert not (shapes % patch_size).any(), f"latents are not multiples of patch_size={tuple(patch_size)}"
        return (shapes // patch_size).prod(axis=1)

    def latent_shape(self, i: int) -> tuple[int, int, int]:
        """Return the latent (frames, height, width) of sample `i`. The latents are not read."""
        f, h, w = self.latent_shapes[i].tolist()
        return f, h, w

    def crc32(self, i: int) -> int:
        """Return the checksum of sample `i`."""
        return int(self.checksums[i])


def frames_of_tokens(
    tokens: tuple[int, int], grid: tuple[int, int, int], patch_size: tuple[int, int, int]
) -> tuple[int, int]:
    """Return the range of latent frames that contains the given tokens of a sample.

    Args:
        tokens: (start, stop), range of token indices in the order of `patchify`.
        grid: number of tokens along (frame, row, column).
        patch_size: latent (frames, height, width) of one token.

    Returns:
        (first, end), the smallest range of latent frames that contains all these tokens. (0, 0) for an empty range.
    """
    start, stop = tokens
    per_frame = grid[1] * grid[2]
    assert 0 <= start <= stop <= grid[0] * per_frame, (tokens, grid)
    if start == stop:
        return 0, 0
    return start // per_frame * patch_size[0], -(-stop // per_frame) * patch_size[0]


def blank_other_frames(latents: Tensor, frames: tuple[int, int]) -> Tensor:
    """Set the latent frames outside a range to zero, in place, and return the latents.

    Args:
        latents: [C, f, h, w] (channels, frames, rows, columns).
        frames: (first, end). The frames from first to end - 1 do not change.
    """
    first, end = frames
    assert 0 <= first <= end <= latents.shape[1], (frames, tuple(latents.shape))
    latents[:, :first] = 0
    latents[:, end:] = 0
    return latents
