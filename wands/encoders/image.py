"""Given frames to what an image-to-video model is conditioned on: their latents and CLIP's states of them.

Letters: C latent channels, F H W pixel frames, rows, columns, f h w the same of latents, I rows of CLIP's states, E
their width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import CLIPVisionModel

from wands.data.clips.video import to_frames
from wands.encoders.components import find_part, quiet_loading
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError
from wands.model.files.loading import load_index


def given_frames(pixels: Tensor, last_image: bool) -> Tensor:
    """The video that is encoded for the given frames of a clip: mid-grey, 0 in [-1, 1], wherever none is given.

    Args:
        pixels: [3, F, H, W] in [-1, 1], F > 1.
        last_image: the last frame is given as well as the first.

    Returns:
        As `pixels`.

    Source: diffusers `WanImageToVideoPipeline.prepare_latents`.
    """
    video = torch.zeros_like(pixels)
    video[:, 0] = pixels[:, 0]
    if last_image:
        video[:, -1] = pixels[:, -1]
    return video


class ImageEncoder:
    """CLIP's vision tower and its image processor, frozen."""

    def __init__(self, processor: Any, model: CLIPVisionModel) -> None:
        """Take a loaded processor and encoder."""
        self.processor = processor
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def load(cls, model: str | Path, device: torch.device | str = "cpu") -> ImageEncoder:
        """Load from a pipeline folder or Hub id, in float32 as published.

        The processor is of the class that the pipeline names: others resize to slightly different pixels.

        Raises:
            ConfigError: there is no such model, or its files are damaged.
        """
        named = (load_index(model).get("image_processor") or [None, None])[1] or "CLIPImageProcessor"
        try:
            kind = getattr(transformers, named)
            processor = kind.from_pretrained(find_part(model, "image_processor"))
            folder = find_part(model, "image_encoder")
            with quiet_loading():
                encoder = CLIPVisionModel.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"model={model}: its image encoder cannot be loaded ({reason}).") from None
        return cls(processor, encoder.to(device))

    @torch.no_grad()
    def encode(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """States before the last layer, those of several pictures one after the other.

        Args:
            pictures: uint8 [H, W, 3] each.

        Returns:
            float32 [I, E] on the CPU.

        Source: diffusers `WanImageToVideoPipeline.encode_image`.
        """
        from PIL import Image

        images = [Image.fromarray(picture) for picture in pictures]
        values = self.processor(images=images, return_tensors="pt").to(self.model.device)
        states = self.model(**values, output_hidden_states=True).hidden_states[-2]
        return states.flatten(0, 1).float().cpu()


class WindowEncoder:
    """All that is stored of a window of a clip beside its text, made while its pixels are there.

    CLIP stays loaded beside the VAE: its 1.3 to 2.5 GB are little next to the VAE's activations, and a pass of its own
    would decode every clip once more.
    """

    def __init__(
        self, vae: WanVideoEncoder, clip: ImageEncoder | None = None, conditions: Collection[str] = ("text",)
    ) -> None:
        """Take loaded encoders.

        Args:
            vae: the VAE.
            clip: for variants with the condition "clip".
            conditions: of the variant.
        """
        assert (clip is not None) == ("clip" in conditions), conditions
        self.vae, self.clip, self.conditions = vae, clip, conditions

    @classmethod
    def load(
        cls,
        model: str | Path,
        device: torch.device | str = "cpu",
        conditions: Collection[str] = ("text",),
        *,
        dtype: Literal["fp32", "bf16"] = "fp32",
        tiling: bool = False,
    ) -> WindowEncoder:
        """Load from a pipeline folder or Hub id.

        Args:
            model: the folder or id.
            device: where the encoders run.
            conditions: of the variant.
            dtype: of the VAE's weights and arithmetic.
            tiling: see `WanVideoEncoder`.

        Raises:
            ConfigError: there is no such model, or its files are damaged.
        """
        vae = WanVideoEncoder.load(model, device, dtype=dtype, tiling=tiling)
        return cls(vae, ImageEncoder.load(model, device) if "clip" in conditions else None, conditions)

    def encode(self, pixels: Tensor) -> dict[str, Tensor]:
        """Encode a window and the frames that are given of it.

        Args:
            pixels: float32 [3, F, H, W] in [-1, 1], see `WanVideoEncoder.encode`.

        Returns:
            bf16 on the CPU: "latents" [C, f, h, w] and, as the conditions ask for, "image_latents" of that shape and
            "image_embeds" [I, E].
        """
        found = {"latents": self.vae.encode(pixels)}
        last_image = "last_image" in self.conditions
        if "image" in self.conditions:
            assert pixels.shape[1] > 1, "a still has no frame that is not given"
            found["image_latents"] = self.vae.encode(given_frames(pixels, last_image))
        if self.clip is not None:
            frames = to_frames(pixels[:, [0, -1] if last_image else [0]])
            found["image_embeds"] = self.clip.encode(list(frames))
        return {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}
