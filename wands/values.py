"""Check the types and bounds of values that were read from files, which anyone may have edited or damaged."""

from __future__ import annotations

import os
import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, InstanceOf, TypeAdapter, ValidationError

T = TypeVar("T")
MAX_COUNT = 2**53
"""Largest integer in a file. JSON programs cannot represent larger integers exactly."""
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
"""Integer that is not negative. A boolean or a text is not an integer."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e100, le=1e100)]
"""Finite number, with which arithmetic cannot overflow. A boolean or a text is not a number."""
Norm = Annotated[Number, Field(ge=0)]
"""Finite number that is not negative."""
Text = InstanceOf[str]
"""Text. pydantic's `str` would refuse file names that are not UTF-8, which Python represents by surrogates."""


def _check_name(name: str) -> str:
    encoded = os.fsencode(name)  # its UnicodeEncodeError is a ValueError
    if b"\0" in encoded or len(encoded) > 255:
        raise ValueError("a file cannot have this name")
    return name


FileName = Annotated[Text, AfterValidator(_check_name)]
"""Text that can be the name of a file or a short path."""


def check_values(kind: TypeAdapter[T], values: Any) -> T:
    """Return the values as the type that `kind` describes.

    Raises:
        ValueError: if a value has another type or is out of bounds. The message names its key.
    """
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{key}={reprlib.repr(first['input'])}: {first['msg']}") from None


def is_valid(kind: TypeAdapter[Any], values: Any) -> bool:
    """Return whether the values have the type that `kind` describes."""
    try:
        kind.validate_python(values)
    except ValidationError:
        return False
    return True
