"""How the programs of this folder end."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from wands.errors import WandsError

Main = Callable[[Sequence[str] | None], int]


def mistakes_are_2(main: Main) -> Callable[..., int]:
    """Make a program print a mistake of the user's in one line to stderr, and end with exit code 2.

    Args:
        main: takes the arguments of the command line (None: those of the process) and returns the exit code.
    """

    @functools.wraps(main)
    def told(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except WandsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return told
