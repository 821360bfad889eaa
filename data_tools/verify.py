"""Verify all data that training reads from a latent cache: `python -m data_tools.verify CACHE [--workers N]`.

The exit code is 0 for an intact cache, 1 for problems, and 2 for a user error. Each problem is one line with its place and fix.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import h5py

from data_tools.program import program
from wands.conditions.arrays import ArraySpec
from wands.config.base import ARGUMENT, Options
from wands.data.cache.format import INDEX_NAME, MANIFEST_NAME, digest, read_manifest, reason, stored_arrays
from wands.data.cache.shards import (
    CacheIndex,
    IndexEntry,
    open_hdf5,
    open_sample,
    read_entry,
    sample_rows,
)
from wands.errors import CacheError, WandsError
from wands.own_files import open_regular_file
from wands.preprocess.progress import progress
from wands.texts import safe_lines

MANIFEST_KEYS = {"format", "schema_version", "variant", "conditions", "arrays", "fingerprint", "digest"}
DAMAGE = (OSError, KeyError, ValueError, RuntimeError, TypeError)
"""Exceptions that h5py raises for a damaged file."""


@dataclass(frozen=True)
class Problem:
    """One problem of a cache. `place` is a file, and for a single sample also its key or its row in the shard."""

    place: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}; {self.fix}"


@dataclass
class VerifyResult:
    """Result of `verify_cache`. `num_samples` includes samples that are not in the index; `num_bytes` counts checked arrays."""

    problems: list[Problem] = field(default_factory=list)
    num_samples: int = 0
    num_bytes: int = 0

    def note(self, place: str, what: str, fix: str) -> None:
        self.problems.append(Problem(place, what, fix))


def verify_cache(
    path: str | Path, workers: int | None = None, advance: Callable[[], object] = lambda: None
) -> VerifyResult:
    """Read a whole cache and compare the data with its checksums and with the index.

    This finds changes of the arrays (CRC-32 in shard and index), of keys, captions and HDF5 structures (checksums of the shard),
    of the index (its checksums, and the shards), and of the manifest (digest). It does not find changes of unused bytes, or of
    metadata above 64 KiB per sample, which HDF5 stores without a checksum. Each of `workers` threads (None: one per CPU core, at
    most 4) checks one shard at a time, and then calls `advance`.

    Raises:
        CacheError: if `path` is not a cache.
    """
    path = Path(path)
    report = VerifyResult()
    shards = sorted(file.name for file in path.glob("shard-*.h5"))
    manifest = _check_manifest(path, shards, report)
    fingerprint = None if manifest is None else digest(manifest["fingerprint"])
    index = _check_index(path, report)
    arrays = index.arrays if index else ()
    if manifest is not None:
        arrays = stored_arrays(manifest)
        if index and index.arrays != arrays:
            report.note(INDEX_NAME, f"the file describes other arrays than {MANIFEST_NAME}", REBUILD)
            index = None
    if not arrays:
        return report
    names = sorted(shards)
    rows = defaultdict[str, dict[int, int]](dict)
    if index:
        names = sorted({*shards, *index.shard_names})
        for i, (shard, row) in enumerate(zip(index.shards.tolist(), index.rows.tolist(), strict=True)):
            if not 0 <= shard < len(index.shard_names) or row in rows[index.shard_names[shard]]:
                what = "the position of the sample is invalid, or another sample has the same position"
                report.note(f"{INDEX_NAME} ({index.keys[i]})", what, REBUILD)
            else:
                rows[index.shard_names[shard]][row] = i

    def check(name: str) -> VerifyResult:
        found = VerifyResult()
        found.problems = list(_check_shard(path / name, fingerprint, arrays, index, rows[name], found))
        advance()
        return found

    with ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1)) as pool:
        for found in pool.map(check, names):
            report.problems += found.problems
            report.num_samples += found.num_samples
            report.num_bytes += found.num_bytes
    return report


REBUILD = "run the same wands preprocess command again, which rebuilds the index from the shards."


def _check_manifest(path: Path, shards: list[str], report: VerifyResult) -> dict[str, Any] | None:
    """Return the manifest of a cache, or append a problem and return None. Raise CacheError without manifest and shards."""
    fix = "restore the file, or copy it from a cache of the same model and settings."
    try:
        manifest = read_manifest(path)
    except CacheError as error:
        if not shards:
            raise
        report.note(MANIFEST_NAME, f"the file cannot be used ({error})", fix)
        return None
    stored = manifest.pop("digest", None)
    if unknown := manifest.keys() - MANIFEST_KEYS:
        what = f"the file has the unknown key(s) {', '.join(sorted(unknown))}"
    elif stored != digest(manifest):
        what = "the file was changed (wrong digest)"
    else:
        return manifest
    report.note(MANIFEST_NAME, what, fix)
    return None


def _check_index(path: Path, report: VerifyResult) -> CacheIndex | None:
    if not (path / INDEX_NAME).exists():
        fix = "run the same wands preprocess command again."
        report.note(INDEX_NAME, "the file is missing, so the cache is unfinished", fix)
        return None
    try:
        index = CacheIndex.from_file(path / INDEX_NAME)
    except CacheError as error:
        what = str(error).partition("(")[2].partition(");")[0]
        report.note(INDEX_NAME, f"the file is damaged ({what})", REBUILD)
        return None
    if list(index.keys) != sorted(set(index.keys)):
        report.note(INDEX_NAME, "the file contains a key twice or in the wrong order", REBUILD)
    return index


def _check_shard(
    path: Path,
    fingerprint: str | None,
    arrays: Sequence[ArraySpec],
    index: CacheIndex | None,
    rows: dict[int, int],
    report: VerifyResult,
) -> Iterator[Problem]:
    """Yield the problems of one shard, and add its numbers of samples and bytes to `report`.

    `fingerprint` is the expected digest or None; `rows` maps the number of a sample in the shard to its position in `index`.
    """
    fix = f"delete {path.name} and run the same `wands preprocess` command again. The command encodes the missing samples."
    problem = partial(Problem, path.name, fix=fix)
    affected = f"which affects {len(rows)} samples"
    with ExitStack() as stack:
        try:
            plain_file = stack.enter_context(open(path, "rb", opener=open_regular_file))
        except (OSError, WandsError) as error:
            yield problem(f"the file cannot be read ({reason(error)}), {affected}")
            return
        if index and path.name in index.shard_names:
            size = int(index.shard_bytes[index.shard_names.index(path.name)])
            if (found := path.stat().st_size) != size:
                yield problem(f"the file has {found:,} bytes, but the index says {size:,}")
        try:
            file = stack.enter_context(open_hdf5(path))
        except DAMAGE as error:
            yield problem(f"the file is damaged ({reason(error)}), {affected}")
            return
        try:
            carried = file.attrs["fingerprint"]
            if fingerprint is not None and carried != fingerprint:
                yield problem(f"the fingerprint of the file is {carried}, which differs from {MANIFEST_NAME}")
            ids = dict(zip(index.shard_names, index.shard_ids, strict=True)) if index else {}
            if ids.get(path.name) not in (None, file.attrs.get("id")):
                yield problem("the file was replaced after the index was written")
            present = set(sample_rows(file))
        except DAMAGE as error:
            yield problem(f"the HDF5 structure of the file is damaged ({reason(error)})")
            present = set()
        for row in sorted(present | rows.keys()):
            i = rows.get(row)
            name = f"{path.name} ({index.keys[i]})" if index and i is not None else f"{path.name} row {row}"
            try:
                entry, computed, num_bytes = _read_sample(file, row, path.name, arrays, plain_file.fileno())
            except DAMAGE as error:
                yield Problem(name, f"the sample cannot be read ({reason(error)})", fix)
                continue
            report.num_samples += 1
            report.num_bytes += num_bytes
            if entry.crc32 != computed:
                what = f"the sample has a wrong checksum of latents and text ({computed:08x}, "
                yield Problem(name, f"{what}not {entry.crc32:08x})", fix)
            elif index and i is not None:
                yield from _compare(name, index, i, entry)


def _read_sample(
    file: h5py.File, row: int, shard: str, arrays: Sequence[ArraySpec], descriptor: int
) -> tuple[IndexEntry, int, int]:
    """Return (facts that the shard stores about a sample, checksum of its arrays, number of their bytes).

    The bytes of arrays are read without HDF5, which allows only one thread to read at a time.
    """
    computed = num_bytes = 0
    for spec, stored in open_sample(file, row, arrays)[1].items():
        if stored.dtype != spec.stored_dtype:
            raise ValueError(
                f"the array {spec.name} has dtype {stored.dtype}, but wands writes {spec.dtype} as {spec.stored_dtype}"
            )
        content = os.pread(descriptor, stored.nbytes, stored.id.get_offset() or 0)
        computed = zlib.crc32(content, computed)
        num_bytes += len(content)
    return read_entry(file, shard, row, arrays), computed, num_bytes


def _compare(name: str, index: CacheIndex, i: int, entry: IndexEntry) -> Iterator[Problem]:
    """Yield a problem for each value of a sample that differs between index and shard.

    The caller has verified the sample's checksum in the shard, so a difference counts as a problem of the index.
    """
    place = f"{INDEX_NAME} ({index.keys[i]})"
    if entry.key != index.keys[i]:
        what = f"the index and the shard name different samples: {name} contains {entry.key}"
        yield Problem(place, what, REBUILD)
    for column, ours, stored in index.differences(i, entry):
        yield Problem(place, f"{column} is {ours} in the index, but {stored} in the shard", REBUILD)


class VerifyArguments(Options):
    """Verify all data that training reads from a latent cache.

    The exit code is 0 for an intact cache, 1 for a cache with problems, and 2 for a user error.

    Examples:
        python -m data_tools.verify cache
    """

    cache: Annotated[Path, ARGUMENT]
    """Cache folder that `wands preprocess` wrote."""
    workers: int | None = None
    """Number of threads that read shards [default: number of CPU cores, at most 4]."""


def _run(options: VerifyArguments) -> int:
    with progress("shards", len(list(options.cache.glob("shard-*.h5")))) as advance:
        report = verify_cache(options.cache, options.workers, advance)
    for problem in report.problems:
        print(safe_lines(str(problem)))
    print(
        f"{options.cache}: {report.num_samples:,} samples, {report.num_bytes:,} bytes of latents and text read, "
        f"{len(report.problems):,} problem(s)"
    )
    return 1 if report.problems else 0


main = program(VerifyArguments, _run)

if __name__ == "__main__":
    sys.exit(main())
