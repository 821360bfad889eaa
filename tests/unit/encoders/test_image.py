"""Conditions of image-to-video models, compared with diffusers itself, on the classes of its pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from PIL import Image

from wands.conditions.published import conditions_of, given_frames
from wands.data.clips.video import to_pixels
from wands.encoders.image import ImageEncoder, PipelineEncoders, WindowEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError
from wands.variants import VARIANTS


def clip(num_frames: int, height: int, width: int) -> np.ndarray:
    coarse = np.random.default_rng(4).integers(
        0, 256, (num_frames, height // 16, width // 16, 3), dtype=np.uint8
    )
    return coarse.repeat(16, axis=1).repeat(16, axis=2)


@pytest.mark.parametrize("size", [(32, 48), (64, 32), (224, 224)])
@pytest.mark.parametrize("variant", ["wan2.1-i2v-14b", "wan2.1-flf2v-14b"])
def test_clip_states_are_the_stock_pipelines(
    variant: str, size: tuple[int, int], tiny_variant: Callable[[str], Path]
) -> None:
    model = tiny_variant(variant)
    frames = clip(VARIANTS[variant].num_images, *size)
    pipeline = WanImageToVideoPipeline.from_pretrained(model, text_encoder=None, tokenizer=None, vae=None)
    with torch.no_grad():
        stock = pipeline.encode_image([Image.fromarray(frame) for frame in frames], torch.device("cpu"))
    ours = ImageEncoder.load(model).encode(list(frames))
    assert ours.shape == (257 * len(frames), 32)
    assert torch.equal(ours, stock.flatten(0, 1))
    assert ours.std() > 0.1


def test_frames_that_are_not_given_are_mid_gray() -> None:
    pixels = torch.rand(3, 9, 16, 16) * 2 - 1
    for last_image in (False, True):
        video = given_frames(pixels, last_image)
        given = [0, 8] if last_image else [0]
        assert torch.equal(video[:, given], pixels[:, given])
        assert video[:, [i for i in range(9) if i not in given]].eq(0).all()


def test_a_still_is_not_encoded(tiny_variant: Callable[[str], Path]) -> None:
    variant = VARIANTS["wan2.2-i2v-a14b"]
    encoder = WindowEncoder(PipelineEncoders(tiny_variant(variant.name)), conditions_of(variant))
    (encoded,) = encoder.encode([(torch.zeros(5, 16, 16, 3, dtype=torch.uint8), {})])
    assert set(encoded) == {"latents", "image_latents"}
    with pytest.raises(AssertionError, match="a still"):
        encoder.encode([(torch.zeros(1, 16, 16, 3, dtype=torch.uint8), {})])


KINDS = {
    "wan2.1": {},
    "wan2.2": {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_latent_frame_is_that_of_the_first_frame_alone(kind: str) -> None:
    """Why nothing more is stored for TI2V: the VAE is causal, both kinds of it."""
    small = {
        "base_dim": 8,
        "z_dim": 6,
        "num_res_blocks": 1,
        "latents_mean": [0.1] * 6,
        "latents_std": [0.2] * 6,
    }
    encoder = WanVideoEncoder(AutoencoderKLWan(**small, **KINDS[kind]))
    assert encoder.stride == (4, 16, 16) if kind == "wan2.2" else (4, 8, 8)
    pixels = to_pixels(clip(9, 64, 96))
    whole = encoder.encode(pixels)
    alone = encoder.encode(pixels[:, :1])
    assert torch.equal(whole[:, :1], alone)
    assert not torch.equal(whole[:, :1], encoder.encode(pixels[:, 1:2]))


def test_a_model_without_its_image_encoder_is_one_sentence(tiny_variant: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="has no image_processor folder"):
        ImageEncoder.load(tiny_variant("wan2.1-t2v-1.3b"))


def test_windows_encoded_together_are_those_encoded_alone(tiny_variant: Callable[[str], Path]) -> None:
    model = tiny_variant("wan2.1-flf2v-14b")
    encoder = WindowEncoder(PipelineEncoders(model), conditions_of(VARIANTS["wan2.1-flf2v-14b"]))
    windows = [torch.from_numpy(clip(5, 32, 48)).roll(turn, dims=2) for turn in (0, 16, 32)]
    together = encoder.encode([(window, {}) for window in windows])
    for window, batched in zip(windows, together, strict=True):
        (alone,) = encoder.encode([(window, {})])
        assert {name: tensor.shape for name, tensor in alone.items()} == {
            name: tensor.shape for name, tensor in batched.items()
        }
        for name, tensor in alone.items():
            torch.testing.assert_close(batched[name], tensor, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(together[0]["latents"], together[1]["latents"], atol=0.1)
