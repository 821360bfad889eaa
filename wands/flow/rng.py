"""Random number generators of training, each keyed by (seed, sample id, repeat index, epoch, purpose).

A new generator is made for each use, so equal keys give equal random numbers, whatever the rank, the packing, the order of the
samples or restarts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleKey:
    """Key of the random numbers for one use of a sample. `repeat_index` counts its uses in an epoch from 0."""

    sample_id: str
    repeat_index: int
    epoch: int


def philox(*parts: int | str) -> np.random.Generator:
    """Return a new Philox generator, keyed by the 128-bit blake2b digest of `parts` as JSON.

    JSON distinguishes ("a", "bc") from ("ab", "c"), and 1 from "1". Python's ``hash`` changes from process to process.
    """
    digest = hashlib.blake2b(json.dumps(parts).encode("ascii"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def rng(seed: int, key: SampleKey, purpose: str) -> np.random.Generator:
    """Return a new generator for one use of a sample. Generators for different purposes are independent.

    `purpose` is "noise", "context_noise", "sigma", "sigma_start", "first_frame", "cfg_dropout" or "dropout". For the noise level
    of a later chunk of the sample, it is "sigma_1", "sigma_start_1" and so on.
    """
    return philox(seed, key.sample_id, key.repeat_index, key.epoch, purpose)


def permutation(length: int, *parts: int | str) -> np.ndarray:
    """Return a random permutation of 0 to length - 1 (int64), keyed by `parts` as in `philox`.

    It is the order that sorts 64-bit integers of Philox. These are the same in every numpy version, unlike
    ``Generator.permutation``.
    """
    words = philox(*parts).bit_generator.random_raw(length)
    return np.argsort(np.asarray(words, dtype=np.uint64), kind="stable")
