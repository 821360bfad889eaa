"""Read encoded samples from shards of other programs: tars of DFM or Megatron-Bridge, and TFRecords of MaxDiffusion.

torch.load reads the latents with weights_only=True, which runs no code. Files with pickled text embeddings are never opened.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_tools.tfrecord import parse_example, parse_tensor, read_tfrecords
from wands.data.clips.archives import MAX_LATENT_BYTES, TAR_EXTENSIONS, TarReader, is_tar
from wands.data.clips.records import Rejection
from wands.errors import DataError, one_line

FIX = "set SHARDS to shards that NVIDIA DFM wrote"


@dataclass(frozen=True)
class EncodedSample:
    """One sample of a shard.

    Attributes:
        key: name of the shard, and name or number of the sample in it.
        latents: [latent channels, frames, rows, columns] in the float type of the shard.
        content: hash of the stored bytes.
        encoding: settings of the encoding, which must be equal in a cache.
        caption: None if the format has no captions.
        text_embeds: [text tokens, width]; None if the format has captions.
        source: path of the video, or empty.
    """

    key: str
    path: Path
    latents: Tensor
    content: str
    encoding: dict[str, Any]
    caption: str | None = None
    text_embeds: Tensor | None = None
    source: str = ""


def find_shards(source: Path) -> list[Path]:
    """Return `source`, if it is a shard, or all shards in this folder and its subfolders.

    Raises:
        DataError: if there are no shards, or both tars and TFRecords.
    """
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    shards = [path for path in files if is_tar(path) or _is_tfrecord(path)]
    if not shards:
        looked_for = f"looked for {' '.join(TAR_EXTENSIONS)} .tfrec .tfrecord"
        what = looked_for if source.exists() else "no such folder"
        raise DataError(f"SHARDS={source} contains no shards ({what}); pass a folder that contains shards")
    if len({is_tar(path) for path in shards}) > 1:
        raise DataError(
            f"SHARDS={source} contains both tars and TFRecords; pass a folder with one kind of shards"
        )
    return shards


def _is_tfrecord(path: Path) -> bool:
    return bool(re.search(r"\.tfrec(ord)?s?(-\d+-of-\d+)?$", path.name.lower()))


def read_samples(shards: Sequence[Path], source: Path) -> Iterator[EncodedSample | Rejection]:
    """Yield the samples of all shards, and a rejection for each sample or shard that cannot be read.

    A sample's key starts with the path of its shard relative to the folder `source`, or with the name of the only shard.
    """
    root = source if source.is_dir() else source.parent
    for path in shards:
        name = path.relative_to(root).as_posix()
        try:
            yield from _read_energon(path, name) if is_tar(path) else _read_tfrecord(path, name)
        except DataError as error:
            yield Rejection(name, str(path), str(error))


def _read_energon(path: Path, name: str) -> Iterator[EncodedSample | Rejection]:
    """Yield the samples (.pth with latents, .json with the caption) of a tar. A .pickle file is never opened."""
    base = next(name[: -len(end)] for end in TAR_EXTENSIONS if name.lower().endswith(end))
    with TarReader(path) as reader:
        for sample, members in reader.samples.items():
            key = f"{base}/{sample}"
            try:
                if missing := [f".{part}" for part in ("pth", "json") if part not in members]:
                    raise DataError(f"the sample has no {' and no '.join(missing)}; {FIX}")
                tensor = reader.read(members["pth"], MAX_LATENT_BYTES)
                info = reader.read(members["json"])
                yield _energon_sample(key, path, tensor, info)
            except DataError as error:
                yield Rejection(key, str(path), str(error))
        for member, reason in reader.rejections:
            yield Rejection(f"{name}:{member}".rstrip(":"), str(path), reason)


def _energon_sample(key: str, path: Path, tensor: bytes, info: bytes) -> EncodedSample:
    try:
        latents = torch.load(io.BytesIO(tensor), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many exception types for damaged files and other pickles
        raise DataError(
            f"the sample's .pth file is not a plain tensor ({one_line(error, 120)}), and wands never opens other pickles; {FIX}"
        ) from None
    if not isinstance(latents, Tensor):
        kind = type(latents).__name__
        raise DataError(f"the sample's .pth file contains a {kind}, not a tensor; {FIX}")
    try:
        facts = json.loads(info)
    except ValueError as error:
        raise DataError(f"the sample's .json file cannot be read ({error}); {FIX}") from None
    if not isinstance(facts, dict):
        raise DataError(f"the sample's .json file does not contain a JSON object; {FIX}")
    if not isinstance(facts.get("caption", ""), str):
        raise DataError(f"the caption in the sample's .json file must be text; {FIX}")
    version = facts.get("model_version", "wan2.1")
    if version != "wan2.1":
        raise DataError(
            f"model_version={version} in the sample's .json file is not supported; remove the sample, or encode its "
            "clip with the VAE of Wan 2.1"
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


def _read_tfrecord(path: Path, name: str) -> Iterator[EncodedSample | Rejection]:
    """Yield the samples (latents, encoder_hidden_states) of a TFRecord file of MaxDiffusion."""
    for number, record in enumerate(read_tfrecords(path)):
        key = f"{name.rpartition('.')[0]}/{number:06d}"
        try:
            if isinstance(record, DataError):
                raise record
            features = parse_example(record)
            if missing := {"latents", "encoder_hidden_states"} - set(features):
                raise DataError(
                    f"the record has no {' and no '.join(sorted(missing))}; set SHARDS to shards that MaxDiffusion wrote"
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
            yield Rejection(key, str(path), str(error))


def _without_batch(tensor: Tensor, ndim: int) -> Tensor:
    return tensor[0] if tensor.ndim == ndim + 1 and len(tensor) == 1 else tensor


def _without_pads(text: Tensor) -> Tensor:
    """Return text embeddings [text tokens, width] without the zero rows at the end, which training appends again."""
    if text.ndim != 2:
        return text
    used = (text != 0).any(dim=1).nonzero()
    return text[: int(used.max()) + 1 if len(used) else 1]


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
