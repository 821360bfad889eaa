"""Clean the answers of caption models, and recognize answers that are not captions."""

from __future__ import annotations

import re
import zlib

MAX_CHARACTERS = 10_000
"""Largest number of characters in an answer of a caption model. Longer answers are rejected."""
MAX_COMPRESSION = 3.5
"""Largest ratio of a caption's bytes to its zlib-compressed bytes. A text with a larger ratio repeats itself, and is rejected."""

_REFUSAL = re.compile(
    r"(?:sorry\b|(?:unfortunately,? |sorry,? (?:but )?)?i(?:['’]m| am) (?:very )?sorry\b|(?:unfortunately,? |sorry,? (?:but )?)?i"
    r" ?(?:apologi[sz]e|can(?:no|['’])t|(?:['’]m|am) (?:not able|unable)|won['’]t|do(?: not|n['’]t) (?:see|have))\b"
    r"|as an ai\b|抱歉|对不起|我无法|作为一个(?:人工智能|AI))|.*\bas an ai (?:language )?(?:model|assistant)\b",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"(?:(?:sure|certainly|of course)[,!.]* *)?"
    r"(?:(?:here(?:['’]s| is)|below is) (?:a|an|the|your)\b[^:.\n]{0,80}|caption|description): *",
    re.IGNORECASE,
)
_LOOP = re.compile(r"(.{8,200}?)\1{2}|(.{1,7}?)\2{9}")
_SENTENCES = re.compile(r".*[.!?。！？][\"'”’)]*(?=\s|$)|.*[。！？]", re.DOTALL)


def clean_answer(text: str, is_cut: bool) -> tuple[str, str]:
    """Return (caption, "") or ("", problem) for an answer of a caption model.

    The caption has no control characters, <think> sections and introductions such as "Here is a caption:". If the answer `is_cut`
    at the token limit, its unfinished last sentence is removed.
    """
    if len(text) > MAX_CHARACTERS:
        return "", f"answer has {len(text):,} characters, more than {MAX_CHARACTERS:,}; lower --max-tokens"
    text = re.sub(r"<think>.*?(?:</think>|$)", "", text, flags=re.DOTALL)
    text = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    text = _PREAMBLE.sub("", text, count=1) if _PREAMBLE.match(text) else text
    if len(text) > 1 and text[0] + text[-1] in ('""', "“”"):
        text = text[1:-1].strip()
    if _REFUSAL.match(text):
        return "", f"the model refused ({text[:60]})"
    data = text.encode()
    if _LOOP.search(text) or len(data) > MAX_COMPRESSION * len(zlib.compress(data, 9)):
        return "", "the answer repeats itself"
    if is_cut:
        sentences = _SENTENCES.match(text)
        if not sentences:
            return "", "the answer was cut off before its first sentence ended; raise --max-tokens"
        text = sentences[0]
    return (text, "") if re.search(r"\w", text) else ("", "the answer is empty")
