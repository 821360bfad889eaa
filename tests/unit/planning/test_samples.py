"""Predicted memory of samples against the tensors of the real models: the VAE's decoder, and a DiT without gradients."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from peak_memory import PeakMemory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.support.commands import plan
from tests.support.runs import make_run
from wands.attention.ulysses import context_attention
from wands.attention.varlen import choose_backend
from wands.config.recipe_loading import load_recipe
from wands.distributed.dims import ParallelDims
from wands.model.files.loading import build_empty
from wands.planning.memory import Activations
from wands.planning.sampling_load import sampling_load
from wands.planning.workload import Workload
from wands.run.sizes import step_flops
from wands.sampling.requests import SampleRequest
from wands.sampling.sharing import token_index
from wands.train.summary import start_block
from wands.variants import VARIANTS, DiTShape

CLOSE = 0.10
# https://huggingface.co/Wan-AI: vae/config.json of Wan2.1-T2V-1.3B-Diffusers and Wan2.2-TI2V-5B-Diffusers.
PUBLISHED_VAES: dict[str, dict[str, Any]] = {
    "wan2.1-t2v-1.3b": {"base_dim": 96, "z_dim": 16},
    "wan2.2-ti2v-5b": {
        "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
        "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
    },
}  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors that exist at a time, also on the meta device, where they need no memory."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._storages:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _forget(self, key: int) -> None:
        self.now -= self._storages.pop(key)


@pytest.mark.parametrize("frames", [17, pytest.param(81, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "wan2.1-t2v-1.3b" else pytest.mark.slow)
        for name in PUBLISHED_VAES
    ],
)
def test_decoding_needs_what_the_published_vae_needs(name: str, frames: int) -> None:
    variant = VARIANTS[name]
    height = 96
    width = 128
    with torch.device("meta"), torch.no_grad(), LiveBytes() as live:
        vae = AutoencoderKLWan(**PUBLISHED_VAES[name]).eval()
        weights = sum(parameter.nbytes for parameter in vae.parameters())
        vae.decode(torch.zeros(1, vae.config.z_dim, *variant.latent_size(frames, height, width)))
    request = SampleRequest(prompt="", height=height, width=width, num_frames=frames)
    load = sampling_load([request], variant)
    assert load["vae_bytes"] == pytest.approx(weights, rel=0.01)
    assert load["decoding_bytes"] - load["vae_bytes"] == pytest.approx(live.peak - weights, rel=CLOSE)


@pytest.mark.parametrize(
    "ffn_dim", [512, pytest.param(1024, marks=pytest.mark.slow)]
)  # attention needs more, then the feed-forward
@pytest.mark.parametrize("compute", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_forward_without_gradients_needs_what_was_measured(compute: str, ffn_dim: int) -> None:
    shape = DiTShape(
        num_heads=8, head_dim=32, num_layers=2, ffn_dim=ffn_dim, in_channels=16, out_channels=16, text_dim=64
    )
    model = build_empty({"_class_name": "WanTransformer3DModel", **shape.to_config()})
    rope = model.rope
    model = model.to_empty(device="cpu").eval()
    model.rope = rope
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    backend = choose_backend("auto", torch.device("cpu"), torch.float32, shape.head_dim)
    model.set_attention(context_attention(backend, None, None, None), backend)
    meta, index, _ = token_index((16, 11, 12), ParallelDims(1, 0), torch.device("cpu"))
    inputs = torch.zeros(len(index), 64), meta, torch.tensor([500.0]), torch.zeros(512, 64)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute == "bf16", cache_enabled=False)
    with torch.no_grad(), autocast, PeakMemory() as measured:
        model(*inputs)
    recipe = load_recipe(None, [f"precision.compute={compute}"])
    ds_config = {"zero_optimization": {"stage": 0}}
    workload = Workload(
        recipe=recipe,
        shape=shape,
        weights=(),
        num_models=1,
        world_size=1,
        device_type="cpu",
        ds_config=ds_config,
        video_tokens=len(index),
    )
    assert Activations(workload).without_gradients() == pytest.approx(measured.bytes, rel=CLOSE)


SECTION = "sample={every: 5, prompts: [a, b], height: 32, width: 64, num_frames: 9, num_inference_steps: 4}"


def test_the_start_block_has_the_share_of_the_flops(tiny_pipeline: Path, tmp_path: Path) -> None:
    run = make_run(tiny_pipeline, tmp_path, (SECTION, "train.max_steps=12"), world_size=1)
    # Before the first step, after steps 5, 10 and 12: two videos of 24 tokens, two forward passes in each of 4 steps.
    sampling = 4 * 2 * 8 * run.model.shape.forward_flops([24])
    plans = run.schedule.sampler.epoch_plan(0).steps
    training = 12 * sum(step_flops(run.model, run.schedule, bins) for bins in plans) / len(plans)
    line = f"2 videos every 5 steps: {sampling / training:.1%} of the training's FLOPs"
    assert line in start_block(run)
    assert "videos" not in start_block(make_run(tiny_pipeline, tmp_path, world_size=1))


@pytest.mark.slow
def test_a_plan_counts_samples() -> None:
    """The VAE that decodes a large video needs more memory than the training on small clips."""
    options = {"gpus": 8, "hardware": "h100", "clips": 100, "frames": 5}
    keys = ("packing.max_tokens=3120", "data.prefetch=0")
    sample = "sample={every: 100, prompts: [a], height: 1280, width: 1280}"
    without, report = (
        plan("wan2.1-t2v-1.3b-lora", overrides=more, **options) for more in (keys, (*keys, sample))
    )
    assert "samples " not in without
    decoding = (508e6 + 1280 * 1280 * (19_500 + 12.5 * 81)) / 2**30
    assert f"samples {decoding:.2f} GiB" in report
    # On 8 ranks: the VAE, and the data of the next step, 3.78 + 0.05 GiB.
    assert re.search(r"^  host    3\.83 GiB of", report, re.MULTILINE)
    assert re.search(
        r"^  samples about \d+ s every 100 steps, if sampling has the MFU of training$", report, re.MULTILINE
    )
