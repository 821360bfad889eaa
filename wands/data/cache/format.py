"""File format of a latent cache: manifest, index, shards, checksums, and functions that read and write whole files.

    manifest.json      schema version, variant, fingerprint of encoders and settings; written first
    shard-00000.h5     /samples/000000/{latents, text_embeds} uint16, contiguous; attributes key, crc32, meta;
                       image_latents for models with given frames, image_embeds for models with CLIP
    index.npz          keys, places, shapes, checksums, the embedding of ""; written last

Letters: N samples, L text tokens, D text width, C latent channels, f h w latent frames, rows, columns, A arrays of
a sample.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from wands.errors import CacheError, one_line
from wands.files import publish, read_json
from wands.variants import Variant

FORMAT = "wands latent cache"
SCHEMA_VERSION = 1
MANIFEST_NAME, INDEX_NAME = "manifest.json", "index.npz"
IMAGE_ARRAYS = {"image": "image_latents", "clip": "image_embeds"}
"""Array that a condition of a variant adds to each sample; image_latents have the shape of the latents."""
ARRAYS = ("latents", "text_embeds", *IMAGE_ARRAYS.values())
"""Names of a sample's arrays in the order of checksum and offsets; all samples of a cache have the same arrays."""
LIBVER = ("v110", "v110")
"""File format that HDF5 1.10 and later read; only the newest library reads "latest"."""


# ---- bits and digests


def to_bits(tensor: Tensor) -> np.ndarray:
    """Return the bits of a bf16 tensor as uint16: numpy and HDF5 have no lossless bf16."""
    assert tensor.dtype == torch.bfloat16, f"the cache stores bf16, got {tensor.dtype}"
    return tensor.detach().cpu().contiguous().view(torch.uint16).numpy()


def from_bits(bits: np.ndarray) -> Tensor:
    """Return the bf16 tensor of uint16 bits, without copying. The array must be writable. Inverse of `to_bits`."""
    return torch.from_numpy(bits).view(torch.bfloat16)


def checksum(*arrays: np.ndarray) -> int:
    """Return the CRC-32 of a sample's bits, in the order of `ARRAYS`."""
    crc32 = 0
    for array in arrays:
        crc32 = zlib.crc32(array.data, crc32)
    return crc32


def digest(value: Any) -> str:
    """Return a hash of a JSON value, 32 hex digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def to_text(value: str) -> str:
    """Escape all characters but ASCII: file names need not be Unicode, HDF5 strings must be."""
    return json.dumps(value)


# ---- manifest


def array_names(conditions: Collection[str]) -> tuple[str, ...]:
    """Return the `ARRAYS` of samples for a variant with these conditions."""
    return (*ARRAYS[:2], *(name for condition, name in IMAGE_ARRAYS.items() if condition in conditions))


def variant_contract(variant: Variant) -> dict[str, Any]:
    """Return the facts of a variant that decide whether a cache fits; the name is for messages."""
    dit = variant.dit
    return {
        "name": variant.name,
        "vae_stride": list(variant.vae_stride),
        "patch_size": list(dit.patch_size),
        "conditions": list(variant.conditions),
        "latent_channels": dit.out_channels,
        "text_dim": dit.text_dim,
    } | ({"image_embeds": [dit.image_len, dit.image_dim]} if dit.image_dim else {})


def build_manifest(variant: Variant, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `manifest.json` as JSON returns it, with a `digest` that reveals changes."""
    manifest = plain(
        {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "variant": variant_contract(variant),
            "fingerprint": fingerprint,
        }
    )
    return manifest | {"digest": digest(manifest)}


def plain(value: Any) -> Any:
    """Return `value` after a round trip through JSON, which converts tuples to lists."""
    return json.loads(json.dumps(value))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read `manifest.json` of a cache folder.

    Raises:
        CacheError: if the folder is not a cache, is damaged, or has another schema version.
    """
    if not path.is_dir():
        raise CacheError(f"cache={path} is not a folder; give the --out of a wands preprocess.")
    if not (path / MANIFEST_NAME).exists():
        raise CacheError(
            f"cache={path} is not a latent cache (no {MANIFEST_NAME}); give the --out of a wands preprocess."
        )
    manifest = read_json(
        path / MANIFEST_NAME,
        label=f"cache={path} {MANIFEST_NAME}",
        fix="restore it or encode again.",
        error=CacheError,
    )
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CacheError(
            f"cache={path} has a {MANIFEST_NAME} of another format; give the --out of a wands preprocess."
        )
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CacheError(
            f"cache={path} has schema_version={manifest.get('schema_version')}, this wands reads "
            f"{SCHEMA_VERSION}; encode again with wands preprocess, or use the wands that wrote it."
        )
    return manifest


# ---- index


@dataclass(frozen=True)
class IndexEntry:
    """Index entry of one sample in a finished shard."""

    key: str
    shard: str
    row: int
    latent_shape: tuple[int, int, int, int]
    text_len: int
    crc32: int
    num_frames: int
    fps: float
    content: str
    video: str = ""
    """Digest of the input of the latents, without the caption; empty in caches of earlier versions."""
    last: bool = False
    """Whether the sample is the last window of its clip."""
    offsets: tuple[int, ...] = (0, 0)
    """Start of each array in the shard, in bytes."""
    display_size: tuple[str, ...] = ()
    """Width and height of the source as fractions, in square pixels; empty in caches of earlier versions."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], **stored: Any) -> IndexEntry:
        """Return the entry of a sample from its metadata and the other fields."""
        return cls(
            num_frames=meta["num_frames"],
            fps=meta["fps"],
            content=meta["content"],
            video=meta.get("video", ""),
            last=meta.get("last", False),
            display_size=tuple(meta.get("display_size", ())),
            **stored,
        )


@dataclass(frozen=True, eq=False)
class CacheIndex:
    """Facts about all samples for planning, as arrays; row i of each array belongs to `keys[i]`.

    Attributes:
        keys: sample ids, sorted.
        shard_names: file names of the shards.
        shard_bytes: int64 [shards], sizes of the shards.
        shard_ids: digests of the shards' contents; `NO_ID` for a shard of an older wands, whose offsets are unknown.
        shards: int32 [N], number of the sample's shard.
        rows: int32 [N], number of the sample in the shard.
        latent_shapes: int32 [N, 4], (C, f, h, w).
        text_lens: int32 [N], text tokens without padding.
        crc32: uint32 [N], checksum of all arrays.
        num_frames: int32 [N], pixel frames.
        fps: float32 [N], frames per second after resampling.
        offsets: int64 [N, A], start of each array in the shard in bytes, so that HDF5 is not needed for reading.
        null_text: uint16 [L, D], bf16 bits of the embedding of "".
    """

    keys: tuple[str, ...]
    shard_names: tuple[str, ...]
    shard_bytes: np.ndarray
    shards: np.ndarray
    rows: np.ndarray
    latent_shapes: np.ndarray
    text_lens: np.ndarray
    crc32: np.ndarray
    num_frames: np.ndarray
    fps: np.ndarray
    null_text: np.ndarray
    offsets: np.ndarray
    shard_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def grid_sizes(self, patch_size: Sequence[int]) -> np.ndarray:
        """Return the tokens along (frames, rows, columns) of each sample, int64 [N, 3]."""
        patch = np.asarray(patch_size, np.int64)
        latents = self.latent_shapes[:, 1:].astype(np.int64)
        assert not (latents % patch).any(), f"latents are not multiples of patch_size={tuple(patch_size)}"
        return latents // patch

    def num_tokens(self, patch_size: Sequence[int]) -> np.ndarray:
        """Return the tokens of each sample, int64 [N]."""
        return self.grid_sizes(patch_size).prod(axis=1)

    @classmethod
    def build(cls, path: Path, entries: Sequence[IndexEntry], null_text: np.ndarray) -> CacheIndex:
        """Return the index of entries in finished shards of a folder, sorted by key."""
        entries = sorted(entries, key=lambda entry: entry.key)
        names = tuple(sorted({entry.shard for entry in entries}))
        number = {name: i for i, name in enumerate(names)}
        return cls(
            keys=tuple(entry.key for entry in entries),
            shard_names=names,
            shard_bytes=np.array([(path / name).stat().st_size for name in names], np.int64),
            shards=np.array([number[entry.shard] for entry in entries], np.int32),
            rows=np.array([entry.row for entry in entries], np.int32),
            latent_shapes=np.array([entry.latent_shape for entry in entries], np.int32).reshape(-1, 4),
            text_lens=np.array([entry.text_len for entry in entries], np.int32),
            crc32=np.array([entry.crc32 for entry in entries], np.uint32),
            num_frames=np.array([entry.num_frames for entry in entries], np.int32),
            fps=np.array([entry.fps for entry in entries], np.float32),
            null_text=null_text,
            offsets=np.array([entry.offsets for entry in entries] or np.zeros((0, 2)), np.int64),
            shard_ids=tuple(read_shard_id(path / name) for name in names),
        )

    def to_bytes(self) -> bytes:
        """Return the content of the npz file. Strings are stored as NUL-separated UTF-8, so that no pickle is needed."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        buffer = io.BytesIO()
        arrays |= {name: _join(getattr(self, name)) for name in TEXTS}
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_file(cls, path: Path) -> CacheIndex:
        """Read `index.npz`.

        Raises:
            CacheError: if the file is damaged or lacks an array.
        """
        try:
            with np.load(path, allow_pickle=False) as npz:
                later = {"offsets", "shard_ids"} - set(npz.files)  # an index of an older wands
                arrays = {name: npz[name] for name in cls.__dataclass_fields__ if name not in later}
            if later:
                arrays["offsets"] = np.zeros((len(arrays["rows"]), 2), np.int64)
                arrays["shard_ids"] = _join([NO_ID] * len(arrays["shard_bytes"]))
            index = cls(**{**arrays, **{name: _split(arrays[name]) for name in TEXTS}})
            wrong = {name for name in SAMPLE_ARRAYS if len(arrays[name]) != len(index)}
            if wrong or not len(index.shard_bytes) == len(index.shard_names) == len(index.shard_ids):
                raise ValueError("arrays of different lengths")
        except (
            *(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error),
            RuntimeError,  # zipfile does not know the method or password
        ) as error:
            raise CacheError(
                f"cache={path.parent} has a damaged {path.name} ({reason(error)}); run the same wands "
                "preprocess again, it rebuilds the index from the shards."
            ) from None
        return index


TEXTS = ("keys", "shard_names", "shard_ids")
SAMPLE_ARRAYS = ("shards", "rows", "latent_shapes", "text_lens", "crc32", "num_frames", "fps", "offsets")
NO_ID = "-"


def _join(texts: Sequence[str]) -> np.ndarray:
    assert not any("\0" in text for text in texts), "a key cannot contain NUL"
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _split(array: np.ndarray) -> tuple[str, ...]:
    text = array.tobytes().decode("utf-8", "surrogateescape")
    return tuple(text.split("\0")) if text else ()


# ---- shards


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.h5"


def shard_number(path: Path) -> int:
    """Return the number of a shard from its path. Inverse of `shard_name`."""
    return int(path.stem.removeprefix("shard-"))


def sample_path(row: int) -> str:
    """Return the HDF5 path of a sample in its shard: a number, because a key may contain any character."""
    return f"samples/{row:06d}"


def open_shard(path: Path, fingerprint: str) -> h5py.File:
    """Open a finished shard for reading.

    Args:
        path: the file.
        fingerprint: digest of the manifest's fingerprint; the shard must have the same.

    Raises:
        OSError: if the file is unreadable or a shard of another cache.
    """
    # Finished shards never change, and locks fail on read-only and network file systems.
    file = h5py.File(path, "r", locking=False)
    if file.attrs.get("fingerprint") != fingerprint:
        file.close()
        raise OSError("it belongs to a cache with another fingerprint")
    return file


def stored_names(group: h5py.Group) -> list[str]:
    """Return the `ARRAYS` of a stored sample; latents and text are required."""
    return [name for name in ARRAYS if name in group or name in ARRAYS[:2]]


def read_offsets(group: h5py.Group) -> tuple[int, ...]:
    """Return the start of each array of a sample in its file, in bytes; 0 for an empty array.

    Raises:
        OSError: if an array is not contiguous.
    """
    arrays = [group[name] for name in stored_names(group)]
    offsets = [stored.id.get_offset() for stored in arrays]
    if any(at is None and stored.size for at, stored in zip(offsets, arrays, strict=True)):
        raise OSError("not stored in one piece")
    return tuple(at or 0 for at in offsets)


def shard_id(entries: Sequence[IndexEntry]) -> str:
    """Return a digest that distinguishes a shard from any other, also of equal size."""
    return digest([[entry.key, entry.crc32, entry.offsets] for entry in entries])


def read_shard_id(path: Path) -> str:
    """Return the `shard_id` stored in a finished shard, or `NO_ID`."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return str(file.attrs.get("id", NO_ID))
    except OSError as error:
        raise CacheError(_damaged_shard(path, error)) from None


def read_entries(path: Path, fingerprint: str) -> Iterator[IndexEntry]:
    """Yield the entries of a finished shard.

    Raises:
        CacheError: if the shard is damaged or belongs to another cache.
    """
    try:
        with open_shard(path, fingerprint) as file:
            for name, group in file["samples"].items():
                yield IndexEntry.of(
                    json.loads(group.attrs["meta"]),
                    key=json.loads(group.attrs["key"]),
                    shard=path.name,
                    row=int(name),
                    latent_shape=tuple(group["latents"].shape),
                    text_len=group["text_embeds"].shape[0],
                    crc32=int(group.attrs["crc32"]),
                    offsets=read_offsets(group),
                )
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise CacheError(_damaged_shard(path, error)) from None


def read_stored(path: Path, fingerprint: str, row: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the uint16 arrays of a sample by name, without the text, and its metadata; the checksum is verified.

    Raises:
        CacheError: if the shard is damaged or belongs to another cache.
    """
    try:
        with open_shard(path, fingerprint) as file:
            group = file[sample_path(row)]
            arrays = {name: group[name][()] for name in stored_names(group)}
            if checksum(*arrays.values()) != int(group.attrs["crc32"]):
                raise OSError(f"wrong checksum of {json.loads(group.attrs['key'])}")
            del arrays["text_embeds"]
            return arrays, json.loads(group.attrs["meta"])
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise CacheError(_damaged_shard(path, error)) from None


def _damaged_shard(path: Path, error: Exception) -> str:
    return (
        f"cache={path.parent} has a damaged {path.name} ({reason(error)}); delete that file and run the "
        "same wands preprocess again, which encodes its clips again."
    )


# ---- whole files


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that exists complete or not at all, even after a power failure.

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
    """Return the error of a failed write: no space, quota, file size limit, or a read-only disk.

    Args:
        path: the file.
        wanted: size of the write in bytes.
        error: the system's error.
        cache: folder of the cache. Default: folder of the file.
    """
    free = shutil.disk_usage(path.parent).free
    return CacheError(
        f"cache={cache or path.parent} cannot take {path.name} ({reason(error)}: {wanted:,} bytes wanted, "
        f"{free:,} free); free some space or choose another --out, then run the same command again; finished "
        "shards are kept."
    )


def reason(error: Exception) -> str:
    """Return the cause of an error in a few words. HDF5 hides the system's error number in a page of text."""
    number = getattr(error, "errno", None) or next(iter(re.findall(r"errno = (\d+)", str(error))), None)
    if number and int(number) in errno.errorcode:
        return os.strerror(int(number))
    return one_line(error)
