"""wands: train the Wan 2.1 / 2.2 video diffusion transformer with DeepSpeed.

The public names are those of `wands.api`. They are imported on first use, so that `import wands` needs no PyTorch. Type checkers
read them in `__init__.pyi`.
"""

import importlib.util
import os
import sys
from typing import Any

from wands.version import __version__ as __version__


def __getattr__(name: str) -> Any:
    is_private = name.startswith("_")  # Python and tools ask for names such as __path__
    # `from wands import lock` asks for an attribute before it imports the module.
    if is_private or importlib.util.find_spec(f"{__name__}.{name}"):
        raise AttributeError(name)
    api = importlib.import_module("wands.api")
    if name not in api.__all__:
        raise AttributeError(f"wands has no public name {name}; it has {', '.join(api.__all__)}")
    return getattr(api, name)


_folder = sys.path[0]
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and os.path.isdir(_folder)
    and os.path.samefile(_folder, ".")
):
    # `python -m wands`: Python searches the current folder first, so a file numpy.py there would run. A checkout that
    # is not installed is searched last, because child processes import wands from it. data_tools has the same rule.
    del sys.path[0]
    if os.path.samefile(_folder, os.path.dirname(os.path.dirname(__file__))):
        sys.path.append(_folder)
