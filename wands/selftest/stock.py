"""Reference for packed training: the stock DiT of diffusers, run on one sample in the same way as in diffusers' pipelines."""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

OFFICIAL_TEXT_LEN = 512
"""Number of tokens to which captions are padded: `text_len` in official Wan. The reference must not use wands' own constant
`TEXT_LEN`, because the checks test the value of `TEXT_LEN`."""


def add_conditions(
    latents: Tensor,
    timestep: Tensor,
    *,
    first_frame: Tensor | None = None,
    image_latents: Tensor | None = None,
    last_image: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add the image conditions of a sample to its noisy latents and timestep.

    Args:
        latents: noisy latents [C, f, h, w], with C channels and f frames of size h x w.
        timestep: timestep of the noise level, a scalar.
        first_frame: latent frame [C, 1, h, w] without noise that replaces the first noisy frame, for the model TI2V.
        image_latents: latents [C, f, h, w] of a clip with the conditioning images and otherwise gray frames, for I2V models.
        last_image: whether the model gets the last frame of the clip in addition to the first frame.

    Returns:
        (latents, timesteps). With `image_latents`, the latents [channels, f, h, w] have additional channels: a mask and
        the image latents. The timesteps have shape [1], or [1, tokens] with `first_frame`.
    """
    if first_frame is not None:
        # These lines copy the loop of WanImageToVideoPipeline with expand_timesteps.
        mask = torch.ones(1, *latents.shape[1:], dtype=latents.dtype)
        mask[:, 0] = 0
        latents = (1 - mask) * first_frame + mask * latents
        timestep = (mask[0][:, ::2, ::2] * timestep).flatten()
    if image_latents is not None:
        given = torch.zeros(4, *latents.shape[1:], dtype=latents.dtype)
        given[:, 0] = 1
        if last_image:
            given[3, -1] = 1
        latents = torch.cat([latents, given, image_latents.to(latents.dtype)])
    return latents, timestep.reshape(1, -1) if first_frame is not None else timestep.reshape(1)


def stock_velocity(
    model: WanTransformer3DModel,
    latents: Tensor,
    timesteps: Tensor,
    text_embeds: Tensor,
    image_embeds: Tensor | None = None,
) -> Tensor:
    """Run a model of diffusers on one sample, and return the velocity [C, f, h, w] for C latent channels.

    Args:
        model: model of diffusers.
        latents: noisy latents [channels, f, h, w] from `add_conditions`, which adds channels for image conditions.
        timesteps: one timestep [1] for the sample, or a timestep [1, tokens] for each token.
        text_embeds: text embedding [L, text_dim] of L tokens, without padding.
        image_embeds: hidden states of CLIP for all given images, [number of states, channels].
    """
    like = model.patch_embedding.weight
    text = torch.nn.functional.pad(text_embeds, (0, 0, 0, OFFICIAL_TEXT_LEN - len(text_embeds)))
    if image_embeds is not None:  # [number of images, rows, channels]
        image_embeds = torch.stack(image_embeds.chunk(2 if model.config.pos_embed_seq_len else 1)).to(like)
    arguments = latents[None].to(like), timesteps.to(like.device), text[None].to(like), image_embeds
    return model(*arguments, return_dict=False)[0][0]
