"""Errors that a user can fix, and the text functions that their messages share.

A message has three parts in this order: what is wrong (key and value), the rule or the numbers, the fix:
``parallel.ulysses_degree=8 does not divide num_heads=12 (wan2.1-t2v-1.3b). Use 1, 2, 3, 4, 6 or 12.``
`wands.cli` alone turns a WandsError into exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class WandsError(Exception):
    """An error the user can fix; its text is the whole message.

    Args:
        message: one message, or several, which become one report.
        agreed: see Attributes.

    Attributes:
        problems: the messages.
        agreed: every rank of the process group raises the same text, so one rank is enough to print it.
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
    """Unusable clip, caption or source of clips."""


class CacheError(WandsError):
    """Latent cache that is missing, damaged, or made for another model."""


class CheckpointError(WandsError):
    """Checkpoint that is missing, incomplete, or saved by an incompatible run."""


class Problems:
    """Problems of independent checks, collected so that one error reports all of them.

    A check has a name. A check that needs the result of another one is skipped if the other one failed.
    """

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self._errors: list[WandsError] = []

    def passed(self, *names: str) -> bool:
        """Return whether no check of these names failed."""
        return self.failed.isdisjoint(names)

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Collect the WandsError that the block raises."""
        try:
            yield
        except WandsError as error:
            self._errors.append(error)
            self.failed.add(name)

    def run(self, name: str, check: Callable[[], Any], *needs: str) -> Any:
        """Run a check and collect its WandsError; skip the check if a check or section in `needs` failed.

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
        """Raise one error with every collected problem, of the class of the first error, if there is a problem."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise type(self._errors[0])([text for error in self._errors for text in error.problems])


def failed_rules(rules: Mapping[str, object]) -> list[str]:
    """Return the messages of all rules that fail.

    Args:
        rules: message -> whether the rule fails.
    """
    return [message for message, fails in rules.items() if fails]


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return an exception's message on one line, for use inside another message.

    The text of an OSError is its reason without number and file name. An empty message becomes the exception's class name.

    Args:
        error: any exception.
        limit: largest number of characters.
    """
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text[:limit].rstrip(". ") or type(error).__name__


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the fix for a misspelled name: the nearest known name, or all of them.

    Args:
        name: what the user typed.
        known: valid names.
        prefix: text to put in front of the nearest name, such as the recipe section with its dot.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else f"use one of {', '.join(names)}."
