"""Convert encoded shards of other trainers into a latent cache, without their videos.

python -m data_tools.import_shards SHARDS --model DIR_OR_HUB_ID --out CACHE [--fps N]

SHARDS is a file or folder: the tars of NVIDIA DFM / Megatron-Bridge (Energon: .pth latents, .json with the caption)
or the .tfrec files of MaxDiffusion. Latents are read by torch's loader of plain tensors. Pickles of text are never
opened; captions are encoded again. TFRecords contain no captions, so their embeddings are used.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_tools.exit_code import exit_2_on_user_error
from data_tools.tfrecord import parse_example, parse_tensor, read_records
from wands.data.cache.format import write_whole
from wands.data.cache.reader import CacheWriter
from wands.data.clips.archives import TAR_EXTENSIONS, TarReader
from wands.data.clips.records import REJECTS_NAME, Rejection
from wands.encoders.components import CONFIG_FILES, find_part, read_config, read_variant
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.text import CLEANING_VERSION, TextEncoder, clean_caption
from wands.errors import ConfigError, DataError, one_line
from wands.variants import TEXT_LEN, Variant

CONTRAST, JITTER = 0.4, 0.3
"""Assumed standard deviations in log units: contrast of a clip against all clips, of a channel against the clip."""


@dataclass(frozen=True)
class EncodedSample:
    """One sample of a shard, or the reason why it cannot be read.

    Attributes:
        key: file, and number in the file.
        path: the shard.
        latents: [C, f, h, w], any float type, as stored.
        caption: None if the format has no captions.
        text_embeds: [L, D] if the format has no captions.
        content: digest of the sample's input.
        encoding: facts about the encoding of the latents; equal for all samples of a cache.
        source: path of the video, if known.
        problem: the rule that is broken, and the fix; empty for a readable sample.
    """

    key: str
    path: Path
    latents: Tensor | None = None
    caption: str | None = None
    text_embeds: Tensor | None = None
    content: str = ""
    encoding: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ImportReport:
    """Result of an import: samples in the cache, samples from an earlier run, rejections."""

    num_samples: int
    num_reused: int
    rejected: tuple[Rejection, ...]


def import_shards(
    source: str | Path, out: str | Path, model: str | Path, *, fps: float | None = None, device: str = "cpu"
) -> ImportReport:
    """Write the samples of encoded shards to a cache, or continue an interrupted import.

    Args:
        source: a shard, or a folder with shards at any depth.
        out: cache folder.
        model: pipeline folder or Hub id with the VAE and text encoder of the shards, which shards do not name. Channels,
            size, normalisation and text width are checked.
        fps: frames per second of the clips, which shards do not contain. Default: the variant's frame rate.
        device: device of the text encoder.

    Raises:
        ConfigError: if the model is not complete, or an option is invalid.
        DataError: if there are no shards or no usable samples.
        CacheError: if the cache has other settings, or the disk is full.
    """
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise ConfigError(f"--fps={fps} must be positive; use the rate of the clips, e.g. 16")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device={device} cannot be used ({one_line(error, 120)}); use cpu, or cuda with an NVIDIA GPU"
        ) from None
    variant = read_variant(model)
    if variant.num_images:
        raise ConfigError(
            f"model={model} is {variant.name}, and shards do not hold what it needs of the given frames; run wands "
            "preprocess on the videos."
        )
    shards = _find_shards(Path(source))
    samples = _read_all(shards, Path(source))
    rejected: list[Rejection] = []
    first = next(_checked(samples, variant, _vae_std(model), rejected), None)
    if first is None:
        reason = f" (first: {rejected[0].reason})" if rejected else ""
        raise DataError(f"source={source} gave no sample, {len(rejected)} rejected{reason}")
    rejected.clear()
    settings = {
        "imported": first.encoding,
        "cleaning": CLEANING_VERSION,
        "text_len": TEXT_LEN,
        "text_dtype": "bf16",
        "stored_dtype": "bf16",
    }
    fingerprint = fingerprint_pipeline(model) | {"settings": settings}
    encoder = TextEncoder.load(model, device)
    accepted, num_reused = set(), 0
    with CacheWriter(out, variant, fingerprint) as writer:
        for sample in _checked(_read_all(shards, Path(source)), variant, _vae_std(model), rejected):
            if sample.encoding != first.encoding:
                reason = (
                    f"encoded with {sample.encoding}, the first sample with {first.encoding}; import it alone"
                )
                rejected.append(Rejection(sample.key, str(sample.path), reason))
                continue
            accepted.add(sample.key)
            if writer.has(sample.key, sample.content):
                num_reused += 1
                continue
            assert sample.latents is not None
            text = sample.text_embeds
            if text is None:
                text = encoder.encode(sample.caption or "")
            writer.add(
                sample.key,
                sample.latents.to(torch.bfloat16),
                text.to(torch.bfloat16),
                _metadata(sample, variant, fps or variant.fps),
            )
        lines = [json.dumps(asdict(item)) + "\n" for item in rejected]
        write_whole(writer.path / REJECTS_NAME, "".join(lines).encode())
        writer.commit(encoder.encode(""), accepted)
    return ImportReport(len(accepted), num_reused, tuple(rejected))


def _metadata(sample: EncodedSample, variant: Variant, fps: float) -> dict[str, Any]:
    assert sample.latents is not None
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


def _checked(
    samples: Iterator[EncodedSample], variant: Variant, std: Tensor, rejected: list[Rejection]
) -> Iterator[EncodedSample]:
    """Yield the samples that fit a cache of ``variant``, and append rejections of the others to ``rejected``."""
    for sample in samples:
        try:
            if sample.problem:
                raise DataError(sample.problem)
            assert sample.latents is not None
            check_latents(sample.latents, variant, std)
            _check_text(sample, variant)
        except DataError as error:
            rejected.append(Rejection(sample.key, str(sample.path), str(error)))
        else:
            yield sample


def _check_text(sample: EncodedSample, variant: Variant) -> None:
    text = sample.text_embeds
    if text is None:
        if not clean_caption(sample.caption or ""):
            raise DataError("missing caption in its .json; write one, the pickle next to it is never opened")
        return
    if text.ndim != 2 or text.shape[1] != variant.dit.text_dim or not 1 <= len(text) <= TEXT_LEN:
        raise DataError(
            f"text embedding of shape {tuple(text.shape)} is not [1 to {TEXT_LEN}, {variant.dit.text_dim}] of "
            f"{variant.name}; give the model that the shards were made for"
        )
    if not text.isfinite().all():
        raise DataError("text embedding contains numbers that are not finite; encode the clip again")


def check_latents(latents: Tensor, variant: Variant, std: Tensor) -> None:
    """Check that latents fit a variant and are normalised.

    The standard deviation of each channel is near 1 for normalised latents, and near the VAE's ``std`` otherwise. A clip's
    contrast scales all channels, so the profile over channels counts more than the absolute value.

    Args:
        latents: [C, f, h, w].
        variant: variant to train.
        std: [C], latents_std of the VAE.

    Raises:
        DataError: if the latents do not fit, are not finite, or look not normalised.
    """
    channels, patch = variant.dit.out_channels, variant.dit.patch_size
    if latents.ndim != 4 or latents.shape[0] != channels or 0 in latents.shape:
        raise DataError(
            f"latents of shape {tuple(latents.shape)} are not [{channels}, frames, rows, columns] of "
            f"{variant.name}; give the model that the shards were made for"
        )
    if any(size % step for size, step in zip(latents.shape[1:], patch, strict=True)):
        raise DataError(
            f"latents of shape {tuple(latents.shape)} are not multiples of patch_size={patch}; encode the clip "
            "again at a size that is"
        )
    if not latents.is_floating_point() or not latents.isfinite().all():
        raise DataError("latents contain numbers that are not finite; encode the clip again")
    spread = latents.float().flatten(1).std(dim=1, correction=0)
    if (spread == 0).any():
        raise DataError("latents are constant in a channel; encode the clip again")
    raw, normalised = _unlikelihood(spread / std), _unlikelihood(spread)
    if raw < normalised:
        raise DataError(
            f"latents look as the VAE gives them, not normalised (spread {spread.min():.2f} to "
            f"{spread.max():.2f} over channels in the VAE's own profile; DFM leaves clips of low contrast so); "
            "encode the clip again"
        )


def _unlikelihood(spread: Tensor) -> float:
    """Return the negative log-likelihood that the channels' deviations, float [C], are 1 up to a common contrast."""
    logs = spread.double().log()
    contrast = logs.mean()
    shared = contrast**2 / (CONTRAST**2 + JITTER**2 / len(logs))
    return float(shared + ((logs - contrast) ** 2).sum() / JITTER**2) / 2


def _vae_std(model: str | Path) -> Tensor:
    from diffusers import AutoencoderKLWan

    default = inspect.signature(AutoencoderKLWan.__init__).parameters["latents_std"].default
    config = read_config(find_part(model, "vae", CONFIG_FILES) / "config.json")
    return torch.tensor(config.get("latents_std", default))


# ---- formats


def _find_shards(source: Path) -> list[Path]:
    found = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    shards = [path for path in found if _is_tar(path) or _is_tfrecord(path)]
    if not shards:
        what = (
            f"looked for {' '.join(TAR_EXTENSIONS)} .tfrec .tfrecord" if source.exists() else "no such folder"
        )
        raise DataError(f"source={source} contains no shards ({what}); give the folder that holds them")
    if len({_is_tar(path) for path in shards}) > 1:
        raise DataError(f"source={source} contains both tars and TFRecords; give the folder of one of them")
    return shards


def _is_tar(path: Path) -> bool:
    return path.name.lower().endswith(TAR_EXTENSIONS)


def _is_tfrecord(path: Path) -> bool:
    return bool(re.search(r"\.tfrec(ord)?s?(-\d+-of-\d+)?$", path.name.lower()))


def _read_all(shards: Sequence[Path], source: Path) -> Iterator[EncodedSample]:
    root = source if source.is_dir() else source.parent
    for path in shards:
        name = path.relative_to(root).as_posix()
        try:
            yield from _read_energon(path, name) if _is_tar(path) else _read_tfrecord(path, name)
        except DataError as error:
            yield EncodedSample(name, path, problem=str(error))


def _read_energon(path: Path, name: str) -> Iterator[EncodedSample]:
    """Yield samples of a tar of DFM or Megatron-Bridge: .pth [C, f, h, w] and .json; .pickle is never opened."""
    base = next(name[: -len(end)] for end in TAR_EXTENSIONS if name.lower().endswith(end))
    with TarReader(path) as reader:
        for sample in reader.samples:
            key = f"{base}/{sample.key}"
            try:
                if missing := [f".{part}" for part in ("pth", "json") if part not in sample.members]:
                    raise DataError(f"no {' and no '.join(missing)} in its shard; give shards of DFM")
                tensor, info = reader.read(sample.members["pth"]), reader.read(sample.members["json"])
                yield _energon_sample(key, path, tensor, info)
            except DataError as error:
                yield EncodedSample(key, path, problem=str(error))
        for item in reader.rejections:
            yield EncodedSample(f"{name}:{item.key}".rstrip(":"), path, problem=item.reason)


def _energon_sample(key: str, path: Path, tensor: bytes, info: bytes) -> EncodedSample:
    try:
        latents = torch.load(io.BytesIO(tensor), map_location="cpu", weights_only=True)
    except Exception as error:  # damage and foreign pickles end in as many types as there are causes
        raise DataError(
            f".pth is not a plain tensor ({one_line(error, 120)}); nothing else is unpickled"
        ) from None
    if not isinstance(latents, Tensor):
        raise DataError(f".pth contains a {type(latents).__name__}, not a tensor; give shards of DFM")
    try:
        facts = json.loads(info)
    except ValueError as error:
        raise DataError(f".json cannot be read ({error}); give shards of DFM") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("caption", ""), str):
        raise DataError(".json is not an object with a caption; give shards of DFM")
    version = facts.get("model_version", "wan2.1")
    if version != "wan2.1":
        raise DataError(
            f"model_version={version} is not wan2.1, whose latents this wands trains on; leave it out"
        )
    caption = facts.get("caption", "")
    return EncodedSample(
        key,
        path,
        latents=latents,
        caption=caption,
        content=_digest(tensor, caption.encode()),
        encoding={
            "from": "energon",
            "posterior": "mean" if facts.get("deterministic_latents", True) else "sample",
            "vae_tiling": bool(facts.get("memory_optimization", True)),
        },
        source=str(facts.get("video_path", "")),
    )


def _read_tfrecord(path: Path, name: str) -> Iterator[EncodedSample]:
    """Yield samples of a file of MaxDiffusion: latents [C, f, h, w], encoder_hidden_states [L, D]."""
    for number, record in enumerate(read_records(path)):
        key = f"{name.rpartition('.')[0]}/{number:06d}"
        try:
            if isinstance(record, DataError):
                raise record
            features = parse_example(record)
            if missing := {"latents", "encoder_hidden_states"} - set(features):
                raise DataError(
                    f"record has no {' and no '.join(sorted(missing))}; give MaxDiffusion's own shards"
                )
            latents, text = (
                _without_batch(parse_tensor(features[part]), ndim)
                for part, ndim in (("latents", 4), ("encoder_hidden_states", 2))
            )
            yield EncodedSample(
                key,
                path,
                latents=latents,
                text_embeds=_without_pads(text),
                content=_digest(record),
                encoding={"from": "maxdiffusion", "posterior": "unknown", "vae_tiling": "unknown"},
            )
        except DataError as error:
            yield EncodedSample(key, path, problem=str(error))


def _without_batch(tensor: Tensor, ndim: int) -> Tensor:
    return tensor[0] if tensor.ndim == ndim + 1 and len(tensor) == 1 else tensor


def _without_pads(text: Tensor) -> Tensor:
    """Return text embeddings up to the last non-zero row; training appends the zeros."""
    if text.ndim != 2:
        return text
    used = (text != 0).any(dim=1).nonzero()
    return text[: int(used.max()) + 1 if len(used) else 1]


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@exit_2_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 for an error of the user."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="python -m data_tools.import_shards", description=__doc__.splitlines()[0]
    )
    parser.add_argument("shards", type=Path, help="tar or .tfrec file, or a folder of them")
    parser.add_argument(
        "--model", required=True, help="pipeline folder or Hub id that they were encoded with"
    )
    parser.add_argument("--out", type=Path, required=True, help="cache folder")
    parser.add_argument("--fps", type=float, help="frame rate of the clips (default: the variant's)")
    parser.add_argument("--device", default="cpu", help="device of the text encoder (default cpu)")
    options = parser.parse_args(arguments)
    report = import_shards(options.shards, options.out, options.model, fps=options.fps, device=options.device)
    reused = f", {report.num_reused:,} of them from an earlier run" if report.num_reused else ""
    print(f"{options.out}: {report.num_samples:,} samples{reused}")
    print(f"{len(report.rejected):,} rejected" + (f", listed in {REJECTS_NAME}:" if report.rejected else ""))
    for item in report.rejected[:50]:
        print(f"  {item.key}: {item.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
