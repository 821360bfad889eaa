"""Encode pixels to the latents that Wan's DiT is trained on, and decode latents to pixels.

Letters: C latent channels; F H W pixel frames, rows, columns; f h w latent frames, rows, columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from wands.encoders.components import check_part, find_part, load_part

TILE = 256
TILE_STRIDE = 192
"""Tile and distance between tiles, in pixels: diffusers' defaults. The fingerprint of a cache contains them."""


class WanVideoEncoder:
    """Frozen VAE for whole clips. It is causal in time, so pieces of a clip would lack the frames before them."""

    def __init__(self, vae: AutoencoderKLWan, *, tiling: bool = False) -> None:
        """Take a loaded VAE, in float32 or, for less memory and time, in bfloat16, and freeze it.

        `tiling` encodes large frames in overlapping tiles and blends their latents. It needs less memory, but latents near the
        edges of tiles do not depend on the whole frame.
        """
        self.vae = vae.eval().requires_grad_(False)
        if tiling:
            vae.enable_tiling(TILE, TILE, TILE_STRIDE, TILE_STRIDE)
        layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
        for weight in vae.parameters() if vae.device.type == "cuda" else ():
            # Activations then have this layout, too. cuDNN would otherwise convert them around each convolution.
            if weight.ndim in layouts:
                weight.data = weight.data.contiguous(memory_format=layouts[weight.ndim])
        self.stride = (vae.config.scale_factor_temporal, *[vae.config.scale_factor_spatial] * 2)
        mean_and_std = torch.tensor([vae.config.latents_mean, vae.config.latents_std], dtype=torch.float32)
        self._mean, self._std = mean_and_std.to(vae.device).view(2, -1, 1, 1, 1)

    @classmethod
    def load(
        cls,
        model: str | Path,
        device: torch.device | str = "cpu",
        *,
        dtype: Literal["fp32", "bf16"] = "fp32",
        tiling: bool = False,
    ) -> WanVideoEncoder:
        """Load the VAE from a pipeline folder or Hub id, with weights and computation in `dtype`. `tiling` is that of `__init__`.

        Raises:
            ConfigError: if the model does not exist or its files are damaged.
            CheckpointError: if a weight contains NaN or infinite values.
        """
        torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

        def load() -> AutoencoderKLWan:
            folder = find_part(model, "vae")
            vae = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch_dtype, use_safetensors=True)
            check_part(vae, folder)
            return vae

        return cls(load_part(model, "VAE", load).to(device), tiling=tiling)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels to normalized latents, float32 [C, f, h, w] on the CPU: (posterior mean - latents_mean) / latents_std.

        `pixels` are float32 [3, F, H, W] in [-1, 1], or a batch of N clips in a leading dimension. F must be 1 + a multiple of
        the temporal stride (4), H and W multiples of the spatial stride. This is asserted, because the VAE would silently crop
        any other size.
        """
        assert pixels.dtype == torch.float32, f"pixels have dtype {pixels.dtype}, not torch.float32"
        assert pixels.ndim in (4, 5), f"pixels have shape {tuple(pixels.shape)}, not [3, F, H, W] or a batch"
        (time, rows, columns) = self.stride
        (frames, height, width) = pixels.shape[-3:]
        assert frames % time == 1, f"{frames} frames are not 1 + {time}k: the VAE would drop the last frames"
        assert height % rows == 0, f"height {height} is not a multiple of {rows}: the VAE would crop it"
        assert width % columns == 0, f"width {width} is not a multiple of {columns}: the VAE would crop it"
        low, high = pixels.aminmax()
        assert -1 <= low <= high <= 1, f"pixels are in [{low}, {high}], not in [-1, 1]"
        batch = pixels if pixels.ndim == 5 else pixels[None]
        posterior = self.vae.encode(batch.to(self.vae.device, self.vae.dtype)).latent_dist
        latents = self.normalize(posterior.mode().float()).cpu()
        return latents if pixels.ndim == 5 else latents[0]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalized latents [C, f, h, w] of any float dtype to pixels, float32 [3, F, H, W] in [-1, 1] on the CPU."""
        restored = self.denormalize(latents.to(self.vae.device, torch.float32)).to(self.vae.dtype)
        return self.vae.decode(restored[None]).sample[0].float().clamp(-1, 1).cpu()

    def normalize(self, latents: Tensor) -> Tensor:
        """Normalize the VAE's latents [channels, frames, rows, columns] for the DiT: (latents - latents_mean) / latents_std."""
        return (latents - self._mean) / self._std

    def denormalize(self, latents: Tensor) -> Tensor:
        """Undo `normalize`: return latents * latents_std + latents_mean."""
        return latents * self._std + self._mean
