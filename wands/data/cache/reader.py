"""Read a latent cache. The index has the shapes of all samples, so an epoch is planned without opening the shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from wands.conditions.arrays import ArraySpec, ClipSize
from wands.conditions.condition import Condition
from wands.conditions.published import PUBLISHED, conditions_of, specs_of
from wands.data.cache.format import (
    INDEX_NAME,
    cache_contract,
    checksum,
    digest,
    from_bits,
    read_manifest,
    stored_arrays,
)
from wands.data.cache.shards import CacheIndex, damage_named, open_sample, open_shard, read_entry
from wands.data.cache.writer import CacheWriter
from wands.data.collate import Sample
from wands.data.sample_facts import SampleFacts
from wands.disk_errors import read_patiently
from wands.errors import CacheError
from wands.files import first_difference
from wands.variants import Variant

__all__ = ["CacheIndex", "CacheWriter", "LatentCache"]

MUST_AGREE = ("vae_stride", "patch_size", "latent_channels", "text_dim")
FIX = "encode again with wands preprocess --model MODEL --out NEW_FOLDER, where MODEL is the model to train."


class LatentCache(SampleFacts):
    """Random access to the samples of a finished cache, of which only the index stays in memory.

    Each read opens the shard and closes it again, so a cache can be passed to worker processes of any start method, and several
    threads can read at once. The first read of a shard, and the first after its file has changed, check that it matches the
    index.

    Attributes:
        keys: sample ids, sorted. `read(i)` returns the sample `keys[i]`.
        licenses: license of each sample, "" if none is stated.
        mask_sums: float64 [N, 2], sums of the token weights of each loss mask: over all tokens, and over the first latent frame.
            Zeros without a mask.
        null_text_embeds: embedding of the empty caption, bf16 [text tokens, width of the text encoder].
        fingerprint: fingerprint of the encoders and settings that made the samples, as nested JSON values.
        num_bytes: size of all shards in bytes.
        places: int64 [N, 2], (shard, position in the shard) of each sample.
        served: names of the arrays that `read` returns: all arrays until `serve` selects those of a model.
        unused: names of the conditions of outside code that the cache stores and `serve` did not select.
    """

    def __init__(self, path: str | Path, verify: bool = False) -> None:
        """Read the manifest and the index. With `verify`, each read verifies the checksum of the sample.

        Raises:
            CacheError: if the folder is no finished cache, its schema version is not supported, or a shard is missing or does not
                match the index.
        """
        self.path = Path(path)
        self.verify = verify
        self.manifest = read_manifest(self.path)
        self.fingerprint: dict[str, Any] = self.manifest["fingerprint"]
        if not (self.path / INDEX_NAME).is_file():
            raise CacheError(
                f"cache={self.path} is unfinished (no {INDEX_NAME}); run the same wands preprocess command again, "
                "which continues where it stopped."
            )
        self.index = CacheIndex.from_file(self.path / INDEX_NAME)
        self.keys = list(self.index.keys)
        self.licenses = np.array([*self.index.license_names, ""], object)[self.index.licenses]
        self.mask_sums = self.index.mask_sums
        self.latent_shapes = self.index.latent_shapes[:, 1:]
        self.checksums = self.index.crc32
        self.places = np.stack([self.index.shards, self.index.rows], axis=1).astype(np.int64)
        self.num_bytes = int(self.index.shard_bytes.sum())
        self.null_text_embeds = from_bits(self.index.null_text)
        self.arrays = stored_arrays(self.manifest)
        self.patch_size: tuple[int, int, int] = tuple(self.manifest["variant"]["patch_size"])
        self.served = {spec.name for spec in self.arrays}
        self.unused = [name for name in self.manifest["conditions"] if name not in PUBLISHED]
        if self.index.arrays != self.arrays:
            raise CacheError(
                f"cache={self.path} has a wrong {INDEX_NAME}: it describes other arrays than the manifest; run the same wands "
                "preprocess command again, which rebuilds the index."
            )
        self._check_shards()
        self._compared: dict[str, tuple[int, ...]] = {}  # file name of a shard -> identity of the file

    def __len__(self) -> int:
        return len(self.index)

    def find(self, key: str) -> int:
        """Return the number of the sample with the given key, for `read`. CacheError names some keys if there is none."""
        if key in self.index.keys:
            return self.index.keys.index(key)
        near = ", ".join([k for k in self.index.keys if key.lower() in k.lower()][:3] or self.index.keys[:3])
        raise CacheError(
            f"key={key} is not in cache={self.path} ({len(self)} samples); use, for example, {near}."
        )

    def read(self, i: int, frames: tuple[int, int] | None = None) -> Sample:
        """Read the arrays of sample `i` that the model needs (`serve`), without optional arrays that it lacks.

        `frames` is the range (first, end) of needed latent frames; all others are zero and, without `verify`, not read. A rank of
        a context-parallel group needs only the frames of its tokens (`wands.patches.frames_of_tokens`).

        Raises:
            CacheError: if the shard is damaged or does not match the index, or (with `verify`) the checksum is wrong.
            DiskError: if the file system does not read the shard.
        """
        return read_patiently(self._path(i), partial(self._read, i, frames))

    def _read(self, i: int, frames: tuple[int, int] | None) -> Sample:
        num_frames = self.latent_shape(i)[0]
        assert frames is None or 0 <= frames[0] <= frames[1] <= num_frames, (frames, num_frames)
        shapes = self._shapes(i)
        stored: dict[ArraySpec, np.ndarray] = {}
        with self._open(i) as file:
            for spec, offset in zip(self.arrays, self.index.offsets[i].tolist(), strict=True):
                if spec in shapes and (self.verify or spec.name in self.served):
                    needed = None if self.verify else self._needed(spec, frames)
                    stored[spec] = _read_array(file, spec, shapes[spec], offset, needed)
        if self.verify and (crc32 := checksum(*stored.values())) != self.index.crc32[i]:
            raise self._damaged(i, f"has a wrong checksum ({crc32:08x}, not {self.index.crc32[i]:08x})")
        arrays = {}
        for spec, array in stored.items():
            if spec.name in self.served:
                arrays[spec.name] = spec.restore(array, shapes[spec])
                if frames is not None:
                    spec.blank(arrays[spec.name], frames, self.patch_size)
        return Sample(sample_id=self.index.keys[i], arrays=arrays)

    def serve(self, conditions: Sequence[Condition]) -> None:
        """Make `read` return only the arrays that these conditions need. The cache may store more arrays."""
        needed = {spec.name for condition in conditions for spec in condition.arrays}
        assert needed <= {spec.name for spec in self.arrays}, needed
        self.served = {"latents", *needed}
        names = (*PUBLISHED, *(condition.name for condition in conditions))
        self.unused = [name for name in self.manifest["conditions"] if name not in names]

    def _needed(self, spec: ArraySpec, frames: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the range of indices along `spec.frames_axis` to read; None for the whole array."""
        if frames is None or spec.frames_axis is None or spec.dtype == "bool":
            return None  # packed bits are small, and frames do not begin at whole bytes
        return spec.frames_of(frames, self.patch_size)

    def meta(self, i: int) -> dict[str, Any]:
        """Return the metadata of sample `i`, such as caption, source file, start time, num_frames and fps."""
        path = self._path(i)

        def read() -> dict[str, Any]:
            with damage_named(path), open_shard(path, digest(self.fingerprint)) as shard:
                return json.loads(self._compare(i, shard).attrs["meta"])

        return read_patiently(path, read)

    def check_fits(self, variant: Variant, fingerprint: Mapping[str, Any]) -> None:
        """Raise CacheError with both values if the cache does not fit a model.

        Cache and model must have the same VAE stride, patch size, latent channels and text width. The cache must contain the
        arrays that the model's conditions need, made with the same settings, and may contain more. Only the components in
        `fingerprint` are compared, because a model folder may contain a bare DiT without encoders.
        """
        conditions = [condition for condition in conditions_of(variant) if condition.arrays]
        contract = cache_contract(variant)
        ours = dict(self.manifest["variant"])
        theirs = dict(contract["variant"])
        differing = [name for name in MUST_AGREE if ours.get(name) != theirs[name]]
        stored = {name: self.manifest["conditions"].get(name) for name in contract["conditions"]}
        if any(stored[condition.name] != contract["conditions"][condition.name] for condition in conditions):
            differing.append("conditions")
            ours["conditions"] = _describe_conditions(self.manifest["conditions"])
            theirs["conditions"] = _describe_conditions(contract["conditions"])
        elif not differing:
            found = {spec.name: spec for spec in self.arrays}
            for spec in specs_of(variant.dit, conditions):
                if found.get(spec.name) != spec:
                    differing.append(spec.name)
                    ours[spec.name] = _describe_array(found.get(spec.name))
                    theirs[spec.name] = _describe_array(spec)
        if differing:
            cached, model = (
                ", ".join(f"{name}={side.get(name)}" for name in differing) for side in (ours, theirs)
            )
            raise CacheError(
                f"cache={self.path} was made for {ours['name']} ({cached}) but the model is {theirs['name']} "
                f"({model}); {FIX}"
            )
        self.check_encoders(fingerprint, theirs["name"])

    def check_encoders(self, fingerprint: Mapping[str, Any], model: str) -> None:
        """Raise CacheError with both digests if the encoders in `fingerprint` differ from those that made the cache."""
        known = {part: self.fingerprint.get(part) for part in fingerprint}
        if difference := first_difference(known, fingerprint):
            name, cached, own = difference
            raise CacheError(
                f"cache={self.path} was encoded for {self.manifest['variant']['name']} with {name}={cached} "
                f"but the model, {model}, has {name}={own}; {FIX}"
            )

    def _check_shards(self) -> None:
        for name, size in zip(self.index.shard_names, self.index.shard_bytes.tolist(), strict=True):
            path = self.path / name
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                what = "is missing" if actual is None else f"has {actual} bytes, but the index says {size}"
                fix = (
                    "check that the whole disk is mounted, or"
                    if actual is None
                    else f"delete only {name}, and"
                )
                raise CacheError(
                    f"cache={self.path} is incomplete: {name} {what}; restore {name}. Otherwise {fix} run the same wands "
                    "preprocess command again, which encodes the missing samples."
                )

    @contextmanager
    def _open(self, i: int) -> Iterator[BufferedReader[FileIO]]:
        """Open the shard of sample `i` as a plain file, compared with the index if it is new or has changed."""
        path = self._path(i)
        # The default buffer of a network file system can be larger than the frames to read.
        with damage_named(path), BufferedReader(FileIO(path), 1 << 13) as file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if self._compared.get(path.name) != identity:
                with open_shard(path, digest(self.fingerprint)) as shard:
                    self._compare(i, shard)
                self._compared[path.name] = identity
            yield file

    def _path(self, i: int) -> Path:
        return self.path / self.index.shard_names[self.index.shards[i]]

    def _compare(self, i: int, file: h5py.File) -> h5py.Group:
        """Compare an open shard with the index, and return the HDF5 group of sample `i`."""
        group, stored = open_sample(file, int(self.index.rows[i]), self.arrays)
        if (key := json.loads(group.attrs["key"])) != self.index.keys[i]:
            raise self._damaged(i, f"is not at its position in the index, because sample {key} is there")
        wanted = {
            spec: (spec.stored_shape(shape), spec.stored_dtype) for spec, shape in self._shapes(i).items()
        }
        if {spec: (array.shape, array.dtype) for spec, array in stored.items()} != wanted:
            found = " and ".join(f"{spec.name} {array.shape}" for spec, array in stored.items())
            raise self._damaged(i, f"has arrays {found}, which differ from the index")
        if file.attrs["id"] != self.index.shard_ids[self.index.shards[i]]:
            raise self._damaged(i, "is in a shard that was replaced after the index was written")
        if self.verify:
            entry = read_entry(file, self._path(i).name, int(self.index.rows[i]), self.arrays)
            for column, ours, stored_value in self.index.differences(i, entry):
                raise self._damaged(i, f"has {column}={stored_value}, but the index says {ours}")
        return group

    def _shapes(self, i: int) -> dict[ArraySpec, tuple[int, ...]]:
        """Return the shape of each array of sample `i`, in the order of the manifest, without optional arrays that it lacks."""
        size = ClipSize(self.latent_shape(i), self.patch_size)
        free = iter(self.index.free_lens[i].tolist())
        offsets = self.index.offsets[i].tolist()
        shapes = {}
        for spec, offset in zip(self.arrays, offsets, strict=True):
            lens = [next(free) for _ in range(spec.num_free)]
            if offset or not spec.optional:
                shapes[spec] = spec.shape(size, lens)
        # The channels of the latents come from the index, so that a damaged index is noticed.
        shapes[self.arrays[0]] = tuple(self.index.latent_shapes[i].tolist())
        return shapes

    def _damaged(self, i: int, what: str) -> CacheError:
        shard = self._path(i).name
        return CacheError(
            f"cache={self.path} is damaged: sample {self.index.keys[i]} in {shard} {what}; delete {shard} "
            "and run the same wands preprocess command again, which encodes the missing samples."
        )


def _describe_conditions(conditions: Mapping[str, Any]) -> str:
    """Return names of conditions as text, with what decides their arrays."""
    texts = []
    for name, settings in conditions.items():
        known = settings if isinstance(settings, Mapping) else {"settings": settings}
        facts = " ".join(f"{key}={value}" for key, value in known.items()) if settings else ""
        texts.append(f"{name} ({facts})" if facts else name)
    return f"[{', '.join(texts)}]"


def _describe_array(spec: ArraySpec | None) -> str:
    return "none" if spec is None else f"{spec.dtype} {list(spec.dims)}"


def _read_array(
    file: BufferedReader[FileIO],
    spec: ArraySpec,
    shape: tuple[int, ...],
    offset: int,
    frames: tuple[int, int] | None,
) -> np.ndarray:
    """Read a stored array at byte `offset`, or only the range `frames` along `spec.frames_axis`; the rest is zero."""
    if offset + spec.num_bytes(shape) > os.fstat(file.fileno()).st_size:  # before memory is allocated
        raise OSError("the file ends too early")
    array = np.zeros(spec.stored_shape(shape), spec.stored_dtype)
    pieces = [array]
    if frames is not None and spec.frames_axis is not None:
        # The array is contiguous, so each index before the axis has one range of bytes.
        flat = array.reshape(-1, *array.shape[spec.frames_axis :])
        pieces = [outer[slice(*frames)] for outer in flat]
    for piece in pieces:
        file.seek(offset + piece.ctypes.data - array.ctypes.data)  # the file has the layout of the array
        if file.readinto(piece.data) < piece.nbytes:
            raise OSError("the file ends too early")
    return array
