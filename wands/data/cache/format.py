"""File format of a latent cache: the stored bits, checksums, the manifest, and functions that write complete files.

    manifest.json      schema version, variant, conditions, arrays, fingerprint of encoders and settings; written first
    shard-00000.h5     /samples/000000/NAME for each array of the sample, contiguous; attributes key, crc32, meta
    index.npz          arrays, keys, positions, shapes, checksums, the embedding of ""; written last

Manifest and index describe each array by name, dtype and dimensions (`wands.conditions.arrays.ArraySpec`). A cache stores bf16 as
uint16 bits, and bool as packed bits. `shards.py` reads shards and defines `CacheIndex`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from wands.conditions.arrays import ArraySpec, latents_spec
from wands.conditions.arrays import from_bits as from_bits
from wands.conditions.arrays import to_bits as to_bits
from wands.conditions.published import arrays_of, conditions_of
from wands.disk_errors import disk_number, system_number
from wands.errors import CacheError, DiskError, one_line
from wands.files import publish, read_json_object
from wands.values import check_values
from wands.variants import Variant

FORMAT = "wands latent cache"
SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.npz"
MASK_ARRAY = "token_weights"
"""Name of the array with the loss weight of each token."""


# ---- bits and digests


def checksum(*arrays: np.ndarray) -> int:
    """Return one CRC-32 checksum over the stored arrays of a sample, in the order of the manifest."""
    crc32 = 0
    for array in arrays:
        crc32 = zlib.crc32(array.data, crc32)
    return crc32


def digest(value: Any) -> str:
    """Return a hash of a JSON value as 32 hex digits. The order of the keys of an object does not change the hash."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


# ---- manifest

_Size = Annotated[int, Field(strict=True, ge=1, lt=2**20)]


@dataclass(frozen=True)
class _VariantFacts:
    """Properties of the variant in a manifest."""

    name: str
    vae_stride: tuple[_Size, _Size, _Size]
    patch_size: tuple[_Size, _Size, _Size]
    latent_channels: _Size
    text_dim: _Size


@dataclass(frozen=True)
class _Manifest:
    """Types of the values in a manifest that are read."""

    variant: _VariantFacts
    conditions: dict[str, Any]
    arrays: list[dict[str, Any]]
    fingerprint: dict[str, Any]


_MANIFEST = TypeAdapter(_Manifest)


def cache_contract(variant: Variant) -> dict[str, Any]:
    """Return the properties of a variant that decide whether a cache fits a model.

    The keys are "variant" (name and sizes), "conditions" (settings that decide the content of each condition's arrays) and
    "arrays" (descriptions, in the order of checksums and offsets).
    """
    return {
        "variant": {
            "name": variant.name,
            "vae_stride": list(variant.vae_stride),
            "patch_size": list(variant.dit.patch_size),
            "latent_channels": variant.dit.out_channels,
            "text_dim": variant.dit.text_dim,
        },
        "conditions": {condition.name: condition.fingerprint() for condition in conditions_of(variant)},
        "arrays": [spec.to_json() for spec in arrays_of(variant)],
    }


def contract_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `cache_contract` that a manifest contains."""
    return {key: manifest[key] for key in ("variant", "conditions", "arrays")}


def build_manifest(variant: Variant | Mapping[str, Any], fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `manifest.json`, with tuples as lists. "digest" is a hash of all other values.

    `variant` may also be a contract from the manifest of another cache.
    """
    contract = cache_contract(variant) if isinstance(variant, Variant) else variant
    manifest: dict[str, Any] = {"format": FORMAT, "schema_version": SCHEMA_VERSION}
    manifest |= {**contract, "fingerprint": fingerprint}
    return json.loads(json.dumps(manifest | {"digest": digest(manifest)}))


def stored_arrays(manifest: Mapping[str, Any]) -> tuple[ArraySpec, ...]:
    """Return the arrays that a manifest describes. A damaged manifest raises ValueError."""
    return tuple(ArraySpec.from_json(value) for value in manifest["arrays"])


def read_manifest(path: Path) -> dict[str, Any]:
    """Read `manifest.json` of a cache folder.

    Raises:
        CacheError: if the folder is no cache, the manifest is damaged, or its schema version is not `SCHEMA_VERSION`.
    """
    if not (path / MANIFEST_NAME).exists():
        what = f"not a latent cache (no {MANIFEST_NAME})" if path.is_dir() else "not a folder"
        raise CacheError(f"cache={path} is {what}; use the --out folder of a wands preprocess run.")
    manifest = read_json_object(
        path / MANIFEST_NAME,
        label=f"cache={path} {MANIFEST_NAME}",
        fix="restore the file, or encode the clips again.",
        error=CacheError,
    )
    if manifest.get("format") != FORMAT:
        raise CacheError(
            f"cache={path} has a {MANIFEST_NAME} of another program; use the --out folder of a wands preprocess run."
        )
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CacheError(
            f"cache={path} has schema_version={manifest.get('schema_version')}, but this version of wands "
            f"reads {SCHEMA_VERSION}; encode again with wands preprocess, or use the version of wands that wrote the cache."
        )
    try:
        check_values(_MANIFEST, manifest)
        specs = stored_arrays(manifest)
        if not specs or specs[0] != latents_spec(manifest["variant"]["latent_channels"]):
            raise ValueError("arrays: the first array must be the latents")
    except ValueError as error:
        raise CacheError(
            f"cache={path} has a damaged {MANIFEST_NAME} ({reason(error)}); restore the file, or encode the clips again."
        ) from None
    return manifest


# ---- complete files


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, even if the power fails.

    Raises:
        DiskError: if the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a link would be followed
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, len(content), error) from None


def disk_error(path: Path, wanted: int, error: Exception, cache: Path | None = None) -> DiskError:
    """Return the DiskError for a failed write of `wanted` bytes. `cache` defaults to the folder of the file."""
    free = shutil.disk_usage(path.parent).free
    problem = reason(error)
    fix = "Free some space, or choose another --out"
    if problem == os.strerror(errno.EFBIG):
        fix = "Raise the limit of file sizes (ulimit -f unlimited)"
    return DiskError(
        f"cache={cache or path.parent} cannot store {path.name} ({problem}: {wanted:,} bytes needed, {free:,} free). {fix}, "
        "and run the same command again, which keeps the finished shards.",
        number=disk_number(error),
    )


def reason(error: Exception) -> str:
    """Return the cause of an operating system or HDF5 error in a few words, such as "No space left on device".

    HDF5 hides the error number in a long text, which is searched for it.
    """
    number = system_number(error)
    return os.strerror(number) if number in errno.errorcode else one_line(error)
