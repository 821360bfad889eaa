"""Exit code and error line of the programs in this folder."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from wands.errors import WandsError
from wands.texts import safe_lines

Main = Callable[[Sequence[str] | None], int]


def exit_2_on_user_error(main: Main) -> Callable[..., int]:
    """Wrap the main function of a program, so that it prints a user error in one line and returns exit code 2.

    The line is printed to stderr. A user error is a `WandsError`. Any other exception is raised as usual.

    Args:
        main: function of the program, which returns the exit code. It takes a list of command-line arguments. None
            means the arguments with which the process was started.
    """

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except WandsError as error:
            print(safe_lines(f"error: {error}"), file=sys.stderr)
            return 2

    return run
