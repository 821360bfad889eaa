"""Read the arrays of `index.npz`, after a comparison of the claimed sizes and types with the file.

A damaged file could otherwise claim more memory than any machine has.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import numpy as np

from wands.errors import failed_rules

COLUMNS: Mapping[str, tuple[type[np.generic], int]] = {
    "keys": (np.uint8, 1),
    "shard_names": (np.uint8, 1),
    "shard_bytes": (np.int64, 1),
    "shards": (np.int32, 1),
    "rows": (np.int32, 1),
    "latent_shapes": (np.int32, 2),
    "free_lens": (np.int32, 2),
    "crc32": (np.uint32, 1),
    "num_frames": (np.int32, 1),
    "fps": (np.float32, 1),
    "null_text": (np.uint16, 2),
    "offsets": (np.int64, 2),
    "shard_ids": (np.uint8, 1),
    "signatures": (np.uint64, 2),
    "license_names": (np.uint8, 1),
    "licenses": (np.int32, 1),
    "mask_sums": (np.float64, 2),
    "arrays": (np.uint8, 1),
}
"""Maps each array of the file to its (type of the items, number of dimensions)."""


def read_index_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of `index.npz`.

    Raises:
        OSError, KeyError, ValueError, RuntimeError, EOFError, BadZipFile: if the file is damaged, or an array is missing or has
            another type.
    """
    content = path.read_bytes()  # ZipFile would call a failed read of a file "not a zip file"
    size = len(content)
    arrays = {}
    with ZipFile(io.BytesIO(content)) as archive:
        for name, (item, num_dims) in COLUMNS.items():
            member = archive.getinfo(f"{name}.npy")
            # A compressed array could fill the memory, and a wrong size could claim petabytes.
            if member.compress_type != ZIP_STORED or member.file_size != member.compress_size:
                raise ValueError(f"the array {name} is compressed, but wands stores it as it is")
            if member.file_size > size:
                raise ValueError(f"the array {name} claims {member.file_size:,} bytes of a file of {size:,}")
            arrays[name] = _parse_array(name, archive.read(member), item, num_dims)
    return arrays


def _parse_array(name: str, content: bytes, item: type[np.generic], num_dims: int) -> np.ndarray:
    stream = io.BytesIO(content)
    np.lib.format.read_magic(stream)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype != item or len(shape) != num_dims:
        raise ValueError(
            f"the array {name} has dtype {dtype} and {len(shape)} dimensions, but wands writes {item.__name__} and {num_dims}"
        )
    num_bytes = len(content) - stream.tell()
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"the array {name} claims the shape {shape}, but has {num_bytes:,} bytes")
    values = np.frombuffer(content, dtype, offset=stream.tell())
    return values.reshape(shape, order="F" if is_fortran else "C").copy()  # writable, as PyTorch wants it


def check_index_values(arrays: Mapping[str, np.ndarray], num_shards: int, num_licenses: int) -> None:
    """Check the values of an index that training computes with. A value out of bounds raises ValueError."""
    shards, fps, licenses = (arrays[name] for name in ("shards", "fps", "licenses"))
    sizes = arrays["latent_shapes"].astype(np.float64).prod(axis=1) * 2  # bf16
    in_shards = bool(np.all((shards >= 0) & (shards < num_shards)))
    sums = arrays["mask_sums"]
    rules = {
        "shards: a sample is in a shard that is not listed": not in_shards,
        "rows: a position in a shard is negative": np.any(arrays["rows"] < 0),
        "offsets: a byte position is negative": np.any(arrays["offsets"] < 0),
        "latent_shapes: a size is not positive": np.any(arrays["latent_shapes"] < 1),
        "latent_shapes: latents are larger than their shard": in_shards
        and np.any(sizes > arrays["shard_bytes"][shards]),
        "free_lens: a length is negative": np.any(arrays["free_lens"] < 0),
        "num_frames: a sample has no frames": np.any(arrays["num_frames"] < 1),
        "fps: a frame rate is not a positive number": not np.all(np.isfinite(fps) & (fps > 0)),
        "licenses: a license is not listed": np.any((licenses < -1) | (licenses >= num_licenses)),
        "mask_sums: a sum is negative or not finite": not np.all(np.isfinite(sums) & (sums >= 0)),
    }
    if problems := failed_rules(rules):
        raise ValueError("; ".join(problems))
