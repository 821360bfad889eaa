"""Encode the conditioning frames of image-to-video models: VAE latents and CLIP hidden states.

Letters: C latent channels; F H W pixel frames, rows, columns; f h w latent frames, rows, columns; I tokens of CLIP; E
width of CLIP's hidden states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import CLIPVisionModel

from wands.data.clips.video import to_pixels
from wands.encoders.components import find_part, loading_part
from wands.encoders.vae import WanVideoEncoder
from wands.model.files.loading import load_index


def given_frames(pixels: Tensor, last_image: bool) -> Tensor:
    """Return a copy of a clip that keeps only the conditioning frames of an image-to-video model. All other frames are gray (0).

    The conditioning frames are the first frame and, if `last_image` is true, the last frame.

    Args:
        pixels: [3, F, H, W] in [-1, 1], for F > 1 frames of H rows and W columns. A batch dimension may come first.
        last_image: whether to keep the last frame in addition to the first frame.

    Returns:
        Tensor of the shape of `pixels`.

    Source: diffusers `WanImageToVideoPipeline.prepare_latents`.
    """
    video = torch.zeros_like(pixels)
    # A list as index would be copied to the GPU, and the host would wait.
    for i in (0, -1) if last_image else (0,):
        video[..., i, :, :] = pixels[..., i, :, :]
    return video


class ImageEncoder:
    """Frozen CLIP vision encoder with its image processor, which resizes and normalizes images."""

    def __init__(self, processor: Any, model: CLIPVisionModel) -> None:
        """Store an image processor and a CLIP encoder that are already loaded, and freeze the encoder."""
        self.processor = processor
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def load(cls, model: str | Path, device: torch.device | str = "cpu") -> ImageEncoder:
        """Load CLIP and its image processor from a pipeline folder or Hub id, in float32 as published.

        The class of the image processor is read from model_index.json, because another class would resize images to
        slightly different pixels.

        Raises:
            ConfigError: if the model does not exist or its files are damaged.
        """
        class_name = (load_index(model).get("image_processor") or [None, None])[1] or "CLIPImageProcessor"
        with loading_part(model, "image encoder"):
            folder = find_part(model, "image_processor")
            processor = getattr(transformers, class_name).from_pretrained(folder, trust_remote_code=False)
            folder = find_part(model, "image_encoder")
            encoder = CLIPVisionModel.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
        return cls(processor, encoder.to(device))

    @torch.no_grad()
    def encode(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return the input of CLIP's last layer: the hidden states of all images, concatenated along the token axis.

        Args:
            images: images, each uint8 [rows, columns, 3].

        Returns:
            float32 [I, E] on the CPU, for I tokens of all images together and width E of the hidden states.

        Source: diffusers `WanImageToVideoPipeline.encode_image`.
        """
        from PIL import Image

        pictures = [Image.fromarray(image) for image in images]
        values = self.processor(images=pictures, return_tensors="pt").to(self.model.device)
        states = self.model(**values, output_hidden_states=True).hidden_states[-2]
        return states.flatten(0, 1).float().cpu()


class WindowEncoder:
    """Encoder of windows (ranges of frames of a clip): the VAE and, for some model variants, CLIP.

    The encoder makes the tensors of the latent cache, except text embeddings. CLIP stays loaded next to the VAE. CLIP needs
    1.3 to 2.5 GB, which is little compared with the activations of the VAE. Running CLIP in a separate pass would read and
    decode every video file twice.
    """

    def __init__(
        self, vae: WanVideoEncoder, clip: ImageEncoder | None = None, conditions: Collection[str] = ("text",)
    ) -> None:
        """Store encoders that are already loaded.

        Args:
            vae: VAE encoder.
            clip: CLIP encoder. It is required if `conditions` contains "clip", and must be None otherwise.
            conditions: names of the inputs of the model variant, such as "text", "image" and "clip" (CLIP's hidden states), see
                `wands.variants.Variant`.
        """
        assert (clip is not None) == ("clip" in conditions), conditions
        self.vae, self.clip, self.conditions = vae, clip, conditions

    def encode(self, windows: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Encode windows of equal shape as one batch. A window is a range of frames of a clip.

        If the model variant takes conditioning frames, the conditioning frames of each window are encoded as well.

        Args:
            windows: frames of each window, uint8 [frames, rows, columns, 3] on the CPU. `WanVideoEncoder.encode` explains
                the valid sizes.

        Returns:
            For each window, a dict of bf16 tensors on the CPU. "latents" is [C, f, h, w]: channels, frames, rows and columns of
            the latents. If the model variant takes conditioning frames as latents (condition "image"), "image_latents"
            [C, f, h, w] are their latents. If the variant takes hidden states of the CLIP encoder (condition "clip"),
            "image_embeds" are these states [CLIP tokens, CLIP width].
        """
        device = self.vae.vae.device  # uint8 has a quarter of the bytes of pixels
        pixels = to_pixels(torch.stack([frames.to(device, non_blocking=True) for frames in windows]))
        encoded = {"latents": self.vae.encode(pixels)}
        last_image = "last_image" in self.conditions
        if "image" in self.conditions:
            assert len(windows[0]) > 1, "a still image has no frames after the first frame"
            encoded["image_latents"] = self.vae.encode(given_frames(pixels, last_image))
        if self.clip is not None:
            kept = [0, -1] if last_image else [0]
            encoded["image_embeds"] = torch.stack([self.clip.encode([*f[kept].numpy()]) for f in windows])
        rows = range(len(windows))
        return [{name: tensor[i].to(torch.bfloat16) for name, tensor in encoded.items()} for i in rows]
