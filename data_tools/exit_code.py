"""Exit code and error line of the programs in this folder."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from wands.errors import WandsError

Main = Callable[[Sequence[str] | None], int]


def exit_2_on_user_error(main: Main) -> Callable[..., int]:
    """Make a program print a user's error in one line to stderr and exit with code 2.

    Args:
        main: function of the command line's arguments (None: arguments of the process) that returns the exit code.
    """

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except WandsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run
