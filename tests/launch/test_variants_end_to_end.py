"""Every variant learns a real clip: 200 steps make the loss fall, and sampling with the clip's caption move towards the clip."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import preprocess
from tests.support.runs import losses, run_training
from tests.support.sampling import infer
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.data.cache.reader import LatentCache
from wands.sampling.requests import SampleRequest
from wands.variants import VARIANTS

CAPTION = "bicycles pass on a street in the sun"
STEPS = 200
SETTINGS = (
    "data.mock=null",
    f"train.max_steps={STEPS}",
    "train.bins_per_step=1",
    "packing.max_tokens=4096",
    "optim.lr=5e-3",
    "flow.cfg_dropout=0",
    "optim.weight_decay=0",
)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


# In all that the others have: FLF2V-14B the pictures of I2V-14B, I2V-A14B the experts of T2V-A14B.
HELD_BY_OTHERS = ("wan2.1-i2v-14b", "wan2.2-t2v-a14b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in HELD_BY_OTHERS else ())
        for name in VARIANTS
        if name != "wan2.1-t2v-14b"  # the 1.3B of another size
    ],
)
def test_a_variant_learns_a_clip(
    name: str, clips_dir: Path, tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    model = tiny_variant(name)
    variant = VARIANTS[name]
    clips = tmp_path / "clips"
    clips.mkdir()
    shutil.copy(clips_dir / "bikes.mp4", clips)
    (clips / "bikes.txt").write_text(CAPTION)
    # As many tokens for a VAE of stride 16 as for one of 8.
    pixels = 64 * 96 * (variant.vae_stride[1] // 8) ** 2
    preprocess(str(clips), tmp_path / "cache", model, max_pixels=pixels, max_frames=9)
    cache = LatentCache(tmp_path / "cache")
    clip = cache.read(0).latents.float()
    meta = cache.meta(0)

    def sample(where: str, checkpoint: Path | None = None) -> torch.Tensor:
        given = {}
        if variant.num_images or "first_frame" in variant.conditions:
            given["image"] = str(clips / "bikes.mp4")
        if variant.num_images == 2:
            given["last_image"] = str(clips / "bikes.mp4")
        request = SampleRequest(
            prompt=CAPTION,
            height=meta["height"],
            width=meta["width"],
            num_frames=meta["num_frames"],
            num_inference_steps=12,
            guidance_scale=1.0,
            seed=3,
            **given,
        )
        [result] = infer(
            model, [request], out_dir=tmp_path / where, checkpoint=checkpoint, dtype="fp32", save_latents=True
        )
        return load_file(result.latents)["latents"]

    settings = (*SETTINGS, f"data.cache={tmp_path / 'cache'}")
    series = losses(worlds[1].run(run_training, model, tmp_path / "run", settings, zero(2), timeout=600)[0])
    first = sum(series[:20]) / 20
    last = sum(series[-20:]) / 20
    assert last < 0.7 * first, (first, last)
    assert len(find_checkpoint(tmp_path / "run")[1].parts) == len(variant.experts)
    # Given frames are left out: every sample has them.
    before, after = (x[:, 1:] for x in (sample("before"), sample("after", tmp_path / "run")))
    towards = [correlation(x, clip[:, 1:]) for x in (before, after)]
    assert towards[1] > towards[0] + 0.3, towards
