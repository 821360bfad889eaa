"""A tiny model and latents for the tests of imported shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

# diffusers' defaults for the VAE of Wan 2.1
WAN_STD = [
    2.8184,
    1.4541,
    2.3275,
    2.6558,
    1.2196,
    1.7708,
    2.6052,
    2.0743,
    3.2687,
    2.1526,
    2.8652,
    1.5579,
    1.6382,
    1.1253,
    2.8251,
    1.916,
]


@pytest.fixture(scope="module")
def model(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline with the statistics of Wan's own VAE."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_pipeline, folder)
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latents_std": WAN_STD}))
    return folder


def latents(
    seed: int, shape: tuple[int, ...] = (16, 3, 4, 6), contrast: float = 1.0, jitter: float = 0.2
) -> Tensor:
    """Normalized latents of a clip of some contrast."""
    generator = torch.Generator().manual_seed(seed)
    spread = contrast * (jitter * torch.randn(shape[0], 1, 1, 1, generator=generator)).exp()
    shift = 0.3 * torch.randn(shape[0], 1, 1, 1, generator=generator)
    return torch.randn(*shape, generator=generator) * spread + shift


def raw(tensor: Tensor) -> Tensor:
    return tensor * torch.tensor(WAN_STD).view(-1, 1, 1, 1)
