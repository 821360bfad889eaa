"""Training gives a model the same conditions with the noisy latents as the stock pipeline at sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from tests.support.samples import sample_of
from wands import patches as conditions
from wands.attention.layout import ContextLayout
from wands.conditions.published import published_conditions
from wands.config.recipe import FlowConfig
from wands.data.clips.video import to_pixels
from wands.data.collate import PackingCollator
from wands.encoders.vae import WanVideoEncoder
from wands.patches import patchify
from wands.variants import VARIANTS, DiTShape

PATCH = (1, 2, 2)
NUM_FRAMES = 13
HEIGHT = 32
WIDTH = 48
true_mask = conditions.image_mask
VARIANTS_OF_MASKS = ["wan2.1-i2v-14b", "wan2.1-flf2v-14b"]


@cache
def load(folder: Path) -> DiffusionPipeline:
    """The stock pipeline of the folder, without what makes nothing of pictures."""
    return WanImageToVideoPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None)


def clip(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    values = np.random.default_rng(4).integers(
        0, 256, (NUM_FRAMES, height // 8, width // 8, 3), dtype=np.uint8
    )
    return values.repeat(8, axis=1).repeat(8, axis=2)


def stock_input(folder: Path, frames: np.ndarray, last_image: bool) -> tuple[Tensor, Tensor]:
    """Noise and the model's input [1, C, f, h, w], as `WanImageToVideoPipeline.__call__` makes them before its loop."""
    pipeline = load(folder)
    (height, width) = frames.shape[1:3]
    given = [Image.fromarray(frames[0]), *([Image.fromarray(frames[-1])] if last_image else [])]
    first, *last = (pipeline.video_processor.preprocess(one, height, width) for one in given)
    with torch.no_grad():
        latents, condition = pipeline.prepare_latents(
            first,
            1,
            pipeline.vae.config.z_dim,
            height,
            width,
            len(frames),
            torch.float32,
            torch.device("cpu"),
            torch.Generator().manual_seed(0),
            None,
            *last,
        )
    return latents[0], torch.cat([latents, condition], dim=1)[0]


def image_latents(folder: Path, frames: np.ndarray, last_image: bool) -> Tensor:
    """As they lie in a cache: of a video whose missing frames are gray."""
    pixels = to_pixels(frames)
    pixels[:, 1 : -1 if last_image else None] = 0.0
    return WanVideoEncoder(load(folder).vae).encode(pixels)


def zeros_for_latents(folder: Path, frames: np.ndarray, last_image: bool) -> Tensor:
    """The mistake: nothing instead of what the VAE makes of gray."""
    encoder = WanVideoEncoder(load(folder).vae)
    pixels = to_pixels(frames)
    latents = image_latents(folder, frames, last_image) * 0
    latents[:, :1] = encoder.encode(pixels[:, :1])
    if last_image:
        latents[:, -1:] = encoder.encode(pixels[:, -1:])
    return latents


def check_model_input(
    folder: Path, variant: str, make: Callable[[Path, np.ndarray, bool], Tensor] = image_latents
) -> None:
    """The collator's shard, with the stock pipeline's noise in the place of the noisy tokens."""
    row = VARIANTS[variant]
    frames = clip()
    last_image = "last_image" in row.conditions
    noise, wanted = stock_input(folder, frames, last_image)
    config = load(folder).transformer.config
    shape = DiTShape.from_config(config)
    embeds = torch.zeros(shape.image_len, shape.image_dim)
    text = torch.zeros(1, shape.text_dim)
    given = make(folder, frames, last_image)
    sample = sample_of("clip", torch.zeros_like(noise), text, image_latents=given, image_embeds=embeds)
    batch = PackingCollator(
        shape=shape,
        flow=FlowConfig(),
        seed=0,
        null_text_embeds=text,
        conditions=published_conditions(shape, row.conditions),
    )([sample], [0], 0)
    shard = batch.rank_slice(ContextLayout.build(batch.seq_lens))
    found = shard.model_inputs(patchify(noise, PATCH), torch.zeros(1))["tokens"]
    wanted = patchify(wanted, PATCH)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def mask_of_the_whole_last_frame(latent_shape: tuple[int, int, int], last_image: bool) -> Tensor:
    mask = torch.zeros(4, *latent_shape)
    mask[:, 0] = 1
    mask[:, -1] = float(last_image)
    return mask


def mask_of_frames_before_channels(latent_shape: tuple[int, int, int], last_image: bool) -> Tensor:
    """Without the transposition behind the view as (frames, 4)."""
    mask = torch.zeros(latent_shape[0], 4, *latent_shape[1:])
    mask[0] = 1
    mask[-1, -1] = float(last_image)
    return mask.view(4, *latent_shape)


def mask_of_the_first_pixel_frame(latent_shape: tuple[int, int, int], last_image: bool) -> Tensor:
    mask = torch.zeros(4, *latent_shape)
    mask[0, 0] = 1
    mask[-1, -1] = float(last_image)
    return mask


def latents_before_mask(latents: Tensor, last_image: bool, patch_size: tuple[int, int, int]) -> Tensor:
    mask = conditions.image_mask(tuple(latents.shape[1:]), last_image)
    return patchify(torch.cat([latents, mask]), patch_size)


@pytest.mark.parametrize("variant", VARIANTS_OF_MASKS)
def test_the_models_input_is_the_stock_pipelines(
    tiny_variant: Callable[[str], Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_variant(variant)
    last_image = variant == "wan2.1-flf2v-14b"
    check_model_input(folder, variant)
    with pytest.raises(AssertionError):
        check_model_input(folder, variant, zeros_for_latents)
    wrong_masks = [mask_of_frames_before_channels, mask_of_the_first_pixel_frame]
    wrong_masks += [mask_of_the_whole_last_frame] if last_image else []
    for wrong in (*wrong_masks, lambda shape, last: true_mask(shape, not last)):
        with monkeypatch.context() as patch:
            patch.setattr(conditions, "image_mask", wrong)
            with pytest.raises(AssertionError):
                check_model_input(folder, variant)
    with monkeypatch.context() as patch:
        patch.setattr("wands.conditions.published.condition_channels", latents_before_mask)
        with pytest.raises(AssertionError):
            check_model_input(folder, variant)
    check_model_input(folder, variant)  # nothing else has changed


def check_clean_frame(folder: Path, num_cond_tokens: Callable[[PackingCollator, Tensor], int]) -> None:
    """TI2V: the first latent frame of a clip is that of its first frame alone, and its tokens are those at timestep 0."""
    frames = clip(64, 96)
    pipeline = load(folder)
    first = pipeline.video_processor.preprocess(Image.fromarray(frames[0]), 64, 96)
    with torch.no_grad():
        _, condition, mask = pipeline.prepare_latents(
            first, 1, 48, 64, 96, NUM_FRAMES, torch.float32, torch.device("cpu"), torch.Generator()
        )
    latents = WanVideoEncoder(pipeline.vae).encode(to_pixels(frames))
    assert (latents[:, :1] - condition[0]).abs().max() <= 1e-5 * condition.abs().max()
    assert (latents[:, 1:2] - condition[0]).abs().max() > 0.1
    shape = DiTShape.from_config(pipeline.transformer.config)
    text = torch.zeros(1, shape.text_dim)
    collator = PackingCollator(
        shape=shape,
        flow=FlowConfig(i2v_ratio=1.0),
        seed=0,
        null_text_embeds=text,
        conditions=published_conditions(shape, ("text", "first_frame")),
    )
    timesteps = (mask[0][0][:, ::2, ::2] * 700.0).flatten()  # as the pipeline makes them
    expected = torch.full((len(timesteps),), 700.0)
    expected[: num_cond_tokens(collator, latents)] = 0
    assert torch.equal(timesteps, expected)


def test_the_clean_tokens_are_the_stock_pipelines(tiny_variant: Callable[[str], Path]) -> None:
    def of_collator(collator: PackingCollator, latents: Tensor) -> int:
        text = torch.zeros(1, 32)
        return collator([sample_of("clip", latents, text)], [0], 0).num_cond_tokens[0]

    folder = tiny_variant("wan2.2-ti2v-5b")
    check_clean_frame(folder, of_collator)
    for wrong in (0, 1):  # frame 0 not clean at all; one token instead of one frame
        with pytest.raises(AssertionError):
            check_clean_frame(folder, lambda collator, latents, wrong=wrong: wrong)
