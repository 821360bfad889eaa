"""Functions that crash or hang their process; few imports, because every new process imports this file."""

from __future__ import annotations

import os
import time
from typing import Any


def decode(real: Any, task: Any) -> Any:
    if task[0].name == "a.mp4":
        os.abort()
    return real(task)


def encode_clips(*args: Any) -> Any:
    """Abort, in place of `wands.preprocess.encoding.encode_clips`."""
    os.abort()


def decode_clip(path: Any, *values: Any) -> Any:
    """Abort for b.mp4, in place of `wands.data.clips.video.decode_clip`."""
    from wands.data.clips import video

    if path.name == "b.mp4":
        os.abort()
    yield from video.decode_clip(path, *values)


def hang() -> Any:
    """Never yield a value."""
    time.sleep(3600)
    yield
