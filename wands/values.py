"""Check the types and bounds of values that were read from files, which anyone may have edited or damaged."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")
MAX_COUNT = 2**53
"""Largest integer in a file. JSON programs cannot represent larger integers exactly."""
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
"""Integer that is not negative. A boolean or a text is not an integer."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e100, le=1e100)]
"""Finite number, with which arithmetic cannot overflow. A boolean or a text is not a number."""


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
