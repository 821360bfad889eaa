"""A worker of `wands check` that one file takes down; light, for every new process imports it."""

from __future__ import annotations

import os
from typing import Any

from wands.commands import check


def look_at(task: Any) -> Any:
    if task.path.name == "a.mp4":
        os.abort()
    return check._look_at(task)
