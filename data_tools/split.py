"""Split a cache in two, by a stable hash of the clips' names or by a list of keys.

python -m data_tools.split CACHE OUT_A OUT_B --fraction F     a share F of the clips goes to OUT_A, each with all its samples
python -m data_tools.split CACHE OUT_A OUT_B --keys-file FILE  the keys in FILE, one a line, go to OUT_A

Killed at any moment, the same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from data_tools.exit_code import exit_2_on_user_error
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
        path: the cache; it is not changed.
        out_a: folder for the samples of `keys`, or of the clips whose hash is below `fraction`.
        out_b: folder for the other samples.
        fraction: share of the clips, in (0, 1). All samples of a clip are on the side that its name decides. A cache that
            has grown is split in the same way, and a larger fraction contains all clips of a smaller fraction.
        keys: sample ids, instead of `fraction`.

    Returns:
        Number of samples in `out_a` and in `out_b`.

    Raises:
        CacheError: if the cache is damaged or the disk is full.
        ConfigError: if a key is not in the cache, or a side has no sample.
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
            raise ConfigError(f"--fraction={fraction} must be between 0 and 1, for example 0.1.")
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
    """Return a number in [0, 1) that depends on a clip's name alone, on every machine."""
    content = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(content, "big") >> 11) / (1 << 53)


@exit_2_on_user_error
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, 2 for an error of the user."""
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
