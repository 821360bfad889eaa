"""Which clips are held out of training: decided by each clip's own name, whatever else is in the data."""

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
"""What may follow a clip's name in the keys of its windows and further captions (`ClipRecord.key`), and its extension."""


def clip_name(key: str) -> str:
    """The clip that a sample is made of: its key without window, caption, size and extension.

    The extension goes because whether a key has one depends on the clip's neighbours. A file whose own name
    ends like a window loses that end too, always.

    Args:
        key: of the sample.
    """
    name = key.partition("#")[0]
    if "@" in name or "~" in name or "." in name[-6:]:
        return SUFFIX.sub("", name, count=1)
    return name


def hold_out(keys: Iterable[str], fraction: float) -> np.ndarray:
    """Which samples belong to clips of the held-out share.

    All samples of a clip fall on the same side. Nothing but the name counts, so adding clips moves none, and a
    larger fraction holds out all that a smaller one does.

    Args:
        keys: of the samples.
        fraction: of the clips, from 0 to 1.

    Returns:
        bool [N].
    """
    # A purpose of its own: a half that data_tools.split has made must not be all on one side.
    purpose, limit = hashlib.blake2b(digest_size=8, person=b"wands holdout"), int(fraction * 2.0**64)
    found = []
    for key in keys:
        named = purpose.copy()
        named.update(clip_name(key).encode("utf-8", "surrogateescape"))
        found.append(int.from_bytes(named.digest(), "big") < limit)
    return np.array(found, dtype=bool)
