"""Random number generators of training, keyed by the use of the number.

No generator keeps a state from one draw to the next. The same (seed, sample, repeat_index, epoch, purpose) therefore gives the
same bits on every rank, in every bin and order, and after every restart.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleKey:
    """Key of one use of a sample.

    Attributes:
        sample_id: stable and unique name of the clip, from the index of the cache.
        repeat_index: 0, 1, ... for a clip that is repeated within an epoch.
        epoch: number of the pass over the data, starting with 0.
    """

    sample_id: str
    repeat_index: int
    epoch: int


def philox(*parts: int | str) -> np.random.Generator:
    """Return a new Philox generator keyed by the 128-bit blake2b digest of `parts`.

    JSON separates the parts (("a", "bc") differs from ("ab", "c")) and the types (1 differs from "1"). Python's ``hash`` is not
    used because it differs between processes.
    """
    digest = hashlib.blake2b(json.dumps(parts).encode("ascii"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def rng(seed: int, key: SampleKey, purpose: str) -> np.random.Generator:
    """Return a new generator for one use of a sample.

    Args:
        seed: `train.seed`.
        key: sample, repeat_index and epoch.
        purpose: "noise", "sigma", "first_frame", "cfg_dropout" or "dropout"; draws for different purposes are independent.
    """
    return philox(seed, key.sample_id, key.repeat_index, key.epoch, purpose)


def permutation(length: int, *parts: int | str) -> np.ndarray:
    """Return a random permutation of 0..length-1, int64.

    The permutation sorts raw Philox words, because numpy guarantees the bits of raw words across versions, and does not guarantee
    the bits of ``Generator.permutation``.
    """
    words = philox(*parts).bit_generator.random_raw(length)
    return np.argsort(np.asarray(words, dtype=np.uint64), kind="stable")
