"""Split a cache in two, by a stable hash of the clips' names or by a list of keys.

python -m data_tools.split CACHE OUT_A OUT_B --fraction F     a share F of the clips goes to OUT_A, each with all its samples
python -m data_tools.split CACHE OUT_A OUT_B --keys-file FILE  the keys in FILE, one a line, go to OUT_A

Killed at any moment, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from data_tools.exit_code import mistakes_are_2
from data_tools.merge import SHOWN, copy_samples
from wands.data.cache.reader import LatentCache
from wands.data.holdout import clip_name
from wands.errors import ConfigError


def split(
    path: str | Path,
    out_a: str | Path,
    out_b: str | Path,
    fraction: float | None = None,
    keys: Collection[str] | None = None,
) -> tuple[int, int]:
    """Copy each sample of a cache into one of two new ones.

    Args:
        path: the cache; it stays as it is.
        out_a: gets the samples of `keys`, or of the clips whose hash is below `fraction`.
        out_b: gets the rest.
        fraction: of the clips, in (0, 1). The side of a clip's windows, captions and sizes depends on its name
            alone: a cache that has grown is split the same way, and a larger fraction keeps all of a smaller one.
        keys: instead of `fraction`.

    Returns:
        Samples in `out_a` and in `out_b`.

    Raises:
        CacheError: a damaged cache, or no space.
        ConfigError: keys that are not in the cache, or a side without any sample.
    """
    assert (fraction is None) != (keys is None)
    cache = LatentCache(path, verify=True)
    if len({Path(p).resolve() for p in (path, out_a, out_b)}) < 3:
        raise ConfigError(f"CACHE={path}, OUT_A={out_a} and OUT_B={out_b} must be three folders.")
    if keys is not None:
        wanted = set(keys)
        if missing := sorted(wanted - set(cache.keys)):
            raise ConfigError(
                f"keys={', '.join(missing[:SHOWN])} are not in cache={path} ({len(missing):,} of "
                f"{len(wanted):,}); see python -m data_tools.inspect for its keys."
            )
    else:
        assert fraction is not None
        if not 0 < fraction < 1:
            raise ConfigError(f"fraction={fraction} must lie between 0 and 1.")
        wanted = {key for key in cache.keys if name_hash(clip_name(key)) < fraction}
    sides = [[i for i, key in enumerate(cache.keys) if (key in wanted) == side] for side in (True, False)]
    if not all(sides):
        raise ConfigError(
            f"cache={path} would be split into {len(sides[0]):,} and {len(sides[1]):,} samples; each side needs one."
        )
    for out, places in zip((out_a, out_b), sides, strict=True):
        copy_samples(cache, Path(out), [(cache, i) for i in places])
    return len(sides[0]), len(sides[1])


def name_hash(name: str) -> float:
    """A number in [0, 1) that depends on a clip's name alone, the same on every machine."""
    content = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(content, "big") >> 11) / (1 << 53)


@mistakes_are_2
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(prog="python -m data_tools.split", description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path, help="folder written by wands preprocess")
    parser.add_argument("out_a", type=Path)
    parser.add_argument("out_b", type=Path)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--fraction", type=float, help="share of the clips for OUT_A, by a hash of their names")
    how.add_argument("--keys-file", type=Path, help="file with the keys for OUT_A, one a line")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keys = None
    if options.keys_file is not None:
        try:
            lines = options.keys_file.read_text("utf-8", "surrogateescape").split("\n")
        except OSError as error:
            raise ConfigError(f"--keys-file={options.keys_file} cannot be read ({error.strerror}).") from None
        keys = [line.removesuffix("\r") for line in lines if line.strip()]
    a, b = split(options.cache, options.out_a, options.out_b, options.fraction, keys)
    print(f"{options.out_a}: {a:,} samples\n{options.out_b}: {b:,} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
