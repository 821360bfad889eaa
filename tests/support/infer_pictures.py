"""Given pictures for the tests of `wands infer`."""

from __future__ import annotations

import numpy as np
from PIL import Image

SMALL = {"height": 32, "width": 64, "num_frames": 9, "num_inference_steps": 3}


def noise_picture(seed: int, height: int = 32, width: int = 64) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height))
