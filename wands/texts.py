"""Make texts safe to print and to publish: escape control characters, and hide secrets and user names.

In a printed path, ``$HOME`` and ``$USER`` stand for the folder and the name of the user, so that the path still works in a shell.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from wands.secret_patterns import HIDDEN, hide_secrets, is_secret_name

Log = Callable[[str], None]
"""Function that prints a line or several lines for the user. It is called on rank 0."""

# Terminals obey control characters. The bidirectional ones make a name look like another name.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_NO_USER_NAMES = {"", "root", "home"}
"""Names that tell nothing about the user, and names of folders that every machine has."""

_LOCAL = re.compile(r"(?:[/~\\]|\$HOME\b|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:)")
_INNER_PATH = re.compile(
    r"(?<![\w/.~-])(?<!:(?=//))(?:"
    r"\$HOME\b(?:[/\\][\w.@+$-]+)*|(?:file://|~|[A-Za-z]:(?!//))?(?:[/\\][\w.@+$-]+)+[/\\][\w.@+$-]+)"
)


def printable(text: str) -> str:
    """Escape control characters, such as line ends, and the surrogates of a file name that is not UTF-8."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def redact(text: str) -> str:
    """Replace the secrets in a text by the word REDACTED, and hide the user's name in paths behind ``$HOME`` and ``$USER``."""
    home = os.path.normpath(os.path.expanduser("~"))
    pattern = _personal_parts(home, os.environ.get("USER", ""), os.environ.get("LOGNAME", ""))
    return pattern.sub(_hide_part, hide_secrets(text))


@cache
def _personal_parts(home: str, *names: str) -> re.Pattern[str]:
    """Pattern of the groups `url`, `home` (the home folder at the start of a path) and `user` (a name within a path)."""
    parent, name = os.path.split(home)
    homes = {home, os.path.realpath(home)} - {"/"} if os.path.isabs(home) and name != "root" else set()
    # The home folder of a service or a container, such as /workspace, does not have the name of a user.
    users = {*names, name if os.path.basename(parent) in ("home", "Users") else ""} - _NO_USER_NAMES
    end = r"(?![\w-]|\.\w)"
    parts = [
        r"(?P<url>https?://\S+)",  # a name in it is the public name of an account
        rf"(?<![\w.~/\\$}}-])(?P<home>{_any_of(homes)}){end}",
        rf"(?<=[/\\])(?P<user>{_any_of(users)}){end}",
    ]
    return re.compile("|".join(parts))


def _any_of(texts: set[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"


def _hide_part(match: re.Match[str]) -> str:
    return match["url"] or ("$HOME" if match["home"] else "$USER")


def without_paths(value: Any) -> Any:
    """Return a copy of a JSON value without secrets, in which each absolute path is shortened to its last component.

    Hub ids, URLs and relative paths such as ``runs/default`` do not change.
    """
    if isinstance(value, Mapping):
        return {key: _without_secret(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    text = redact(value)
    return last_part(text) if is_local(text) else _INNER_PATH.sub(lambda match: last_part(match[0]), text)


def _without_secret(key: object, value: Any) -> Any:
    is_secret = isinstance(value, str) and value and is_secret_name(str(key))
    return HIDDEN if is_secret else without_paths(value)


def is_local(text: str) -> bool:
    """Return whether a text looks like a path on the user's machine: absolute, under ~, with ``./`` or ``../``, or ``file:``."""
    return bool(_LOCAL.match(text))


def last_part(path: str) -> str:
    """Return the last component of a path. Return "~" for a home folder, because its name is the name of the user."""
    *folders, name = re.split(r"[/\\]", redact(path).rstrip("/\\"))
    return "~" if name == "$HOME" or folders[-1:] in (["home"], ["Users"]) else name


def safe_lines(text: str) -> str:
    """Hide secrets and the user's name in a text, and escape its control characters, except for line ends."""
    return "\n".join(map(printable, redact(text).split("\n")))


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return safe_lines(super().format(record))


def log_to_stderr(level: int = logging.WARNING, layout: str = "%(message)s") -> None:
    """Send the log records of this process to stderr, without secrets, user names and control characters."""
    handler = logging.StreamHandler()
    handler.setFormatter(_SafeFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


def escape_unprintable() -> None:
    """Let stdout escape the characters that the encoding of the terminal lacks, as stderr does, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 clip" or "1,280 clips"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Return a time as text in seconds, minutes or hours, such as "90 s", "5 min" or "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
