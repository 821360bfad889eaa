"""Programs that inspect, verify, merge, split, export and import latent caches, such as `python -m data_tools.inspect CACHE`."""

import os
import sys

_folder = sys.path[0]
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and os.path.isdir(_folder)
    and os.path.samefile(_folder, ".")
):
    # `python -m data_tools.inspect`: the rule of wands/__init__.py, before wands is imported.
    del sys.path[0]
    if os.path.samefile(_folder, os.path.dirname(os.path.dirname(__file__))):
        sys.path.append(_folder)
