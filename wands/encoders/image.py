"""Encode the conditioning frames of image-to-video models: VAE latents and CLIP hidden states.

Letters: C latent channels; F H W pixel frames, rows, columns; f h w latent frames, rows, columns; I tokens of CLIP; E
width of CLIP.
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
from wands.encoders.components import find_part, loading_part
from wands.encoders.vae import WanVideoEncoder
from wands.model.files.loading import load_index


def given_frames(pixels: Tensor, last_image: bool) -> Tensor:
    """Return a clip with its first frame, optionally its last frame, and mid-grey (value 0) in all other frames.

    Args:
        pixels: [3, F, H, W] in [-1, 1], F > 1.
        last_image: keep the last frame too.

    Returns:
        Tensor of the shape of `pixels`.

    Source: diffusers `WanImageToVideoPipeline.prepare_latents`.
    """
    video = torch.zeros_like(pixels)
    video[:, 0] = pixels[:, 0]
    if last_image:
        video[:, -1] = pixels[:, -1]
    return video


class ImageEncoder:
    """Frozen CLIP vision encoder with its image processor."""

    def __init__(self, processor: Any, model: CLIPVisionModel) -> None:
        """Store a loaded processor and encoder."""
        self.processor = processor
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def load(cls, model: str | Path, device: torch.device | str = "cpu") -> ImageEncoder:
        """Load from a pipeline folder or Hub id, in float32 as published.

        The class of the processor is the class in model_index.json, because other classes resize to slightly different pixels.

        Raises:
            ConfigError: if the model does not exist or its files are damaged.
        """
        class_name = (load_index(model).get("image_processor") or [None, None])[1] or "CLIPImageProcessor"
        with loading_part(model, "image encoder"):
            processor = getattr(transformers, class_name).from_pretrained(find_part(model, "image_processor"))
            folder = find_part(model, "image_encoder")
            encoder = CLIPVisionModel.from_pretrained(folder, dtype=torch.float32)
        return cls(processor, encoder.to(device))

    @torch.no_grad()
    def encode(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return the hidden states before the last layer for all images, one image after the other.

        Args:
            images: images, each uint8 [H, W, 3].

        Returns:
            float32 [I, E] on the CPU.

        Source: diffusers `WanImageToVideoPipeline.encode_image`.
        """
        from PIL import Image

        values = self.processor(images=[Image.fromarray(image) for image in images], return_tensors="pt").to(
            self.model.device
        )
        states = self.model(**values, output_hidden_states=True).hidden_states[-2]
        return states.flatten(0, 1).float().cpu()


class WindowEncoder:
    """Encodes the pixels of a window to everything that the cache stores for it, except the text.

    CLIP stays loaded next to the VAE. CLIP's 1.3 to 2.5 GB are small compared with the activations of the VAE, and a separate
    pass would decode every clip twice.
    """

    def __init__(
        self, vae: WanVideoEncoder, clip: ImageEncoder | None = None, conditions: Collection[str] = ("text",)
    ) -> None:
        """Store loaded encoders.

        Args:
            vae: the VAE.
            clip: CLIP, for variants with the condition "clip".
            conditions: conditions of the variant.
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
            model: pipeline folder or Hub id.
            device: device of the encoders.
            conditions: conditions of the variant.
            dtype: dtype of the VAE's weights and arithmetic.
            tiling: see `WanVideoEncoder`.

        Raises:
            ConfigError: if the model does not exist or its files are damaged.
        """
        vae = WanVideoEncoder.load(model, device, dtype=dtype, tiling=tiling)
        return cls(vae, ImageEncoder.load(model, device) if "clip" in conditions else None, conditions)

    def encode(self, pixels: Tensor) -> dict[str, Tensor]:
        """Encode a window and its conditioning frames.

        Args:
            pixels: float32 [3, F, H, W] in [-1, 1], see `WanVideoEncoder.encode`.

        Returns:
            bf16 on the CPU: "latents" [C, f, h, w] and, depending on the conditions, "image_latents" [C, f, h, w] and
            "image_embeds" [I, E].
        """
        encoded = {"latents": self.vae.encode(pixels)}
        last_image = "last_image" in self.conditions
        if "image" in self.conditions:
            assert pixels.shape[1] > 1, "a still image has no frames after the first frame"
            encoded["image_latents"] = self.vae.encode(given_frames(pixels, last_image))
        if self.clip is not None:
            frames = to_frames(pixels[:, [0, -1] if last_image else [0]])
            encoded["image_embeds"] = self.clip.encode(list(frames))
        return {name: tensor.to(torch.bfloat16) for name, tensor in encoded.items()}
