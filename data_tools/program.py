"""Command line of the programs in data_tools."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from wands.config.base import Options
from wands.config.click_options import build_command
from wands.errors import WandsError
from wands.texts import escape_unprintable, log_to_stderr, safe_lines


def program(options: type[Options], run: Callable[[Any], int]) -> Callable[..., int]:
    """Return the main function of a program, which takes command-line arguments and returns the exit code of `run`.

    A WandsError is printed in one line, an error in the command line with the usage; the exit code is then 2.
    """
    command = build_command(options, run)

    def main(arguments: Sequence[str] | None = None) -> int:
        escape_unprintable()
        log_to_stderr(logging.INFO)
        try:
            return command.main(arguments, standalone_mode=False)
        except click.ClickException as error:
            error.show()
        except WandsError as error:
            print(safe_lines(f"error: {error}"), file=sys.stderr)
        return 2

    return main
