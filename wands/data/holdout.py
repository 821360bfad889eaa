"""Choose the clips that are held out of training. The choice depends only on the name of each clip."""

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
"""Suffixes that follow the clip's name in a key: time range, hash of the caption (`ClipRecord.key`), file extension."""


def clip_name(key: str) -> str:
    """Return the name of the clip that a sample belongs to.

    The name is the key without time range, caption, window, size and file extension. Keys contain the file extension
    only if two files differ in nothing else (a.mp4 and a.mov). If the name of a file ends with text that looks like a time
    range, this text is removed, too.

    Args:
        key: key of the sample.
    """
    name = key.partition("#")[0]
    if "@" in name or "~" in name or "." in name[-6:]:
        return SUFFIX.sub("", name, count=1)
    return name


def hold_out(keys: Iterable[str], fraction: float) -> np.ndarray:
    """Choose the clips that are held out of training, and mark their samples.

    All samples of a clip are held out, or none. The decision depends only on the clip's name. So new clips do not
    change the decision for other clips, and a larger fraction holds out all clips that a smaller fraction holds out.

    Args:
        keys: keys of the samples.
        fraction: share of the clips to hold out, from 0 to 1.

    Returns:
        bool [N], True for samples of held-out clips.
    """
    # This hash differs from the hash of data_tools.split. Otherwise all clips of one split could be held out.
    purpose, limit = hashlib.blake2b(digest_size=8, person=b"wands holdout"), int(fraction * 2.0**64)
    held_out = []
    for key in keys:
        digest = purpose.copy()
        digest.update(clip_name(key).encode("utf-8", "surrogateescape"))
        held_out.append(int.from_bytes(digest.digest(), "big") < limit)
    return np.array(held_out, dtype=bool)
