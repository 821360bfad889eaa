"""Shards of a latent cache and their index: file names, functions that read finished shards, and facts about all samples."""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from zipfile import BadZipFile

import h5py
import numpy as np
from pydantic import Field, TypeAdapter
from torch import Tensor

from wands.conditions.arrays import ArraySpec, ClipSize
from wands.data.cache.format import checksum, digest, reason
from wands.data.cache.index_file import check_index_values, read_index_arrays
from wands.data.clips.rows import pick_license
from wands.disk_errors import disk_number, read_patiently, unreadable
from wands.errors import CacheError
from wands.own_files import open_regular_file
from wands.values import check_values

T = TypeVar("T")
LIBVER = ("v110", "v110")
"""(oldest, newest) HDF5 format to write, for HDF5 1.10 and later. With "latest", only the newest HDF5 could read the files."""
TEXTS = ("keys", "shard_names", "shard_ids", "license_names")
"""Arrays of `CacheIndex` that contain texts."""
_SHARD_NAME = re.compile(r"shard-\d{5,}\.h5")
SHARD_FIX = (
    "delete that file and run the same `wands preprocess` command again. The command encodes the clips of the "
    "deleted file again."
)
"""End of an error message about a damaged shard. It says how to repair the cache."""


_Positive = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Bits = Annotated[int, Field(strict=True, ge=0, lt=2**64)]


@dataclass(frozen=True)
class _Meta:
    """Attributes and metadata of a stored sample that become part of the index. A shard may store more metadata."""

    crc32: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    signature: tuple[_Bits, _Bits]
    mask_sums: tuple[_Positive, _Positive]
    num_frames: Annotated[int, Field(strict=True, ge=1, lt=2**31)]
    fps: Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
    content: str
    video: str = ""
    last: bool = False
    clip_seconds: _Positive = 0.0
    display_size: tuple[Annotated[str, Field(pattern=r"^\d{1,9}(/[1-9]\d{0,8})?$")], ...] = ()
    matrix: str = ""


_META = TypeAdapter(_Meta)


@dataclass(frozen=True)
class IndexEntry:
    """Facts about one sample in a finished shard, from which `CacheIndex` is built."""

    key: str
    shard: str
    row: int
    latent_shape: tuple[int, int, int, int]
    free_lens: tuple[int, ...]
    """Sizes of the dimensions that the size of the sample does not decide, such as the number of text tokens."""
    crc32: int
    num_frames: int
    fps: float
    content: str
    offsets: tuple[int, ...]
    """Position in bytes in the shard at which each array of the cache starts; 0 for an array that the sample lacks."""
    video: str = ""
    """Digest of file, time range, crop and mask, from which the latents were made. Empty for imported latents."""
    last: bool = False
    """Whether the sample contains the last window of its clip."""
    signature: tuple[int, int] = (0, 0)
    """Bits by which nearly equal videos are found (`wands.data.holdout.signature`)."""
    display_size: tuple[str, ...] = ()
    """Width and height in square pixels as texts such as "640" or "2560/3". Empty for imported latents."""
    matrix: str = ""
    """`VideoInfo.matrix` of the source video. Empty for small videos."""
    license: str = ""
    """License that the source states for the clip; "" without a license."""
    clip_seconds: float = 0.0
    """Length of the clip in seconds, without the parts of the file outside the clip's time range. 0 for imported latents."""
    mask_sums: tuple[float, float] = (0.0, 0.0)
    """(sum of the weights of all tokens of the sample, sum of the weights of the tokens in its first latent frame). The
    weights are the values of the sample's mask. (0, 0) for a sample without a mask."""


def shard_name(number: int) -> str:
    """Return the file name of the shard with this number."""
    return f"shard-{number:05d}.h5"


def shard_number(path: Path) -> int:
    """Return the number of a shard from its path. Inverse of `shard_name`."""
    return int(path.stem.removeprefix("shard-"))


def sample_path(row: int) -> str:
    """Return the HDF5 path of sample `row`: a number, because keys may contain any character."""
    return f"samples/{row:06d}"


def open_hdf5(path: Path, mode: Literal["r", "w"] = "r") -> h5py.File:
    """Open an HDF5 file without the lock of HDF5, which fails on read-only file systems and on those without locks.

    Raises:
        WandsError: if the file is no regular file, such as a named pipe, which would block.
        OSError: if the file cannot be opened, or is no HDF5 file.
    """
    if mode == "r":
        os.close(open_regular_file(path, os.O_RDONLY))
        return h5py.File(path, locking=False)
    return h5py.File(path, "w", libver=LIBVER, locking=False)


def open_shard(path: Path, fingerprint: str) -> h5py.File:
    """Open a finished shard for reading. Raise OSError if it is unreadable or has another fingerprint digest."""
    file = open_hdf5(path)
    if file.attrs.get("fingerprint") != fingerprint:
        file.close()
        raise OSError("the shard belongs to another cache: it was made with other encoders or settings")
    return file


def sample_rows(file: h5py.File) -> list[int]:
    """Return the numbers of the samples in an open shard."""
    return [int(name) for name in _child(file, "samples", h5py.Group)]


def open_sample(
    file: h5py.File, row: int, arrays: Sequence[ArraySpec]
) -> tuple[h5py.Group, dict[ArraySpec, h5py.Dataset]]:
    """Return the HDF5 group of a stored sample, and its arrays without optional arrays that it lacks.

    Raises:
        KeyError: if the shard lacks the sample or an array that is not optional.
        OSError: if something is a link, or an array is not stored in one piece inside the shard. wands writes no such shard.
    """
    group = _child(_child(file, "samples", h5py.Group), f"{row:06d}", h5py.Group)
    stored = {}
    for spec in arrays:
        if spec.optional and not group.id.links.exists(spec.name.encode()):
            continue
        array = stored[spec] = _child(group, spec.name, h5py.Dataset)
        layout = array.id.get_create_plist()
        offset = array.id.get_offset()
        in_one_piece = layout.get_layout() == h5py.h5d.CONTIGUOUS and not layout.get_external_count()
        end = (offset or 0) + array.nbytes
        if not in_one_piece or (array.size and offset is None) or end > file.id.get_filesize():
            raise OSError(
                f"another program has changed the shard: the array {spec.name} of sample {row} is stored in chunks or outside "
                "the shard, but wands stores each array in one piece"
            )
    return group, stored


def _child(group: h5py.Group, name: str, kind: type[T]) -> T:
    """Return a group or dataset inside a group. Links are not followed: they can lead to another file, a pipe or a loop."""
    link = name.encode()
    if not group.id.links.exists(link):
        raise KeyError(f"{group.name.rstrip('/')}/{name} is missing")
    if group.id.links.get_info(link).type == h5py.h5l.TYPE_HARD and isinstance(group[name], kind):
        return group[name]
    raise OSError(
        f"another program has changed the shard: {group.name.rstrip('/')}/{name} is a link or has the wrong kind"
    )


def shard_id(entries: Sequence[IndexEntry]) -> str:
    """Return a digest of the keys, checksums and byte positions of a shard's samples, which tells shards of equal size apart."""
    return digest([[entry.key, entry.crc32, entry.offsets] for entry in entries])


def read_shard_id(path: Path) -> str:
    """Read the `shard_id` that a finished shard stores. A damaged shard raises CacheError."""

    def read() -> str:
        with damage_named(path), open_hdf5(path) as file:
            return str(file.attrs["id"])

    return read_patiently(path, read)


def entries_of(file: h5py.File, shard: str, arrays: Sequence[ArraySpec]) -> Iterator[IndexEntry]:
    """Yield the index entry of each sample in an open shard."""
    for row in sample_rows(file):
        yield read_entry(file, shard, row, arrays)


def read_entry(file: h5py.File, shard: str, row: int, arrays: Sequence[ArraySpec]) -> IndexEntry:
    """Return the index entry of one stored sample.

    Raises:
        KeyError, OSError, ValueError: if the sample is damaged, or another program has changed the shard.
    """
    group, stored = open_sample(file, row, arrays)
    meta = json.loads(group.attrs["meta"])
    key = json.loads(group.attrs["key"])
    if not isinstance(meta, dict) or not isinstance(key, str) or "\0" in key:
        raise ValueError(f"the key or the metadata of sample {row} are of the wrong kind")
    names = ("crc32", "signature", "mask_sums")
    stored_facts = {name: np.asarray(group.attrs[name]).tolist() for name in names}
    facts = check_values(_META, meta | stored_facts)
    free_lens: list[int] = []
    for spec in arrays:
        if spec.num_free:
            free_lens += spec.free_lens(stored[spec].shape if spec in stored else (0,) * len(spec.dims))
    return IndexEntry(
        key=key,
        shard=shard,
        row=row,
        latent_shape=stored[arrays[0]].shape,
        free_lens=tuple(free_lens),
        offsets=tuple(stored[spec].id.get_offset() or 0 if spec in stored else 0 for spec in arrays),
        license=pick_license(meta),
        **vars(facts),
    )


def read_entries(path: Path, fingerprint: str, arrays: Sequence[ArraySpec]) -> Iterator[IndexEntry]:
    """Yield the index entries of a finished shard. CacheError if it is damaged or belongs to another cache."""

    def read() -> list[IndexEntry]:
        with damage_named(path), open_shard(path, fingerprint) as file:
            return list(entries_of(file, path.name, arrays))

    yield from read_patiently(path, read)


def read_stored(
    path: Path, fingerprint: str, row: int, arrays: Sequence[ArraySpec], patch_size: tuple[int, int, int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read (arrays, metadata) of a sample in a finished shard, with its checksum verified.

    The text embedding is left out, because callers reuse the other arrays with a new caption.

    Raises:
        CacheError: if the checksum is wrong, or the shard is damaged or belongs to another cache.
    """

    def read() -> tuple[dict[str, Tensor], dict[str, Any]]:
        with damage_named(path), open_shard(path, fingerprint) as file:
            group, datasets = open_sample(file, row, arrays)
            stored = {spec: dataset[()] for spec, dataset in datasets.items()}
            if checksum(*stored.values()) != int(group.attrs["crc32"]):
                raise OSError(f"sample {json.loads(group.attrs['key'])} does not match its stored checksum")
            size = ClipSize(tuple(group["latents"].shape[1:]), patch_size)
            restored = {
                spec.name: spec.restore(array, array.shape if spec.num_free else spec.shape(size))
                for spec, array in stored.items()
                if spec.name != "text_embeds"
            }
            return restored, json.loads(group.attrs["meta"])

    return read_patiently(path, read)


@contextmanager
def damage_named(path: Path, fix: str = SHARD_FIX) -> Iterator[None]:
    """Context manager that raises CacheError, with `fix` as the end of its message, for errors of a damaged cache file.

    An error of the file system raises DiskError: the file may be intact.
    """
    try:
        yield
    except (
        OSError,
        KeyError,
        ValueError,
        RuntimeError,
        TypeError,
        EOFError,
        BadZipFile,
        zlib.error,
    ) as error:
        if disk_number(error):
            raise unreadable(path, error) from error
        raise CacheError(f"cache={path.parent} has a damaged {path.name} ({reason(error)}); {fix}") from None


# ---- index


@dataclass(frozen=True, eq=False)
class CacheIndex:
    """Facts about all samples of a cache. Item i of each array of length N belongs to `keys[i]`; the keys are sorted.

    Attributes:
        shard_bytes: int64 [shards], sizes of the shards in bytes.
        shard_ids: digests of the shards' contents.
        shards: int32 [N], position in `shard_names` of the sample's shard.
        rows: int32 [N], number of the sample inside its shard.
        latent_shapes: int32 [N, 4], latent (channels, frames, rows, columns).
        free_lens: int32 [N, K], sizes of the dimensions of `arrays` that the sample's size does not decide, such as the number of
            text tokens. 0 for an array that the sample lacks.
        crc32: uint32 [N], checksum of all arrays of the sample.
        num_frames: int32 [N], number of pixel frames.
        fps: float32 [N], frames per second after resampling.
        offsets: int64 [N, number of `arrays`], byte position of each array in the shard, for reading without HDF5. 0 for an array
            that the sample lacks.
        null_text: uint16 [text tokens, width of the text encoder], bf16 bits of the embedding of "".
        signatures: uint64 [N, 2], see `wands.data.holdout.signature`.
        licenses: int32 [N], position in `license_names`; -1 if the source states no license.
        mask_sums: float64 [N, 2], see `LatentCache`.
        arrays: arrays of the samples, in the order of the manifest.
    """

    keys: tuple[str, ...]
    shard_names: tuple[str, ...]
    shard_bytes: np.ndarray
    shards: np.ndarray
    rows: np.ndarray
    latent_shapes: np.ndarray
    free_lens: np.ndarray
    crc32: np.ndarray
    num_frames: np.ndarray
    fps: np.ndarray
    null_text: np.ndarray
    offsets: np.ndarray
    shard_ids: tuple[str, ...]
    signatures: np.ndarray
    license_names: tuple[str, ...]
    licenses: np.ndarray
    mask_sums: np.ndarray
    arrays: tuple[ArraySpec, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def lens_of(self, name: str) -> np.ndarray:
        """Return the sizes of the free dimensions of an array, int32 [N, number of these dimensions]."""
        column = 0
        for spec in self.arrays:
            if spec.name == name:
                return self.free_lens[:, column : column + spec.num_free]
            column += spec.num_free
        raise KeyError(name)

    @property
    def text_lens(self) -> np.ndarray:
        """Number of text tokens of each sample without padding, int32 [N]."""
        return self.lens_of("text_embeds")[:, 0]

    def differences(self, i: int, entry: IndexEntry) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value here, value in the shard) for each fact about sample `i` that differs from the shard's."""
        facts = {
            "latent_shapes": list(entry.latent_shape),
            "free_lens": list(entry.free_lens),
            "crc32": entry.crc32,
            "num_frames": entry.num_frames,
            "fps": float(np.float32(entry.fps)),
            "offsets": list(entry.offsets),
            "mask_sums": list(entry.mask_sums),
        }
        for name, stored in facts.items():
            ours = getattr(self, name)[i].tolist()
            if ours != stored:
                yield name, ours, stored

    @classmethod
    def build(
        cls, path: Path, entries: Sequence[IndexEntry], null_text: np.ndarray, arrays: Sequence[ArraySpec]
    ) -> CacheIndex:
        """Build the index of finished shards. `null_text` is uint16 [text tokens, width of the text encoder], bf16 bits."""
        entries = sorted(entries, key=lambda entry: entry.key)
        names = tuple(sorted({entry.shard for entry in entries}))
        number = {name: i for i, name in enumerate(names)}
        num_free = sum(spec.num_free for spec in arrays)
        licenses = {name: i for i, name in enumerate(sorted({entry.license for entry in entries} - {""}))}
        return cls(
            keys=tuple(entry.key for entry in entries),
            shard_names=names,
            shard_bytes=np.array([(path / name).stat().st_size for name in names], np.int64),
            shards=np.array([number[entry.shard] for entry in entries], np.int32),
            rows=np.array([entry.row for entry in entries], np.int32),
            latent_shapes=np.array([entry.latent_shape for entry in entries], np.int32).reshape(-1, 4),
            free_lens=np.array([entry.free_lens for entry in entries], np.int32).reshape(-1, num_free),
            crc32=np.array([entry.crc32 for entry in entries], np.uint32),
            num_frames=np.array([entry.num_frames for entry in entries], np.int32),
            fps=np.array([entry.fps for entry in entries], np.float32),
            null_text=null_text,
            offsets=np.array([entry.offsets for entry in entries], np.int64).reshape(-1, len(arrays)),
            shard_ids=tuple(read_shard_id(path / name) for name in names),
            signatures=np.array([entry.signature for entry in entries], np.uint64).reshape(-1, 2),
            license_names=tuple(licenses),
            licenses=np.array([licenses.get(entry.license, -1) for entry in entries], np.int32),
            mask_sums=np.array([entry.mask_sums for entry in entries], np.float64).reshape(-1, 2),
            arrays=tuple(arrays),
        )

    def to_bytes(self) -> bytes:
        """Return the content of `index.npz`. Strings are NUL-separated UTF-8, so that reading needs no pickle."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        buffer = io.BytesIO()
        arrays |= {name: _join(getattr(self, name)) for name in TEXTS}
        arrays["arrays"] = _join([json.dumps(spec.to_json()) for spec in self.arrays])
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_file(cls, path: Path) -> CacheIndex:
        """Read `index.npz`. CacheError if it is damaged or an array is missing."""
        fix = "run the same wands preprocess command again, which rebuilds the index from the shards."

        def read() -> CacheIndex:
            with damage_named(path, fix):
                arrays = read_index_arrays(path)
                texts: dict[str, Any] = {name: _split(arrays[name]) for name in TEXTS}
                specs = tuple(ArraySpec.from_json(json.loads(text)) for text in _split(arrays["arrays"]))
                index = cls(**{**arrays, **texts, "arrays": specs})
                of_samples = arrays.keys() - {*TEXTS, "shard_bytes", "null_text", "arrays"}
                wrong = [name for name in of_samples if len(arrays[name]) != len(index)]
                if wrong or not len(index.shard_bytes) == len(index.shard_names) == len(index.shard_ids):
                    raise ValueError("arrays with one item per sample (or per shard) have different lengths")
                widths = {"offsets": len(specs), "free_lens": sum(spec.num_free for spec in specs)}
                widths |= {"latent_shapes": 4, "signatures": 2, "mask_sums": 2}
                if any(arrays[name].shape[1] != width for name, width in widths.items()):
                    raise ValueError("the positions or lengths of the arrays have a wrong number of columns")
                if not all(map(_SHARD_NAME.fullmatch, index.shard_names)):
                    raise ValueError("shard_names: a name is not that of a shard, such as shard-00000.h5")
                check_index_values(arrays, len(index.shard_names), len(index.license_names))
            return index

        return read_patiently(path, read)


def _join(texts: Sequence[str]) -> np.ndarray:
    assert not any("\0" in text for text in texts), "a key cannot contain NUL"
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _split(array: np.ndarray) -> tuple[str, ...]:
    text = array.tobytes().decode("utf-8", "surrogateescape")
    return tuple(text.split("\0")) if text else ()
