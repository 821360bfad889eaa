"""Captions as the text encoder will see them, and a guess of their length where no tokenizer is at hand."""

from __future__ import annotations

import html
import re

import ftfy

CLEANING_VERSION = 1
"""Changes when `clean_caption` gives another text for any caption: it is part of a cache's fingerprint."""

_WIDE = re.compile(r"[\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")
"""Scripts without blanks between words: Hangul, kana, Han."""


def clean_caption(caption: str) -> str:
    """Repair broken Unicode, resolve HTML entities twice, make every run of white space one blank.

    Source: `prompt_clean` of diffusers' Wan pipelines, `whitespace` cleaning of the official tokenizer.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", text).strip()


def estimate_tokens(caption: str) -> int:
    """Guess the UMT5 tokens of a caption, its end token included, without a tokenizer.

    One token for each 4 characters, and for each 1.5 of Chinese, Japanese and Korean. Good for a warning
    near 512 tokens, not for arithmetic: a quarter too many or too few is usual.

    Args:
        caption: as written; it is cleaned first.
    """
    text = clean_caption(caption)
    wide = len(_WIDE.findall(text))
    return round((len(text) - wide) / 4 + wide / 1.5) + 1
