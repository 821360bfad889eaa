"""Read `wands_export.json` and `samples.jsonl` of a folder, which anyone may have edited, for the model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from wands.errors import WandsError, one_line
from wands.files import read_json_object
from wands.values import Count, Number, check_values

RECORD_FILE = "wands_export.json"
SAMPLES_FILE = "samples.jsonl"  # written by `wands infer` next to the samples


@dataclass(frozen=True)
class _Data:
    num_samples: Count | None = None
    num_frames_total: Count | None = None
    num_tokens: Count | None = None
    licenses: list[tuple[str, Count]] | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class _Ema:
    decay: Number | None = None


@dataclass(frozen=True)
class _Lora:
    rank: Count | None = None
    alpha: Number | None = None
    targets: str | list[str] | None = None


@dataclass(frozen=True)
class _Recipe:
    lora: _Lora | None = None


@dataclass(frozen=True)
class _Record:
    """Types of the values in a record. Every key may be missing, and there may be further keys."""

    wands_version: str | None = None
    base: str | None = None
    step: Count | None = None
    checkpoint: str | None = None
    variant: str | None = None
    parts: list[str] | None = None
    dtype: str | None = None
    ema: _Ema | None = None
    recipe: _Recipe | None = None
    data: _Data | None = None
    loss: list[tuple[Count, Number | None]] | None = None
    held_out: list[tuple[Count, Number | None]] | None = None
    events: dict[str, list[Count]] = field(default_factory=dict)


@dataclass(frozen=True)
class _SampleRow:
    file: str | None = None
    prompt: str | None = None


_RECORD = TypeAdapter(_Record)
_SAMPLE_ROW = TypeAdapter(_SampleRow)


def check_record(record: Mapping[str, Any], path: Path) -> None:
    """Check the types of the values in a record.

    Raises:
        WandsError: if a value that the model card shows has another type or is out of bounds.
    """
    try:
        check_values(_RECORD, record)
    except ValueError as error:
        raise WandsError(f"{path} has a wrong value ({one_line(error)}); run `wands export` again.") from None


def read_record(path: Path) -> dict[str, Any]:
    """Return the checked contents of `wands_export.json`. Raise WandsError if the file cannot be read or has a wrong value."""
    record = read_json_object(path, fix="run `wands export` again.", error=WandsError)
    check_record(record, path)
    return record


def read_sample_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `samples.jsonl` of `wands infer`; [] if the file does not exist.

    Raises:
        WandsError: if the file cannot be read, or a line is not a JSON object with the right types.
    """
    try:
        # splitlines would also split at characters such as U+2028, which JSON does not escape in a prompt.
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        for row in rows:
            check_values(_SAMPLE_ROW, row)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise WandsError(f"{path} cannot be read ({one_line(error)}). Fix or remove the file.") from error
    return rows
