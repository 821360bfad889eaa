"""Shards of a latent cache: their file names, and functions that read finished shards."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import h5py
import numpy as np

from wands.data.cache.format import ARRAYS, checksum, digest, reason
from wands.data.clips.rows import pick_license
from wands.errors import CacheError

LIBVER = ("v110", "v110")
"""(oldest, newest) version of the HDF5 file format that h5py may write. HDF5 1.10 and later can read these files. With
"latest", only the newest HDF5 could read the files."""
SHARD_FIX = (
    "delete that file and run the same `wands preprocess` command again. The command encodes the clips of the "
    "deleted file again."
)
"""Fix of a damaged shard, the end of an error message."""


@dataclass(frozen=True)
class IndexEntry:
    """Facts about one sample in a finished shard, from which `CacheIndex` is built."""

    key: str
    shard: str
    row: int
    latent_shape: tuple[int, int, int, int]
    text_len: int
    crc32: int
    num_frames: int
    fps: float
    content: str
    offsets: tuple[int, ...]
    """Position in bytes in the shard at which each array of the sample starts."""
    video: str = ""
    """Digest of what the latents were made from: the clip's file and time range, but not the caption. Empty for imported
    latents."""
    last: bool = False
    """Whether the sample contains the last window of its clip."""
    signature: tuple[int, int] = (0, 0)
    """Bits by which nearly equal videos are found (`wands.data.holdout.signature`). Zeros for shards of earlier versions."""
    display_size: tuple[str, ...] = ()
    """Displayed width and height of the source video in square pixels, each as a text such as "640" or "2560/3". Empty for
    imported latents."""
    license: str = ""
    """Licence that the source states for the clip. "" without a licence, and for shards of earlier versions."""
    clip_seconds: float = 0.0
    """Seconds of the clip from which windows are taken. 0 for imported latents and shards of earlier versions."""
    mask_sums: tuple[float, float] = (0.0, 0.0)
    """Sum of the token weights of the sample, and of the weights in its first latent frame. Zeros without a mask."""


def shard_name(number: int) -> str:
    """Return the file name of the shard with this number."""
    return f"shard-{number:05d}.h5"


def shard_number(path: Path) -> int:
    """Return the number of a shard from its path. Inverse of `shard_name`."""
    return int(path.stem.removeprefix("shard-"))


def sample_path(row: int) -> str:
    """Return the HDF5 path of sample number `row` of a shard. The path contains the number and not the sample's key,
    because keys may contain any character.
    """
    return f"samples/{row:06d}"


def open_shard(path: Path, fingerprint: str) -> h5py.File:
    """Open a finished shard for reading.

    Args:
        path: file of the shard.
        fingerprint: digest of the fingerprint (encoders and settings) in the manifest. The shard must contain the
            same digest.

    Raises:
        OSError: if the file is unreadable, or the shard belongs to a cache with another fingerprint.
    """
    # Finished shards never change, and locks fail on read-only and network file systems.
    file = h5py.File(path, "r", locking=False)
    if file.attrs.get("fingerprint") != fingerprint:
        file.close()
        raise OSError("the shard has another fingerprint (encoders and settings) than the cache")
    return file


def stored_names(group: h5py.Group) -> list[str]:
    """Return the names of the arrays in the HDF5 group of a stored sample, in the order of `ARRAYS`. "latents" and
    "text_embeds" are always included, because every sample must have these two arrays.
    """
    return [name for name in ARRAYS if name in group or name in ARRAYS[:2]]


def read_offsets(group: h5py.Group) -> tuple[int, ...]:
    """Return the position in bytes at which each array of a sample starts in the shard; 0 for an empty array.

    Raises:
        OSError: if an array is not contiguous.
    """
    arrays = [group[name] for name in stored_names(group)]
    offsets = [stored.id.get_offset() for stored in arrays]
    if any(at is None and stored.size for at, stored in zip(offsets, arrays, strict=True)):
        raise OSError(
            "another program has changed the shard: an array is stored in chunks, but wands stores each array in one piece"
        )
    return tuple(at or 0 for at in offsets)


def shard_id(entries: Sequence[IndexEntry]) -> str:
    """Return a digest of the samples of a shard: their keys, checksums and positions. Shards with different samples
    have different digests, even if the files have equal sizes.
    """
    return digest([[entry.key, entry.crc32, entry.offsets] for entry in entries])


def read_shard_id(path: Path) -> str:
    """Read the digest that a finished shard stores. The digest covers all samples of the shard, see `shard_id`.

    Raises:
        CacheError: if the shard is damaged.
    """
    with damage_named(path), h5py.File(path, "r", locking=False) as file:
        return str(file.attrs["id"])


def entries_of(file: h5py.File, shard: str) -> Iterator[IndexEntry]:
    """Yield an index entry (shape, checksum and other facts) for each sample in an open shard.

    Args:
        file: the open shard.
        shard: file name of the shard, which becomes part of each entry.
    """
    for name, group in file["samples"].items():
        yield read_entry(group, shard, int(name))


def read_entry(group: h5py.Group, shard: str, row: int) -> IndexEntry:
    """Return the index entry of one stored sample.

    Args:
        group: HDF5 group of the sample.
        shard: file name of the shard.
        row: number of the sample in the shard.
    """
    meta = json.loads(group.attrs["meta"])
    return IndexEntry(
        key=json.loads(group.attrs["key"]),
        shard=shard,
        row=row,
        latent_shape=tuple(group["latents"].shape),
        text_len=group["text_embeds"].shape[0],
        crc32=int(group.attrs["crc32"]),
        num_frames=meta["num_frames"],
        fps=meta["fps"],
        content=meta["content"],
        offsets=read_offsets(group),
        video=meta.get("video", ""),
        last=meta.get("last", False),
        signature=tuple(group.attrs.get("signature", (0, 0))),
        display_size=tuple(meta.get("display_size", ())),
        license=pick_license(meta),
        clip_seconds=meta.get("clip_seconds", 0.0),
        mask_sums=tuple(group.attrs.get("mask_sums", (0.0, 0.0))),
    )


def read_entries(path: Path, fingerprint: str) -> Iterator[IndexEntry]:
    """Yield an index entry (shape, checksum and other facts) for each sample in a finished shard.

    Args:
        path: file of the shard.
        fingerprint: digest of the fingerprint (encoders and settings) in the manifest.

    Raises:
        CacheError: if the shard is damaged or belongs to another cache.
    """
    with damage_named(path), open_shard(path, fingerprint) as file:
        yield from entries_of(file, path.name)


def read_stored(path: Path, fingerprint: str, row: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a sample of a finished shard, and verify its checksum.

    Args:
        path: file of the shard.
        fingerprint: digest of the fingerprint (encoders and settings) in the manifest.
        row: number of the sample in the shard.

    Returns:
        A pair. The first item maps the names of all arrays except text_embeds to uint16 arrays. The second item is the
        metadata of the sample.

    Raises:
        CacheError: if the shard is damaged or belongs to another cache.
    """
    with damage_named(path), open_shard(path, fingerprint) as file:
        group = file[sample_path(row)]
        arrays = {name: group[name][()] for name in stored_names(group)}
        if checksum(*arrays.values()) != int(group.attrs["crc32"]):
            raise OSError(f"wrong checksum of sample {json.loads(group.attrs['key'])}")
        del arrays["text_embeds"]
        return arrays, json.loads(group.attrs["meta"])


@contextmanager
def damage_named(path: Path, fix: str = SHARD_FIX) -> Iterator[None]:
    """Convert an error that a damaged file of a cache causes inside the `with` block to a CacheError.

    Args:
        path: the file, which the message names.
        fix: end of the message. The default is for a damaged shard.
    """
    try:
        yield
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, BadZipFile, zlib.error) as error:
        raise CacheError(f"cache={path.parent} has a damaged {path.name} ({reason(error)}); {fix}") from None
