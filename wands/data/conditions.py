"""Conditioning channels of image-to-video models: a mask and the latents of the conditioning frames.

The mask marks the conditioning frames. Conditioning frames are images that the user gives: the first frame of the
video, or its first and last frames.

Letters: C latent channels, (f, h, w) latent frames, rows and columns, n tokens, P channels of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wands.data.patchify import patchify
from wands.variants import MASK_CHANNELS


def image_mask(latent_shape: tuple[int, int, int], last_image: bool) -> Tensor:
    """Return the mask that marks the conditioning frames. The mask has four channels, because a latent frame encodes
    four pixel frames.

    The causal VAE encodes the first pixel frame alone as latent frame 0. So all four channels of latent frame 0 mark
    this pixel frame. Each later latent frame encodes four pixel frames, and channel i marks pixel frame i of these four.

    Args:
        latent_shape: (f, h, w), number of latent frames, rows and columns.
        last_image: whether the last pixel frame is a conditioning frame, in addition to the first.

    Returns:
        fp32 [4, f, h, w], 1 for conditioning frames, 0 for all other frames.

    Source: the mask in `get_sampling` of the official Wan 2.1 image2video.py and first_last_frame2video.py.
    """
    mask = torch.zeros(MASK_CHANNELS, *latent_shape)
    if last_image:
        mask[-1, -1] = 1.0
    mask[:, 0] = 1.0
    return mask


def condition_channels(image_latents: Tensor, last_image: bool, patch_size: tuple[int, int, int]) -> Tensor:
    """Return the conditioning channels of each token: first the mask, then the image latents.

    In the model's input, these channels follow the channels of the noisy token.

    Args:
        image_latents: [C, f, h, w] (latent channels, frames, rows, columns), normalised latents of a video in which all
            frames except the conditioning frames are grey.
        last_image: whether the last pixel frame is a conditioning frame, in addition to the first.
        patch_size: latent (frames, height, width) of one token.

    Returns:
        fp32 [number of tokens, channels of a token], tokens in the order of `patchify`.
    """
    f, h, w = image_latents.shape[1:]
    mask = image_mask((f, h, w), last_image)
    return patchify(torch.cat([mask, image_latents.to(torch.float32)]), patch_size)
