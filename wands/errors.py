"""Errors that a user can fix, and helpers for their messages.

A message has three elements in this order: what is wrong (key and value), the rule or the numbers, and the fix. Example:
``parallel.ulysses_degree=8 does not divide num_heads=12 (wan2.1-t2v-1.3b). Use 1, 2, 3, 4, 6 or 12.`` Only `wands.cli` turns a
WandsError into an exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MAX_MESSAGE = 4000
"""Largest number of characters of a message. The middle of a longer message is left out."""


class WandsError(Exception):
    """An error that the user can fix. Its text is the complete message; several messages are shown as a list.

    Attributes:
        problems: the messages.
        agreed: whether every rank of the process group raises the same text, so that only one rank must print it.
        exit_code: exit code of `wands`. After 2, the launch scripts do not restart the run.
    """

    exit_code = 2

    def __init__(self, message: str | Sequence[str], *, agreed: bool = False) -> None:
        messages = (message,) if isinstance(message, str) else message
        self.problems = tuple(map(_shorten, messages))
        text = self.problems[0]
        if len(self.problems) > 1:
            text = "\n  - ".join([f"{len(self.problems)} problems:", *self.problems])
        super().__init__(text)
        self.agreed = agreed


def _shorten(message: str) -> str:
    """Leave out the middle of a long message. The fix is at the end."""
    return (
        message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1000]} [...] {message[-1000:]}"
    )


class ConfigError(WandsError):
    """Error in a recipe, a command-line option or a DeepSpeed JSON."""


class DataError(WandsError):
    """Error because a clip, a caption or a source of clips cannot be used."""


class CacheError(WandsError):
    """Error because a latent cache is missing, damaged, or made for a different model."""


class CheckpointError(WandsError):
    """Error because a checkpoint is missing, incomplete, or saved by an incompatible run."""


class RankError(WandsError):
    """Error because another rank has crashed or does not answer. The launch scripts may restart the run."""

    exit_code = 3


class DiskError(WandsError):
    """Error because the file system failed. The files may be intact, and the launch scripts may restart the run.

    `number` is the error number of the operating system, such as `errno.EIO`.
    """

    exit_code = 3

    def __init__(self, message: str | Sequence[str], *, agreed: bool = False, number: int = 0) -> None:
        super().__init__(message, agreed=agreed)
        self.number = number


class Problems:
    """Collector for the errors of named checks, so that one exception can report them all."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self._errors: list[WandsError] = []

    def passed(self, *names: str) -> bool:
        """Return whether none of these checks has failed or was skipped. A check that has not run yet counts as passed."""
        return self.failed.isdisjoint(names)

    def add(self, name: str, error: WandsError) -> None:
        """Store the error of the check `name`, which then counts as failed."""
        self._errors.append(error)
        self.failed.add(name)

    def run(self, name: str, check: Callable[[], Any], *needs: str) -> Any:
        """Run a check, collect its WandsError, and return its result, or None if the check failed.

        The check is skipped, and counts as failed, if a check named in `needs` has failed.
        """
        if self.passed(*needs):
            try:
                return check()
            except WandsError as error:
                self._errors.append(error)
        self.failed.add(name)
        return None

    def raise_all(self) -> None:
        """Raise one error with the messages of all collected errors, of the class of the first. Do nothing without errors."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise type(self._errors[0])([text for error in self._errors for text in error.problems])


def failed_rules(rules: Mapping[str, object]) -> list[str]:
    """Return the messages of all broken rules: the keys of `rules` whose value is true."""
    return [message for message, fails in rules.items() if fails]


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return an exception's message on one line of at most `limit` characters, for use inside another message.

    For an OSError, return only the reason, without error number and file name. If the message is empty, return the class name.
    """
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text[:limit].rstrip(". ") or type(error).__name__


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "did you mean cp_size?" with the most similar valid name; without a similar name, list all names.

    `prefix` is put in front of the similar name, such as a recipe section with its dot.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else f"use one of {', '.join(names)}."
