"""Convert latents to tokens and tokens to latents, and make the conditioning channels of image-to-video models.

The channels of a token are in the order of the patch convolution: (C, pt, ph, pw). C is the number of latent channels,
and (pt, ph, pw) is the patch size in latent frames, rows and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wands.variants import MASK_CHANNELS

if TYPE_CHECKING:
    from torch import Tensor


def patchify(latents: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Split latents into patches, one token per patch.

    The model embeds patches by a convolution whose kernel size equals its stride. With the tokens that this function
    returns, the convolution is one matrix product.

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
    (f, h, w) = latent_shape
    (pt, ph, pw) = patch_size
    return f // pt, h // ph, w // pw


# ---- conditioning frames: images that the user gives, the first frame of the video, or its first and last frames


def image_mask(latent_shape: tuple[int, int, int], last_image: bool) -> Tensor:
    """Return the mask that marks the conditioning frames. The mask has four channels, because a latent frame encodes
    four pixel frames.

    The causal VAE encodes the first pixel frame alone as latent frame 0, so the four channels of latent frame 0 are equal.
    Each later latent frame encodes four pixel frames, and channel i belongs to pixel frame i of these four.

    Args:
        latent_shape: (f, h, w), number of latent frames, rows and columns.
        last_image: whether the last pixel frame is a conditioning frame, in addition to the first.

    Returns:
        fp32 [4, f, h, w], 1 where the pixel frame is a conditioning frame, and 0 for all other pixel frames.

    Source: the mask in `get_sampling` of the official Wan 2.1 image2video.py and first_last_frame2video.py.
    """
    import torch

    mask = torch.zeros(MASK_CHANNELS, *latent_shape)
    if last_image:
        mask[-1, -1] = 1.0
    mask[:, 0] = 1.0
    return mask


def condition_channels(image_latents: Tensor, last_image: bool, patch_size: tuple[int, int, int]) -> Tensor:
    """Return the conditioning channels of each token: first the mask, then the image latents.

    In the model's input, these channels follow the channels of the noisy token.

    Args:
        image_latents: [C, f, h, w] (latent channels, frames, rows, columns), normalized latents of a video in which all
            frames except the conditioning frames are gray.
        last_image: whether the last pixel frame is a conditioning frame, in addition to the first.
        patch_size: latent (frames, height, width) of one token.

    Returns:
        fp32 [number of tokens, conditioning channels of a token], tokens in the order of `patchify`.
    """
    import torch

    f, h, w = image_latents.shape[1:]
    mask = image_mask((f, h, w), last_image)
    return patchify(torch.cat([mask, image_latents.to(torch.float32)]), patch_size)


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


def blank_other_frames(array: Tensor, frames: tuple[int, int], axis: int = 1) -> Tensor:
    """Set the frames outside a range to zero, in place, and return the array.

    Args:
        array: array with one index per frame along `axis`, such as latents [channels, frames, rows, columns].
        frames: (first, end). The frames from first to end - 1 do not change.
        axis: dimension of the frames.
    """
    first, end = frames
    assert 0 <= first <= end <= array.shape[axis], (frames, tuple(array.shape))
    moved = array.movedim(axis, 0)
    moved[:first] = 0
    moved[end:] = 0
    return array
