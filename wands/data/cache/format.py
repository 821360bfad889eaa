"""File format of a latent cache: the stored bits, checksums, the manifest, and functions that write complete files.

    manifest.json      schema version, variant, fingerprint of encoders and settings; written first
    shard-00000.h5     /samples/000000/{latents, text_embeds} uint16, contiguous; attributes key, crc32, meta.
                       Also image_latents for models with conditioning frames, and image_embeds for models with CLIP.
                       Also token_weights, and the attribute mask_sums (sums of the weights), for samples with a loss mask.
    index.npz          keys, positions, shapes, checksums, the embedding of ""; written last

A cache stores bf16 tensors as uint16 arrays of their bits. `shards.py` defines functions that read shards,
and the class of the index (`CacheIndex`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wands.errors import CacheError, one_line
from wands.files import publish, read_json_object
from wands.variants import Variant

FORMAT = "wands latent cache"
SCHEMA_VERSION = 1
MANIFEST_NAME, INDEX_NAME = "manifest.json", "index.npz"
IMAGE_ARRAYS = {"image": "image_latents", "clip": "image_embeds"}
"""Maps a condition of a variant to the array that the condition adds to each sample. image_latents have the shape of
the latents."""
MASK_ARRAY = "token_weights"
"""Name of the array that only samples with a mask have: the weight of each token in the loss, [frames, rows, columns] in
tokens. It is bf16 as every other array, so that logs, checksums and exports need no second dtype. bf16 stores 0 and 1 exactly,
and other weights with an error of at most 0.4 %."""
ARRAYS = ("latents", "text_embeds", *IMAGE_ARRAYS.values(), MASK_ARRAY)
"""Names of the arrays that a sample can have, in the order in which checksums and offsets use them. All samples of a
cache have the same arrays, except for `MASK_ARRAY`."""


# ---- bits and digests


def to_bits(tensor: Tensor) -> np.ndarray:
    """Return the bits of a bf16 tensor as a uint16 array, because numpy and HDF5 have no bf16."""
    assert tensor.dtype == torch.bfloat16, f"the cache stores bf16, got {tensor.dtype}"
    return tensor.detach().cpu().contiguous().view(torch.uint16).numpy()


def from_bits(bits: np.ndarray) -> Tensor:
    """Return the bf16 tensor with the given uint16 bits, without copying. The array must be writable. Inverse of
    `to_bits`.
    """
    return torch.from_numpy(bits).view(torch.bfloat16)


def checksum(*arrays: np.ndarray) -> int:
    """Return one CRC-32 checksum over the bits of all arrays of a sample. The arrays must be in the order of
    `ARRAYS`.
    """
    crc32 = 0
    for array in arrays:
        crc32 = zlib.crc32(array.data, crc32)
    return crc32


def digest(value: Any) -> str:
    """Return a hash of a JSON value as 32 hex digits. The order of the keys of an object does not change the hash."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


# ---- manifest


def array_names(conditions: Collection[str]) -> tuple[str, ...]:
    """Return the names of the arrays that every sample of a cache has, in the order in which checksums use the arrays.

    Args:
        conditions: conditions (inputs other than noise) of the model variant for which the cache is made, such as "image"
            (`Variant.conditions`).
    """
    return (*ARRAYS[:2], *(name for condition, name in IMAGE_ARRAYS.items() if condition in conditions))


def variant_contract(variant: Variant) -> dict[str, Any]:
    """Return the properties of a variant (published Wan model) that decide whether a cache fits a model, such as "vae_stride"
    and "text_dim". The key "name" contains the variant's name for error messages.
    """
    dit = variant.dit
    return {
        "name": variant.name,
        "vae_stride": list(variant.vae_stride),
        "patch_size": list(dit.patch_size),
        "conditions": list(variant.conditions),
        "latent_channels": dit.out_channels,
        "text_dim": dit.text_dim,
    } | ({"image_embeds": [dit.image_len, dit.image_dim]} if dit.image_dim else {})


def build_manifest(variant: Variant | Mapping[str, Any], fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `manifest.json`. The value of "digest" is a hash of all other values, so that a damaged
    or edited file is noticed.

    Tuples are converted to lists, so that the result equals the content of the written file.

    Args:
        variant: variant of the model, or the dict of its properties (see `variant_contract`), for example from the manifest of
            another cache.
        fingerprint: fingerprint of encoders and settings, as nested JSON values.
    """
    contract = variant_contract(variant) if isinstance(variant, Variant) else variant
    manifest: dict[str, Any] = {"format": FORMAT, "schema_version": SCHEMA_VERSION}
    manifest |= {"variant": contract, "fingerprint": fingerprint}
    return json.loads(json.dumps(manifest | {"digest": digest(manifest)}))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read `manifest.json` of a cache folder.

    Raises:
        CacheError: if the folder is not a cache, the manifest is damaged, or its schema version is not
            `SCHEMA_VERSION`.
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
    return manifest


# ---- complete files


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, even if the power fails.

    Raises:
        CacheError: if the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, len(content), error) from None


def disk_error(path: Path, wanted: int, error: Exception, cache: Path | None = None) -> CacheError:
    """Return the CacheError for a failed write, for example because the disk is full or read-only.

    Args:
        path: file that could not be written.
        wanted: size of the write in bytes.
        error: error that the operating system or HDF5 raised.
        cache: folder of the cache, for the message. Default: folder of the file.
    """
    free, problem = shutil.disk_usage(path.parent).free, reason(error)
    fix = "Free some space, or choose another --out"
    if problem == os.strerror(errno.EFBIG):
        fix = "Raise the limit of file sizes (ulimit -f unlimited)"
    return CacheError(
        f"cache={cache or path.parent} cannot store {path.name} ({problem}: {wanted:,} bytes needed, {free:,} free). {fix}, "
        "and run the same command again, which keeps the finished shards."
    )


def reason(error: Exception) -> str:
    """Return the cause of an operating system or HDF5 error in a few words, such as "No space left on device".

    HDF5 hides the operating system's error number in a long text, so this function searches the text for the number.
    """
    number = getattr(error, "errno", None) or next(iter(re.findall(r"errno = (\d+)", str(error))), None)
    if number and int(number) in errno.errorcode:
        return os.strerror(int(number))
    return one_line(error)
