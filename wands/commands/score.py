"""`wands tools score`: compare sampled videos with reference clips by SSIM, PSNR and the correlation of their latents."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.config.options import ScoreOptions
from wands.data.clips.clip import ClipSpec
from wands.data.clips.file_kinds import VIDEO_EXTENSIONS
from wands.data.clips.layouts import load_source
from wands.data.clips.video import decode_clip, probe, to_pixels
from wands.distributed.bootstrap import accelerator_type
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError
from wands.files import read_rows, write_text
from wands.run.append_log import to_line


def score(options: ScoreOptions) -> str:
    """Compare each sampled video with its reference clip, and return a table as text; --json gets its rows.

    The reference clip has the file name of the video, apart from the extension, or else a caption equal to the video's prompt.

    Raises:
        ConfigError: if no sample has a reference clip.
        DataError: if a video cannot be decoded, or `options.reference` contains no clip.
    """
    records, rejections = load_source(options.reference)
    clips: dict[str | None, Any] = {}
    items: list[Any] = [*records, *rejections]
    for clip in items:  # a clip without a caption is rejected, but its file name is known
        clips.setdefault(Path(clip.path).stem, clip)
        clips.setdefault(getattr(clip, "caption", clip.path), clip)
    videos = [path for path in sorted(options.samples.rglob("*")) if path.suffix.lower() in VIDEO_EXTENSIONS]
    encoder = WanVideoEncoder.load(options.model, accelerator_type()) if options.model else None
    pairs = [(video, clips.get(video.stem) or clips.get(_prompt(video))) for video in videos]
    rows = [_score_video(video, clip, encoder) for video, clip in pairs if clip]
    unmatched = [str(video) for video, clip in pairs if not clip]
    if not rows:
        raise ConfigError(
            f"SAMPLES={options.samples} contains no video that has a reference clip in --reference={options.reference}. "
            "Give each video the file name (without extension) of its reference clip, or sample the video with the clip's "
            "caption as the prompt."
        )
    if options.json_path:
        write_text(options.json_path, json.dumps([json.loads(to_line(row)) for row in rows], indent=2))
    names = ("SSIM", "PSNR", "latent_correlation") if encoder else ("SSIM", "PSNR")
    means = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    lines = ["  ".join(f"{name:>{len(name)}}" for name in (*names, "sample, reference"))]
    for row in [*rows, {"sample": "mean", "reference": f"{len(rows)} of {len(videos)} samples", **means}]:
        numbers = "  ".join(f"{row[name]:>{len(name)}.3f}" for name in names)
        lines.append(f"{numbers}  {row['sample']}, {row['reference']}")
    if unmatched:
        lines.append(f"without a reference clip in {options.reference}: {', '.join(unmatched)}")
    return "\n".join(lines)


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the Pearson correlation of two latents [channels, frames, height, width], with `b` resized to the shape of `a`."""
    if a.shape != b.shape:
        b = torch.nn.functional.interpolate(b[None], size=a.shape[1:], mode="trilinear")[0]
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def _prompt(video: Path) -> str | None:
    """Return the prompt of a sampled video from a samples.jsonl; None if no row names the video.

    That of `wands infer` is next to the video. That of training is one folder up, with paths relative to the run folder.
    """
    for folder in (video.parent, video.parent.parent):
        for row in read_rows(folder / "samples.jsonl"):
            name = row.get("video") or row.get("file")
            prompt = row.get("prompt")
            if not isinstance(name, str) or not isinstance(prompt, str):
                continue
            if video in (folder / name, folder.parent / name):
                return prompt
    return None


def _score_video(path: Path, clip: Any, encoder: WanVideoEncoder | None) -> dict[str, Any]:
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    info = probe(path)
    start, end, crop = (getattr(clip, name, None) for name in ("start", "end", "crop"))
    sample = next(decode_clip(path, ClipSpec(info.fps, max_pixels=info.width * info.height))).frames
    count, height, width, _ = sample.shape
    spec = ClipSpec(info.fps, height, width, center_crop=True, max_frames=count)
    reference = next(decode_clip(Path(clip.path), spec, start, end, crop)).frames
    pixels = [to_pixels(frames[: len(reference)]) for frames in (sample, reference)]
    images = [video.movedim(1, 0)[:, None].add(1).div(2) for video in pixels]  # [1, 3, H, W] in [0, 1]
    pairs = list(zip(*images, strict=True))
    ssim = [structural_similarity_index_measure(a, b, data_range=1.0) for a, b in pairs]
    psnr = [peak_signal_noise_ratio(a, b, data_range=1.0) for a, b in pairs]
    latents = [encoder.encode(video) for video in pixels] if encoder else []
    return {
        "sample": str(path),
        "reference": str(clip.path),
        "SSIM": float(torch.stack(ssim).mean()),
        "PSNR": float(torch.stack(psnr).mean()),
        "latent_correlation": correlation(*latents) if latents else math.nan,
    }
