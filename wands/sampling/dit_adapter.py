"""Call a DiT for packed tokens as diffusers' pipelines call their transformer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wands.distributed.dims import ProcessGroups
from wands.patches import grid_size, latent_size, patchify, unpatchify
from wands.sampling.sharing import join_tokens, token_index


class DiTAdapter(nn.Module):
    """Adapter with the interface of diffusers' transformer, so that a pipeline can call a DiT for packed tokens.

    Args:
        model: the DiT, whose config is read.
        call: function that runs it: the DiT itself, or its engine.
        groups: process groups of this rank. The ranks of the context-parallel group divide the tokens of each call.
        device: device of this rank.
    """

    def __init__(
        self, model: Any, call: Callable[..., Tensor], groups: ProcessGroups, device: torch.device
    ) -> None:
        super().__init__()
        self.config: Any = model.config
        self.device = device
        self.dtype = torch.float32
        self.cache_context: Callable[..., Any] = lambda *_, **__: contextlib.nullcontext()
        self.first_frame = 0
        """Position of the first frame of the next calls."""
        self._call = call
        self._groups = groups

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **more: Any
    ) -> tuple[Tensor]:
        """Return (velocity,) of a video: fp32 [1, noisy channels, f, h, w], equal on all ranks of the context-parallel group.

        All ranks of the group must call this method with equal tensors.

        Args:
            hidden_states: [1, channels, f, h, w], noisy latents, and the conditioning channels after them.
            timestep: [1], or [1, number of tokens] with a timestep for each token.
            encoder_hidden_states: [1, 512, text width], text with padding.
            more: "encoder_hidden_states_image" is [images, CLIP tokens, CLIP width], or None without CLIP. Others are not used.
        """
        config = self.config
        image = more.get("encoder_hidden_states_image")
        grid = grid_size(latent_size(hidden_states), config.patch_size)
        meta, index, order = token_index(grid, self._groups.dims, self.device)
        if self.first_frame:
            offset = torch.tensor([self.first_frame, 0, 0]).to(meta.positions)
            meta = replace(meta, positions=meta.positions + offset)
        timesteps = timestep.float().flatten()
        if len(timesteps) > 1:
            own = index[: max(sum(meta.local_seq_lens), 1)]  # a rank may have only padding
            timesteps, lens = timesteps[own].unique_consecutive(return_counts=True)
            if len(lens) > 1:
                meta = replace(meta, timestep_lens=tuple(lens.tolist()), timestep_samples=(0,) * len(lens))
        tokens = patchify(hidden_states[0], config.patch_size)[index]
        image = image if image is None else image.flatten(0, 1)[None]
        velocity = self._call(tokens, meta, timesteps, encoder_hidden_states[0], image)
        velocity = join_tokens(velocity[None], order, self._groups.cp)[0]
        return (unpatchify(velocity, grid, config.out_channels, config.patch_size)[None],)
