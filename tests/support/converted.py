"""Pipelines that are converted, and their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from make_tiny_pipeline import build_tiny_pipeline
from torch import Tensor

from tests.support.packs import randomize
from wands.model.files.name_maps import EXPERTS
from wands.model.files.tensor_files import TensorFiles, as_bytes

WEIGHTS = "diffusion_pytorch_model.safetensors"
VARIANTS = ["wan2.1-t2v-1.3b", "wan2.1-flf2v-14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b"]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines whose DiTs predict something, and whose VAE has Wan's own statistics."""
    made = {}
    for variant in VARIANTS:
        folder = tmp_path_factory.mktemp("pipelines") / variant
        build_tiny_pipeline(folder, size="test", variant=variant)
        for seed, expert in enumerate(EXPERTS):
            if (folder / expert).is_dir():
                model = WanTransformer3DModel.from_pretrained(folder / expert)
                randomize(model, seed)
                model.save_pretrained(folder / expert)
        config = folder / "vae" / "config.json"
        said = json.loads(config.read_text())
        if said["z_dim"] == 16:
            del said["latents_mean"], said["latents_std"]
            config.write_text(json.dumps(said))
        made[variant] = folder
    return made


def tensors(*files: Path) -> dict[str, Tensor]:
    opened = TensorFiles(files, "test")
    return {name: opened.read(name).clone() for name in opened.shapes}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(as_bytes(found[name]), as_bytes(value)), name
