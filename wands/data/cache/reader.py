"""Read a latent cache: HDF5 shards that store bf16 bits, and an index.

The index contains the shapes of all samples, so that an epoch can be planned without opening the shards.
`wands/data/cache/format.py` describes the files. `wands/data/cache/writer.py` writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from wands.data.cache.format import (
    INDEX_NAME,
    MASK_ARRAY,
    array_names,
    checksum,
    digest,
    from_bits,
    read_manifest,
    variant_contract,
)
from wands.data.cache.shards import CacheIndex, damage_named, open_shard, sample_path, stored_names
from wands.data.cache.writer import CacheWriter
from wands.data.collate import Sample
from wands.data.patchify import SampleFacts, blank_other_frames, grid_size
from wands.errors import CacheError
from wands.files import first_difference
from wands.variants import Variant

__all__ = ["CacheIndex", "CacheWriter", "LatentCache"]

MUST_AGREE = ("vae_stride", "patch_size", "latent_channels", "text_dim")
GIVEN = {"image", "last_image", "clip"}
"""Conditions (inputs of a model other than noise) for which a cache stores additional arrays. Text embeddings are always
stored, and the clean first frame of TI2V is part of the latents."""
LATENTS = {"latents", "image_latents"}
FIX = "encode again with wands preprocess --model MODEL --out NEW_FOLDER, where MODEL is the model to train."


class LatentCache(SampleFacts):
    """Random access to the samples of a finished cache.

    Each read opens the shard and closes it again, so a cache can be passed to worker processes of any start method.
    Several threads can read at once. The first read of a shard, and the first read after its file has changed, check
    that the shard matches the index.

    A cache may be larger than memory. Only the index (some hundred bytes per sample) stays in memory.

    Attributes:
        keys: sample ids, sorted. `read(i)` returns the sample `keys[i]`.
        licenses: array of texts, the license of each sample. "" if the source of the sample states no license.
        mask_sums: float64 [N, 2], two sums of token weights for each sample with a loss mask: over all tokens, and over the
            tokens of the first latent frame. Zeros for a sample without a mask.
        null_text_embeds: embedding of the empty caption, bf16 [text tokens, width of the text encoder].
        index: the `CacheIndex` with facts about all samples.
        manifest: content of manifest.json, with the variant (kind of Wan model) and the fingerprint.
        fingerprint: fingerprint of the encoders and settings that made the samples, as nested JSON values.
        num_bytes: size of all shards in bytes.
        places: int64 [N, 2], (number of the shard, position in the shard) of each sample.
        conditions: names of a model's inputs other than noise, such as "text" and "image". `read` returns the arrays that these
            inputs need. Until `serve` is called, these are the inputs of the model variant for which the cache was made.
            `serve` selects the inputs of another variant.
    """

    def __init__(self, path: str | Path, verify: bool = False) -> None:
        """Read the manifest and the index. Check that all shards exist and have the right size.

        Args:
            path: cache folder.
            verify: whether each read verifies the checksum of the sample.

        Raises:
            CacheError: if the folder is not a finished cache, its schema version is not supported, or a shard is
                missing or does not match the index.
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
        self.latent_shapes, self.checksums = self.index.latent_shapes[:, 1:], self.index.crc32
        self.places = np.stack([self.index.shards, self.index.rows], axis=1).astype(np.int64)
        self.num_bytes = int(self.index.shard_bytes.sum())
        self.null_text_embeds = from_bits(self.index.null_text)
        self.conditions: tuple[str, ...] = tuple(self.manifest["variant"]["conditions"])
        self._names = array_names(self.conditions)
        num_arrays = len(self._names) + int(self.mask_sums.any())
        if len(self) and self.index.offsets.shape[1] != num_arrays:
            raise CacheError(
                f"cache={self.path} has a wrong {INDEX_NAME}: it lists {self.index.offsets.shape[1]} arrays per "
                f"sample, but must list {num_arrays}; run the same wands preprocess command again, which "
                "rebuilds the index."
            )
        self._check_shards()
        self._compared: dict[str, tuple[int, ...]] = {}  # file name of a shard -> identity of the file

    def __len__(self) -> int:
        return len(self.index)

    def find(self, key: str) -> int:
        """Return the number of the sample with the given key. `read` takes this number.

        Raises:
            CacheError: if the cache has no sample with this key. The error message names some existing keys.
        """
        if key in self.index.keys:
            return self.index.keys.index(key)
        near = ", ".join([k for k in self.index.keys if key.lower() in k.lower()][:3] or self.index.keys[:3])
        raise CacheError(
            f"key={key} is not in cache={self.path} ({len(self)} samples); use, for example, {near}."
        )

    def read(self, i: int, frames: tuple[int, int] | None = None) -> Sample:
        """Read a sample in bf16: its latents, its text embeddings without padding, and its loss mask if it has a mask.

        The reader's attribute `conditions` lists inputs of the model, such as "image". The result also contains the image
        arrays for these inputs. `Sample` describes the arrays and their shapes.

        Args:
            i: number of the sample: its position in the reader's attribute `keys`.
            frames: (first, end) of the needed latent frames, without `end` itself. Default: all frames. All other frames
                are zero in the returned latents. They are not read from the file, unless the reader was opened with `verify`,
                which needs the whole sample to compute the checksum. A rank of a context-parallel group needs only the frames
                that contain the rank's tokens (`wands.data.patchify.frames_of_tokens`).

        Raises:
            CacheError: if the shard cannot be read or does not match the index, or (with `verify`) the checksum is
                wrong.
        """
        num_frames, needed = self.latent_shape(i)[0], {*array_names(self.conditions), MASK_ARRAY}
        assert frames is None or 0 <= frames[0] <= frames[1] <= num_frames, (frames, num_frames)
        arrays: dict[str, np.ndarray] = {}
        with self._open(i) as file:
            stored = zip(self._shapes(i).items(), self.index.offsets[i].tolist(), strict=False)
            for (name, shape), offset in stored:
                if self.verify or name in needed:
                    reads_all = self.verify or name not in LATENTS
                    arrays[name] = _read_array(file, shape, offset, None if reads_all else frames)
        if self.verify and (crc32 := checksum(*arrays.values())) != self.index.crc32[i]:
            raise self._damaged(i, f"has a wrong checksum ({crc32:08x}, not {self.index.crc32[i]:08x})")
        tensors = {name: from_bits(array) for name, array in arrays.items() if name in needed}
        if self.verify and frames is not None:
            for name in LATENTS & tensors.keys():
                blank_other_frames(tensors[name], frames)
        return Sample(sample_id=self.index.keys[i], **tensors)

    def serve(self, variant: Variant) -> None:
        """Make `read` return only the arrays that this model variant needs. The cache may store more arrays."""
        assert set(array_names(variant.conditions)) <= set(self._names), variant.name
        self.conditions = variant.conditions

    def meta(self, i: int) -> dict[str, Any]:
        """Return the metadata of sample `i`, such as caption, source file, start time, num_frames and fps."""
        path = self._path(i)
        with damage_named(path), open_shard(path, digest(self.fingerprint)) as shard:
            return json.loads(self._compare(i, shard).attrs["meta"])

    def check_fits(self, variant: Variant, fingerprint: Mapping[str, Any]) -> None:
        """Raise CacheError if the cache does not fit a model.

        Cache and model must have the same VAE stride, patch size, latent channels and text width. The cache must contain
        the arrays that the model's conditions (text and images) need, and may contain more arrays. But a cache made for
        first and last images does not fit a model that takes only first images.

        Args:
            variant: variant (kind of Wan model) to train.
            fingerprint: fingerprint of the model's encoders (`wands.encoders.fingerprint.fingerprint_pipeline`). Only
                the components in this mapping are compared, because a model folder may contain a bare DiT without
                encoders.

        Raises:
            CacheError: if the cache and the model differ. The error message names the value of the cache and the value
                of the model.
        """
        ours, theirs = self.manifest["variant"], variant_contract(variant)
        differing = [name for name in MUST_AGREE if ours.get(name) != theirs[name]]
        has, wanted = set(ours.get("conditions", ())) & GIVEN, set(theirs["conditions"]) & GIVEN
        # Latents of the first frame alone differ from latents of the first and last frame.
        if not wanted <= has or ("image" in wanted and "last_image" in has - wanted):
            differing.append("conditions")
        elif "clip" in wanted and ours["image_embeds"] != theirs["image_embeds"]:
            differing.append("image_embeds")
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
        """Raise CacheError if the encoders that made the cache differ from the encoders of a model.

        Args:
            fingerprint: digests of the model's encoders. Only the components (such as "vae") in this mapping are
                compared, see `check_fits`.
            model: name of the model for the error message.

        Raises:
            CacheError: if a component differs. The error message names the digest of the cache and the digest of the
                model.
        """
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
                raise CacheError(
                    f"cache={self.path} is incomplete: {name} {what}; restore {name}. Or delete only {name}, "
                    "if it exists, and run the same wands preprocess command again, which encodes the missing samples."
                )

    @contextmanager
    def _open(self, i: int) -> Iterator[BufferedReader[FileIO]]:
        """Open the shard of sample `i` as a plain file. The first call for a shard, and the first call after the file has
        changed, compare the shard with the index.

        Raises:
            CacheError: if the shard does not match the index or cannot be read. Read errors inside the `with` block are
                also converted to this error.
        """
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
        """Compare an open shard with the index, and return the HDF5 group of sample `i`.

        Raises:
            CacheError: if the sample's key, the shape of an array or the digest of the shard differs from the index, or an
                array is not uint16.
        """
        group = file[sample_path(int(self.index.rows[i]))]
        if (key := json.loads(group.attrs["key"])) != self.index.keys[i]:
            raise self._damaged(i, f"is not at its position in the index, because sample {key} is there")
        arrays = {name: group[name] for name in stored_names(group)}
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != self._shapes(i) or {array.dtype for array in arrays.values()} != {np.dtype(np.uint16)}:
            stored = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise self._damaged(i, f"has arrays {stored}, which differ from the index")
        if file.attrs["id"] != self.index.shard_ids[self.index.shards[i]]:
            raise self._damaged(i, "is in a shard that was replaced after the index was written")
        return group

    def _shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return a dictionary that maps each array name to the shape that the array must have in sample `i`.

        The shapes come from the index and the manifest. The names have the same order as the offsets of the arrays in the index.
        """
        latents = tuple(self.index.latent_shapes[i].tolist())
        text = (int(self.index.text_lens[i]), self.null_text_embeds.shape[1])
        embeds = tuple(self.manifest["variant"].get("image_embeds", ()))
        shapes = {"latents": latents, "text_embeds": text, "image_latents": latents, "image_embeds": embeds}
        shapes = {name: shapes[name] for name in self._names}
        if self.mask_sums[i, 0] > 0:
            shapes[MASK_ARRAY] = grid_size(self.latent_shape(i), self.manifest["variant"]["patch_size"])
        return shapes

    def _damaged(self, i: int, what: str) -> CacheError:
        shard = self._path(i).name
        return CacheError(
            f"cache={self.path} is damaged: sample {self.index.keys[i]} in {shard} {what}; delete {shard} "
            "and run the same wands preprocess command again, which encodes the missing samples."
        )


def _read_array(
    file: BufferedReader[FileIO], shape: tuple[int, ...], offset: int, frames: tuple[int, int] | None
) -> np.ndarray:
    """Read a stored array, and return it as uint16 bits of bf16.

    Args:
        file: the shard.
        shape: shape of the array. With `frames`, this is (latent channels, frames, rows, columns).
        offset: position in bytes at which the array starts.
        frames: (first, end) of the latent frames to read, without `end` itself. All other frames of the result are zero.
            None reads the whole array.
    """
    array = np.zeros(shape, np.uint16)
    pieces = [array] if frames is None else [channel[slice(*frames)] for channel in array]
    for piece in pieces:
        file.seek(offset + piece.ctypes.data - array.ctypes.data)  # the file has the layout of the array
        if file.readinto(piece.data) < piece.nbytes:
            raise OSError("the file ends too early")
    return array
