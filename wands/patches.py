"""Latents to tokens and back, and the conditioning channels of image-to-video models.

The channels of a token are in the order of the patch convolution, (C, pt, ph, pw): C latent channels, and the patch size (pt, ph,
pw) in latent frames, rows and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wands.variants import MASK_CHANNELS

if TYPE_CHECKING:
    from torch import Tensor


def patchify(latents: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Split latents [C, f, h, w] into tokens [n, C * pt * ph * pw] in (frame, row, column) order.

    f, h and w are multiples of `patch_size`. With these tokens, the patch convolution of the model, whose kernel size equals its
    stride, is one matrix product.
    """
    channels, f, h, w = latents.shape
    pt, ph, pw = patch_size
    assert (f % pt, h % ph, w % pw) == (0, 0, 0), (tuple(latents.shape), patch_size)
    blocks = latents.reshape(channels, f // pt, pt, h // ph, ph, w // pw, pw)
    return blocks.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, channels * pt * ph * pw)


def unpatchify(
    tokens: Tensor, grid: tuple[int, int, int], channels: int, patch_size: tuple[int, int, int]
) -> Tensor:
    """Convert tokens back to latents [C, f, h, w], from `grid` tokens along (frame, row, column). Inverse of `patchify`."""
    nf, nh, nw = grid
    pt, ph, pw = patch_size
    blocks = tokens.reshape(nf, nh, nw, channels, pt, ph, pw)
    return blocks.permute(3, 0, 4, 1, 5, 2, 6).reshape(channels, nf * pt, nh * ph, nw * pw)


def latent_size(latents: Tensor) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of latents [..., f, h, w]."""
    (f, h, w) = latents.shape[-3:]
    return f, h, w


def grid_size(latent_shape: tuple[int, int, int], patch_size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the number of tokens along (frame, row, column) for latents of (frames, rows, columns)."""
    (f, h, w) = latent_shape
    (pt, ph, pw) = patch_size
    return f // pt, h // ph, w // pw


# ---- conditioning frames: images that the user gives, the first frame of the video, or its first and last frames


def image_mask(latent_shape: tuple[int, int, int], last_image: bool) -> Tensor:
    """Return the mask of the conditioning frames, fp32 [4, f, h, w]: 1 for the first pixel frame, and with `last_image` the last.

    A latent frame encodes four pixel frames, one per channel. The causal VAE encodes the first pixel frame alone as latent frame
    0, whose four channels are therefore equal.

    Source: the mask in `get_sampling` of the official Wan 2.1 image2video.py and first_last_frame2video.py.
    """
    import torch

    mask = torch.zeros(MASK_CHANNELS, *latent_shape)
    if last_image:
        mask[-1, -1] = 1.0
    mask[:, 0] = 1.0
    return mask


def condition_channels(image_latents: Tensor, last_image: bool, patch_size: tuple[int, int, int]) -> Tensor:
    """Return the conditioning channels of each token, fp32 [number of tokens, channels]: the mask, then the image latents.

    In the model's input, they follow the channels of the noisy token. `image_latents` [C, f, h, w] are the normalized latents of
    a video that is gray except in the conditioning frames.
    """
    import torch

    f, h, w = image_latents.shape[1:]
    mask = image_mask((f, h, w), last_image)
    return patchify(torch.cat([mask, image_latents.to(torch.float32)]), patch_size)


def frames_of_tokens(
    tokens: tuple[int, int], grid: tuple[int, int, int], patch_size: tuple[int, int, int]
) -> tuple[int, int]:
    """Return the smallest range (first, end) of latent frames with the tokens (start, stop) of a sample; (0, 0) for no tokens.

    `grid` is the number of tokens along (frame, row, column).
    """
    start, stop = tokens
    per_frame = grid[1] * grid[2]
    assert 0 <= start <= stop <= grid[0] * per_frame, (tokens, grid)
    if start == stop:
        return 0, 0
    return start // per_frame * patch_size[0], -(-stop // per_frame) * patch_size[0]


def blank_other_frames(array: Tensor, frames: tuple[int, int], axis: int = 1) -> Tensor:
    """Set the frames outside the range (first, end) along `axis` to zero, in place, and return the array."""
    first, end = frames
    assert 0 <= first <= end <= array.shape[axis], (frames, tuple(array.shape))
    moved = array.movedim(axis, 0)
    moved[:first] = 0
    moved[end:] = 0
    return array
