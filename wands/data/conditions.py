"""What a model is conditioned on besides text, beside the latents that it denoises: masks and given frames.

Letters: C latent channels, f h w latent frames, rows, columns, n tokens, P channels of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wands.data.patchify import patchify
from wands.variants import MASK_CHANNELS


def image_mask(latent_shape: tuple[int, int, int], last_image: bool) -> Tensor:
    """Which pixel frames are given, in the channels of the latent frame that they belong to.

    The causal VAE makes latent frame 0 of the first pixel frame alone, which then counts four times, and every
    other of four pixel frames.

    Args:
        latent_shape: (f, h, w).
        last_image: the last pixel frame is given as well as the first.

    Returns:
        fp32 [4, f, h, w], 1 where given.

    Source: `get_sampling`'s mask of the official Wan 2.1 image2video.py and first_last_frame2video.py.
    """
    mask = torch.zeros(MASK_CHANNELS, *latent_shape)
    if last_image:
        mask[-1, -1] = 1.0
    mask[:, 0] = 1.0
    return mask


def condition_tokens(image_latents: Tensor, last_image: bool, patch_size: tuple[int, int, int]) -> Tensor:
    """The channels that stand behind those of the noisy latents in each token: mask, then latents of the pictures.

    Args:
        image_latents: [C, f, h, w], the normalised latents of a video of the given frames and grey ones between.
        last_image: see `image_mask`.
        patch_size: latent (frames, height, width) of one token.

    Returns:
        fp32 [n, P], in the order of `patchify`.
    """
    f, h, w = image_latents.shape[1:]
    mask = image_mask((f, h, w), last_image)
    return patchify(torch.cat([mask, image_latents.to(torch.float32)]), patch_size)
