"""`wands infer --causal`: chunk by chunk, on every variant, on several ranks; and the samples of a causal run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor
from PIL import Image
from safetensors.torch import load_file

from tests.support.infer_runs import read_video
from tests.support.runs import run_training
from tests.support.sampling import infer
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.commands.infer import InferResult
from wands.errors import ConfigError
from wands.files import read_rows
from wands.sampling import sample as sampling
from wands.sampling.pipeline import find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest

SMALL = {"height": 32, "width": 48, "num_inference_steps": 2, "guidance_scale": 3.0}
CAUSAL = {**SMALL, "causal": True, "chunk_frames": 2, "save_latents": True}


def latents_of(result: InferResult) -> torch.Tensor:
    assert result.latents is not None
    return load_file(result.latents)["latents"]


def sample(model: Path, out: Path, prompt: Any = "a red bike", **options: Any) -> torch.Tensor:
    [result] = infer(model, [prompt], out_dir=out, **{**CAUSAL, **options})
    latents = latents_of(result)
    assert torch.isfinite(latents).all()
    assert len(read_video(result.video)) == 4 * (latents.shape[1] - 1) + 1
    return latents


def test_a_longer_video_begins_with_the_shorter_one(tiny_pipeline: Path, tmp_path: Path):
    """Seven latent frames, then three: chunks never see what follows, and their noise is their own."""
    long = sample(tiny_pipeline, tmp_path / "long", num_frames=25)
    short = sample(tiny_pipeline, tmp_path / "short", num_frames=13)
    assert long.shape == (16, 7, 4, 6)
    assert torch.equal(long[:, :2], short[:, :2])  # the last chunk of the short video is shorter
    other = sample(tiny_pipeline, tmp_path / "other", num_frames=25, seed=1)
    assert not torch.equal(long, other)


@pytest.mark.slow
def test_the_chunks_of_a_window_forget_the_others(tiny_pipeline: Path, tmp_path: Path):
    windows = [None, 2, 4]
    all_seen, two, four = (
        sample(tiny_pipeline, tmp_path / str(window), num_frames=25, window_frames=window)
        for window in windows
    )
    assert torch.equal(all_seen[:, :4], two[:, :4])  # the second chunk has one before it
    assert not torch.equal(all_seen[:, 4:6], two[:, 4:6])
    assert torch.equal(all_seen[:, :6], four[:, :6])
    assert not torch.equal(all_seen[:, 6:], four[:, 6:])


def test_a_later_prompt_changes_what_follows(tiny_pipeline: Path, tmp_path: Path):
    """Frame 10 is in the second chunk (frames 5 to 12), so that the third chunk is the first with the later prompt."""
    plain = sample(tiny_pipeline, tmp_path / "plain", num_frames=25)
    request = SampleRequest(prompt="a red bike", later_prompts=[(10, "a dog in the snow")])
    changed = sample(tiny_pipeline, tmp_path / "changed", request, num_frames=25)
    assert torch.equal(plain[:, :4], changed[:, :4])
    assert not torch.equal(plain[:, 4:6], changed[:, 4:6])


VARIANTS: dict[str, dict[str, Any]] = {
    "wan2.1-i2v-14b": {"image": True},
    "wan2.1-flf2v-14b": {"image": True, "last_image": True},
    "wan2.2-t2v-a14b": {"num_inference_steps": 4},
    "wan2.2-i2v-a14b": {"image": True, "num_inference_steps": 4},
    "wan2.2-ti2v-5b": {"image": True, "independent_first_frame": True},
    "wan2.2-ti2v-5b, together": {"image": True, "context_noise": 0.1},
    "wan2.2-ti2v-5b, text": {},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "together" in name else pytest.mark.slow) for name in VARIANTS]
)
def test_every_variant_rolls_out(name: str, tiny_variant: Callable[[str], Path], tmp_path: Path):
    """A first frame that is given comes back as it is encoded."""
    model = tiny_variant(name.partition(",")[0])
    options = dict(VARIANTS[name])
    size = 64 if "5b" in name else 32
    for key in ("image", "last_image"):
        if key in options:
            pixels = np.random.default_rng(3).integers(0, 255, (size, 2 * size, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{key}.png")
            options[key] = str(tmp_path / f"{key}.png")
    latents = sample(model, tmp_path / "out", num_frames=17, height=size, width=2 * size, **options)
    if "5b" in name and "image" in options:
        pipeline = load_pipeline(find_pipeline(model))
        video = torch.from_numpy(pixels).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
        mean, std = (
            torch.tensor(pipeline.vae.config[key]).view(-1, 1, 1) for key in ("latents_mean", "latents_std")
        )
        with torch.no_grad():
            first = (pipeline.vae.encode(video).latent_dist.mode()[0, :, 0] - mean) / std
        torch.testing.assert_close(latents[:, 0], first, rtol=1e-4, atol=1e-4)


VAES: dict[str, dict[str, Any]] = {
    "wan2.1": {},
    "wan2.2": {
        **{
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
        },
        **{"z_dim": 48, "latents_mean": [0.1] * 48, "latents_std": [1.5] * 48, "decoder_base_dim": 8},
    },
}


@pytest.mark.parametrize("name", VAES)
def test_chunks_are_decoded_as_a_whole_video(name: str):
    """The test pins the private cache of diffusers' VAE: any cut of a video decodes to the frames of the whole, bit for bit."""
    torch.manual_seed(0)
    pipeline = SimpleNamespace(
        vae=AutoencoderKLWan(base_dim=8, **VAES[name]).eval(),
        _execution_device=torch.device("cpu"),
        video_processor=VideoProcessor(vae_scale_factor=8),
        maybe_free_model_hooks=lambda: None,
    )
    latents = torch.randn(pipeline.vae.config.z_dim, 6, 4, 6, generator=torch.Generator().manual_seed(0))
    whole = sampling.decode_latents(pipeline, latents)  # type: ignore[arg-type]
    assert len(whole) == 21
    assert whole.std() > 1
    for cut in ([6], [1, 2, 3], [2, 4]):
        frames = np.stack([*sampling.decode_chunks(pipeline, latents.split(cut, dim=1))])  # type: ignore[arg-type]
        np.testing.assert_array_equal(frames, whole)


def rolled_on_ranks(model: Path, root: Path, ring: int, ulysses: int) -> torch.Tensor | None:
    results = infer(
        model,
        ["a red bike"],
        out_dir=root / f"{ring}x{ulysses}",
        num_frames=17,
        ring_degree=ring,
        ulysses_degree=ulysses,
        **CAUSAL,
    )
    return latents_of(results[0]) if results else None


@pytest.mark.parametrize(
    "degrees",
    [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)],
)
def test_ranks_roll_out_the_video_of_one_process(
    degrees: tuple[int, int], tiny_pipeline: Path, tmp_path: Path, run_world
):
    alone = sample(tiny_pipeline, tmp_path / "alone", num_frames=17)
    found, *others = run_world(degrees[0] * degrees[1], rolled_on_ranks, tiny_pipeline, tmp_path, *degrees)
    assert all(other is None for other in others)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_frames": None}, "--causal needs the chunks of the training"),
        ({"causal": False}, "--chunk-frames needs causal sampling; add --causal"),
        ({"sink_frames": 3}, "--causal: sink_frames needs window_frames"),
        ({"window_frames": 1}, "--causal: window_frames=1 must be at least chunk_frames=2"),
        ({"window_frames": 2, "sink_frames": 1}, "--causal: sink_frames=1 must be 0 or at least 2"),
        ({"vae_tiling": True}, "--vae-tiling does not work with --causal"),
        ({"guidance_mode": "batched"}, "--guidance-mode does not work with --causal"),
        (
            {"num_frames": 4097},
            "1,025 latent frames, and Wan has positions for 1,024. Use at most 4,093 frames",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    options: dict[str, Any], message: str, tiny_pipeline: Path, tmp_path: Path
):
    with pytest.raises(ConfigError, match=message):
        sample(tiny_pipeline, tmp_path, **{"num_frames": 9, **options})


def test_later_prompts_need_causal_sampling(tiny_pipeline: Path, tmp_path: Path):
    request = SampleRequest(prompt="a", later_prompts=[(5, "b")])
    with pytest.raises(ConfigError, match="later_prompts of prompt 1 need causal sampling"):
        infer(tiny_pipeline, [request], out_dir=tmp_path, num_frames=9, **SMALL)
    late = SampleRequest(prompt="a", later_prompts=[(9, "b")])
    with pytest.raises(ConfigError, match="begin at frame 9, but the video has 9 frames"):
        sample(tiny_pipeline, tmp_path, late, num_frames=9)
    unsorted = SampleRequest(prompt="a", later_prompts=[(5, "b"), (5, "c")])
    with pytest.raises(ConfigError, match="must be in ascending order"):
        sample(tiny_pipeline, tmp_path, unsorted, num_frames=9)


@pytest.mark.slow
def test_the_chunks_of_the_training_are_used(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, caplog: pytest.LogCaptureFixture
):
    """From a checkpoint. The run has made samples on two ranks, before the first step and at the end."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"prompt": "a cat", "later_prompts": [[10, "a dog"]]}) + '\n{"prompt": "a bird"}\n'
    )
    settings = (
        *("objective.name=teacher_forcing", "objective.chunk_frames=2", "objective.context_noise=0.1"),
        *("train.max_steps=2", "packing.max_tokens=64", "checkpoint.every=2", "parallel.ring_degree=2"),
        *("sample.num_inference_steps=2", "sample.height=32", "sample.width=48", "sample.num_frames=17"),
        *(f"sample.prompts_file={prompts}", "sample.guidance_scale=3"),
    )
    run = tmp_path / "run"
    worlds[2].run(run_training, tiny_pipeline, run, settings, zero(3))
    rows = read_rows(run / "samples" / "samples.jsonl")
    assert [(row["step"], row["number"]) for row in rows] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert all(len(read_video(run / row["video"])) == 17 for row in rows)
    assert not [row for row in read_rows(run / "events.jsonl") if row["event"] == "sample failed"]
    options = {**CAUSAL, "chunk_frames": None, "num_frames": 17, "checkpoint": run}
    known = sample(tiny_pipeline, tmp_path / "known", **options)
    given = {"chunk_frames": 2, "context_noise": 0.1}
    assert torch.equal(known, sample(tiny_pipeline, tmp_path / "given", **options | given))
    assert not torch.equal(
        known, sample(tiny_pipeline, tmp_path / "clean", **options | {"context_noise": 0.0})
    )
    [record] = read_rows(tmp_path / "given" / "samples.jsonl")
    assert record["causal"]["chunk_frames"] == 2
    assert record["causal"]["context_noise"] == 0.1
    infer(tiny_pipeline, ["a"], out_dir=tmp_path / "plain", checkpoint=run, num_frames=5, **SMALL)
    assert "the model was trained with objective.name=teacher_forcing; add --causal" in caplog.text


def test_a_sample_of_the_run_is_that_of_infer(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    settings = (
        *("objective.name=diffusion_forcing", "objective.chunk_frames=2", "train.max_steps=1"),
        *("packing.max_tokens=64", "checkpoint.every=1", "sample.prompts=[a cat]"),
        *("sample.num_inference_steps=2", "sample.height=32", "sample.width=48", "sample.num_frames=17"),
    )
    run = tmp_path / "run"
    worlds[1].run(run_training, tiny_pipeline, run, settings, zero(2))
    row = read_rows(run / "samples" / "samples.jsonl")[-1]
    options = {**SMALL, "guidance_scale": row["guidance_scale"], "negative_prompt": row["negative_prompt"]}
    [result] = infer(
        tiny_pipeline, ["a cat"], out_dir=tmp_path, checkpoint=run, causal=True, num_frames=17, **options
    )
    np.testing.assert_array_equal(read_video(result.video), read_video(run / row["video"]))
