"""Train the tiny Wan VAEs in scripts/tiny_vae and scripts/tiny_vae_48 on a few clips, in one thread.

    python scripts/train_tiny_vae.py --clips DIR --unseen DIR --out scripts/tiny_vae --minutes 60
    python scripts/train_tiny_vae.py --variant wan2.2-ti2v-5b --clips DIR --out scripts/tiny_vae_48

The VAE is trained on the clips of --clips. The clips of --unseen are only used to measure the quality.

A tiny VAE is an AutoencoderKLWan with the interface of the variant's VAE: 16 latent channels and stride 4x8x8, or 48 latent
channels and stride 4x16x16. It is causal, and encodes 4k + 1 frames. It has about 1/90 of the parameters of Wan 2.1's VAE. The
weights are stored in float16. At the end, the script prints the PSNR of each clip. The PSNR is measured with the stored weights
and the unchanged code of diffusers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from whole_clip_vae import channels_last, for_whole_clips, from_patches, start_linear, to_patches

from wands.variants import VARIANTS


@dataclass(frozen=True)
class Preset:
    """Settings of a tiny VAE.

    Attributes:
        config: arguments of AutoencoderKLWan.
        scale: spatial stride of the VAE divided by 8, the spatial stride of Wan 2.1's VAE.
    """

    config: dict[str, Any]
    scale: int = 1


def _latents(channels: int) -> dict[str, Any]:
    return {"z_dim": channels, "latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}


PRESETS = {
    16: Preset({"base_dim": 16, "dim_mult": [1, 2, 2, 3], "num_res_blocks": 1, **_latents(16)}),
    # The pixels are cut into 2x2 patches first, as in the VAE of Wan 2.2: twelve channels at half the size.
    48: Preset(
        {
            "base_dim": 12,
            "decoder_base_dim": 10,
            "dim_mult": [2, 3, 4, 4],
            "num_res_blocks": 1,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            **_latents(48),
        },
        scale=2,
    ),
}
"""Maps the number of latent channels to the settings of a tiny VAE. Wan 2.1 and Wan 2.2 A14B have 16, TI2V-5B has 48."""
FPS = 16
VIDEO_SUFFIXES = {".mp4", ".mpg", ".mpeg", ".avi", ".mkv", ".mov", ".webm"}
# Areas at scale 1; they grow with the square of the scale.
AREAS = (64 * 96, 96 * 144, 128 * 208)  # pixels per frame; the demo works between the last two
CROP = 64
POSITIONS_PER_STEP = 80_000  # frames x height x width of one optimizer step: sets the batch of each shape
KL_WEIGHT = 3e-4
EMA_DECAY = 0.998
SAVE_EVERY = 300  # seconds


# ----------------------------------------------------------------------------------------------- clips


def load_clip(path: Path, area: int, max_seconds: float = 12.0) -> torch.Tensor:
    """Decode a clip sequentially and resample it in time and space.

    Args:
        path: a file that PyAV opens.
        area: wanted height x width in pixels. The display aspect ratio is kept, and both sides are multiples of 16.
        max_seconds: largest number of seconds to read.

    Returns:
        uint8 [T, H, W, 3] at 16 frames per second. Frame i of the result is the frame that the file shows at i/16 seconds.
    """
    frames = []
    stamps = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        for frame in container.decode(stream):
            aspect = frame.width * float(stream.sample_aspect_ratio or 1) / frame.height
            height = max(1, round(math.sqrt(area / aspect) / 16)) * 16
            width = max(1, round(height * aspect / 16)) * 16
            frames.append(frame.reformat(width, height, "rgb24", interpolation="AREA").to_ndarray())
            stamps.append(float(frame.pts * frame.time_base))
            if stamps[-1] - stamps[0] > max_seconds:
                break
    seconds = np.array(stamps) - stamps[0]
    wanted = np.arange(int(seconds[-1] * FPS) + 1) / FPS
    shown = np.searchsorted(seconds, wanted + 1e-6, side="right") - 1
    return torch.from_numpy(np.stack(frames)[shown])


def clip_paths(folder: Path) -> list[Path]:
    """Return the video files of a folder, sorted by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in VIDEO_SUFFIXES)


def to_pixels(window: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [T, H, W, 3] to float32 [3, T, H, W] in [-1, 1]."""
    return window.permute(3, 0, 1, 2).float() / 127.5 - 1


def draw_batches(
    clips: list[list[torch.Tensor]], rng: np.random.Generator, progress: Callable[[], float], scale: int
) -> Iterator[torch.Tensor]:
    """Yield an endless sequence of training batches, float32 [B, 3, T, H, W]. A batch has either crops or whole frames.

    At first, most batches have crops, because crops are cheaper. Later, half of the batches have whole frames, because the
    quality is measured on whole frames. A clip is drawn with a probability proportional to its length.

    Args:
        clips: clips[i][j] is clip i in size j of `AREAS`, uint8 [T, H, W, 3].
        rng: random generator.
        progress: function that returns the elapsed fraction of the training time.
        scale: factor for the sides of the crops (`Preset.scale`).
    """
    lengths = np.array([len(sizes[0]) for sizes in clips], dtype=float)

    def draw_clip() -> list[torch.Tensor]:
        return clips[int(rng.choice(len(clips), p=lengths / lengths.sum()))]

    while True:
        if rng.random() < (0.85 if progress() < 0.6 else 0.5):
            level = int(rng.integers(1, len(AREAS)))
            num_frames = int(rng.choice((9, 17)))
            crop = CROP * scale
        else:
            level = int(rng.integers(len(AREAS)))
            num_frames = int(rng.choice((9, 17, 25)))
            crop = 0
        clip = draw_clip()[level]
        batch = []
        positions = 0
        while positions < POSITIONS_PER_STEP * scale**2 * 0.75:
            if crop:  # crops of one step may come from several clips, because all crops have one shape
                clip = draw_clip()[level]
            start = int(rng.integers(max(1, len(clip) - num_frames + 1)))
            window = clip[start : start + num_frames]
            window = window[: (len(window) - 1) // 4 * 4 + 1]
            if crop:
                top = int(rng.integers(window.shape[1] - crop + 1))
                left = int(rng.integers(window.shape[2] - crop + 1))
                window = window[:, top : top + crop, left : left + crop]
            pixels = to_pixels(window)
            batch.append(pixels.flip(-1) if rng.random() < 0.5 else pixels)
            positions += pixels[0].numel()
        yield torch.stack([b for b in batch if b.shape == batch[0].shape])


# ------------------------------------------------------------------------------------------------- loss


def forward_loss(vae: AutoencoderKLWan, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode pixels, sample latents, decode them, and return the loss.

    Args:
        vae: prepared by `for_whole_clips`.
        pixels: float32 [B, 3, T, H, W] in [-1, 1].

    Returns:
        (loss, mean squared error), both scalars.
    """
    with torch.autocast("cpu", torch.bfloat16):
        moments = vae.quant_conv(vae.encoder(to_patches(vae, pixels))).float()
        mean, logvar = moments.chunk(2, dim=1)
        logvar = logvar.clamp(-30, 20)
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        decoded = from_patches(vae, vae.decoder(vae.post_quant_conv(latents))).float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    error = decoded - pixels
    mse = error.square().mean()
    # Errors of edges: an error that differs between neighboring pixels is more visible than a constant error.
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    color = (error - error.mean(dim=1, keepdim=True)).square().mean()
    return 4 * mse + 0.25 * error.abs().mean() + 0.1 * edges + 4 * color + KL_WEIGHT * kl, mse.detach()


# ------------------------------------------------------------------------------------------- measuring


@torch.no_grad()
def reconstruct(vae: AutoencoderKLWan, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode and decode a window (range of frames) of a clip.

    Args:
        vae: the VAE.
        window: uint8 [T, H, W, 3].

    Returns:
        (decoded window, float32 [3, T, H, W] in [-1, 1]; latents, float32 [Z, t, h, w]). The latents are the posterior mean.
    """
    latents = vae.encode(to_pixels(window)[None]).latent_dist.mode()
    return vae.decode(latents).sample[0].clamp(-1, 1), latents[0]


def windows_of(clip: torch.Tensor, num_frames: int = 17, count: int = 3) -> list[torch.Tensor]:
    """Return `count` evenly spaced windows (ranges of frames) of a clip. A window has 4k + 1 frames, at most `num_frames`."""
    num_frames = min(num_frames, (len(clip) - 1) // 4 * 4 + 1)
    return [clip[s : s + num_frames] for s in np.linspace(0, len(clip) - num_frames, count).astype(int)]


def psnr(vae: AutoencoderKLWan, clip: torch.Tensor, count: int = 3) -> float:
    """Reconstruct `count` windows (ranges of frames) of a clip, and return one PSNR in dB.

    The peak signal-to-noise ratio is computed from the mean squared error over all windows.
    """
    errors = [
        (reconstruct(vae, w)[0] - to_pixels(w)).square().mean().item() for w in windows_of(clip, count=count)
    ]
    return 10 * math.log10(4 / (sum(errors) / len(errors)))


@torch.no_grad()
def measure_latents(
    vae: AutoencoderKLWan, clips: list[torch.Tensor], count: int
) -> tuple[list[float], list[float]]:
    """Return the means and the standard deviations of the latent channels, measured on parts of the clips.

    The parts are `count` windows (ranges of frames) of each clip. Every clip has the same weight.
    """
    per_clip = []
    for clip in clips:
        pixels = [to_pixels(window)[None] for window in windows_of(clip, 33, count)]
        z = torch.cat([vae.encode(x).latent_dist.mode()[0].flatten(1) for x in pixels], dim=1)
        per_clip.append((z.mean(1), z.square().mean(1)))
    mean = torch.stack([m for m, _ in per_clip]).mean(0)
    std = (torch.stack([s for _, s in per_clip]).mean(0) - mean.square()).sqrt()
    return mean.tolist(), std.tolist()


def write_sheet(vae: AutoencoderKLWan, clips: dict[str, torch.Tensor], path: Path) -> None:
    """Write an image that shows four frames of each clip, with their reconstructions below."""
    rows = []
    for clip in clips.values():
        window = windows_of(clip, 17, 3)[1]
        pick = np.linspace(0, len(window) - 1, 4).astype(int)
        decoded = ((reconstruct(vae, window)[0] + 1) * 127.5).round().byte().permute(1, 2, 3, 0)
        for frames in (window, decoded):
            strip = Image.fromarray(np.concatenate(list(frames[pick].numpy()), axis=1))
            rows.append(
                strip.resize((1280, round(1280 * strip.height / strip.width)), Image.Resampling.BICUBIC)
            )
    sheet = Image.new("RGB", (1280, sum(r.height for r in rows)))
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    sheet.save(path)


# -------------------------------------------------------------------------------------------- training


def save(
    preset: Preset, weights: dict[str, torch.Tensor], out: Path, clips: list[torch.Tensor], count: int
) -> AutoencoderKLWan:
    """Write the trained VAE to a folder: weights in float16, and a config with the mean and standard deviation of its latents.

    Args:
        preset: settings of the VAE.
        weights: trained weights by name.
        out: folder to write.
        clips: clips on which the mean and standard deviation of the latents are measured.
        count: number of windows (ranges of frames) of each clip for this measurement.

    Returns:
        The VAE with the weights that were written, converted back to float32.
    """
    vae = AutoencoderKLWan(**preset.config)
    vae.load_state_dict({k: v.half().float() for k, v in weights.items()})
    mean, std = measure_latents(channels_last(vae.eval()), clips, count)
    vae.register_to_config(
        latents_mean=[round(v, 4) for v in mean],
        latents_std=[round(v, 4) for v in std],
    )
    vae.half().save_pretrained(out)
    return vae.float()


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate: linear warm-up over 3 % of the time, then a cosine to 2 % of the peak."""
    if progress < 0.03:
        return peak * (0.05 + 0.95 * progress / 0.03)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    preset: Preset, clips: list[list[torch.Tensor]], out: Path, minutes: float, seed: int, peak_lr: float
) -> None:
    """Train a VAE from scratch for `minutes` of wall time, and write it to `out` every 5 minutes and at the end."""
    torch.manual_seed(seed)
    vae = for_whole_clips(AutoencoderKLWan(**preset.config)).train()
    largest = [sizes[-1] for sizes in clips]
    start_linear(
        vae, [to_pixels(w)[None] for clip in largest for w in windows_of(clip, 17, 2 * preset.scale)]
    )
    averaged = {k: v.clone() for k, v in vae.state_dict().items()}
    optimizer = torch.optim.AdamW(vae.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=1e-3)
    begin = time.monotonic()
    last_save = begin - SAVE_EVERY  # the initial weights are stored, too

    def progress() -> float:
        return (time.monotonic() - begin) / (minutes * 60)

    batches = draw_batches(clips, np.random.default_rng(seed), progress, preset.scale)
    step = 0
    recent = []
    while (done := progress()) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, peak_lr)
        pixels = next(batches).contiguous(memory_format=torch.channels_last_3d)
        loss, mse = forward_loss(vae, pixels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        recent.append(mse.item())
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        for k, v in vae.state_dict().items():
            averaged[k].lerp_(v, 1 - decay)
        if step % 100 == 0:
            db = 10 * math.log10(4 / (sum(recent) / len(recent)))
            print(f"{done * minutes:6.1f} min  step {step:6d}  training windows {db:5.2f} dB", flush=True)
            recent = []
        if time.monotonic() - last_save > SAVE_EVERY:
            stored = save(preset, averaged, out, largest, count=1)
            on_clips = "  ".join(f"{psnr(stored, clip, 1):.2f}" for clip in largest)
            print(f"    saved; whole frames {on_clips} dB", flush=True)
            last_save = time.monotonic()
    save(preset, averaged, out, largest, count=4)


def report(
    out: Path, trained_on: dict[str, torch.Tensor], unseen: dict[str, torch.Tensor]
) -> AutoencoderKLWan:
    """Load the VAE that is stored in `out`, print a table with its PSNR on each clip, and return the VAE."""
    vae = channels_last(AutoencoderKLWan.from_pretrained(out, torch_dtype=torch.float32).eval())
    print(f"{'clip':28s} {'set':9s} {'frames':>12s}   PSNR dB")
    for label, group in (("training", trained_on), ("unseen", unseen)):
        for name, clip in group.items():
            print(f"{name:28s} {label:9s} {'x'.join(map(str, clip.shape[:3])):>12s}   {psnr(vae, clip):6.2f}")
    size = sum(p.stat().st_size for p in out.iterdir())
    print(f"parameters {sum(p.numel() for p in vae.parameters()):,}, {size:,} bytes in {out}")
    config = json.loads((out / "config.json").read_text())
    print("latents_mean", config["latents_mean"], "latents_std", config["latents_std"], sep="\n")
    return vae


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="wan2.1-t2v-1.3b")
    parser.add_argument("--clips", type=Path, required=True, help="folder of training clips")
    parser.add_argument("--unseen", type=Path, help="folder of clips for the measurement only")
    parser.add_argument("--skip", nargs="*", default=["carphone_distorted"], help="stems of clips to skip")
    parser.add_argument("--out", type=Path, required=True, help="folder for config.json and the weights")
    parser.add_argument(
        "--minutes", type=float, default=60, help="wall time of the training; 0 only measures --out"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-5, help="peak learning rate")
    parser.add_argument("--sheet", type=Path, help="write a PNG: frames above their reconstruction")
    args = parser.parse_args()
    torch.set_num_threads(1)
    paths = [p for p in clip_paths(args.clips) if p.stem not in args.skip]
    preset = PRESETS[VARIANTS[args.variant].dit.out_channels]
    areas = [area * preset.scale**2 for area in AREAS]
    if args.minutes > 0:
        clips = [[load_clip(p, a) for a in areas] for p in paths]
        train(preset, clips, args.out, args.minutes, args.seed, args.lr)
    trained_on = {p.name: load_clip(p, areas[-1]) for p in paths}
    unseen = {p.name: load_clip(p, areas[-1]) for p in clip_paths(args.unseen)} if args.unseen else {}
    vae = report(args.out, trained_on, unseen)
    if args.sheet:
        write_sheet(vae, {**trained_on, **unseen}, args.sheet)


if __name__ == "__main__":
    main()
