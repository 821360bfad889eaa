"""Merge several caches of the same model and settings: `python -m data_tools.merge CACHE... --out OUT`.

Nothing is encoded again. OUT also gets one list of the rejected clips. If the program is killed, the same command continues.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from data_tools.program import program
from wands.config.base import ARGUMENT, Options
from wands.data.cache.format import INDEX_NAME, contract_of, to_bits
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.clips.records import REJECTS_NAME
from wands.errors import CacheError, ConfigError
from wands.files import first_difference, write_text
from wands.preprocess.progress import progress
from wands.texts import plural, printable

SHOWN = 5
"""Largest number of sample keys that an error message lists."""


@dataclass(frozen=True)
class Merged:
    """Result of `merge`.

    Attributes:
        num_copied: samples that this run copied; an earlier run copied the others.
        duplicates: keys with equal samples in several caches, which are stored once.
        num_rejected: rejected clips of all caches, which rejects.jsonl lists.
    """

    num_samples: int
    num_copied: int
    duplicates: list[str]
    num_rejected: int = 0


def merge(out: str | Path, paths: Sequence[str | Path]) -> Merged:
    """Copy the samples of several caches into one cache without any change, and verify the checksum of each sample.

    `out` is new, or from an earlier run with the same caches. Of equal samples with the same key, the first is kept.

    Raises:
        CacheError: if a cache is damaged, or the caches differ in fingerprint. The message names the difference.
        ConfigError: if samples with the same key differ in latents or text, or `out` is one of the caches or has other samples.
    """
    caches = [LatentCache(path, verify=True) for path in paths]
    if any(cache.path.resolve() == Path(out).resolve() for cache in caches):
        raise ConfigError(f"OUT={out} is one of the caches to merge; pass a new folder.")
    for cache in caches[1:]:
        _check_alike(caches[0], cache)
    places: dict[str, tuple[LatentCache, int]] = {}
    duplicates = []
    differing = []
    for cache in caches:
        for i, key in enumerate(cache.keys):
            if key not in places:
                places[key] = (cache, i)
            elif _signature(*places[key]) == _signature(cache, i):
                duplicates.append(key)
            else:
                differing.append(f"{key} (in {places[key][0].path} and {cache.path})")
    if differing:
        raise ConfigError(
            f"{len(differing):,} key(s) have different samples in two caches: {', '.join(differing[:SHOWN])}. Write these keys "
            "to FILE, one per line. Run python -m data_tools.split CACHE DROPPED KEPT --keys-file FILE; CACHE is one of the two "
            f"caches. The new cache KEPT lacks these keys; merge KEPT instead of CACHE. At most {SHOWN} keys are shown."
        )
    copied = copy_samples(caches[0], Path(out), list(places.values()))
    return Merged(
        num_samples=len(places),
        num_copied=copied,
        duplicates=duplicates,
        num_rejected=_join_rejects(caches, Path(out)),
    )


def _join_rejects(caches: Sequence[LatentCache], out: Path) -> int:
    """Write the rejected clips of all caches to one list in `out`, without repeated lines, and return their number."""
    files = [path for cache in caches if (path := cache.path / REJECTS_NAME).is_file()]
    texts = [path.read_text(encoding="utf-8") for path in files]
    lines = dict.fromkeys(line for text in texts for line in text.split("\n") if line)
    if files:
        write_text(out / REJECTS_NAME, "".join(f"{line}\n" for line in lines))
    return len(lines)


def copy_samples(like: LatentCache, out: Path, places: Collection[tuple[LatentCache, int]]) -> int:
    """Copy (cache, index) samples into a new cache, or continue a copy, and return the number of samples that were copied now.

    The new cache gets the variant, fingerprint and empty caption of the cache `like`.

    Raises:
        CacheError: if a sample is damaged, the disk is full, or `out` has another fingerprint than `like`.
        ConfigError: if `out` is a finished cache that contains a sample which is not in `places`.
    """
    keys = {cache.keys[i] for cache, i in places}
    if (out / INDEX_NAME).exists() and (others := sorted(set(LatentCache(out).keys) - keys)):
        raise ConfigError(
            f"OUT={out} is a finished cache, and {len(others):,} of its samples (first: {others[0]}) are not among the samples "
            "to copy; pass a new folder as OUT. To merge, you can instead add the cache that contains these samples."
        )
    copied = 0
    with CacheWriter(out, contract_of(like.manifest), like.fingerprint) as writer:
        with progress("samples", len(places)) as advance:
            for cache, i in places:
                meta = cache.meta(i)
                if not writer.has(cache.keys[i], meta["content"]):
                    sample = cache.read(i)
                    writer.add(sample.sample_id, sample.arrays, meta)
                    copied += 1
                advance()
        writer.commit(like.null_text_embeds, keys)
    return copied


def _check_alike(first: LatentCache, other: LatentCache) -> None:
    ours, theirs = (
        {**cache.manifest["fingerprint"], **contract_of(cache.manifest)} for cache in (first, other)
    )
    if difference := first_difference(ours, theirs):
        name, one, two = difference
        raise CacheError(
            f"CACHE={other.path} has {name}={two}, but CACHE={first.path} has {name}={one}; only caches of the same "
            "model and settings can be merged. Encode one of the two caches again, or train on both with data.sources."
        )
    if to_bits(first.null_text_embeds).tobytes() != to_bits(other.null_text_embeds).tobytes():
        raise CacheError(
            f"CACHE={other.path} and CACHE={first.path} have different embeddings of the empty caption; one of the "
            "two caches was changed. Check both caches with python -m data_tools.verify."
        )


def _signature(cache: LatentCache, i: int) -> tuple[Any, ...]:
    index = cache.index
    numbers = (index.text_lens, index.crc32, index.num_frames, index.fps)
    return (*index.latent_shapes[i].tolist(), *(column[i].item() for column in numbers))


class MergeArguments(Options):
    """Merge several caches of the same model and settings.

    Examples:
        python -m data_tools.merge part-1 part-2 --out cache
    """

    cache: Annotated[tuple[Path, ...], ARGUMENT]
    """Folders of the caches to merge, written by `wands preprocess`."""
    out: Path
    """New folder for the merged cache."""


def _run(options: MergeArguments) -> int:
    merged = merge(options.out, options.cache)
    print(f"{options.out}: {plural(merged.num_samples, 'sample')}, {merged.num_copied:,} of them copied now")
    if merged.num_rejected:
        print(f"{merged.num_rejected:,} rejected clips are listed in {options.out / REJECTS_NAME}")
    if merged.duplicates:
        names = printable(", ".join(merged.duplicates[:SHOWN]))
        print(
            f"{len(merged.duplicates):,} samples are in several caches with equal content and are stored once: {names}"
        )
    return 0


main = program(MergeArguments, _run)

if __name__ == "__main__":
    sys.exit(main())
