"""Caches of models with given frames, and the inputs of the stock pipeline."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from tests.support.commands import preprocess
from tests.support.preprocessed import SMALL
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip
from wands.preprocess.preprocess_report import PreprocessReport
from wands.variants import Variant, variant_of

CLIP = "wan2.1-i2v-14b"
BOUNDS = (64 * 96, 48 * 64)
CAPTIONS = ["A man in a dark suit sits in a moving car.", "A man talks."]
OPTIONS = SMALL | {"max_pixels": BOUNDS}


def read_variant(model: Path) -> Variant:
    dit = model / "transformer" / "config.json"
    index = model / "model_index.json"
    return variant_of(json.loads(dit.read_text()), json.loads(index.read_text()))


def run(source: Path, out: Path, model: Path, **changes: Any) -> PreprocessReport:
    report = preprocess(str(source), out, model, **(OPTIONS | changes))
    assert report is not None
    return report


@pytest.fixture(scope="module")
def source(clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip with two captions, and a picture."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copy(clips_dir / "carphone_pristine.mp4", folder / "man.mp4")
    Image.fromarray(next(decode_clip(folder / "man.mp4", ClipSpec(fps=16, max_frames=1))).frames[0]).save(
        folder / "still.png"
    )
    captions = {"man.mp4": CAPTIONS, "still.png": "A man in a car."}
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


# ---- the golden one


@dataclass(frozen=True)
class StockInput:
    """Inputs of the stock pipeline's DiT in the first step: [C, f, h, w], timestep, CLIP's states [I, E]."""

    hidden_states: Tensor
    timestep: Tensor
    image_embeds: Tensor | None


class _Caught(Exception):
    """The model was called."""


def stock_input(model: Path, frames: np.ndarray, noise: Tensor) -> StockInput:
    """Call the pipeline as a user does, with the first and last frame as pictures, and stop it at its DiT."""
    variant = read_variant(model)
    (height, width) = frames.shape[1:3]
    pipeline = DiffusionPipeline.from_pretrained(model)
    if (
        "first_frame" in variant.conditions
    ):  # diffusers publishes the model as a T2V pipeline; this is its I2V one
        parts = pipeline.components | {"image_encoder": None, "image_processor": None}
        pipeline = WanImageToVideoPipeline(**parts, expand_timesteps=True)
    pipeline.set_progress_bar_config(disable=True)
    caught: dict[str, Any] = {}

    def catch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.update(kwargs)
        raise _Caught

    pipeline.transformer.register_forward_pre_hook(catch, with_kwargs=True)
    last = {"last_image": Image.fromarray(frames[-1])} if "last_image" in variant.conditions else {}
    with pytest.raises(_Caught):
        pipeline(
            image=Image.fromarray(frames[0]),
            **last,
            prompt="",
            latents=noise[None],
            height=height,
            width=width,
            num_frames=len(frames),
            num_inference_steps=2,
            guidance_scale=1.0,
        )
    embeds = caught["encoder_hidden_states_image"]
    return StockInput(
        caught["hidden_states"][0], caught["timestep"], None if embeds is None else embeds.flatten(0, 1)
    )
