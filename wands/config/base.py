"""Base class of the sections of a recipe, and base class of the options of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

MAX_INTEGER = 2**53
"""Largest integer of a recipe key or an option."""


class StrictModel(BaseModel):
    """Immutable pydantic model that refuses unknown keys. The docstring of a field becomes its description.

    pydantic would take `true` for the number 1. Here it is refused, and so are integers above `MAX_INTEGER`.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        types = _types_in(cls.model_fields[info.field_name or ""].annotation)
        if (
            types & {int, float}
            and bool not in types
            and any(type(item) is bool for item in _items_of(value))
        ):
            raise ValueError("true and false are not numbers")
        return value

    @field_validator("*")
    @classmethod
    def _limit_integers(cls, value: Any) -> Any:
        if any(isinstance(item, int) and abs(item) > MAX_INTEGER for item in _items_of(value)):
            raise ValueError(f"an integer can be at most {MAX_INTEGER:,}")
        return value


def invalid_reason(problem: Mapping[str, Any]) -> str:
    """Return the reason of one entry of `ValidationError.errors()`, without pydantic's prefix for the errors of validators."""
    reason = str(problem["msg"])
    return reason.removeprefix("Value error, ")


def _items_of(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_items_of, value))
    else:
        yield value


def _types_in(annotation: Any) -> set[Any]:
    """Return the types that occur in a type annotation, such as {list, int} for `list[int]`."""
    return {get_origin(annotation) or annotation}.union(*map(_types_in, get_args(annotation)))


@dataclass(frozen=True)
class Spelling:
    """Command-line spelling of an option field.

    Attributes:
        name: flag, such as `--set`. If empty, it is made from the name of the field: `max_frames` becomes `--max-frames`.
        metavar: placeholder for the value in the help text; None means click's default.
        flag_value: value of a flag without a value. None means that the flag needs a value.
        argument: True for a positional argument.
    """

    name: str = ""
    metavar: str | None = None
    flag_value: str | None = None
    argument: bool = False


@dataclass(frozen=True)
class Heading:
    """Heading on the help page above an option. The options after it belong to it too, up to the next heading."""

    text: str


def limits_of(field: FieldInfo) -> dict[str, Any]:
    """Return the limits of a numeric field by pydantic's names, such as {"ge": 0, "lt": 1}."""
    rules = ("ge", "gt", "le", "lt")
    return {rule: getattr(item, rule) for item in field.metadata for rule in rules if hasattr(item, rule)}


def spelling_of(field: FieldInfo) -> Spelling:
    """Return the `Spelling` in the annotation of an option field, or a default one."""
    return next((item for item in field.metadata if isinstance(item, Spelling)), Spelling())


def heading_of(field: FieldInfo) -> str | None:
    """Return the text of the `Heading` in the annotation of an option field."""
    return next((item.text for item in field.metadata if isinstance(item, Heading)), None)


ARGUMENT = Spelling(argument=True)
"""Spelling of a field that is a positional argument."""


class Options(StrictModel):
    """Base class of `wands.config.options`: each command has a subclass, whose fields are the options of the command."""
