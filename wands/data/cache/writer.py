"""Write a latent cache: first the shards, then the index.

Every file is written under a temporary name, synced and renamed. A killed process loses its unfinished shard. Readers refuse a
folder without an index, which is sorted by key, so neither order nor interruption of writing affects training.
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
    """Writer of new shards. Several processes may write to the same folder, because each shard has only one writer.

    Attributes:
        digest: digest of the fingerprint in the manifest, which each shard stores.
        entries: index entries by key, of the samples in all shards that this writer has finished (or `CacheWriter.refresh` read).
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        arrays: Sequence[ArraySpec],
        max_samples: int = 512,
        max_bytes: int = 1 << 30,
    ) -> None:
        """Store the settings; the first sample creates the first file. `path` has a manifest already.

        A shard is finished at `max_samples` or when its arrays have at least `max_bytes` bytes, so it may be larger by one
        sample.
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
        """Return whether a finished shard has a sample with this key and this `content`."""
        return key in self.entries and self.entries[key].content == content

    def add(self, key: str, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Append a sample. Samples of a shard that differ only in the text share one copy of their other arrays.

        The arrays are as in the manifest, the text without padding; at least one token weight must not be 0. `meta` needs
        `num_frames`, `fps` and `content` (digest of everything that the sample was made from). Usual are `caption`, `source`,
        `start_seconds`, `video` (digest of everything that the latents were made from) and `last` (whether it is the clip's last
        window).

        Raises:
            DiskError: if the disk is full. Without space for the sample, the shard is closed and keeps the earlier samples. If a
                write fails in reserved space, the unfinished shard is removed.
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
        """Copy samples from a write-ahead log to shards, skip those in finished shards, and finish the last shard.

        A record is one video with one or several captions, each of which makes a sample: first the arrays named in
        `meta["arrays"]`, then one text embedding for each (key, metadata) in `meta["samples"]`.

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
        """Give the open shard its final name, or remove it if it is empty or, with a DiskError, if the disk is full."""
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
        """Return the open or a new shard, with disk space for `num_bytes` more bytes reserved.

        A failed write inside HDF5 would end the process with a segmentation fault.
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
        """Remove the file and the samples of the unfinished shard, and return the error to raise."""
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
    """Release the reserved disk space that the shard did not need, which HDF5 keeps.

    Source: HDF5 File Format Specification 3.0, superblock versions 2 and 3, "End of File Address".
    """
    with shard.open("r+b") as file:
        signature, version, end = struct.unpack("<8sB19xQ", file.read(36))
        assert (signature, version) == (b"\x89HDF\r\n\x1a\n", 3), (signature, version)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)


class CacheWriter(ShardWriter, AbstractContextManager["CacheWriter"]):
    """Context manager that writes a new cache, or continues one with the same fingerprint. Call `commit` at the end.

    If an error or Ctrl-C ends the context early, the samples so far are stored in a finished shard, but no index is written, so
    readers see the cache unchanged. `check_lock` raises a WandsError if another process has taken the cache over.
    """

    def __init__(
        self, path: Path, variant: Variant | Mapping[str, Any], fingerprint: Mapping[str, Any], **limits: int
    ) -> None:
        """Create or open the cache folder, and lock it. `variant` may be a contract; `limits` are those of `ShardWriter`.

        Raises:
            CacheError: if the folder contains other files than a cache, or a cache with another variant or fingerprint.
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
        """Read the entries of shards that other writers have finished since the last call. CacheError if one is damaged."""
        # A clip is encoded again if its caption or file has changed. Of two samples with one key, the later one counts.
        for shard in sorted(self.path.glob("shard-*.h5"), key=shard_number):
            if shard.name not in self._known:
                self.entries.update(
                    (entry.key, entry) for entry in read_entries(shard, self.digest, self.arrays)
                )
                self._known.add(shard.name)
                self._next = max(self._next, shard_number(shard) + 1)

    def commit(self, null_text_embeds: Tensor, keys: Collection[str] | None = None) -> None:
        """Finish the last shard and write the index, with all samples or those in `keys`. The others stay in the shards for later
        runs.

        `null_text_embeds` is bf16 [text tokens, width of the text encoder]. A full disk raises DiskError.
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
