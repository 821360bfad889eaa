"""Verify every bit of a latent cache that a reader uses.

python -m data_tools.verify CACHE [--workers N]

Exit code 0: no problem. 1: problems; each line names the sample or the part of a file, and the fix.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_tools.exit_code import exit_2_on_user_error
from wands.commands.progress import progress
from wands.data.cache.format import INDEX_NAME, MANIFEST_NAME, digest, read_manifest, reason
from wands.data.cache.index import CacheIndex
from wands.data.cache.shards import read_offsets, sample_path, stored_names
from wands.errors import CacheError

MANIFEST_KEYS = {"format", "schema_version", "variant", "fingerprint", "digest"}
DAMAGE = (OSError, KeyError, ValueError, RuntimeError, TypeError)
"""Exceptions of h5py for a file with broken structures."""


@dataclass(frozen=True)
class Problem:
    """A problem of a cache.

    Attributes:
        place: file name, with the sample's key if only one sample is affected.
        what: description of the problem.
        fix: how to repair the cache.
    """

    place: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}; {self.fix}"


@dataclass
class VerifyResult:
    """Result of `verify`.

    Attributes:
        problems: problems; empty for an intact cache.
        num_samples: samples in the shards, indexed or not.
        num_bytes: bytes of arrays whose checksum was computed.
    """

    problems: list[Problem] = field(default_factory=list)
    num_samples: int = 0
    num_bytes: int = 0

    def add(self, other: VerifyResult) -> None:
        self.problems += other.problems
        self.num_samples += other.num_samples
        self.num_bytes += other.num_bytes


def verify(
    path: str | Path, workers: int | None = None, advance: Callable[[], object] = lambda: None
) -> VerifyResult:
    """Read a whole cache and compare the data with its checksums and with the index.

    Protected are: arrays by the CRC-32 of the sample in shard and index; keys, captions and structures of a shard by HDF5's
    checksums; the index by the checksums of the zip file and by comparison with the shards; the manifest by its digest.
    Unused bits, such as gaps in a shard, are not read. Not protected is metadata outside an HDF5 header: metadata of one
    sample above 64 KiB.

    Args:
        path: cache folder, finished or not.
        workers: number of threads; each thread checks one shard at a time.
        advance: called after each shard.

    Raises:
        CacheError: if `path` is not a cache.
    """
    path, report = Path(path), VerifyResult()
    shards = sorted(file.name for file in path.glob("shard-*.h5"))
    fingerprint = _check_manifest(path, shards, report)
    index = _check_index(path, report)
    names, rows = sorted(shards), defaultdict[str, dict[int, int]](dict)
    if index:
        names = sorted({*shards, *index.shard_names})
        for i, (shard, row) in enumerate(zip(index.shards.tolist(), index.rows.tolist(), strict=True)):
            if not 0 <= shard < len(index.shard_names) or row in rows[index.shard_names[shard]]:
                report.problems.append(
                    Problem(f"{INDEX_NAME} ({index.keys[i]})", "no separate place", REBUILD)
                )
            else:
                rows[index.shard_names[shard]][row] = i

    def check(name: str) -> VerifyResult:
        found = VerifyResult()
        found.problems = list(_check_shard(path / name, fingerprint, index, rows[name], found))
        advance()
        return found

    with ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1)) as pool:
        for found in pool.map(check, names):
            report.add(found)
    return report


REBUILD = "run the same wands preprocess again, which rebuilds the index from the shards."


def _check_manifest(path: Path, shards: list[str], report: VerifyResult) -> str | None:
    """Return the digest of the fingerprint that shards must have; None if the manifest is damaged."""
    fix = "restore it, or copy it from a cache of the same model and settings."
    try:
        manifest = read_manifest(path)
    except CacheError as error:
        if not shards:
            raise
        report.problems.append(Problem(MANIFEST_NAME, f"cannot be used ({error})", fix))
        return None
    stored = manifest.pop("digest", None)
    unknown = manifest.keys() - MANIFEST_KEYS
    if unknown or (stored is not None and stored != digest(manifest)):
        what = f"has an unknown {', '.join(sorted(unknown))}" if unknown else "was altered: wrong digest"
        report.problems.append(Problem(MANIFEST_NAME, what, fix))
        return None
    return digest(manifest["fingerprint"])


def _check_index(path: Path, report: VerifyResult) -> CacheIndex | None:
    if not (path / INDEX_NAME).exists():
        report.problems.append(
            Problem(INDEX_NAME, "is missing: the cache is unfinished", "run the same wands preprocess again.")
        )
        return None
    try:
        index = CacheIndex.from_file(path / INDEX_NAME)
    except CacheError as error:
        what = str(error).partition("(")[2].partition(");")[0]
        report.problems.append(Problem(INDEX_NAME, f"is damaged ({what})", REBUILD))
        return None
    if list(index.keys) != sorted(set(index.keys)):
        report.problems.append(Problem(INDEX_NAME, "names a key twice or out of order", REBUILD))
    return index


def _check_shard(
    path: Path, fingerprint: str | None, index: CacheIndex | None, rows: dict[int, int], report: VerifyResult
) -> Iterator[Problem]:
    """Yield the problems of a shard; `rows` maps rows of the shard to samples of the index."""
    fix = f"delete {path.name} and run the same wands preprocess again, which encodes the missing samples."
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        yield Problem(path.name, f"cannot be read ({reason(error)}), {len(rows)} samples", fix)
        return
    try:
        if index and path.name in index.shard_names:
            size = int(index.shard_bytes[index.shard_names.index(path.name)])
            if (found := os.fstat(descriptor).st_size) != size:
                yield Problem(path.name, f"has {found:,} bytes, the index says {size:,}", fix)
        try:
            file = h5py.File(path, "r", locking=False)
        except DAMAGE as error:
            yield Problem(path.name, f"is damaged ({reason(error)}), {len(rows)} samples", fix)
            return
        with file:
            try:
                carried = file.attrs["fingerprint"]
                if fingerprint is not None and carried != fingerprint:
                    yield Problem(path.name, f"carries fingerprint {carried}, not the manifest's", fix)
                ids = dict(zip(index.shard_names, index.shard_ids, strict=True)) if index else {}
                if ids.get(path.name) not in (None, file.attrs.get("id")):
                    yield Problem(path.name, "is not the shard that was indexed", fix)
                present = {int(name) for name in file["samples"]}
            except DAMAGE as error:
                yield Problem(path.name, f"has damaged structures ({reason(error)})", fix)
                present = set()
            for row in sorted(present | rows.keys()):
                i = rows.get(row)
                name = (
                    f"{path.name} ({index.keys[i]})" if index and i is not None else f"{path.name} row {row}"
                )
                try:
                    group = file[sample_path(row)]
                    stored = _read_sample(group, descriptor)
                except DAMAGE as error:
                    yield Problem(name, f"cannot be read ({reason(error)})", fix)
                    continue
                report.num_samples += 1
                report.num_bytes += stored["num_bytes"]
                if stored["crc32"] != stored["computed"]:
                    what = f"wrong checksum of latents and text ({stored['computed']:08x}, "
                    yield Problem(name, f"{what}not {stored['crc32']:08x})", fix)
                elif index and i is not None:
                    yield from _compare(name, index, i, stored)
    finally:
        os.close(descriptor)


def _read_sample(group: h5py.Group, descriptor: int) -> dict[str, Any]:
    """Return everything that a reader uses of a sample.

    The bits are read without HDF5, which allows only one reading thread.
    """
    attrs = {name: group.attrs[name] for name in ("key", "dtype", "crc32", "meta")}
    if attrs["dtype"] not in ("bfloat16", b"bfloat16"):
        raise ValueError(f"dtype {attrs['dtype']}")
    computed = num_bytes = 0
    for name in stored_names(group):
        stored = group[name]
        if stored.dtype != np.uint16:
            raise ValueError(f"{name} of {stored.dtype}")
        offset = stored.id.get_offset()
        content = stored[()].tobytes() if offset is None else os.pread(descriptor, stored.nbytes, offset)
        computed = zlib.crc32(content, computed)
        num_bytes += len(content)
    meta = json.loads(attrs["meta"])
    return {
        "key": json.loads(attrs["key"]),
        "latent_shapes": list(group["latents"].shape),
        "text_lens": group["text_embeds"].shape[0],
        "crc32": int(attrs["crc32"]),
        "num_frames": meta["num_frames"],
        "fps": float(np.float32(meta["fps"])),
        "offsets": list(read_offsets(group)),
        "computed": computed,
        "num_bytes": num_bytes,
    }


def _compare(name: str, index: CacheIndex, i: int, stored: dict[str, Any]) -> Iterator[Problem]:
    """Yield differences of index and shard; the values of the shard have passed their checksums."""
    if stored["key"] != index.keys[i]:
        yield Problem(f"{INDEX_NAME} ({index.keys[i]})", f"{name} holds {stored['key']}", REBUILD)
    for column in ("latent_shapes", "text_lens", "crc32", "num_frames", "fps", "offsets"):
        ours = getattr(index, column)[i].tolist()
        if ours != stored[column]:
            what = f"{column} {ours}, the shard has {stored[column]}"
            yield Problem(f"{INDEX_NAME} ({index.keys[i]})", what, REBUILD)


@exit_2_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 when something is wrong, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(prog="python -m data_tools.verify", description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path, help="folder written by wands preprocess")
    parser.add_argument("--workers", type=int, help="threads (default: cores, at most 4)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with progress("shards", len(list(options.cache.glob("shard-*.h5")))) as advance:
        report = verify(options.cache, options.workers, advance)
    for problem in report.problems:
        print(problem)
    print(
        f"{options.cache}: {report.num_samples:,} samples, {report.num_bytes:,} bytes of latents and text read, "
        f"{len(report.problems):,} problem(s)"
    )
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
