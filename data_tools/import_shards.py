"""Convert encoded shards of other training programs into a latent cache, without their videos.

`python -m data_tools.import_shards SHARDS --model DIR_OR_HUB_ID --out CACHE [--fps N]` reads two formats:

- Energon tars of NVIDIA DFM or Megatron-Bridge: a .pth file with the latents and a .json file with the caption per sample. The
  captions are encoded with --model. Loading a .pth runs no code, and .pickle files are never opened.
- TFRecord files of MaxDiffusion, which have no captions: their stored text embeddings are used.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from data_tools.program import program
from data_tools.shard_formats import EncodedSample, find_shards, read_samples
from wands.config.base import ARGUMENT, Options
from wands.data.cache.format import write_whole
from wands.data.cache.reader import CacheWriter
from wands.data.clips.records import REJECTS_NAME, Rejection
from wands.encoders.components import CONFIG_FILES, find_part, read_config, read_variant
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.text import CLEANING_VERSION, TextEncoder, clean_caption
from wands.errors import ConfigError, DataError
from wands.preprocess.workers import pick_device
from wands.texts import plural, safe_lines
from wands.variants import TEXT_LEN, Variant

CONTRAST = 0.4
JITTER = 0.3
"""Assumptions of `check_imported_latents` about normalized latents. The log of a channel's standard deviation in one clip varies
by 0.4 from clip to clip, and by 0.3 between the channels of one clip."""


@dataclass(frozen=True)
class ImportReport:
    """Result of an import. `num_samples` counts all samples in the cache, `num_reused` those of an earlier run."""

    num_samples: int
    num_reused: int
    rejected: tuple[Rejection, ...]


def import_shards(
    source: str | Path, out: str | Path, model: str | Path, *, fps: float | None = None, device: str = "cpu"
) -> ImportReport:
    """Write the samples of a shard, or of all shards in a folder at any depth, to a cache, or continue an interrupted import.

    `model` is the pipeline folder or Hub id with the VAE and text encoder of the shards. Shards do not name them, so only the
    shapes and the normalization of the latents are checked. Nor do they contain `fps`; None is the frame rate of the variant.

    Raises:
        ConfigError: if the device is invalid, or the model is incomplete or needs conditioning frames, which cannot be imported.
        DataError: if there are no shards or no usable samples.
        CacheError: if the cache has other settings, or the disk is full.
    """
    pick_device("--device", device)
    variant, std = read_variant_and_std(model)
    shards = find_shards(Path(source))
    rejected: list[Rejection] = []
    first = next(_fitting_samples(read_samples(shards, Path(source)), variant, std, rejected), None)
    if first is None:
        reason = f" (first: {rejected[0].reason})" if rejected else ""
        raise DataError(
            f"SHARDS={source} contains no usable sample: {len(rejected)} rejected{reason}. Correct or replace the samples."
        )
    rejected.clear()
    fingerprint = imported_fingerprint(model, first.encoding)
    encoder = TextEncoder.load(model, device)
    accepted = set()
    num_reused = 0
    with CacheWriter(Path(out), variant, fingerprint) as writer:
        for sample in _fitting_samples(read_samples(shards, Path(source)), variant, std, rejected):
            if sample.encoding != first.encoding:
                reason = (
                    f"sample was encoded with {sample.encoding}, but the first sample with {first.encoding}; "
                    "import this sample into another cache"
                )
                rejected.append(Rejection(sample.key, str(sample.path), reason))
                continue
            accepted.add(sample.key)
            if writer.has(sample.key, sample.content):
                num_reused += 1
                continue
            text = sample.text_embeds
            text = encoder.encode(sample.caption or "") if text is None else text
            meta = _metadata(sample, variant, fps or variant.fps)
            arrays = {"latents": sample.latents, "text_embeds": text}
            writer.add(sample.key, {name: array.to(torch.bfloat16) for name, array in arrays.items()}, meta)
        lines = [json.dumps(asdict(item)) + "\n" for item in rejected]
        write_whole(writer.path / REJECTS_NAME, "".join(lines).encode())
        writer.commit(encoder.encode(""), accepted)
    return ImportReport(len(accepted), num_reused, tuple(rejected))


def read_variant_and_std(model: str | Path) -> tuple[Variant, Tensor]:
    """Return the variant of a pipeline folder or Hub id, and `latents_std` of its VAE, [latent channels].

    Raises:
        ConfigError: if the model is incomplete, or needs conditioning frames, which cannot be imported.
    """
    from diffusers import AutoencoderKLWan

    variant = read_variant(model)
    if variant.num_images:
        raise ConfigError(
            f"--model={model} is {variant.name}, which needs conditioning frames, but conditioning frames cannot be "
            "imported from other programs; run wands preprocess on the videos."
        )
    default = inspect.signature(AutoencoderKLWan.__init__).parameters["latents_std"].default
    config = read_config(find_part(model, "vae", CONFIG_FILES) / "config.json")
    return variant, torch.tensor(config.get("latents_std", default))


def imported_fingerprint(model: str | Path, imported: Any) -> dict[str, Any]:
    """Return the fingerprint of a cache whose latents another program encoded with the encoders of `model`.

    `imported` is a JSON value that describes the encoding, for example the name of the program.
    """
    settings = {
        "imported": imported,
        "cleaning": CLEANING_VERSION,
        "text_len": TEXT_LEN,
        "text_dtype": "bf16",
        "stored_dtype": "bf16",
    }
    return fingerprint_pipeline(model) | {"settings": settings}


def _metadata(sample: EncodedSample, variant: Variant, fps: float) -> dict[str, Any]:
    _, frames, rows, columns = sample.latents.shape
    time, down, across = variant.vae_stride
    return {
        "caption": clean_caption(sample.caption) if sample.caption else None,
        "source": sample.source,
        "start_seconds": 0.0,
        "num_frames": (frames - 1) * time + 1,
        "height": rows * down,
        "width": columns * across,
        "fps": fps,
        "content": sample.content,
    }


# ---- checks


def _fitting_samples(
    samples: Iterator[EncodedSample | Rejection], variant: Variant, std: Tensor, rejected: list[Rejection]
) -> Iterator[EncodedSample]:
    """Yield the samples that fit a cache of `variant`, and append a rejection for every other sample to `rejected`."""
    for sample in samples:
        if isinstance(sample, Rejection):
            rejected.append(sample)
            continue
        try:
            check_imported_latents(sample.latents, variant, std)
            if sample.text_embeds is not None:
                check_text_embeds(sample.text_embeds, variant)
            elif not clean_caption(sample.caption or ""):
                raise DataError(
                    "missing caption in the .json file of the sample; write a caption there. wands encodes this caption and "
                    "never opens the pickled text embeddings"
                )
        except DataError as error:
            rejected.append(Rejection(sample.key, str(sample.path), str(error)))
        else:
            yield sample


def check_text_embeds(text: Tensor, variant: Variant) -> None:
    """Check that text embeddings are finite and have the shape [1 to 512 tokens, text width of the variant].

    Raises:
        DataError: if the shape is wrong, or a number is not finite.
    """
    if text.ndim != 2 or text.shape[1] != variant.dit.text_dim or not 1 <= len(text) <= TEXT_LEN:
        raise DataError(
            f"text embedding of shape {tuple(text.shape)} is not [1 to {TEXT_LEN}, {variant.dit.text_dim}] as in "
            f"{variant.name}; set --model to the model with which the clip was encoded"
        )
    if not text.isfinite().all():
        raise DataError("text embedding contains numbers that are not finite; encode the clip again")


def check_imported_latents(latents: Tensor, variant: Variant, std: Tensor) -> None:
    """Check that latents [latent channels, frames, rows, columns] can train a variant, are finite, and are normalized.

    The standard deviation of each channel is near 1 for normalized latents, and else near the VAE's `std`. The contrast of a clip
    multiplies all of them by one factor, so the ratios between the channels count more than the absolute values.

    Raises:
        DataError: if the shape does not fit, a number is not finite, a channel is constant, or the latents seem not normalized.
    """
    channels = variant.dit.out_channels
    patch = variant.dit.patch_size
    if latents.ndim != 4 or latents.shape[0] != channels or 0 in latents.shape:
        raise DataError(
            f"latents of shape {tuple(latents.shape)} are not [{channels}, frames, rows, columns] as in "
            f"{variant.name}; set --model to the model with which the clip was encoded"
        )
    if any(size % step for size, step in zip(latents.shape[1:], patch, strict=True)):
        raise DataError(
            f"latents of shape {tuple(latents.shape)} are not multiples of patch_size={patch} in frames, rows and "
            "columns; encode the clip again at another size"
        )
    if not latents.is_floating_point() or not latents.isfinite().all():
        raise DataError("latents contain numbers that are not finite; encode the clip again")
    spread = latents.float().flatten(1).std(dim=1, correction=0)
    if (spread == 0).any():
        raise DataError("latents are constant in a channel; encode the clip again")
    raw = _unlikelihood(spread / std)
    normalized = _unlikelihood(spread)
    if raw < normalized:
        raise DataError(
            "latents are not normalized: the channels have standard deviations from "
            f"{spread.min():.2f} to {spread.max():.2f}, similar to latents_std of the VAE, instead of about 1 (NVIDIA DFM does "
            "not normalize clips of low contrast); encode the clip with wands preprocess"
        )


def _unlikelihood(spread: Tensor) -> float:
    """Return how unlikely the standard deviations `spread` of the channels are for normalized latents.

    It is a negative log-likelihood without constant terms. Each standard deviation is taken as the product of a factor of the
    clip and a factor of the channel, whose logs are normal with mean 0 and standard deviations `CONTRAST` and `JITTER`.
    """
    logs = spread.double().log()
    contrast = logs.mean()
    shared = contrast**2 / (CONTRAST**2 + JITTER**2 / len(logs))
    return float(shared + ((logs - contrast) ** 2).sum() / JITTER**2) / 2


class ImportShardsArguments(Options):
    """Convert encoded shards of other training programs into a latent cache.

    Examples:
        python -m data_tools.import_shards shards/ --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --out cache
    """

    shards: Annotated[Path, ARGUMENT]
    """One shard (a tar or .tfrec file), or a folder with shards."""
    model: str
    """Pipeline folder or Hub id of the model that encoded the shards."""
    out: Path
    """Cache folder: a new folder, or the folder of an interrupted import."""
    fps: Annotated[float | None, Field(gt=0)] = None
    """Frame rate of the clips in frames per second, which shards do not contain [default: the frame rate of the model
    variant]."""
    device: str = "cpu"
    """Device that runs the text encoder, such as cuda:0."""


def _run(options: ImportShardsArguments) -> int:
    report = import_shards(options.shards, options.out, options.model, fps=options.fps, device=options.device)
    reused = f", {report.num_reused:,} of them from an earlier run" if report.num_reused else ""
    print(f"{options.out}: {plural(report.num_samples, 'sample')}{reused}")
    print(f"{len(report.rejected):,} rejected" + (f", listed in {REJECTS_NAME}:" if report.rejected else ""))
    for item in report.rejected[:50]:
        print(safe_lines(f"  {item.key}: {item.reason}"))
    return 0


main = program(ImportShardsArguments, _run)

if __name__ == "__main__":
    sys.exit(main())
