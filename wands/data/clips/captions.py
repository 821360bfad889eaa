"""Captions: check and clean the text for the text encoder, and estimate the number of tokens."""

from __future__ import annotations

import html
import re
from typing import Any

import ftfy

from wands.errors import DataError

CLEANING_VERSION = 1
"""Version of `clean_caption`, part of a cache's fingerprint. Increase it when `clean_caption` returns a different text
for any caption."""
MAX_CHARACTERS = 20_000
"""Longest caption in characters. Unicode normalization of a hostile text needs quadratic time: 0.2 s for this length."""

_WIDE = re.compile(r"[\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")
"""Characters of scripts without spaces between words: Hangul, kana, Han."""


def clean_caption(caption: str) -> str:
    """Repair broken Unicode, resolve HTML entities twice, and replace each run of white space by one space.

    Source: `prompt_clean` of diffusers' Wan pipelines, and `whitespace` cleaning of the official Wan tokenizer.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", text).strip()


def estimate_tokens(caption: str) -> int:
    """Estimate the number of UMT5 tokens of a caption, including the end token, without a tokenizer.

    One token per 4 characters, or per 1.5 characters of Chinese, Japanese and Korean. Errors of 25 % are common, so use it only
    to warn near the limit of 512 tokens.
    """
    text = clean_caption(caption)
    wide = len(_WIDE.findall(text))
    return round((len(text) - wide) / 4 + wide / 1.5) + 1


def add_trigger(caption: str, trigger: str) -> str:
    """Return the caption with a trigger word and a comma in front. A caption that contains the word is returned unchanged."""
    contains = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption, re.ASCII)
    return caption if contains else f"{trigger}, {caption}"


def check_caption(value: Any, place: str) -> str:
    """Return a caption without leading and trailing white space. `place` is its file or row, for errors.

    Raises:
        DataError: if the caption is missing, empty, not a text, longer than `MAX_CHARACTERS`, or not valid Unicode.
    """
    if value is None or value != value:
        raise DataError(f"missing caption; write a caption in {place}, or run wands caption")
    if not isinstance(value, str):
        kind = type(value).__name__
        raise DataError(f"caption has the type {kind}, but it must be text; write text in {place}")
    if not value.strip():
        raise DataError(f"empty caption; write a caption in {place}, or run wands caption")
    if len(value) > MAX_CHARACTERS:
        raise DataError(
            f"caption has {len(value):,} characters, more than {MAX_CHARACTERS:,}; write a shorter caption in {place}"
        )
    if value != value.encode("utf-8", "replace").decode("utf-8"):
        raise DataError(f"caption is not valid Unicode; rewrite the caption in {place}")
    return value.strip()
