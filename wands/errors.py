"""Errors that a user can fix, and functions for the texts of error messages.

A message has three elements in this order: what is wrong (key and value), the rule or the numbers, and the fix.
Example: ``parallel.ulysses_degree=8 does not divide num_heads=12 (wan2.1-t2v-1.3b). Use 1, 2, 3, 4, 6 or 12.`` Only
`wands.cli` turns a WandsError into exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class WandsError(Exception):
    """An error that the user can fix. Its text is the complete message for the user.

    Args:
        message: one message, or a list of messages, which the text of the error lists together.
        agreed: True if every rank of the process group raises the same text, so that only one rank must print it.

    Attributes:
        problems: the messages.
        agreed: value of the argument `agreed`.
    """

    def __init__(self, message: str | Sequence[str], *, agreed: bool = False) -> None:
        self.problems = (message,) if isinstance(message, str) else tuple(message)
        header = f"{len(self.problems)} problems:"
        super().__init__(
            self.problems[0]
            if len(self.problems) == 1
            else "\n".join([header, *(f"  - {text}" for text in self.problems)])
        )
        self.agreed = agreed


class ConfigError(WandsError):
    """Invalid recipe, option or DeepSpeed JSON."""


class DataError(WandsError):
    """Clip, caption or source of clips that cannot be used."""


class CacheError(WandsError):
    """Latent cache that is missing, damaged, or made for a different model."""


class CheckpointError(WandsError):
    """Checkpoint that is missing, incomplete, or saved by an incompatible run."""


class Problems:
    """Errors of several checks, collected so that one error can report them all.

    Each check has a name. A check can need the result of other checks. If one of these other checks failed, the check
    is skipped.
    """

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self._errors: list[WandsError] = []

    def passed(self, *names: str) -> bool:
        """Return True if none of the named checks failed."""
        return self.failed.isdisjoint(names)

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Catch the WandsError that the block raises, and collect it for `raise_all`.

        Args:
            name: name of the check, which counts as failed if the block raises.
        """
        try:
            yield
        except WandsError as error:
            self._errors.append(error)
            self.failed.add(name)

    def run(self, name: str, check: Callable[[], Any], *needs: str) -> Any:
        """Run a check and collect the WandsError that the check raises. Skip the check if a check named in `needs` failed.

        Returns:
            The result of the check; None if the check failed or was skipped. A skipped check counts as failed.
        """
        if not self.passed(*needs):
            self.failed.add(name)
            return None
        with self.check(name):
            return check()
        return None

    def raise_all(self) -> None:
        """Raise one error that contains all collected problems, or return if there are none.

        The error has the class of the first collected error.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise type(self._errors[0])([text for error in self._errors for text in error.problems])


def failed_rules(rules: Mapping[str, object]) -> list[str]:
    """Return the messages of all rules that fail.

    Args:
        rules: maps the message of a rule to a true value if the rule fails.
    """
    return [message for message, fails in rules.items() if fails]


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return an exception's message on one line, so that it can be used inside another message.

    For an OSError, return only the reason, without error number and file name. If the message is empty, return the name
    of the exception's class.

    Args:
        error: any exception.
        limit: largest number of characters.
    """
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text[:limit].rstrip(". ") or type(error).__name__


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a fix for a misspelled name.

    The fix is a question with the most similar known name, such as "did you mean cp_size?". If no known name is
    similar, the fix lists all known names.

    Args:
        name: name that the user typed.
        known: valid names.
        prefix: text in front of the most similar name, such as a recipe section with its dot.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else f"use one of {', '.join(names)}."
