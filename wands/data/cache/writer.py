"""Write a latent cache: first the shards, then the index.

Every file is written under a temporary name, synced and renamed, so a shard is either complete or absent. If a process is
killed, its unfinished shard (an HDF5 file) is lost. A resumed run therefore continues after the last complete shard.
Readers refuse a folder without an index. The index is sorted by key. So neither the order of writing nor an interruption
affects training.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch import Tensor

from wands.conditions.arrays import ArraySpec
from wands.data.cache.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    MASK_ARRAY,
    build_manifest,
    checksum,
    digest,
    disk_error,
    from_bits,
    read_manifest,
    stored_arrays,
    to_bits,
    write_whole,
)
from wands.data.cache.shards import (
    CacheIndex,
    IndexEntry,
    entries_of,
    open_hdf5,
    read_entries,
    sample_path,
    shard_id,
    shard_name,
    shard_number,
)
from wands.data.cache.write_ahead_log import read_records
from wands.data.holdout import signature
from wands.errors import CacheError, DiskError
from wands.files import differences, publish
from wands.lock import LOCK_NAME, WriterLock
from wands.variants import Variant

SLACK = 1 << 17
"""Bytes of disk space that are reserved for HDF5's tables in a shard, in addition to the samples."""


class ShardWriter:
    """Writer that stores samples in new shards of a cache. Several processes may write to the same folder, because
    each shard has only one writer.

    Attributes:
        path: cache folder.
        digest: digest of the fingerprint (encoders and settings) in the manifest. Each shard stores the digest.
        arrays: arrays of the cache, in the order of the manifest.
        entries: maps the key of a sample to its index entry, for the samples in all shards that this writer has finished. In
            the subclass `CacheWriter`, `entries` also contains the samples in all shards that `refresh` has read.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        arrays: Sequence[ArraySpec],
        max_samples: int = 512,
        max_bytes: int = 1 << 30,
    ) -> None:
        """Store the settings. The first file is created when the first sample is added.

        Args:
            path: cache folder, which already contains a manifest.
            fingerprint: digest of the fingerprint (encoders and settings) in the manifest.
            arrays: arrays of the cache, in the order of the manifest.
            max_samples: largest number of samples of a shard.
            max_bytes: a shard is finished when its arrays have at least this many bytes, so it may be larger by one sample.
        """
        self.path = path
        self.max_samples = max_samples
        self.max_bytes = max_bytes
        self.digest = fingerprint
        self.arrays = tuple(arrays)
        self._next = 0
        self.entries: dict[str, IndexEntry] = {}
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._file: h5py.File | None = None
        self._num_samples = self._num_bytes = 0
        # Maps the shapes and digests of all arrays except the text to a sample of the open shard.
        self._rows: dict[str, int] = {}

    def has(self, key: str, content: str) -> bool:
        """Return whether a finished shard contains a sample with this key and this content.

        Args:
            key: sample id.
            content: digest of everything that the sample is made from, including the caption.
        """
        return key in self.entries and self.entries[key].content == content

    def add(self, key: str, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Append a sample. Samples of a shard that differ only in the text share one copy of their other arrays.

        Args:
            key: unique sample id.
            arrays: arrays of the sample by name, with the dtypes and shapes that the manifest describes. The text embedding has
                no padding. At least one token weight must not be 0.
            meta: JSON values. Required: `num_frames`, `fps` and `content` (digest of everything that the sample was
                made from, including the caption). Usual: `caption`, `source` (path of the file), `start_seconds`, `video`
                (digest of everything that the latents were made from) and `last`. `last` tells whether the sample is the last
                range of frames of its clip.

        Raises:
            DiskError: if the disk is full. If the space for the sample cannot be reserved, the shard is closed and keeps the
                earlier samples. If the space was reserved and a write fails, the unfinished shard is removed.
        """
        unknown = arrays.keys() - {spec.name for spec in self.arrays}
        missing = {spec.name for spec in self.arrays if not spec.optional} - arrays.keys()
        assert not unknown | missing, f"the cache stores other arrays: {sorted(unknown)}, {sorted(missing)}"
        of_latents = dict(zip(("frames", "rows", "columns"), arrays["latents"].shape[1:], strict=True))
        for spec in self.arrays:
            if spec.name in arrays:
                shape = tuple(arrays[spec.name].shape)
                assert len(shape) == len(spec.dims), (spec.name, shape)
                wanted = [of_latents.get(str(dim), dim) for dim in spec.dims]
                fits = [not isinstance(dim, int) or n == dim for n, dim in zip(shape, wanted, strict=True)]
                assert all(fits), (spec.name, shape, wanted)
        stored = {spec.name: spec.store(arrays[spec.name]) for spec in self.arrays if spec.name in arrays}
        self._add_stored(key, stored, meta)

    def _add_stored(self, key: str, stored: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
        """Append a sample whose arrays are in their stored form."""
        assert "\0" not in key, "the index separates keys by NUL"
        ordered = {spec.name: stored[spec.name] for spec in self.arrays if spec.name in stored}
        row = self._num_samples
        crc32 = checksum(*ordered.values())
        text_bits = ordered.pop("text_embeds")
        content = str([(array.shape, hashlib.blake2b(array.data).hexdigest()) for array in ordered.values()])
        same = self._rows.get(content)
        size = text_bits.nbytes + (sum(array.nbytes for array in ordered.values()) if same is None else 0)
        text = json.dumps(meta)
        try:
            file = self._open_shard(size + 4 * len(text))
            group = file.create_group(sample_path(row))
            for array, values in ordered.items():
                if same is None:
                    _write_dataset(group, array, values)
                else:  # for example another caption of the same clip: link to the stored array
                    group[array] = file[sample_path(same)][array]
            _write_dataset(group, "text_embeds", text_bits)
            # JSON escapes file names that are not Unicode; HDF5 strings must be Unicode. Strings of fixed length are
            # in the object's header, which HDF5 protects by a checksum.
            group.attrs.update(key=np.bytes_(json.dumps(key)), crc32=crc32, meta=np.bytes_(text))
            group.attrs["signature"] = signature(from_bits(ordered["latents"]))
            group.attrs["mask_sums"] = _mask_sums(ordered.get(MASK_ARRAY))
        except (OSError, RuntimeError) as error:
            raise self._drop_shard(size, error) from None
        self._num_samples += 1
        self._num_bytes += size
        self._rows.setdefault(content, row)
        if self._num_samples >= self.max_samples or self._num_bytes >= self.max_bytes:
            self.finish_shard()

    def add_log(self, path: Path) -> None:
        """Copy samples from a write-ahead log to shards, and finish the last shard. Samples in finished shards are skipped.

        A record of the log contains one video with one or several captions. Each caption makes one sample. The first arrays
        of the record belong to the video: the latents and, for some videos, further arrays. `meta["arrays"]` lists the
        names of the video's arrays. The other arrays are the text embeddings, one for each sample. `meta["samples"]` is
        a list of pairs (sample key, metadata of the sample).

        Args:
            path: file of the log.

        Raises:
            CacheError: if a record is damaged.
            DiskError: if the disk is full.
        """
        for record in read_records(path):
            samples = record.meta["samples"]
            if all(self.has(key, meta["content"]) for key, meta in samples):
                continue
            names = record.meta["arrays"]
            arrays = record.read()
            of_video = dict(zip(names, arrays[: -len(samples)], strict=True))
            for text_embeds, (key, meta) in zip(arrays[-len(samples) :], samples, strict=True):
                if not self.has(key, meta["content"]):
                    self._add_stored(key, {**of_video, "text_embeds": text_embeds}, meta)
        self.finish_shard()

    def finish_shard(self) -> None:
        """Close the file of the open shard, and give it the final name. Remove the file if the shard has no samples.

        Raises:
            DiskError: if the disk is full. The shard is then removed.
        """
        if self._file is None:
            return
        try:
            partial = sample_path(self._num_samples)
            if partial in self._file:  # Ctrl-C interrupted the writing of a sample
                del self._file[partial]
            if self._num_samples:
                entries = list(entries_of(self._file, shard_name(self._next), self.arrays))
                self._file.attrs["id"] = shard_id(entries)
                self._file.close()
                _cut_slack(self._temporary)
                publish(self._temporary, self.path / shard_name(self._next))
                self.entries.update((entry.key, entry) for entry in entries)
                self._next += 1
            else:
                self._file.close()
                self._temporary.unlink()
        except (OSError, RuntimeError) as error:
            raise self._drop_shard(self._num_bytes, error) from None
        self._begin_shard()

    @property
    def _temporary(self) -> Path:
        return self.path / f".{shard_name(self._next)}.tmp"

    def _claim_number(self) -> None:
        while True:
            with suppress(FileExistsError):
                os.close(os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                if not (self.path / shard_name(self._next)).exists():
                    return
                self._temporary.unlink()  # another writer finished the shard before this writer claimed the name
            self._next += 1

    def _open_shard(self, num_bytes: int) -> h5py.File:
        """Return the open shard, or begin a new shard, and reserve disk space for `num_bytes` more bytes.

        A failed write inside HDF5 ends the process with a segmentation fault. The space is therefore reserved
        before HDF5 writes.
        """
        try:
            if self._file is None:
                self._claim_number()
                self._reserve(num_bytes + SLACK)
                self._file = open_hdf5(self._temporary, "w")
                self._file.attrs["fingerprint"] = self.digest
            self._reserve(self._file.id.get_filesize() + num_bytes + SLACK)
        except OSError as error:
            self.finish_shard()  # disk space for the samples in this shard is reserved already
            self._temporary.unlink(missing_ok=True)
            raise disk_error(self.path / shard_name(self._next), num_bytes, error) from None
        return self._file

    def _reserve(self, num_bytes: int) -> None:
        # Without O_APPEND: if the file system cannot reserve space, glibc then writes to every block of a new file.
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise  # other errors mean that the space cannot be reserved
        finally:
            os.close(descriptor)

    def _drop_shard(self, wanted: int, error: Exception) -> DiskError:
        """Remove the file and the samples of the unfinished shard, and return the error to raise.

        Args:
            wanted: size of the failed write in bytes.
            error: error of the failed write.
        """
        with suppress(OSError, RuntimeError):  # the flush on closing fails, too
            if self._file is not None:
                self._file.close()
        self._temporary.unlink(missing_ok=True)
        self._begin_shard()
        return disk_error(self.path / shard_name(self._next), wanted, error)


def _write_dataset(group: h5py.Group, name: str, values: np.ndarray) -> None:
    """Write an array. HDF5 keeps small arrays in a buffer, and h5py ignores an error of a write when the array is closed."""
    group.create_dataset(name, data=values).flush()


def _mask_sums(bits: np.ndarray | None) -> list[float]:
    """Return two sums of token weights: over all tokens, and over the first latent frame. Zeros without a mask."""
    if bits is None:
        return [0.0, 0.0]
    of_frames = from_bits(bits).double().sum(dim=(1, 2))
    return [float(of_frames.sum()), float(of_frames[0])]


def _cut_slack(shard: Path) -> None:
    """Release the reserved disk space that the shard did not need. HDF5 does not release this space when it closes the
    file.

    Source: HDF5 File Format Specification 3.0, superblock versions 2 and 3, "End of File Address".
    """
    with shard.open("r+b") as file:
        signature, version, end = struct.unpack("<8sB19xQ", file.read(36))
        assert (signature, version) == (b"\x89HDF\r\n\x1a\n", 3), (signature, version)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)


class CacheWriter(ShardWriter, AbstractContextManager["CacheWriter"]):
    """Writer for a new cache, or for a cache that an earlier run with the same fingerprint (encoders and settings) began.

    Use the writer as a context manager, and call `commit` at the end. If an error or Ctrl-C ends the context early, the
    samples written so far are stored in a finished shard, but no index is written. So readers see the cache unchanged.

    Attributes:
        check_lock: function that raises a WandsError if another process has taken the cache over.
    """

    def __init__(
        self, path: Path, variant: Variant | Mapping[str, Any], fingerprint: Mapping[str, Any], **limits: int
    ) -> None:
        """Create or open the cache folder, and lock it.

        Args:
            path: cache folder.
            variant: variant (kind of Wan model) for which the samples are made, or its contract (`cache_contract`), which the
                manifest of a cache contains.
            fingerprint: fingerprint of encoders and settings, as nested JSON values.
            limits: `max_samples` and `max_bytes` of a shard, see `ShardWriter`.

        Raises:
            CacheError: if the folder contains files that are not a cache, or a cache with another variant or fingerprint;
                the message names the differing values.
            WandsError: if another process writes to the folder, or the folder cannot be created.
        """
        manifest = build_manifest(variant, fingerprint)
        super().__init__(path, digest(manifest["fingerprint"]), stored_arrays(manifest), **limits)
        with ExitStack() as stack:
            lock = stack.enter_context(WriterLock(self.path / LOCK_NAME, f"cache={self.path}"))
            self.check_lock = lock.check
            self._enter(manifest)
            self._known: set[str] = set()
            self.refresh()
            self._lock = stack.pop_all()

    def finish_shard(self) -> None:
        """Finish the open shard as `ShardWriter` does, unless another process has taken the cache over."""
        self.check_lock()
        super().finish_shard()

    def refresh(self) -> None:
        """Read the index entries of the samples in shards that other writers have finished since the last call.

        Raises:
            CacheError: if a shard is damaged.
        """
        # A clip is encoded again if its caption or file has changed. Of two samples with one key, the later one counts.
        for shard in sorted(self.path.glob("shard-*.h5"), key=shard_number):
            if shard.name not in self._known:
                self.entries.update(
                    (entry.key, entry) for entry in read_entries(shard, self.digest, self.arrays)
                )
                self._known.add(shard.name)
                self._next = max(self._next, shard_number(shard) + 1)

    def commit(self, null_text_embeds: Tensor, keys: Collection[str] | None = None) -> None:
        """Finish the last shard and write the index. The index makes the cache readable.

        Args:
            null_text_embeds: embedding of "", bf16 [text tokens, width of the text encoder].
            keys: keys of the samples in the index. Default: all samples. Other samples stay in the shards, so that a
                later run need not encode them again.

        Raises:
            DiskError: if the disk is full.
        """
        self.finish_shard()
        entries = [entry for key, entry in self.entries.items() if keys is None or key in keys]
        index = CacheIndex.build(self.path, entries, to_bits(null_text_embeds), self.arrays)
        write_whole(self.path / INDEX_NAME, index.to_bytes())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.finish_shard()

    def _enter(self, manifest: dict[str, Any]) -> None:
        if (self.path / MANIFEST_NAME).exists():
            present = read_manifest(self.path)
            changes = differences(present["fingerprint"], manifest["fingerprint"])
            for part in ("variant", "conditions"):
                changes += differences(present[part], manifest[part], part)
            if not changes and present["arrays"] != manifest["arrays"]:
                changes = [("arrays", present["arrays"], manifest["arrays"])]
            if changes:
                text = ", ".join(f"{name}={cached} but this run has {this}" for name, cached, this in changes)
                raise CacheError(
                    f"cache={self.path} was begun with {text}; use the settings of the first run, or another --out."
                )
        elif any(not name.endswith(".tmp") and name != LOCK_NAME for name in os.listdir(self.path)):
            raise CacheError(
                f"cache={self.path} contains other files, but no cache; choose an empty or new folder as --out."
            )
        else:
            write_whole(self.path / MANIFEST_NAME, json.dumps(manifest, indent=2).encode())
        for leftover in self.path.glob(".*.tmp"):  # files of a killed run: no other process has the lock
            leftover.unlink()
