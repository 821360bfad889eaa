"""The latent cache, read: HDF5 shards of bf16 bits beside an index that needs none of them opened.

`wands/data/cache/format.py` says what lies in the files, `wands/data/cache/writer.py` writes them.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from wands.data.cache.format import (
    INDEX_NAME,
    NO_ID,
    CacheIndex,
    array_names,
    checksum,
    digest,
    first_difference,
    from_bits,
    open_shard,
    plain,
    read_manifest,
    read_offsets,
    reason,
    sample_path,
    stored_names,
    variant_contract,
)
from wands.data.cache.writer import CacheWriter
from wands.data.collate import Sample
from wands.data.patchify import blank_other_frames
from wands.errors import CacheError
from wands.variants import Variant

__all__ = ["CacheIndex", "CacheWriter", "LatentCache"]

MAX_HANDLES = 32
PER_PROCESS = ("_pid", "_lock", "_handles", "_offsets", "_looked_into")
MUST_AGREE = ("vae_stride", "patch_size", "latent_channels", "text_dim")
GIVEN = {"image", "last_image", "clip"}
"""Conditions that are stored; text always is, and a clean first frame is one of the latents."""
LATENTS = {"latents", "image_latents"}
CURE = "encode again with wands preprocess --model of the model you train, into another --out."


class LatentCache:
    """Random access to the samples of a finished cache.

    Shards are opened at the first read, once per process, and never pickled: a cache may be handed to worker
    processes of any start method. Each shard is known by a digest of what it holds, and the index knows where in
    it a sample lies: after one look into the shard to see that this is so, the bits are read beside HDF5, by
    several threads at once and as fast as from any file. With an index of an older wands HDF5 is asked for the
    place of each sample, once.

    A cache may be larger than memory: nothing of a shard is mapped or kept, each read fills new arrays that are
    its caller's, and what stays of the files is the system's page cache, which gives way to everything else.
    What is kept is the index (some hundred bytes a sample) and at most `MAX_HANDLES` open shards.

    Attributes:
        keys: sample ids, sorted; `read(i)` gives the sample called `keys[i]`.
        null_text_embeds: embedding of the empty caption, bf16 [L, D].
        index: shapes, lengths and places of all samples.
        manifest: variant and fingerprint.
        conditions: of a variant, whose samples `read` gives; those of the cache until `serve`.
    """

    def __init__(self, path: str | Path, verify: bool = False) -> None:
        """Read the manifest and the index; of the shards only presence and size are checked.

        Args:
            path: cache folder.
            verify: check a sample's checksum at every read.

        Raises:
            CacheError: not a cache, unfinished, another schema version, or shards that do not match.
        """
        self.path = Path(path)
        self.verify = verify
        self.manifest = read_manifest(self.path)
        if not (self.path / INDEX_NAME).is_file():
            raise CacheError(
                f"cache={self.path} is unfinished (no {INDEX_NAME}); run the same wands preprocess again, "
                "it goes on where it stopped."
            )
        self.index = CacheIndex.from_file(self.path / INDEX_NAME)
        self.keys = list(self.index.keys)
        self.null_text_embeds = from_bits(self.index.null_text)
        self.conditions: tuple[str, ...] = tuple(self.manifest["variant"]["conditions"])
        self._names = array_names(self.conditions)
        if len(self) and self.index.offsets.shape[1] != len(self._names):
            raise CacheError(
                f"cache={self.path} has an {INDEX_NAME} of samples with {self.index.offsets.shape[1]} arrays, not "
                f"{', '.join(self._names)}; run the same wands preprocess again, it rebuilds the index."
            )
        self._check_shards()
        self._forget_handles()

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> LatentCache:
        """The same as the constructor, read as a sentence."""
        return cls(path, verify)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the samples were made with: encoders and settings, nested."""
        return self.manifest["fingerprint"]

    @property
    def num_bytes(self) -> int:
        """Size of all shards on disk."""
        return int(self.index.shard_bytes.sum())

    @property
    def places(self) -> np.ndarray:
        """Where every sample is stored: its shard and its number there, int64 [N, 2]."""
        return np.stack([self.index.shards, self.index.rows], axis=1).astype(np.int64)

    def num_tokens(self, patch_size: tuple[int, int, int]) -> np.ndarray:
        """Video tokens of every sample, int64 [N]."""
        return self.index.num_tokens(patch_size)

    def find(self, key: str) -> int:
        """Position of the sample called `key`.

        Raises:
            CacheError: there is none; the message names some that are there.
        """
        if key in self.index.keys:
            return self.index.keys.index(key)
        near = ", ".join([k for k in self.index.keys if key.lower() in k.lower()][:3] or self.index.keys[:3])
        raise CacheError(
            f"key={key} is not in cache={self.path} ({len(self)} samples); use for example {near}."
        )

    def latent_shape(self, i: int) -> tuple[int, int, int]:
        """Latent (frames, height, width) of sample `i`, without opening its shard."""
        f, h, w = self.index.latent_shapes[i][1:].tolist()
        return f, h, w

    def read(self, i: int, frames: tuple[int, int] | None = None) -> Sample:
        """Sample `i` of the index: latents bf16 [C, f, h, w], trimmed text_embeds bf16 [L, D], and of the given
        frames what `conditions` ask for: image_latents bf16 [C, f, h, w], image_embeds bf16 [I, E].

        Args:
            i: position in `keys`.
            frames: (first, end) of the latent frames wanted, all by default. Latents keep their shape;
                the other frames are zero and, without `verify`, not read from the file: a rank of a
                context-parallel group needs but the frames of its own tokens
                (`wands.data.patchify.frames_of_tokens`). A checksum is one of the whole sample, so `verify`
                reads all of it.

        Raises:
            CacheError: the shard cannot be read, does not match the index, or (with `verify`) a checksum is
                wrong.
        """
        num_frames = self.latent_shape(i)[0]
        first, end = (0, num_frames) if frames is None else frames
        assert 0 <= first <= end <= num_frames, (frames, num_frames)
        offsets, file = self._place(i)
        whole, wanted = self.verify or (first, end) == (0, num_frames), array_names(self.conditions)
        arrays: dict[str, np.ndarray] = {}
        try:
            for (name, shape), offset in zip(self._shapes(i).items(), offsets, strict=True):
                if not self.verify and name not in wanted:
                    continue
                if whole or name not in LATENTS:
                    arrays[name] = np.empty(shape, np.uint16)
                    _read_into(arrays[name], file, offset)
                else:
                    arrays[name] = _read_frames(shape, (first, end), file, offset)
        except OSError as error:
            raise self._damaged(i, f"cannot be read ({reason(error)})") from None
        if self.verify and (found := checksum(*arrays.values())) != self.index.crc32[i]:
            raise self._damaged(i, f"has a wrong checksum ({found:08x}, not {self.index.crc32[i]:08x})")
        tensors = {name: from_bits(arrays[name]) for name in wanted}
        if self.verify:
            for name in LATENTS & tensors.keys():
                blank_other_frames(tensors[name], (first, end))
        return Sample(sample_id=self.index.keys[i], **tensors)

    def serve(self, variant: Variant) -> None:
        """From here on give the samples of a variant that the cache fits, which may take less than is stored."""
        assert set(array_names(variant.conditions)) <= set(self._names), variant.name
        self.conditions = variant.conditions

    def meta(self, i: int) -> dict[str, Any]:
        """What is known of sample `i` beside its numbers: caption, source file, window, num_frames, fps."""
        with self._own_handles():
            return json.loads(self._group(i).attrs["meta"])

    def check_fits(self, variant: Variant, fingerprint: Mapping[str, Any]) -> None:
        """Refuse to train a model on latents or text that were made for another one.

        Args:
            variant: of the model to train. Sizes of one family share their caches: what must agree is the
                VAE's stride, the latent channels and the text width; and the cache must have what the model is
                conditioned on. It may have more: see `serve`.
            fingerprint: of the model's encoders (`wands.encoders.components.fingerprint_pipeline`). Parts that
                the model folder does not have, such as a bare DiT's, are not compared.

        Raises:
            CacheError: naming what the cache has and what the model has.
        """
        ours, theirs = self.manifest["variant"], variant_contract(variant)
        differing = [name for name in MUST_AGREE if ours.get(name) != theirs[name]]
        differing += _lacking(ours, theirs)
        if differing:
            cached, model = (
                ", ".join(f"{name}={side.get(name)}" for name in differing) for side in (ours, theirs)
            )
            raise CacheError(
                f"cache={self.path} was made for {ours['name']} ({cached}) but the model is {theirs['name']} "
                f"({model}); {CURE}"
            )
        self.check_encoders(fingerprint, theirs["name"])

    def check_encoders(self, fingerprint: Mapping[str, Any], model: str) -> None:
        """Refuse encoders other than those that made the cache.

        Args:
            fingerprint: of the parts to compare, see `check_fits`.
            model: how the message calls the model that they belong to.

        Raises:
            CacheError: naming what the cache has and what the model has.
        """
        known = {part: self.fingerprint.get(part) for part in fingerprint}
        if difference := first_difference(known, plain(fingerprint)):
            name, cached, found = difference
            raise CacheError(
                f"cache={self.path} was encoded for {self.manifest['variant']['name']} with {name}={cached} "
                f"but the model, {model}, has {name}={found}; {CURE}"
            )

    def _check_shards(self) -> None:
        for name, size in zip(self.index.shard_names, self.index.shard_bytes.tolist(), strict=True):
            found = _file_size(f"{self.path}/{name}")
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes, not the {size} of the index"
                raise CacheError(
                    f"cache={self.path} is incomplete: {name} {what}; restore the file, or delete it and run "
                    "the same wands preprocess again."
                )

    def _forget_handles(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, tuple[h5py.File, FileIO]] = OrderedDict()
        self._offsets: dict[int, tuple[int, ...]] = {}
        self._looked_into: set[str] = set()

    def _own_handles(self) -> threading.Lock:
        if self._pid != os.getpid():  # a forked child: HDF5 promises nothing for handles opened by the parent
            self._forget_handles()
        return self._lock

    def _shard(self, i: int) -> tuple[h5py.File, FileIO]:
        """The shard of sample `i` as HDF5 and as bytes; the latter is closed when its last reader is done."""
        name = self.index.shard_names[self.index.shards[i]]
        if name not in self._handles:
            path = self.path / name
            self._handles[name] = open_shard(path, digest(self.fingerprint)), FileIO(path)
        self._handles.move_to_end(name)
        if len(self._handles) > MAX_HANDLES:
            oldest, (file, _) = self._handles.popitem(last=False)
            file.close()
            self._looked_into.discard(oldest)
        return self._handles[name]

    def _group(self, i: int) -> h5py.Group:
        try:
            group = self._shard(i)[0][sample_path(int(self.index.rows[i]))]
            found = json.loads(group.attrs["key"])
        except (OSError, KeyError, ValueError) as error:
            raise self._damaged(i, f"cannot be read ({reason(error)})") from None
        if found != self.index.keys[i]:
            raise self._damaged(i, f"is not where the index says, {found} is")
        return group

    def _shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """Shapes of all arrays of sample `i`, by index and manifest, in the order of their offsets."""
        latents = tuple(self.index.latent_shapes[i].tolist())
        text = (int(self.index.text_lens[i]), self.null_text_embeds.shape[1])
        embeds = tuple(self.manifest["variant"].get("image_embeds", ()))
        shapes = {"latents": latents, "text_embeds": text, "image_latents": latents, "image_embeds": embeds}
        return {name: shapes[name] for name in self._names}

    def _place(self, i: int) -> tuple[tuple[int, ...], FileIO]:
        """Where each array of sample `i` begins, in bytes of its shard; and that file."""
        with self._own_handles():
            try:
                file = self._shard(i)[1]
            except OSError as error:
                raise self._damaged(i, f"cannot be read ({reason(error)})") from None
            shard = int(self.index.shards[i])
            name, known = self.index.shard_names[shard], self.index.shard_ids[shard]
            if name in self._looked_into:
                return tuple(self.index.offsets[i].tolist()), file
            if known != NO_ID or i not in self._offsets:
                group = self._group(i)
                try:
                    found = {name: group[name].shape for name in stored_names(group)}
                    types = {group[name].dtype for name in found}
                    offsets = read_offsets(group)
                except (OSError, KeyError, RuntimeError) as error:
                    raise self._damaged(i, f"cannot be read ({reason(error)})") from None
                if found != self._shapes(i) or types != {np.dtype(np.uint16)}:
                    told = " and ".join(f"{name} {shape}" for name, shape in found.items())
                    raise self._damaged(i, f"has {told}, not what the index says")
                self._offsets[i] = offsets
                if known != NO_ID:
                    if known != self._handles[name][0].attrs.get("id"):
                        raise self._damaged(i, "is in another shard than the one that was indexed")
                    self._looked_into.add(name)
            return self._offsets[i], file

    def _damaged(self, i: int, what: str) -> CacheError:
        shard = self.index.shard_names[self.index.shards[i]]
        return CacheError(
            f"cache={self.path} is damaged: sample {self.index.keys[i]} in {shard} {what}; delete {shard} "
            "and run the same wands preprocess again: it encodes what is missing."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in PER_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_handles()


def _lacking(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of what keeps a cache with the contract `ours` from giving all that `theirs` is conditioned on."""
    has, wanted = set(ours.get("conditions", ())) & GIVEN, set(theirs["conditions"]) & GIVEN
    # Latents of the first frame alone are other numbers than latents of the first and the last.
    if not wanted <= has or ("image" in wanted and "last_image" in has - wanted):
        return ["conditions"]
    return ["image_embeds"] if "clip" in wanted and ours["image_embeds"] != theirs["image_embeds"] else []


def _file_size(path: str) -> int | None:
    """Of a file, None where there is none; one call to the system, for there may be thousands of shards."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _read_frames(shape: tuple[int, ...], frames: tuple[int, int], file: FileIO, offset: int) -> np.ndarray:
    """uint16 [C, f, h, w] of which only the frames (first, end) are read, the others zero."""
    (first, end), (channels, num_frames, rows, columns) = frames, shape
    bits = np.zeros(shape, np.uint16)
    for channel in range(channels):
        start = offset + 2 * rows * columns * (channel * num_frames + first)
        _read_into(bits[channel, first:end], file, start)
    return bits


def _read_into(array: np.ndarray, file: FileIO, offset: int) -> None:
    """Fill a contiguous array from a place in a file; the system gives at most 2 GiB at a time."""
    view = array.data.cast("B") if array.size else memoryview(b"")
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if count == 0:
            raise OSError("the file ends too early")
        view, offset = view[count:], offset + count
