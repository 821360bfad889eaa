"""Merge several caches of the same model and settings.

python -m data_tools.merge OUT CACHE...

Nothing is encoded again. The lists of rejected clips are joined. Killed at any moment, the same command continues where it
stopped.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_tools.exit_code import exit_2_on_user_error
from wands.commands.progress import progress
from wands.data.cache.format import INDEX_NAME, to_bits
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.clips.records import REJECTS_NAME
from wands.errors import CacheError, ConfigError
from wands.files import first_difference, write_text
from wands.variants import MASK_CHANNELS, VARIANTS, Variant

SHOWN = 5
"""Keys named in a message about many."""


@dataclass(frozen=True)
class Merged:
    """Result of `merge`.

    Attributes:
        num_samples: samples in the merged cache.
        num_copied: samples copied by this run; an earlier run copied the others.
        duplicates: keys that several caches have with equal content, stored once.
        num_rejected: rejected clips of all caches, listed in rejects.jsonl.
    """

    num_samples: int
    num_copied: int
    duplicates: list[str]
    num_rejected: int = 0


def merge(out: str | Path, paths: Sequence[str | Path]) -> Merged:
    """Copy the samples of several caches into one, bit by bit, and verify each checksum.

    Args:
        out: folder of the merged cache: new, or from an earlier run with the same caches.
        paths: the caches. Samples with one key must have equal latents and text; the metadata of the first is kept.

    Raises:
        CacheError: if fingerprints differ (the message names the difference), or a cache is damaged.
        ConfigError: if samples of one key differ, or `out` contains other samples.
    """
    caches = [LatentCache(path, verify=True) for path in paths]
    if any(cache.path.resolve() == Path(out).resolve() for cache in caches):
        raise ConfigError(f"OUT={out} is one of the caches to merge; give a new folder.")
    for cache in caches[1:]:
        _check_alike(caches[0], cache)
    places: dict[str, tuple[LatentCache, int]] = {}
    duplicates, differing = [], []
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
            f"{len(differing):,} key(s) have different samples: {', '.join(differing[:SHOWN])}; take them "
            "out of one cache with python -m data_tools.split CACHE KEEP DROP --keys-file FILE."
        )
    copied = copy_samples(caches[0], Path(out), list(places.values()))
    return Merged(len(places), copied, duplicates, _join_rejects(caches, Path(out)))


def _join_rejects(caches: Sequence[LatentCache], out: Path) -> int:
    """Write the rejected clips of all caches, each line once, and return their number."""
    files = [path for cache in caches if (path := cache.path / REJECTS_NAME).is_file()]
    texts = [path.read_text(encoding="utf-8") for path in files]
    lines = dict.fromkeys(line for text in texts for line in text.split("\n") if line)
    if files:
        write_text(out / REJECTS_NAME, "".join(f"{line}\n" for line in lines))
    return len(lines)


def copy_samples(like: LatentCache, out: Path, places: Collection[tuple[LatentCache, int]]) -> int:
    """Copy samples of other caches into a cache, new or from a copy that was killed.

    Args:
        like: cache with the variant, the fingerprint and the embedding of "".
        out: target folder.
        places: (cache, position) of each sample.

    Returns:
        Number of samples copied by this run.

    Raises:
        CacheError: if a sample is damaged, the disk is full, or `out` has another fingerprint.
        ConfigError: if `out` is a finished cache with other samples.
    """
    keys = {cache.keys[i] for cache, i in places}
    if (out / INDEX_NAME).exists() and (others := sorted(set(LatentCache(out).keys) - keys)):
        raise ConfigError(
            f"OUT={out} is a finished cache with {len(others):,} other sample(s), such as {others[0]}; give a "
            "new folder, or merge that cache too."
        )
    copied = 0
    with CacheWriter(out, to_variant(like.manifest["variant"]), like.fingerprint) as writer:
        with progress("samples", len(places)) as advance:
            for cache, i in places:
                meta = cache.meta(i)
                if not writer.has(cache.keys[i], meta["content"]):
                    sample = cache.read(i)
                    writer.add(
                        *(sample.sample_id, sample.latents, sample.text_embeds, meta),
                        image_latents=sample.image_latents,
                        image_embeds=sample.image_embeds,
                    )
                    copied += 1
                advance()
        writer.commit(like.null_text_embeds, keys)
    return copied


def to_variant(contract: dict[str, Any]) -> Variant:
    """Return a variant with the contract of a manifest; sizes of the DiT, which no cache contains, are arbitrary."""
    base = next(iter(VARIANTS.values()))
    channels, conditions = contract["latent_channels"], tuple(contract["conditions"])
    image_len, image_dim = contract.get("image_embeds", (0, None))
    dit = replace(
        base.dit,
        patch_size=tuple(contract["patch_size"]),
        in_channels=channels + (MASK_CHANNELS + channels if "image" in conditions else 0),
        out_channels=channels,
        text_dim=contract["text_dim"],
        image_len=image_len,
        image_dim=image_dim,
    )
    return replace(
        base, name=contract["name"], vae_stride=tuple(contract["vae_stride"]), conditions=conditions, dit=dit
    )


def _check_alike(first: LatentCache, other: LatentCache) -> None:
    ours, theirs = (
        {**cache.manifest["fingerprint"], "variant": cache.manifest["variant"]} for cache in (first, other)
    )
    if difference := first_difference(ours, theirs):
        name, one, two = difference
        raise CacheError(
            f"cache={other.path} has {name}={two} but {first.path} has {one}; only caches made with the same "
            "model and settings can be merged: encode one of them again, or train on both with data.sources."
        )
    if to_bits(first.null_text_embeds).tobytes() != to_bits(other.null_text_embeds).tobytes():
        raise CacheError(
            f"cache={other.path} has another embedding of the empty caption than {first.path}; one of them was "
            "altered: see python -m data_tools.verify."
        )


def _signature(cache: LatentCache, i: int) -> tuple[Any, ...]:
    index = cache.index
    numbers = (index.text_lens, index.crc32, index.num_frames, index.fps)
    return (*index.latent_shapes[i].tolist(), *(column[i].item() for column in numbers))


@exit_2_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 for an error of the user."""
    parser = argparse.ArgumentParser(prog="python -m data_tools.merge", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the merged cache")
    parser.add_argument("cache", type=Path, nargs="+", help="folders written by wands preprocess")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    merged = merge(options.out, options.cache)
    print(f"{options.out}: {merged.num_samples:,} samples, {merged.num_copied:,} of them copied now")
    if merged.num_rejected:
        print(f"{merged.num_rejected:,} rejected clips are listed in {options.out / REJECTS_NAME}")
    if merged.duplicates:
        names = ", ".join(merged.duplicates[:SHOWN])
        print(f"{len(merged.duplicates):,} were in several caches with the same content, kept once: {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
