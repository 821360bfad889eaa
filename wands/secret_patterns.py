"""Find the secrets in a text: one table of their patterns, and one table of the names whose values are secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path

HIDDEN = "REDACTED"
SHORTEST = 8
"""Shorter values of environment variables are not searched: they also occur in ordinary words."""

# A name is compared in upper case, with "_" between its words: apiKey and api-key are API_KEY.
_SECRET_NAME = re.compile(
    r"(?:TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|AUTHORIZATION)(?=_|$)"
    r"|(?:^|_)(?:SSH|DB|SQL|MYSQL|PG|USER|ROOT)?PASS(?=_|$)|(?:_|DB|SQL|PG)PWD(?=_|$)"
    r"|(?:^|_)(?:JWT|PAT)(?=_|$)|(?:AMZ|GOOG)_SIGNATURE$|_KEY(?=_|$)"
)
_ORDINARY_NAME = re.compile(
    r"^(?:OLD_?)?PWD$|(?:^|_)(?:EOS|BOS|PAD|UNK|SEP|CLS|MASK|START|END|IMAGE|VIDEO)_TOKEN(?=_|$)"
    r"|(?:PUBLIC|PRIMARY|FOREIGN|SORT|CACHE|HASH|SAMPLE|CLIP)_KEY(?=_|$)"
    r"|_(?:PATH|FILE|DIR|FOLDER|NAME|TYPE|URL|HOST|LENGTH|SIZE|COUNT|LIMIT|MODE|FORMAT|HELPER)$"
)
_QUERY_NAME = re.compile(r"SIG(?:NATURE)?|AUTH|SAS|(?:AMZ|GOOG)_CREDENTIAL")
"""Names that are ordinary words elsewhere, and hold secrets in the query of a URL."""

_TOKENS = (
    r"hf_[A-Za-z0-9]{16,}",
    r"api_org_[A-Za-z0-9]{16,}",
    r"gh[oprsu]_[A-Za-z0-9]{16,}",
    r"github_pat_\w{20,}",
    r"gl(?:pat|dt|rt|ptt|cbt)-[\w-]{20,}",
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16,}",
    r"LTAI(?=[A-Z]*[a-z0-9])[A-Za-z0-9]{12,}",
    r"AKID(?=[A-Z]*[a-z0-9])[A-Za-z0-9]{13,}",
    r"AIza[\w-]{35}",
    r"ya29\.[\w-]{20,}",
    r"GOCSPX-[\w-]{20,}",
    r"sk-(?=[\w-]{0,99}\d)[\w-]{20,}",
    r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    r"(?:xox[abeoprs]|xapp|nvapi|pypi)-[\w-]{20,}",
    r"(?:npm|r8)_[A-Za-z0-9]{30,}",
    r"(?:dckr_pat|dop_v1|wandb_v1)_\w{20,}",
    r"dapi[0-9a-f]{32}",
    r"SG\.[\w-]{16,}\.[\w-]{16,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)*",  # a JSON web token
)
_SEARCHED_BYTES = 1 << 20
_LONGEST_TEXT = 1 << 26
_TEXT = re.compile(rb"[\t\n\r -~]{12,}")
_PRIVATE_KEY = r"[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
_SECRET = re.compile(
    rf"(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})"
    rf"|-----BEGIN {_PRIVATE_KEY}(?:.*?-----END {_PRIVATE_KEY}|.*)"
    r"|(?<=://)[^\s/?#\"'<>]+(?=@)",  # user and password of a URL
    re.DOTALL,
)
_HEADER = re.compile(
    r"(?P<kept>\bauthorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:(?:bearer|basic|token|digest)\s{1,9})?"
    r"|\bbearer\s{1,9}(?=\S{0,99}\d))[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(
    r"(?P<before>[?&]|(?P<option>(?<![\w-])--)|(?<![\w.-]))(?P<name>[A-Za-z][\w.-]{0,80})"
    r"(?P<sign>\\?[\"']?\s{0,9}(?:=|:\s)\s{0,9}|\\?[\"']\s{0,9}:\s{0,9}|(?(option)\s(?=\S)|(?!)))(?P<quote>(?:\\?[\"'])?)"
)
_VALUES = {
    "": re.compile(r"[^\s\"'\\&;,<>\[\](){}$][^\s\"'\\&;,<>]*"),
    '"': re.compile(r"[^\"\\<>\[\](){}$][^\"\\]*"),
    "'": re.compile(r"[^'\\<>\[\](){}$][^'\\]*"),
}
"""Maps the quote in front of a value to the pattern of the value."""


def is_secret_name(name: str) -> bool:
    """Return whether the value of a variable, an option or a key with this name is a secret: DB_PASS, apiKey, x-api-key."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).upper()
    return bool(_SECRET_NAME.search(words)) and not _ORDINARY_NAME.search(words)


def hide_secrets(text: str) -> str:
    """Replace the secrets in a text by the word REDACTED.

    Secrets are access tokens and keys of known services, JSON web tokens, private keys, user names and passwords in URLs,
    signatures and tokens in their queries, values after names such as `DB_PASS=` and `Authorization: Bearer`, and values of
    environment variables with such names.
    """
    # A shorter text contains no such value. Reading the environment takes longer than all other work.
    variables = os.environ.items() if len(text) >= SHORTEST else ()
    values = {value for name, value in variables if len(value) >= SHORTEST and is_secret_name(name)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return hide_patterns(text)


def hide_patterns(text: str) -> str:
    """Do the same as `hide_secrets`, but leave out the values of environment variables."""
    text = _HEADER.sub(lambda match: match["kept"] + HIDDEN, _SECRET.sub(HIDDEN, text))
    pieces = []
    start = 0
    for name in _ASSIGNMENT.finditer(text):
        value = _VALUES[name["quote"][-1:]].match(text, name.end())
        if value and name.start() >= start and _is_secret(name, value[0]):
            pieces += [text[start : value.start()], HIDDEN]
            start = value.end()
    return "".join([*pieces, text[start:]])


def contains_secret(path: Path) -> bool:
    """Return whether a file contains a secret, whatever its name.

    Of a binary file, such as weights or a video, only the texts in its first MiB are searched: the metadata. In a longer text,
    such as a vocabulary, the values of environment variables are ordinary words.
    """
    with path.open("rb") as file:
        data = file.read(_SEARCHED_BYTES)
        if b"\0" in data:
            return any(
                hide_secrets(text) != text for text in (found.decode() for found in _TEXT.findall(data))
            )
        text = (data + file.read(_LONGEST_TEXT)).decode(errors="replace")
    hide = hide_secrets if len(data) < _SEARCHED_BYTES else hide_patterns
    return hide(text) != text


def _is_secret(assignment: re.Match[str], value: str) -> bool:
    before, name, sign, quote = assignment.group("before", "name", "sign", "quote")
    in_query = before in ("?", "&")
    if in_query:
        words = name.replace("-", "_").upper()
        if _QUERY_NAME.search(words) or (words == "KEY" and len(value) >= 16):
            return True
    # "Secret: transformer" is a sentence; "secret: x7Kp29ab", "secret": "transformer" and SECRET=transformer are values.
    is_sentence = ":" in sign and not quote and not any(map(str.isdigit, value))
    return is_secret_name(name) and not is_sentence and (in_query or len(value) >= 6)
