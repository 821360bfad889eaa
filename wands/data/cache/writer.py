"""The latent cache, written: shards, each complete or not there at all, then the index.

Every file is written under a temporary name, synced and renamed: HDF5 files of a killed process are lost, so
a shard is the unit of resume, and a folder without an index is an unfinished cache that no reader opens. The
index is sorted by key: the order of writing, and how often a run was killed, leave no trace in training.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from torch import Tensor

from wands.data.cache.format import (
    ARRAYS,
    IMAGE_ARRAYS,
    INDEX_NAME,
    LIBVER,
    MANIFEST_NAME,
    CacheIndex,
    IndexEntry,
    build_manifest,
    checksum,
    differences,
    digest,
    disk_error,
    from_bits,
    read_entries,
    read_manifest,
    read_offsets,
    reason,
    sample_path,
    shard_id,
    shard_name,
    shard_number,
    to_bits,
    to_text,
    write_whole,
)
from wands.data.cache.write_ahead_log import LogRecord, read_records
from wands.errors import CacheError
from wands.files import publish
from wands.variants import Variant

SLACK = 1 << 17
"""Bytes claimed beyond the samples for HDF5's own tables of one shard."""


class ShardWriter:
    """Adds samples to shards of its own; several processes may each have one in the same folder.

    A shard's number is claimed by creating its temporary file, so that no two writers ever share one.

    Attributes:
        path: cache folder.
        digest: of the manifest's fingerprint; each shard carries it.
        max_samples: of one shard.
        max_bytes: of one shard.
    """

    def __init__(
        self, path: Path, fingerprint: str, max_samples: int = 512, max_bytes: int = 1 << 30, first: int = 0
    ) -> None:
        """Name the folder; nothing is written before the first sample.

        Args:
            path: cache folder, with its manifest.
            fingerprint: digest of the manifest's fingerprint.
            max_samples: of one shard.
            max_bytes: of one shard, reached but for one sample.
            first: number to begin with; numbers in use are skipped.
        """
        self.path = path
        self.max_samples, self.max_bytes = max_samples, max_bytes
        self.digest, self._next = fingerprint, first
        self._entries: dict[str, IndexEntry] = {}
        self._file: h5py.File | None = None
        self._pending: list[IndexEntry] = []
        self._num_bytes = 0
        self._rows: dict[
            str, int
        ] = {}  # digest of all but the text -> the sample of the open shard that has it

    def has(self, key: str, content: str) -> bool:
        """Whether a finished shard already holds `key`, made from the same `content`."""
        return key in self._entries and self._entries[key].content == content

    def add(
        self,
        key: str,
        latents: Tensor,
        text_embeds: Tensor,
        meta: Mapping[str, Any],
        *,
        image_latents: Tensor | None = None,
        image_embeds: Tensor | None = None,
    ) -> None:
        """Append one sample; of several samples in a shard that differ in their text alone the rest is stored once.

        Args:
            key: unique name; becomes the sample id of training.
            latents: bf16 [C, f, h, w], normalised.
            text_embeds: bf16 [L, D], trimmed to its real length.
            meta: JSON values; must hold `num_frames`, `fps` and `content` (a digest of what the sample is
                made from), usually also `caption`, `source`, the window, `video` (a digest of what the
                latents are made from) and `last` (no window of the clip follows).
            image_latents: bf16 [C, f, h, w], of the given frames, for variants that take them.
            image_embeds: bf16 [I, E], CLIP's states of the given frames, likewise.

        Raises:
            CacheError: the disk is full; the unfinished shard is removed.
        """
        assert (latents.ndim, text_embeds.ndim) == (4, 2), (latents.shape, text_embeds.shape)
        assert image_latents is None or image_latents.shape == latents.shape, image_latents.shape
        assert "\0" not in key, "the index separates keys by NUL"
        given = zip(ARRAYS, (latents, text_embeds, image_latents, image_embeds), strict=True)
        bits = {name: to_bits(tensor) for name, tensor in given if tensor is not None}
        row, crc32 = len(self._pending), checksum(*bits.values())
        text_bits = bits.pop("text_embeds")
        name = _digest_of(bits.values())
        same = self._rows.get(name) if self._file is not None else None
        size = text_bits.nbytes + (sum(array.nbytes for array in bits.values()) if same is None else 0)
        try:
            file = self._open_shard(size + 4 * len(text := json.dumps(meta)))
            group = file.create_group(sample_path(row))
            for array, values in bits.items():
                if same is None:
                    group.create_dataset(array, data=values)
                else:  # another caption of the clip, say: a second name for the same numbers
                    group[array] = file[sample_path(same)][array]
            group.create_dataset("text_embeds", data=text_bits)
            # Of fixed length they lie in the object's header, which HDF5 guards by a checksum of its own.
            group.attrs.update(
                key=np.bytes_(to_text(key)), dtype=np.bytes_("bfloat16"), crc32=crc32, meta=np.bytes_(text)
            )
            offsets = read_offsets(group)
        except (OSError, RuntimeError) as error:
            raise self._drop_shard(size, error) from None
        self._pending.append(
            IndexEntry.of(
                *(key, shard_name(self._next), row, tuple(latents.shape), len(text_embeds), crc32, meta),
                offsets,
            )
        )
        self._num_bytes += size
        self._rows.setdefault(name, row)
        if row + 1 >= self.max_samples or self._num_bytes >= self.max_bytes:
            self.finish_shard()

    def add_record(self, record: LogRecord) -> None:
        """Append the samples of a journal's record, those that a finished shard does not hold.

        Args:
            record: latents, what there is of the given frames, and then the text of each sample; `meta["samples"]`
                has their keys and metadata.

        Raises:
            CacheError: the record is damaged, or the disk is full.
        """
        lacking = [not self.has(key, meta["content"]) for key, meta in record.meta["samples"]]
        if not any(lacking):
            return
        arrays = [from_bits(bits) for bits in record.read()]
        texts = arrays[-len(lacking) :]
        latents, *of_frames = arrays[: -len(lacking)]
        images = dict(zip(IMAGE_ARRAYS.values(), of_frames, strict=False))
        for text_embeds, (key, meta), lacks in zip(texts, record.meta["samples"], lacking, strict=True):
            if lacks:
                self.add(key, latents, text_embeds, meta, **images)

    def finish_shard(self) -> None:
        """Give the samples added since the last shard their file.

        Raises:
            CacheError: the disk is full; the shard is removed.
        """
        if self._file is None:
            return
        try:
            partial = sample_path(len(self._pending))
            if partial in self._file:  # Ctrl-C came in the middle of a sample
                del self._file[partial]
            self._file.attrs["id"] = shard_id(self._pending)
            self._file.close()
            if not self._pending:
                self._temporary.unlink()
                self._file, self._rows = None, {}
                return
            _cut_slack(self._temporary)
            publish(self._temporary, self.path / shard_name(self._next))
        except (OSError, RuntimeError) as error:
            raise self._drop_shard(self._num_bytes, error) from None
        self._entries.update((entry.key, entry) for entry in self._pending)
        self._file, self._pending, self._num_bytes, self._rows = None, [], 0, {}
        self._next += 1

    @property
    def _temporary(self) -> Path:
        return self.path / f".{shard_name(self._next)}.tmp"

    def _claim_number(self) -> None:
        while True:
            try:
                os.close(os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            except FileExistsError:
                self._next += 1
                continue
            if not (self.path / shard_name(self._next)).exists():
                return
            self._temporary.unlink()  # finished by another writer before the temporary name was ours
            self._next += 1

    def _open_shard(self, num_bytes: int) -> h5py.File:
        """The shard being written, with `num_bytes` more of the disk claimed for it.

        A write that fails inside HDF5 leaves a file that can neither be closed nor forgotten, and the process
        ends by a segmentation fault; so that space is asked for before HDF5 needs it.
        """
        try:
            if self._file is None:
                self._claim_number()
                self._reserve(num_bytes + SLACK)
                self._file = h5py.File(self._temporary, "w", libver=LIBVER)
                self._file.attrs["fingerprint"] = self.digest
            self._reserve(self._file.id.get_filesize() + num_bytes + SLACK)
        except OSError as error:
            self.finish_shard()  # what it holds already has its space
            self._temporary.unlink(missing_ok=True)
            raise disk_error(self.path / shard_name(self._next), num_bytes, error) from None
        return self._file

    def _reserve(self, num_bytes: int) -> None:
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise  # any other: a file system that cannot promise space
        finally:
            os.close(descriptor)

    def _drop_shard(self, wanted: int, error: Exception) -> CacheError:
        """Give up the unfinished shard, so that neither its file nor its entries are met again."""
        try:
            if self._file is not None:
                self._file.close()
        except (OSError, RuntimeError):
            pass  # what could not be written before cannot be flushed now; the file goes anyway
        self._temporary.unlink(missing_ok=True)
        self._file, self._pending, self._num_bytes, self._rows = None, [], 0, {}
        return disk_error(self.path / shard_name(self._next), wanted, error)


def _cut_slack(shard: Path) -> None:
    """Give back the space that was claimed and not needed: HDF5 does not know of it and leaves it in the file.

    Source: HDF5 File Format Specification 3.0, superblock versions 2 and 3, "End of File Address".
    """
    with shard.open("r+b") as file:
        signature, version, end = struct.unpack("<8sB19xQ", file.read(36))
        assert (signature, version) == (b"\x89HDF\r\n\x1a\n", 3), (signature, version)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)


def _digest_of(arrays: Iterable[np.ndarray]) -> str:
    found = hashlib.blake2b()
    for array in arrays:
        found.update(repr(array.shape).encode())
        found.update(array.data)
    return found.hexdigest()


class CacheWriter(ShardWriter):
    """Adds samples to a cache, new or begun by an earlier run with the same fingerprint.

    Use as a context manager and call `commit` at the end. Leaving early, by an error or Ctrl-C, keeps the
    samples written so far in a finished shard, but writes no index: the cache stays as it was for readers.
    """

    def __init__(
        self,
        path: str | Path,
        variant: Variant,
        fingerprint: Mapping[str, Any],
        max_samples: int = 512,
        max_bytes: int = 1 << 30,
    ) -> None:
        """Create the folder, or take up what is in it.

        Args:
            path: cache folder.
            variant: the samples are made for.
            fingerprint: of encoders and settings, nested, of JSON values.
            max_samples: of one shard.
            max_bytes: of one shard, reached but for one sample.

        Raises:
            CacheError: the folder holds something else, a cache with another fingerprint (both values are
                named), or another process writes to it.
        """
        manifest = build_manifest(variant, fingerprint)
        super().__init__(Path(path), digest(manifest["fingerprint"]), max_samples, max_bytes)
        self._lock = self._claim()
        try:
            self._enter(manifest)
            self._known: set[str] = set()
            self.refresh()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def keys(self) -> frozenset[str]:
        """Every key in a finished shard."""
        return frozenset(self._entries)

    @property
    def entries(self) -> Mapping[str, IndexEntry]:
        """Every sample in a finished shard by its key."""
        return self._entries

    def refresh(self) -> None:
        """Take in the shards that others have finished since this writer last looked.

        Raises:
            CacheError: one is damaged.
        """
        # A clip whose caption or file has changed is encoded again: of two samples the later one counts.
        for shard in sorted(self.path.glob("shard-*.h5"), key=shard_number):
            if shard.name not in self._known:
                self._entries.update((entry.key, entry) for entry in read_entries(shard, self.digest))
                self._known.add(shard.name)
                self._next = max(self._next, shard_number(shard) + 1)

    def adopt(self, journal: Path) -> None:
        """Move the samples of a journal into shards, whatever ended the process that wrote it; the journal goes.

        Raises:
            CacheError: a sample is damaged, or the disk is full.
        """
        for record in read_records(journal):
            self.add_record(record)
        self.finish_shard()
        journal.unlink()

    def commit(self, null_text_embeds: Tensor, keys: Collection[str] | None = None) -> None:
        """Finish the last shard and write the index: from here on the cache can be read.

        Args:
            null_text_embeds: embedding of "", bf16 [L, D].
            keys: what the index shall hold; default: everything. The rest stays in the shards, and a later
                run that wants it back does not encode it again.

        Raises:
            CacheError: the disk is full.
        """
        self.finish_shard()
        entries = [entry for key, entry in self._entries.items() if keys is None or key in keys]
        index = CacheIndex.build(self.path, entries, to_bits(null_text_embeds))
        write_whole(self.path / INDEX_NAME, index.to_bytes())

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.finish_shard()
        finally:
            os.close(self._lock)

    def _claim(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CacheError(
                f"cache={self.path} cannot be made a folder ({reason(error)}); choose another --out."
            ) from None
        try:
            # The system lifts this lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise CacheError(
                f"cache={self.path} is being written by another process; wait for it or choose another --out."
            ) from None
        except OSError:
            pass  # a file system without locks: then the user alone sees to it that one run writes
        return lock

    def _enter(self, manifest: dict[str, Any]) -> None:
        if (self.path / MANIFEST_NAME).exists():
            present = read_manifest(self.path)
            if found := differences(
                {name: present[name] for name in ("variant", "fingerprint")},
                {name: manifest[name] for name in ("variant", "fingerprint")},
            ):
                told = ", ".join(
                    f"{name.removeprefix('fingerprint.')}={cached} but this run has {asked}"
                    for name, cached, asked in found
                )
                raise CacheError(
                    f"cache={self.path} was begun with {told}; give the settings it was begun with, or another --out."
                )
        elif any(not name.endswith(".tmp") for name in os.listdir(self.path)):
            raise CacheError(
                f"cache={self.path} is a folder with other files in it; choose an empty or new --out."
            )
        else:
            write_whole(self.path / MANIFEST_NAME, json.dumps(manifest, indent=2).encode())
        for leftover in self.path.glob(".*.tmp"):  # a killed run's: the lock is ours, nobody else writes
            leftover.unlink()
