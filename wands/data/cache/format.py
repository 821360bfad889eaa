"""What lies in a cache folder and how each file is read and written whole: manifest, index, shard, checksums.

    manifest.json      schema version, variant, fingerprint of encoders and settings; written first
    shard-00000.h5     /samples/000000/{latents, text_embeds} uint16, contiguous; attributes key, crc32, meta;
                       for models that are given frames also image_latents, for those with CLIP image_embeds
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

from wands.errors import CacheError
from wands.files import publish
from wands.variants import Variant

FORMAT = "wands latent cache"
SCHEMA_VERSION = 1
MANIFEST_NAME, INDEX_NAME = "manifest.json", "index.npz"
IMAGE_ARRAYS = {"image": "image_latents", "clip": "image_embeds"}
"""What a condition of a variant adds to each sample; image_latents have the shape of the latents."""
ARRAYS = ("latents", "text_embeds", *IMAGE_ARRAYS.values())
"""Names of a sample's arrays in the order of checksum and offsets; every sample of a cache has the same ones."""
LIBVER = ("v110", "v110")
"""File format that HDF5 1.10 and later read; "latest" would write what only the newest library opens."""


# ---- bits and digests


def to_bits(tensor: Tensor) -> np.ndarray:
    """The bits of a bf16 tensor as uint16: neither numpy nor HDF5 has a bf16 that survives a round trip."""
    assert tensor.dtype == torch.bfloat16, f"the cache stores bf16, got {tensor.dtype}"
    return tensor.detach().cpu().contiguous().view(torch.uint16).numpy()


def from_bits(bits: np.ndarray) -> Tensor:
    """Inverse of `to_bits`; the array must be writable and is shared, not copied."""
    return torch.from_numpy(bits).view(torch.bfloat16)


def checksum(*arrays: np.ndarray) -> int:
    """CRC-32 of a sample's bits, in the order of `ARRAYS`."""
    found = 0
    for array in arrays:
        found = zlib.crc32(array.data, found)
    return found


def digest(value: Any) -> str:
    """32 hex digits that name a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def to_text(value: str) -> str:
    """`value` with all but ASCII escaped: file names need not be Unicode, HDF5 strings must."""
    return json.dumps(value)


# ---- manifest


def array_names(conditions: Collection[str]) -> tuple[str, ...]:
    """Which of `ARRAYS` the samples for a variant with these conditions have."""
    return (*ARRAYS[:2], *(name for condition, name in IMAGE_ARRAYS.items() if condition in conditions))


def variant_contract(variant: Variant) -> dict[str, Any]:
    """What of a variant decides whether a cache fits it; the name is for the reader of the message."""
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
    """The content of `manifest.json`, as JSON will give it back; `digest` tells whether it was altered since."""
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
    """`value` after a trip through JSON, so that tuples equal the lists they come back as."""
    return json.loads(json.dumps(value))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read `manifest.json` of a cache folder.

    Raises:
        CacheError: no folder, not a cache, damaged, or written by a version with another schema.
    """
    if not path.is_dir():
        raise CacheError(f"cache={path} is not a folder; give the --out of a wands preprocess.")
    try:
        manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CacheError(
            f"cache={path} is not a latent cache (no {MANIFEST_NAME}); give the --out of a wands preprocess."
        ) from None
    except (OSError, ValueError) as error:
        raise CacheError(
            f"cache={path} has an unreadable {MANIFEST_NAME} ({reason(error)}); restore it or encode again."
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CacheError(
            f"cache={path} has a {MANIFEST_NAME} of something else; give the --out of a wands preprocess."
        )
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CacheError(
            f"cache={path} has schema_version={manifest.get('schema_version')}, this wands reads "
            f"{SCHEMA_VERSION}; encode again with wands preprocess, or use the wands that wrote it."
        )
    return manifest


def differences(ours: Any, theirs: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Every place where two nested JSON values differ: (dotted name, value in ours, value in theirs)."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for key in sorted(ours.keys() | theirs.keys())
            for found in differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if ours == theirs else [(name, ours, theirs)]


def first_difference(ours: Any, theirs: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first of the `differences`."""
    return next(iter(differences(ours, theirs, name)), None)


# ---- index


@dataclass(frozen=True)
class IndexEntry:
    """One sample of a finished shard."""

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
    """Digest of what the latents are made from, without the caption; empty in caches of earlier versions."""
    last: bool = False
    """No other window of its clip follows."""
    offsets: tuple[int, ...] = (0, 0)
    """Where each array begins in the shard, in bytes."""
    display_size: tuple[str, ...] = ()
    """Width and height of the source as fractions, in square pixels; empty in caches of earlier versions."""

    @classmethod
    def of(
        cls,
        key: str,
        shard: str,
        row: int,
        latent_shape: tuple[int, ...],
        text_len: int,
        crc32: int,
        meta: Mapping[str, Any],
        offsets: tuple[int, ...],
    ) -> IndexEntry:
        """From what a shard holds of a sample; `meta` is its metadata."""
        c, f, h, w = latent_shape
        return cls(
            key=key,
            shard=shard,
            row=row,
            latent_shape=(c, f, h, w),
            text_len=text_len,
            crc32=crc32,
            num_frames=meta["num_frames"],
            fps=meta["fps"],
            content=meta["content"],
            video=meta.get("video", ""),
            last=meta.get("last", False),
            offsets=offsets,
            display_size=tuple(meta.get("display_size", ())),
        )


@dataclass(frozen=True, eq=False)
class CacheIndex:
    """What planning needs of every sample, as arrays; row i of each belongs to `keys[i]`.

    Attributes:
        keys: sample ids, sorted.
        shard_names: file names of the shards.
        shard_bytes: int64 [shards], their sizes.
        shard_ids: digests of what they hold; `NO_ID` for one of an older wands, whose offsets are not known.
        shards: int32 [N], which shard holds the sample.
        rows: int32 [N], its number inside the shard.
        latent_shapes: int32 [N, 4], (C, f, h, w).
        text_lens: int32 [N], text tokens kept.
        crc32: uint32 [N], of the bits of all arrays.
        num_frames: int32 [N], pixel frames.
        fps: float32 [N], frames per second after resampling.
        offsets: int64 [N, A], where each array begins in the shard, in bytes: HDF5 need not be asked.
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
        """Tokens along (frames, rows, columns) of each sample, int64 [N, 3]."""
        patch = np.asarray(patch_size, np.int64)
        latents = self.latent_shapes[:, 1:].astype(np.int64)
        assert not (latents % patch).any(), f"latents are not multiples of patch_size={tuple(patch_size)}"
        return latents // patch

    def num_tokens(self, patch_size: Sequence[int]) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        return self.grid_sizes(patch_size).prod(axis=1)

    @classmethod
    def build(cls, path: Path, entries: Sequence[IndexEntry], null_text: np.ndarray) -> CacheIndex:
        """Index the entries of finished shards in `path`, sorted by key."""
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
        """The npz file. Strings travel as NUL-separated UTF-8, so that no pickle is involved."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        buffer = io.BytesIO()
        arrays |= {name: _join(getattr(self, name)) for name in TEXTS}
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_file(cls, path: Path) -> CacheIndex:
        """Read `index.npz`.

        Raises:
            CacheError: the file is damaged or lacks an array.
        """
        try:
            with np.load(path, allow_pickle=False) as npz:
                later = {"offsets", "shard_ids"} - set(npz.files)  # an index of an older wands
                arrays = {name: npz[name] for name in cls.__dataclass_fields__ if name not in later}
            if later:
                arrays["offsets"] = np.zeros((len(arrays["rows"]), 2), np.int64)
                arrays["shard_ids"] = _join([NO_ID] * len(arrays["shard_bytes"]))
            index = cls(**{**arrays, **{name: _split(arrays[name]) for name in TEXTS}})
            lengths = {
                len(arrays[n])
                for n in (
                    "shards",
                    "rows",
                    "latent_shapes",
                    "text_lens",
                    "crc32",
                    "num_frames",
                    "fps",
                    "offsets",
                )
            }
            shards = {len(index.shard_bytes), len(index.shard_names), len(index.shard_ids)}
            if lengths != {len(index)} or len(shards) != 1:
                raise ValueError("arrays of different lengths")
        except (
            *(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error),
            RuntimeError,  # a method or a password that zipfile does not know
        ) as error:
            raise CacheError(
                f"cache={path.parent} has a damaged {path.name} ({reason(error)}); run the same wands "
                "preprocess again, it rebuilds the index from the shards."
            ) from None
        return index


TEXTS = ("keys", "shard_names", "shard_ids")
NO_ID = "-"


def _join(texts: Sequence[str]) -> np.ndarray:
    assert not any("\0" in text for text in texts), "a key cannot contain NUL"
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _split(array: np.ndarray) -> tuple[str, ...]:
    text = array.tobytes().decode("utf-8", "surrogateescape")
    return tuple(text.split("\0")) if text else ()


# ---- shards


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.h5"


def shard_number(path: Path) -> int:
    """Inverse of `shard_name`."""
    return int(path.stem.removeprefix("shard-"))


def sample_path(row: int) -> str:
    """HDF5 path of a sample in its shard: a number, because a key may hold any character."""
    return f"samples/{row:06d}"


def open_shard(path: Path, fingerprint: str) -> h5py.File:
    """Open a finished shard for reading.

    Args:
        path: the file.
        fingerprint: digest of the manifest's fingerprint, which the shard must carry too.

    Raises:
        OSError: unreadable, or a shard of another cache.
    """
    # Finished shards never change, and locks fail on read-only and network file systems.
    file = h5py.File(path, "r", locking=False)
    if file.attrs.get("fingerprint") != fingerprint:
        file.close()
        raise OSError("it belongs to a cache with another fingerprint")
    return file


def stored_names(group: h5py.Group) -> list[str]:
    """Which of `ARRAYS` a sample has; each has latents and text, or is damaged."""
    return [name for name in ARRAYS if name in group or name in ARRAYS[:2]]


def read_offsets(group: h5py.Group) -> tuple[int, ...]:
    """Where each array of a sample begins in its file, in bytes; 0 for an empty one.

    Raises:
        OSError: one is not stored in one piece.
    """
    arrays = [group[name] for name in stored_names(group)]
    found = [stored.id.get_offset() for stored in arrays]
    if any(at is None and stored.size for at, stored in zip(found, arrays, strict=True)):
        raise OSError("not stored in one piece")
    return tuple(at or 0 for at in found)


def shard_id(entries: Sequence[IndexEntry]) -> str:
    """What tells a shard from any other, of the same size too."""
    return digest([[entry.key, entry.crc32, entry.offsets] for entry in entries])


def read_shard_id(path: Path) -> str:
    """The `shard_id` that a finished shard carries, or `NO_ID`."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return str(file.attrs.get("id", NO_ID))
    except OSError as error:
        raise CacheError(_damaged_shard(path, error)) from None


def read_entries(path: Path, fingerprint: str) -> Iterator[IndexEntry]:
    """Every sample of a finished shard.

    Raises:
        CacheError: the shard is damaged or of another cache.
    """
    try:
        with open_shard(path, fingerprint) as file:
            for name, group in file["samples"].items():
                yield IndexEntry.of(
                    json.loads(group.attrs["key"]),
                    path.name,
                    int(name),
                    group["latents"].shape,
                    group["text_embeds"].shape[0],
                    int(group.attrs["crc32"]),
                    json.loads(group.attrs["meta"]),
                    read_offsets(group),
                )
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise CacheError(_damaged_shard(path, error)) from None


def read_stored(path: Path, fingerprint: str, row: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """All arrays of one sample of a finished shard but the text, checked: uint16, by name, and the metadata.

    Raises:
        CacheError: the shard is damaged or of another cache.
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
        "same wands preprocess again: its clips are then encoded once more."
    )


# ---- whole files


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it exists complete or not at all, even after a power cut.

    Raises:
        CacheError: the disk is full or refuses.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, len(content), error) from None


def disk_error(path: Path, wanted: int, error: Exception, cache: Path | None = None) -> CacheError:
    """The sentence for a write that failed: no space, a quota, a file size limit, a read-only disk.

    Args:
        path: the file.
        wanted: bytes.
        error: what the system said.
        cache: folder of the cache; default: the file's.
    """
    free = shutil.disk_usage(path.parent).free
    return CacheError(
        f"cache={cache or path.parent} cannot take {path.name} ({reason(error)}: {wanted:,} bytes wanted, "
        f"{free:,} free); free some space or choose another --out, then run the same command again: finished "
        "shards are kept."
    )


def reason(error: Exception) -> str:
    """The cause in a few words. HDF5 hides the system's error number in a page of text."""
    number = getattr(error, "errno", None) or next(iter(re.findall(r"errno = (\d+)", str(error))), None)
    if number and int(number) in errno.errorcode:
        return os.strerror(int(number))
    return " ".join(str(error).split()) or type(error).__name__
