"""Reference for packed training: the stock DiT of diffusers, run on one sample in the same way as in diffusers' pipelines."""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

OFFICIAL_TEXT_LEN = 512
"""`text_len` in official Wan, to which captions are padded. Not wands' `TEXT_LEN`, whose value the checks test."""


def add_conditions(
    latents: Tensor,
    timestep: Tensor,
    *,
    first_frame: Tensor | None = None,
    image_latents: Tensor | None = None,
    last_image: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add the image conditions of a sample to its noisy latents [C, f, h, w] and scalar timestep.

    Args:
        latents: noisy latents.
        timestep: timestep of the noise level.
        first_frame: clean latent frame [C, 1, h, w] that replaces the first noisy frame, for TI2V.
        image_latents: latents [C, f, h, w] of a clip with the conditioning images and otherwise gray frames, for I2V models.
        last_image: whether the model gets the last frame, too.

    Returns:
        (latents, timesteps). With `image_latents`, a mask and these are additional channels. The timesteps are [1], or [1,
        tokens] with `first_frame`.
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
    """Run a model of diffusers on one sample from `add_conditions`, and return the velocity [C, f, h, w].

    `text_embeds` are [L, text_dim] without padding; `image_embeds` are the hidden states of CLIP for all given images, [states,
    channels].
    """
    like = model.patch_embedding.weight
    text = torch.nn.functional.pad(text_embeds, (0, 0, 0, OFFICIAL_TEXT_LEN - len(text_embeds)))
    if image_embeds is not None:  # [number of images, rows, channels]
        image_embeds = torch.stack(image_embeds.chunk(2 if model.config.pos_embed_seq_len else 1)).to(like)
    arguments = latents[None].to(like), timesteps.to(like.device), text[None].to(like), image_embeds
    return model(*arguments, return_dict=False)[0][0]
