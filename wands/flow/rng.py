"""Random number generators of training. Each generator is keyed by (seed, sample id, repeat index, epoch, purpose).

The repeat index (0, 1, ...) counts the uses of a sample in one epoch. A new generator is made whenever random numbers are
needed, so equal keys always give equal random numbers. The random numbers do not depend on the rank, the packing of the
samples, the order of the samples, or restarts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleKey:
    """Key of the random numbers for one use of a sample in training.

    Attributes:
        sample_id: stable and unique name of the sample.
        repeat_index: 0, 1, ... for the uses of the sample in an epoch.
        epoch: number of the pass over the data, starting with 0.
    """

    sample_id: str
    repeat_index: int
    epoch: int


def philox(*parts: int | str) -> np.random.Generator:
    """Return a new Philox random number generator, keyed by the 128-bit blake2b digest of `parts`.

    The digest is computed from `parts` as JSON. JSON distinguishes ("a", "bc") from ("ab", "c"), and 1 from "1".
    Python's ``hash`` is not used, because the values of ``hash`` change from process to process.
    """
    digest = hashlib.blake2b(json.dumps(parts).encode("ascii"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def rng(seed: int, key: SampleKey, purpose: str) -> np.random.Generator:
    """Return a new random number generator for one use of a sample in training.

    Args:
        seed: `train.seed`.
        key: sample id, epoch, and repeat index (0, 1, ...), which distinguishes the uses of a sample in one epoch.
        purpose: "noise", "sigma", "sigma_start", "first_frame", "cfg_dropout" or "dropout". Generators for different purposes are
            independent.
    """
    return philox(seed, key.sample_id, key.repeat_index, key.epoch, purpose)


def permutation(length: int, *parts: int | str) -> np.ndarray:
    """Return a random permutation of the integers from 0 to length - 1 (int64) that depends only on the arguments.

    The permutation is the order that sorts `length` random 64-bit integers of Philox. These integers are the same in
    every numpy version. The result of numpy's ``Generator.permutation`` can change with the version.

    Args:
        length: number of integers.
        parts: key of the random generator, as in `philox`, such as the seed and the epoch.
    """
    words = philox(*parts).bit_generator.random_raw(length)
    return np.argsort(np.asarray(words, dtype=np.uint64), kind="stable")
