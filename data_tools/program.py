"""Command line of the programs in this folder."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from wands.config.base import Options
from wands.config.click_options import build_command
from wands.errors import WandsError
from wands.texts import log_to_stderr, safe_lines


def program(options: type[Options]) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Return a decorator for the main function of a program.

    The decorated function takes a list of command-line arguments; None means the arguments of the process. It returns the
    exit code. The exit code is 2 after a user error (a `WandsError`), which is printed in one line. It is also 2 after a
    wrong command line, for which the usage of the program is printed.

    Args:
        options: class whose fields are the options of the program, as for the subcommands of `wands`. The main function gets
            an instance of this class.
    """

    def decorate(run: Callable[[Any], int]) -> Callable[..., int]:
        command = build_command(options, run)

        @functools.wraps(run)
        def main(arguments: Sequence[str] | None = None) -> int:
            log_to_stderr(logging.INFO)
            try:
                return command.main(arguments, standalone_mode=False)
            except click.ClickException as error:
                error.show()
            except WandsError as error:
                print(safe_lines(f"error: {error}"), file=sys.stderr)
            return 2

        return main

    return decorate
