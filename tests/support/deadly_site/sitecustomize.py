"""On the path of a Python process: a video whose name begins with "deadly" ends it, as a faulty decoder does."""

from __future__ import annotations

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class _Finder(MetaPathFinder):
    """Changes PyAV as soon as somebody imports it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "wands.data.clips.video":  # imports PyAV itself
            sys.meta_path.remove(self)
            import av

            whole = av.open

            def opened(file: str, *args: Any, **kwargs: Any) -> Any:
                if Path(file).name.startswith("deadly"):
                    os.kill(os.getpid(), signal.SIGSEGV)
                return whole(file, *args, **kwargs)

            av.open = opened


sys.meta_path.insert(0, _Finder())
