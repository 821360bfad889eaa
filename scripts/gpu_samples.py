"""Stages `infer` and `encode` of gpu_stages.py: sampling, the VAE and the text encoder."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpu_clock
import torch
from bench_record import Results, Rows
from gpu_sizes import ENCODED, VARIANT_NAMES, VIDEO

from wands.variants import VARIANTS


def infer(device: str) -> Rows:
    """Sample one video with random weights, and measure the time of each part of `wands infer`.

    On CUDA, the DiT and the VAE have the sizes of 1.3B, and the text encoder is tiny. On a CPU, all models are tiny.
    """
    from diffusers import AutoencoderKLWan
    from make_tiny_pipeline import build_tiny_pipeline

    from wands.commands import infer as command
    from wands.commands import infer_files
    from wands.config.options import InferOptions

    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(owner: Any, name: str, title: str) -> Iterator[None]:
        original = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            gpu_clock.wait(device)
            started = time.perf_counter()
            result = original(*given, **options)
            gpu_clock.wait(device)
            seconds[title] = seconds.get(title, 0.0) + time.perf_counter() - started
            return result

        setattr(owner, name, call)
        try:
            yield
        finally:
            setattr(owner, name, original)

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        dit = None
        vae_dir = "random"
        if device == "cuda":
            dit = {
                **VARIANTS[VARIANT_NAMES[0]].dit.to_config(),
                "text_dim": 32,
            }  # the width of the tiny text encoder
            vae_dir = str(Path(folder) / "vae")
            AutoencoderKLWan().save_pretrained(vae_dir)
        build_tiny_pipeline(Path(folder) / "model", vae_dir=vae_dir, dit=dit, size="test")
        for owner, name, title in (
            (command, "load_pipeline", "load"),
            (infer_files, "encode_all_texts", "text"),
            (infer_files, "sample_latents", "denoising"),
            (infer_files, "decode_latents", "decode"),
            (infer_files, "save_video", "write mp4"),
        ):
            stack.enter_context(timed(owner, name, title))
        options = {"model": str(Path(folder) / "model"), "out_dir": Path(folder) / "videos", "device": device}
        started = time.perf_counter()
        command.infer(InferOptions(prompts=("a red kite",), **options, **VIDEO[device]))
        total = time.perf_counter() - started
    seconds["one denoising step"] = seconds["denoising"] / VIDEO[device]["num_inference_steps"][0]
    return [{"part": name, "s": value, "of all": value / total} for name, value in seconds.items()]


def infer_stage(args: argparse.Namespace, results: Results) -> None:
    """Sample a video, measure the time of each part of `wands infer`, and add the measurements to `results`."""
    results.run("81 frames of 480 x 832" if args.device == "cuda" else "tiny", lambda: infer(args.device))


def encode_clips(device: str, dtype: torch.dtype, batch: int, channels_last: bool = False) -> Rows:
    """Measure the VAE of Wan 2.1 with random weights, on clips of one size. On a CPU, the VAE is tiny.

    With `channels_last`, the weights of the 3-D convolutions and the pixels store the channels of a voxel side by side.
    """
    from diffusers import AutoencoderKLWan

    from wands.encoders.vae import WanVideoEncoder

    sizes = {} if device == "cuda" else {"base_dim": 8, "num_res_blocks": 1}
    vae = AutoencoderKLWan(**sizes).to(device, dtype)
    pixels = torch.rand(batch, *ENCODED[device][0], device=device) * 2 - 1
    if channels_last:
        pixels = pixels.contiguous(memory_format=torch.channels_last_3d)
        for parameter in vae.parameters():
            if parameter.dim() == 5:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
    encoder = WanVideoEncoder(vae)
    seconds = gpu_clock.time_calls(lambda: encoder.encode(pixels), device, rounds=2)[1]
    return [{"s": seconds, "clips/s": batch / seconds}]


def encode_texts(device: str) -> Rows:
    """Measure UMT5-XXL with random weights in bf16, on full captions. On a CPU, the model is tiny."""
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "vocab_size": 256384,
    }
    if device == "cpu":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    _, tokens, captions = ENCODED[device]
    with torch.device(device):
        encoder = UMT5EncoderModel(UMT5Config(**sizes)).to(torch.bfloat16).eval()
        ids = torch.randint(0, sizes["vocab_size"], (captions, tokens))
    with torch.no_grad():
        seconds = gpu_clock.time_calls(lambda: encoder(input_ids=ids), device, rounds=2)[1]
    return [{"s": seconds, "captions/s": captions / seconds}]


def encode_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `encode`: measure the VAE and the text encoder of `wands preprocess`."""
    device = args.device
    for dtype in (torch.bfloat16, torch.float32):
        for batch in (1, 2):
            name = f"VAE, {str(dtype).removeprefix('torch.')}, batch {batch}"
            results.run(name, partial(encode_clips, device, dtype, batch))
    name = "VAE, bfloat16, batch 1, channels last"
    results.run(name, partial(encode_clips, device, torch.bfloat16, 1, channels_last=True))
    results.run("UMT5", lambda: encode_texts(device))
