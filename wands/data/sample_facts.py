"""Facts about the samples of a data set that are known without reading the samples."""

from __future__ import annotations

import numpy as np


class SampleFacts:
    """Shapes, int [N, 3] (frames, rows, columns), and checksums, uint32 [N], of samples. Mock data has checksums of 0."""

    latent_shapes: np.ndarray
    checksums: np.ndarray

    def num_tokens(self, patch_size: tuple[int, int, int]) -> np.ndarray:
        """Return the number of video tokens of each sample, int64 [number of samples]."""
        shapes = self.latent_shapes.astype(np.int64)
        assert not (shapes % patch_size).any(), f"latents are not multiples of patch_size={tuple(patch_size)}"
        return (shapes // patch_size).prod(axis=1)

    def latent_shape(self, i: int) -> tuple[int, int, int]:
        """Return the latent (frames, height, width) of sample `i`. The latents are not read."""
        f, h, w = self.latent_shapes[i].tolist()
        return f, h, w
