"""Choose the clips that are held out of training, by the name of each clip alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import numpy as np

from wands.data.clips.records import CLIP_EXTENSIONS

SUFFIX = re.compile(
    rf"(?:@\d+\.\d+(?:-\d+\.\d+)?|~[0-9a-f]{{8}}|{'|'.join(map(re.escape, CLIP_EXTENSIONS))})+\Z",
    re.IGNORECASE,
)
"""Suffixes of a clip's name in keys: time range and caption (`ClipRecord.key`), and the extension."""


def clip_name(key: str) -> str:
    """Return the name of a sample's clip: its key without time range, caption, window, size and extension.

    The extension is removed because a key has it only if another clip has the same name. A file whose own name ends like a
    time range always loses this end, too.

    Args:
        key: key of the sample.
    """
    name = key.partition("#")[0]
    if "@" in name or "~" in name or "." in name[-6:]:
        return SUFFIX.sub("", name, count=1)
    return name


def hold_out(keys: Iterable[str], fraction: float) -> np.ndarray:
    """Return which samples belong to held-out clips.

    All samples of a clip are on the same side. The decision depends on the name alone: adding clips moves no other clip,
    and a larger fraction holds out all clips that a smaller fraction does.

    Args:
        keys: keys of the samples.
        fraction: share of the clips, from 0 to 1.

    Returns:
        bool [N].
    """
    # Not the hash of data_tools.split: a half made by it must not be completely on one side.
    purpose, limit = hashlib.blake2b(digest_size=8, person=b"wands holdout"), int(fraction * 2.0**64)
    held_out = []
    for key in keys:
        digest = purpose.copy()
        digest.update(clip_name(key).encode("utf-8", "surrogateescape"))
        held_out.append(int.from_bytes(digest.digest(), "big") < limit)
    return np.array(held_out, dtype=bool)
