"""Convert an export of data_tools.export, or a cache of musubi-tuner, into a latent cache.

`python -m data_tools.import_cache SOURCE OUT [--model DIR_OR_HUB_ID]`; a cache of musubi-tuner does not name its encoders, so it
needs --model. No pickle is opened, and no tar is unpacked. If the program is killed, the same command continues.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from data_tools.export import EXPORT_FORMAT, EXPORT_NAME, FORMATS, NULL_NAME
from data_tools.import_shards import (
    check_imported_latents,
    check_text_embeds,
    imported_fingerprint,
    read_variant_and_std,
)
from data_tools.program import program
from wands.conditions.arrays import ArraySpec
from wands.config.base import ARGUMENT, Options
from wands.data.cache.format import checksum, contract_of, digest, reason, stored_arrays
from wands.data.cache.reader import CacheWriter
from wands.data.clips.archives import MAX_LATENT_BYTES, TarReader
from wands.data.collate import Sample
from wands.errors import ConfigError, DataError
from wands.texts import plural

PICKLES = {".pth", ".pt", ".pkl", ".pickle", ".ckpt", ".bin"}
MUSUBI_FPS = 16.0
"""Frames per second to which musubi-tuner resamples videos for Wan."""
MUSUBI_LATENTS = re.compile(
    r"(?P<base>.+?)(_(?P<first>\d{5})-(?P<count>\d{3,}))?_\d{4,}x\d{4,}_wan\.safetensors"
)


EncodedClip = tuple[Sample, dict[str, Any]]
"""Sample to import, and its metadata, such as caption, source and fps."""


def import_cache(source: str | Path, out: str | Path, model: str | None = None) -> int:
    """Write the samples of an export, or of a cache of musubi-tuner, to a cache, or continue an import. Return their number.

    `model` is the pipeline folder or Hub id with the VAE and the text encoder of musubi-tuner; None for an export.

    Raises:
        CacheError: if `out` is a cache with other settings, or the disk is full.
        ConfigError: if `model` is missing for musubi-tuner, is given for an export, or is an image-to-video model.
        DataError: if `source` has nothing to import, or the named file is damaged, is a pickle, or does not fit the model.
    """
    source = Path(source)
    if (source / EXPORT_NAME).is_file():
        if model is not None:
            raise ConfigError(
                f"--model={model} is not needed, because the export in {source} names its encoders; leave --model out."
            )
        return _import_export(source, Path(out))
    if any(source.glob("*_wan.safetensors")):
        if model is None:
            raise ConfigError(
                f"--model is needed: the cache of musubi-tuner in {source} does not name its encoders; set "
                "--model to the pipeline with which the cache was made."
            )
        return _import_musubi(source, Path(out), model)
    if pickles := sorted(path for path in source.glob("*") if path.suffix in PICKLES):
        raise DataError(
            f"SOURCE={source} contains pickles such as {pickles[0].name}, as DiffSynth writes them, and opening a pickle can "
            "run any code; run wands preprocess on the videos instead."
        )
    raise DataError(
        f"SOURCE={source} has neither {EXPORT_NAME} nor *_wan.safetensors; pass a folder that data_tools.export wrote, or "
        "the cache_directory of musubi-tuner."
    )


def _import_export(source: Path, out: Path) -> int:
    try:
        manifest = json.loads((source / EXPORT_NAME).read_text(encoding="utf-8"))
        stored = manifest["cache"]
        count = manifest["num_samples"]
        layout = manifest["layout"]
        contract = contract_of(stored)
        fingerprint = stored["fingerprint"]
        arrays = stored_arrays(stored)
        if stored.pop("digest") != digest(stored):
            raise ValueError(f"'cache' in {EXPORT_NAME} does not match its digest: it was changed")
        null_text = load((source / NULL_NAME).read_bytes())["text_embeds"]
        if manifest["format"] != EXPORT_FORMAT:
            raise ValueError(f"format={manifest['format']} in {EXPORT_NAME} must be {EXPORT_FORMAT!r}")
        if layout not in FORMATS:
            raise ValueError(f"layout={layout} in {EXPORT_NAME} must be one of {', '.join(FORMATS)}")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(
            f"{EXPORT_NAME} or {NULL_NAME} in SOURCE={source} cannot be imported ({reason(error)}); run data_tools.export again."
        ) from None
    items = _read_folder(source, arrays) if layout == "safetensors" else _read_tars(source, arrays)
    seen: set[str] = set()
    with CacheWriter(out, contract, fingerprint) as writer:
        for sample, meta in items:
            if sample.sample_id in seen:
                raise DataError(
                    f"SOURCE={source} contains the sample {sample.sample_id} twice; run data_tools.export again."
                )
            seen.add(sample.sample_id)
            if not writer.has(sample.sample_id, meta["content"]):
                writer.add(sample.sample_id, sample.arrays, meta)
        if len(seen) != count:
            raise DataError(
                f"SOURCE={source} has {len(seen):,} of {count:,} samples; restore missing files, or run data_tools.export again."
            )
        writer.commit(null_text, seen)
    return count


def _read_folder(source: Path, arrays: Sequence[ArraySpec]) -> Iterator[EncodedClip]:
    for path in sorted(source.iterdir()):
        if path.suffix in PICKLES:
            raise DataError(f"{path} is a pickle, and opening a pickle can run any code; remove the file.")
        if path.suffix == ".safetensors" and path.name != NULL_NAME:
            yield _exported(path.read_bytes(), str(path), arrays)


def _read_tars(source: Path, arrays: Sequence[ArraySpec]) -> Iterator[EncodedClip]:
    for path in sorted(source.glob("*.tar")):
        try:
            reader = TarReader(path)
        except DataError as error:
            raise DataError(f"{path}: {error}.") from None
        with reader as tar:
            for member, reason in tar.rejections:
                raise DataError(f"{path}: {member or 'archive'}: {reason}.")
            for key, members in tar.samples.items():
                _refuse_pickles(path, key, members)
                if "safetensors" not in members:
                    raise DataError(f"{path}: sample {key} has no .safetensors; run data_tools.export again.")
                content = tar.read(members["safetensors"], MAX_LATENT_BYTES)
                yield _exported(content, f"{path}: {key}.safetensors", arrays)


def _refuse_pickles(path: Path, key: str, extensions: Iterable[str]) -> None:
    """Raise a DataError if a sample of a tar has a pickle."""
    for extension in extensions:
        if f".{extension.rpartition('.')[2]}" in PICKLES:
            raise DataError(
                f"{path}: {key}.{extension} is a pickle, which can run any code when it is opened. An export has no "
                "pickles: run data_tools.export again. For shards of other trainers, use data_tools.import_shards."
            )


def _exported(content: bytes, place: str, arrays: Sequence[ArraySpec]) -> EncodedClip:
    """Return the sample in a safetensors file of an export, and verify its checksum. `place` names the file in messages."""
    try:
        header = _read_metadata(content)
        stored = load(content)
        present = [spec for spec in arrays if spec.name in stored or not spec.optional]
        tensors = {spec.name: stored[spec.name] for spec in present}
        for spec in present:
            if tensors[spec.name].dtype != spec.torch_dtype:
                raise ValueError(
                    f"{spec.name} has the dtype {tensors[spec.name].dtype}, but data_tools.export writes {spec.torch_dtype}, so "
                    "another program wrote the file"
                )
        crc32 = checksum(*(spec.store(tensors[spec.name]) for spec in present))
        if crc32 != int(header["crc32"], 16):
            raise ValueError(
                f"the checksum of the tensors is {crc32:08x}, but the header says {header['crc32']}, so the file was changed"
            )
        return Sample(json.loads(header["key"]), tensors), json.loads(header["meta"])
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{place} is damaged ({reason(error)}); run data_tools.export again.") from None


def _read_metadata(content: bytes) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file; {} if there is none."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]).get("__metadata__", {})


# ---- musubi-tuner


def _import_musubi(source: Path, out: Path, model: str) -> int:
    from wands.encoders.text import TextEncoder

    variant, std = read_variant_and_std(model)
    keys = set()
    with CacheWriter(out, variant, imported_fingerprint(model, "musubi-tuner")) as writer:
        for path in sorted(source.glob("*_wan.safetensors")):
            sample, meta = _musubi_item(path)
            try:
                check_imported_latents(sample.latents, variant, std)
                check_text_embeds(sample.text_embeds, variant)
            except DataError as error:
                raise DataError(f"{path}: {error}.") from None
            keys.add(sample.sample_id)
            if not writer.has(sample.sample_id, meta["content"]):
                meta["num_frames"] = (sample.latents.shape[1] - 1) * variant.vae_stride[0] + 1
                writer.add(sample.sample_id, sample.arrays, meta)
        writer.commit(TextEncoder.load(model).encode(""), keys)
    return len(keys)


def _musubi_item(path: Path) -> EncodedClip:
    """Read the latents in `path` and the text embeddings next to it: one clip of musubi-tuner 0.2.

    Source: kohya-ss/musubi-tuner, src/musubi_tuner/dataset (save_latent_cache_wan, save_text_encoder_output_cache_wan).
    """
    named = MUSUBI_LATENTS.fullmatch(path.name)
    if named is None:
        raise DataError(
            f"{path} is not named like musubi-tuner's files (clip_00000-081_0832x0480_wan.safetensors); remove the file."
        )
    text_path = path.with_name(f"{named['base']}_wan_te.safetensors")
    try:
        latent_bytes = path.read_bytes()
        text_bytes = text_path.read_bytes()
        latents = _tensor(latent_bytes, r"latents_\d+x\d+x\d+_\w+")
        text = _tensor(text_bytes, r"varlen_t5_(?!preservation)\w+")
        caption = _read_metadata(text_bytes).get("caption1")
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({reason(error)}); cache the clip again with musubi-tuner."
        ) from None
    except (ValueError, SafetensorError) as error:
        raise DataError(
            f"{path} or {text_path.name} is damaged or of another model ({reason(error)}); "
            "cache the clip again with musubi-tuner."
        ) from None
    meta = {
        "caption": caption,
        "source": named["base"],
        "start_seconds": int(named["first"] or 0) / MUSUBI_FPS,
        "fps": MUSUBI_FPS,
        "content": hashlib.blake2b(latent_bytes + text_bytes, digest_size=16).hexdigest(),
    }
    return Sample(path.name.removesuffix("_wan.safetensors"), {"latents": latents, "text_embeds": text}), meta


def _tensor(content: bytes, pattern: str) -> Tensor:
    tensors = load(content)
    if any(name.startswith("f_indices") for name in tensors):
        raise ValueError(
            "the file contains f_indices: musubi-tuner encoded the clip for one-frame training, which wands cannot import; "
            "encode the clip for normal training"
        )
    names = [name for name in tensors if re.fullmatch(pattern, name)]
    if len(names) != 1:
        raise ValueError(
            f"the file must contain exactly one tensor with a name like {pattern}, but the names are {', '.join(sorted(tensors))}"
        )
    return tensors[names[0]].to(torch.bfloat16)


class ImportCacheArguments(Options):
    """Convert encoded samples of another program into a latent cache.

    Examples:
        python -m data_tools.import_cache exported cache
        python -m data_tools.import_cache musubi_cache cache --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    """

    source: Annotated[Path, ARGUMENT]
    """Folder that `data_tools.export` wrote, or cache folder of musubi-tuner."""
    out: Annotated[Path, ARGUMENT]
    """Cache folder: a new folder, or the folder of an interrupted import."""
    model: str | None = None
    """Model that musubi-tuner used: pipeline folder or Hub id. Leave --model out for a folder that `data_tools.export`
    wrote."""


def _run(options: ImportCacheArguments) -> int:
    count = import_cache(options.source, options.out, options.model)
    print(f"{options.out}: {plural(count, 'sample')}")
    return 0


main = program(ImportCacheArguments, _run)

if __name__ == "__main__":
    sys.exit(main())
