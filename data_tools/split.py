"""Split a cache into two caches: `python -m data_tools.split CACHE OUT_A OUT_B --fraction F | --keys-file FILE`.

OUT_A gets a fraction of the clips with all their samples, or the samples whose keys are in FILE, one per line. If the program is
killed, the same command continues the split.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from data_tools.merge import SHOWN, copy_samples
from data_tools.program import program
from wands.config.base import ARGUMENT, Options
from wands.data.cache.reader import LatentCache
from wands.data.holdout import clip_name
from wands.errors import ConfigError
from wands.texts import plural


def split_cache(
    path: str | Path,
    out_a: str | Path,
    out_b: str | Path,
    fraction: float | None = None,
    keys: Collection[str] | None = None,
) -> tuple[int, int]:
    """Copy each sample of a cache into one of two new caches, and return their numbers of samples.

    `out_a` gets the samples in `keys`, or `fraction` of the clips; exactly one is set. A hash of the clip's name selects the
    folder: all samples of a clip go to one folder, a later split of a grown cache puts the earlier clips into the same folders,
    and a larger fraction only moves clips from `out_b` to `out_a`.

    Raises:
        CacheError: if the cache is damaged or the disk is full.
        ConfigError: if `fraction` is not between 0 and 1, a key is unknown, two folders are equal, or a new cache would be empty.
    """
    assert (fraction is None) != (keys is None)
    cache = LatentCache(path, verify=True)
    if len({Path(p).resolve() for p in (path, out_a, out_b)}) < 3:
        raise ConfigError(
            f"CACHE={path}, OUT_A={out_a} and OUT_B={out_b} must be three different folders; pass new folders."
        )
    if keys is not None:
        wanted = set(keys)
        if missing := sorted(wanted - set(cache.keys)):
            raise ConfigError(
                f"{len(missing):,} of the {len(wanted):,} keys in --keys-file are not in CACHE={path}, such as "
                f"{', '.join(missing[:SHOWN])}; correct the keys. python -m data_tools.inspect CACHE --rows N lists N keys."
            )
    else:
        assert fraction is not None
        if not 0 < fraction < 1:
            raise ConfigError(f"--fraction={fraction} must be between 0 and 1, for example 0.1.")
        wanted = {key for key in cache.keys if name_hash(clip_name(key)) < fraction}
    sides = [[i for i, key in enumerate(cache.keys) if (key in wanted) == side] for side in (True, False)]
    if not all(sides):
        raise ConfigError(
            f"CACHE={path} would be split into {len(sides[0]):,} and {len(sides[1]):,} samples, but each new cache needs a "
            "sample; change --fraction or --keys-file."
        )
    for out, places in zip((out_a, out_b), sides, strict=True):
        copy_samples(cache, Path(out), [(cache, i) for i in places])
    return len(sides[0]), len(sides[1])


def name_hash(name: str) -> float:
    """Return a number in [0, 1) that depends only on a clip's name, on every machine."""
    content = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(content, "big") >> 11) / (1 << 53)


class SplitArguments(Options):
    """Split a cache into two caches, by a stable hash of the clips' names or by a list of keys.

    Examples:
        python -m data_tools.split cache a b --fraction 0.1
        python -m data_tools.split cache a b --keys-file keys.txt
    """

    cache: Annotated[Path, ARGUMENT]
    """Cache folder that `wands preprocess` wrote."""
    out_a: Annotated[Path, ARGUMENT]
    """New folder for the samples that --fraction or --keys-file selects."""
    out_b: Annotated[Path, ARGUMENT]
    """New folder for all samples that are not in OUT_A."""
    fraction: float | None = None
    """Fraction of the clips for OUT_A, between 0 and 1. A hash of the clip names selects the clips. Set either --fraction or
    --keys-file."""
    keys_file: Path | None = None
    """File with the keys of the samples for OUT_A, one per line."""


def _run(options: SplitArguments) -> int:
    keys = None
    if options.fraction is None and options.keys_file is None:
        raise ConfigError(
            "--fraction and --keys-file are both missing; set one of them, to select the samples for OUT_A."
        )
    if options.fraction is not None and options.keys_file is not None:
        raise ConfigError(
            f"--fraction={options.fraction} and --keys-file={options.keys_file} cannot be combined; remove one of the options."
        )
    if options.keys_file is not None:
        try:
            lines = options.keys_file.read_text("utf-8", "surrogateescape").split("\n")
        except OSError as error:
            raise ConfigError(
                f"--keys-file={options.keys_file} cannot be read ({error.strerror}); correct the path."
            ) from None
        keys = [line.removesuffix("\r") for line in lines if line.strip()]
    a, b = split_cache(options.cache, options.out_a, options.out_b, options.fraction, keys)
    print(f"{options.out_a}: {plural(a, 'sample')}\n{options.out_b}: {plural(b, 'sample')}")
    return 0


main = program(SplitArguments, _run)

if __name__ == "__main__":
    sys.exit(main())
