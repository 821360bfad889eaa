"""Make texts safe to print and to publish: escape control characters, and hide secrets and user names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

Log = Callable[[str], None]
"""Function that prints a line or several lines for the user. It is called on rank 0."""

# Terminals obey control characters. The bidirectional ones make a name look like another name.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?:API|ACCESS|PRIVATE|_)_?KEY")
_SECRET = re.compile(
    r"\b(?:hf_|gh[opsu]_|AKIA)[A-Za-z0-9]{16,}|\b(?:github_pat_|glpat-|sk-|xox[abp]-)[\w-]{20,}"
    r"|(?<=://)[^\s/@]+(?=@)|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*"
)

_LOCAL = re.compile(r"(?:[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:)")
_INNER_PATH = re.compile(
    r"(?<![\w/.~-])(?<!:(?=//))(?:file://|~|[A-Za-z]:(?!//))?(?:[/\\][\w.@+$-]+)+[/\\][\w.@+$-]+"
)


def printable(text: str) -> str:
    """Escape control characters, such as line ends, and characters that are not valid Unicode.

    In Python, a file name that is not UTF-8 contains characters that are not valid Unicode (surrogates).
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def hide_secrets(text: str) -> str:
    """Replace the secrets in a text by the word REDACTED.

    Secrets are:

    - access tokens of known services, such as Hugging Face and GitHub
    - private keys
    - user names and passwords in URLs
    - values of environment variables whose name contains a word such as TOKEN or PASSWORD
    """
    # A shorter text contains no such value. Reading the environment takes longer than all other work.
    variables = os.environ.items() if len(text) >= 8 else ()
    for name, value in variables:
        if len(value) >= 8 and _SECRET_NAME.search(name.upper()):
            text = text.replace(value, "REDACTED")
    return _SECRET.sub("REDACTED", text)


def redact(text: str) -> str:
    """Replace the secrets in a text by the word REDACTED, and the name of the user in paths by the shell variable ``$USER``."""
    names = {os.path.basename(os.path.expanduser("~")), os.environ.get("USER"), os.environ.get("LOGNAME")}
    # A container may have the home folder /home, which names no user.
    name = "|".join(re.escape(name) for name in names if name and name not in ("root", "~", "home"))
    # In a URL, the name is the public name of an account.
    pattern = rf"(https?://\S+)|(?<=[/\\])(?:{name})(?![\w-]|\.\w)" if name else r"(?!)"
    return re.sub(pattern, lambda match: match[1] or "$USER", hide_secrets(text))


def without_paths(value: Any) -> Any:
    """Return a copy of a JSON value in which each absolute path is shortened to its last component. Secrets are hidden.

    Hub ids, URLs and relative paths such as ``runs/default`` do not change, because they reveal nothing about the
    user's machine.
    """
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    text = redact(value)
    return last_part(text) if is_local(text) else _INNER_PATH.sub(lambda match: last_part(match[0]), text)


def is_local(text: str) -> bool:
    """Return whether a string looks like a path on the user's machine: an absolute path, a path under the home folder, a path
    that starts with ``./`` or ``../``, or a URL that starts with ``file:``.
    """
    return bool(_LOCAL.match(text))


def last_part(path: str) -> str:
    """Return the last component of a path. Return "~" for a home folder, because its name is the name of the user."""
    *folders, name = re.split(r"[/\\]", redact(path).rstrip("/\\"))
    return "~" if folders[-1:] in (["home"], ["Users"]) else name  # the name of a user


def safe_lines(text: str) -> str:
    """Hide secrets and the user's name in a text, and escape its control characters, except for line ends."""
    return "\n".join(map(printable, redact(text).split("\n")))


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return safe_lines(super().format(record))


def log_to_stderr(level: int = logging.WARNING, layout: str = "%(message)s") -> None:
    """Send the log records of this process to stderr, without secrets, user names and control characters.

    Args:
        level: lowest level of the records.
        layout: format string of a record, as in `logging.Formatter`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_SafeFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


def format_seconds(seconds: float) -> str:
    """Return a time as text in seconds, minutes or hours, such as "90 s", "5 min" or "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
