"""Names that `import wands` offers, for type checkers."""

from wands.api import *  # noqa: F403
from wands.version import __version__ as __version__
