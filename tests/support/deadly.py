"""Workers that one file takes down; light, for every new process imports it."""

from __future__ import annotations

import os
from typing import Any

from wands.commands.check import check


def look_at(task: Any) -> Any:
    if task.path.name == "a.mp4":
        os.abort()
    return check._look_at(task)


def encode_windows(*args: Any) -> Any:
    """In place of `wands.commands.preprocess.decoding.encode_windows`: memory runs out at the first one."""
    os.abort()
