"""Encode pixels to the latents that Wan's DiT is trained on, and decode them.

Letters: C latent channels; F H W pixel frames, rows, columns; f h w latent frames, rows, columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from wands.encoders.components import find_part, loading_part

TILE, TILE_STRIDE = 256, 192
"""Side of a tile, and distance between the starts of neighbouring tiles, in pixels: diffusers' defaults. Fingerprints of caches
contain both numbers."""


class WanVideoEncoder:
    """Frozen VAE, which encodes a whole clip at once because a causal VAE would start anew at every cut."""

    def __init__(self, vae: AutoencoderKLWan, *, tiling: bool = False) -> None:
        """Store a loaded VAE.

        Args:
            vae: VAE in float32, or in bfloat16 for less memory and time.
            tiling: encode large frames in overlapping tiles and blend their latents. This needs less memory, but latents near
                the seams do not depend on the whole frame.
        """
        self.vae = vae.eval().requires_grad_(False)
        if tiling:
            vae.enable_tiling(TILE, TILE, TILE_STRIDE, TILE_STRIDE)
        self.stride = (vae.config.scale_factor_temporal, *[vae.config.scale_factor_spatial] * 2)
        per_channel = {"dtype": torch.float32, "device": vae.device}
        self._mean = torch.tensor(vae.config.latents_mean, **per_channel).view(-1, 1, 1, 1)
        self._std = torch.tensor(vae.config.latents_std, **per_channel).view(-1, 1, 1, 1)

    @classmethod
    def load(
        cls,
        model: str | Path,
        device: torch.device | str = "cpu",
        *,
        dtype: Literal["fp32", "bf16"] = "fp32",
        tiling: bool = False,
    ) -> WanVideoEncoder:
        """Load from a pipeline folder or Hub id.

        Args:
            model: pipeline folder or Hub id.
            device: device of the VAE.
            dtype: dtype of weights and arithmetic.
            tiling: see `__init__`.

        Raises:
            ConfigError: if the model does not exist or its files are damaged.
        """
        torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        with loading_part(model, "VAE"):
            vae = AutoencoderKLWan.from_pretrained(find_part(model, "vae"), torch_dtype=torch_dtype)
        return cls(vae.to(device), tiling=tiling)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return the posterior mean, normalised by the VAE's statistics: (mean - latents_mean) / latents_std.

        Args:
            pixels: float32 [3, F, H, W] in [-1, 1]; F = 1 + 4k, H and W multiples of the spatial stride.
                The VAE silently crops other sizes.

        Returns:
            float32 [C, f, h, w] on the CPU.
        """
        assert pixels.dtype == torch.float32, f"pixels are {pixels.dtype}; the range is checked in float32"
        assert pixels.ndim == 4, f"pixels have shape {tuple(pixels.shape)}, not [3, F, H, W]"
        (time, rows, columns), (_, frames, height, width) = self.stride, pixels.shape
        assert frames % time == 1, f"{frames} frames are not 1 + {time}k: the VAE would drop the last frames"
        assert height % rows == 0, f"height {height} is not a multiple of {rows}: the VAE would crop it"
        assert width % columns == 0, f"width {width} is not a multiple of {columns}: the VAE would crop it"
        low, high = pixels.aminmax()
        assert -1 <= low <= high <= 1, f"pixels are in [{low}, {high}], not in [-1, 1]"
        posterior = self.vae.encode(pixels[None].to(self.vae.device, self.vae.dtype)).latent_dist
        return self.normalise(posterior.mode()[0].float()).cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to pixels; approximate inverse of `encode`.

        Args:
            latents: [C, f, h, w], normalised, any float type.

        Returns:
            float32 [3, F, H, W] in [-1, 1] on the CPU.
        """
        restored = self.denormalise(latents.to(self.vae.device, torch.float32)).to(self.vae.dtype)
        return self.vae.decode(restored[None]).sample[0].float().clamp(-1, 1).cpu()

    def normalise(self, latents: Tensor) -> Tensor:
        """Normalise latents [C, f, h, w] of the VAE for the DiT."""
        return (latents - self._mean) / self._std

    def denormalise(self, latents: Tensor) -> Tensor:
        """Undo `normalise`."""
        return latents * self._std + self._mean
