"""wands: train the Wan 2.1 / 2.2 video diffusion transformer with DeepSpeed."""

import os
import sys

__version__ = "0.1.0"

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
