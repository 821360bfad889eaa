"""Which clips are held out of training: decided by each clip's own name, whatever else is in the data."""

from __future__ import annotations

import hashlib
import re

from wands.data.manifest import CLIP_EXTENSIONS

SUFFIX = re.compile(r"(?:@\d+\.\d+(?:-\d+\.\d+)?)?(?:~[0-9a-f]{8})?\Z")
"""What follows a clip's name in the keys of its windows and of its further captions (`ManifestRow.key`)."""


def clip_name(key: str) -> str:
    """The clip that a sample is made of: its key without window, caption, further suffixes and extension.

    The extension goes because whether a key has one depends on the clip's neighbours.

    Args:
        key: of the sample.
    """
    name = key.partition("#")[0]
    if "@" in name or "~" in name:
        name = SUFFIX.sub("", name, count=1)
    stem, dot, extension = name.rpartition(".")
    return stem if dot and f".{extension.lower()}" in CLIP_EXTENSIONS else name


def hold_out(key: str, fraction: float) -> bool:
    """Whether the clip of a sample belongs to the held-out share.

    All samples of a clip fall on the same side. Nothing but the name counts, so adding clips moves none, and a
    larger fraction holds out all that a smaller one does.

    Args:
        key: of the sample.
        fraction: of the clips, from 0 to 1.
    """
    name = clip_name(key).encode("utf-8", "surrogateescape")
    # A purpose of its own: a half that data_tools.split has made must not be all on one side.
    found = hashlib.blake2b(name, digest_size=8, person=b"wands holdout").digest()
    return int.from_bytes(found, "big") < fraction * 2.0**64
