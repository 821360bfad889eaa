"""Where every random number of training comes from: generators keyed by what the number is for.

No generator is ever carried from one draw to the next, so a draw cannot depend on the rank, the bin, the
order or the number of restarts: the same (seed, sample, repeat_index, epoch, purpose) gives the same bits
everywhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleKey:
    """Which visit to which sample.

    Attributes:
        sample_id: stable and unique name of the clip, from the cache's index.
        repeat_index: 0, 1, ... for a clip that stands several times in one epoch.
        epoch: pass over the data.
    """

    sample_id: str
    repeat_index: int
    epoch: int


def philox(*parts: int | str) -> np.random.Generator:
    """A fresh Philox generator keyed by the 128-bit blake2b digest of `parts`.

    JSON keeps the parts apart (("a", "bc") is not ("ab", "c")) and 1 from "1". Python's ``hash`` would
    differ from process to process.
    """
    digest = hashlib.blake2b(json.dumps(parts).encode("ascii"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def rng(seed: int, key: SampleKey, purpose: str) -> np.random.Generator:
    """The generator of one visit to one sample.

    Args:
        seed: `train.seed`.
        key: sample, repeat_index and epoch.
        purpose: "noise", "sigma", "cfg_dropout" or "dropout"; draws for different purposes are independent.

    Returns:
        A generator that nobody else holds; its first draw is always the same.
    """
    return philox(seed, key.sample_id, key.repeat_index, key.epoch, purpose)


def permutation(length: int, *parts: int | str) -> np.ndarray:
    """A random order of 0..length-1, int64.

    It sorts raw Philox words: numpy promises their bits for ever, but not those of ``Generator.permutation``.
    """
    words = philox(*parts).bit_generator.random_raw(length)
    return np.argsort(np.asarray(words, dtype=np.uint64), kind="stable")
