"""Encode windows of clips for the cache: the latents, and the arrays of the conditions, such as CLIP hidden states.

Letters: I tokens of CLIP; E width of CLIP's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import CLIPVisionModel

from wands.conditions.arrays import ClipSize
from wands.conditions.condition import Arrays, ClipFrames, Condition, Encoders
from wands.data.clips.video import to_pixels
from wands.encoders.components import check_part, find_part, load_part
from wands.encoders.vae import WanVideoEncoder
from wands.model.files.loading import load_index


class ImageEncoder:
    """Frozen CLIP vision encoder with its image processor, which resizes and normalizes images."""

    def __init__(self, processor: Any, model: CLIPVisionModel) -> None:
        """Store an image processor and a CLIP encoder that are already loaded, and freeze the encoder."""
        self.processor = processor
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def load(cls, model: str | Path, device: torch.device | str = "cpu") -> ImageEncoder:
        """Load CLIP and its image processor from a pipeline folder or Hub id, in float32 as published.

        The class of the image processor is read from model_index.json, because others resize to slightly different pixels.

        Raises:
            ConfigError: if the model does not exist or its files are damaged.
            CheckpointError: if a weight contains NaN or infinite values.
        """
        class_name = (load_index(model).get("image_processor") or [None, None])[1] or "CLIPImageProcessor"

        def load() -> tuple[Any, CLIPVisionModel]:
            folder = find_part(model, "image_processor")
            processor = getattr(transformers, class_name).from_pretrained(folder, trust_remote_code=False)
            folder = find_part(model, "image_encoder")
            encoder = CLIPVisionModel.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
            check_part(encoder, folder)
            return processor, encoder

        processor, encoder = load_part(model, "image encoder", load)
        return cls(processor, encoder.to(device))

    @torch.no_grad()
    def encode(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return the input of CLIP's last layer for images, each uint8 [rows, columns, 3]: float32 [I, E] on the CPU.

        The tokens of all images are concatenated. Source: diffusers `WanImageToVideoPipeline.encode_image`.
        """
        from PIL import Image

        pictures = [Image.fromarray(image) for image in images]
        values = self.processor(images=pictures, return_tensors="pt").to(self.model.device)
        states = self.model(**values, output_hidden_states=True).hidden_states[-2]
        return states.flatten(0, 1).float().cpu()


class PipelineEncoders:
    """Frozen encoders of a pipeline folder or Hub id for conditions. Each is loaded at its first use."""

    def __init__(
        self,
        model: str | Path,
        device: torch.device | str = "cpu",
        *,
        vae_dtype: Literal["fp32", "bf16"] = "fp32",
        vae_tiling: bool = False,
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self._vae_dtype = vae_dtype
        self._vae_tiling = vae_tiling

    @cached_property
    def vae(self) -> WanVideoEncoder:
        return WanVideoEncoder.load(self.model, self.device, dtype=self._vae_dtype, tiling=self._vae_tiling)

    @cached_property
    def image(self) -> ImageEncoder:
        return ImageEncoder.load(self.model, self.device)


class WindowEncoder:
    """Encoder of windows (ranges of frames of a clip) to the arrays of the latent cache, except text embeddings.

    CLIP stays loaded next to the VAE: its 1.3 to 2.5 GB are little compared with the VAE's activations, and a separate pass would
    decode every video twice.
    """

    def __init__(
        self,
        encoders: Encoders,
        conditions: Sequence[Condition] = (),
        patch_size: tuple[int, int, int] = (1, 2, 2),
    ) -> None:
        self.encoders = encoders
        self.conditions = conditions
        self.patch_size = patch_size
        # Before the first clip, so that an encoder that cannot be loaded is not taken for a clip that crashes the process.
        for name in dict.fromkeys(
            ("vae", *(name for condition in conditions for name in condition.encoders))
        ):
            getattr(encoders, name)

    def encode(self, windows: Sequence[tuple[Tensor, Arrays]]) -> list[dict[str, Tensor]]:
        """Encode windows of equal shape as one batch.

        Args:
            windows: (frames, files) of each: uint8 [frames, rows, columns, 3] on the CPU, in a size that `WanVideoEncoder.encode`
                takes, and files as in `ClipFrames`.

        Returns:
            For each window, the latents and the arrays of the conditions, on the CPU in the dtypes of the cache.
        """
        device = self.encoders.device  # uint8 has a quarter of the bytes of pixels
        pixels = to_pixels(torch.stack([frames.to(device, non_blocking=True) for frames, _ in windows]))
        latents = self.encoders.vae.encode(pixels)
        frames, rows, columns = latents.shape[-3:]
        size = ClipSize((frames, rows, columns), self.patch_size)
        clips = [
            ClipFrames(frames=frames, pixels=pixels[i], files=files, size=size)
            for i, (frames, files) in enumerate(windows)
        ]
        encoded = [{"latents": one.to(torch.bfloat16)} for one in latents]
        for condition in self.conditions:
            dtypes = {spec.name: spec.torch_dtype for spec in condition.arrays}
            for arrays, own in zip(encoded, condition.encode_batch(clips, self.encoders), strict=True):
                arrays.update({name: array.cpu().to(dtypes[name]) for name, array in own.items()})
        return encoded
