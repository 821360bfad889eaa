"""Random latents with realistic shapes and the interface of the cache, to test a model or a cluster without data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wands.config.recipe import MockConfig
from wands.data.collate import Sample
from wands.data.patchify import SampleFacts, blank_other_frames
from wands.errors import DataError
from wands.flow.rng import philox
from wands.variants import DiTShape


@dataclass(eq=False)
class MockDataset(SampleFacts):
    """Data set of artificial samples, whose latents and text embeddings are standard normal numbers.

    The numbers depend only on the seed and the sample key.

    Attributes:
        mock: number of samples, and lists of latent shapes and text lengths. Sample i uses item i of each list. After
            the last item of a list, the list starts again.
        shape: shape of the DiT, which gives latent channels, patch size and text width.
        seed: `train.seed`.
        keys: sample ids.
        licenses: array of one empty text per sample, because mock data has no licence.
        mask_sums: zeros [N, 2], because mock data has no masks.
        places: int64 [N, 2], (shard, position in the shard) of each sample, as if the samples were stored in shards of 512
            samples.
        null_text_embeds: bf16 [1, text_dim], random numbers that replace the embedding of the empty caption.

    Raises:
        DataError: if a latent shape is not a multiple of the patch size.
    """

    mock: MockConfig
    shape: DiTShape
    seed: int

    def __post_init__(self) -> None:
        patch_size = self.shape.patch_size
        for latent_shape in self.mock.shapes:
            if any(n < 1 or n % patch for n, patch in zip(latent_shape, patch_size, strict=True)):
                raise DataError(
                    f"data.mock.shapes={list(latent_shape)} (frames, height, width) must be multiples of the model's patch "
                    f"size {list(patch_size)}; change this shape."
                )
        self.keys = [f"mock-{i:06d}" for i in range(self.mock.num_samples)]
        self.licenses = np.full(len(self.keys), "", object)
        self.mask_sums = np.zeros((len(self.keys), 2))
        self.latent_shapes = np.resize(self.mock.shapes, (len(self.keys), 3))
        self.checksums = np.zeros(len(self.keys), np.uint32)  # the seed and the key determine a sample
        self.null_text_embeds = self._normal("", "null", 1, self.shape.text_dim)
        self.places = np.stack(np.divmod(np.arange(len(self.keys)), 512), axis=1)

    def read(self, index: int, frames: tuple[int, int] | None = None) -> Sample:
        """Return a sample in bf16: latents [channels, frames, rows, columns], text_embeds [text tokens, text_dim], and
        image latents and image embeddings if the model needs them.

        The same index always gives the same numbers.

        Args:
            index: position in `keys`.
            frames: (first, end) of the needed latent frames. The other frames are zero, as in a sample from the cache.
                Default: all frames.
        """
        key = self.keys[index]
        shape, text_len = self.shape, self.mock.text_lens[index % len(self.mock.text_lens)]

        def latents(what: str) -> Tensor:
            whole = self._normal(key, what, shape.out_channels, *self.latent_shape(index))
            return whole if frames is None else blank_other_frames(whole, frames)

        return Sample(
            sample_id=key,
            latents=latents("latents"),
            text_embeds=self._normal(key, "text", text_len, shape.text_dim),
            image_latents=latents("image latents") if shape.condition_channels else None,
            image_embeds=self._normal(key, "image", shape.image_len, shape.image_dim)
            if shape.image_dim
            else None,
        )

    def _normal(self, key: str, what: str, *shape: int) -> Tensor:
        values = philox(self.seed, key, "mock", what).standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values).to(torch.bfloat16)
