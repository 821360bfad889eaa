"""Base classes of the recipe sections and of the option models."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Immutable model that refuses unknown keys; field docstrings become the descriptions of the fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True)
class Spelling:
    """Spelling of a field on the command line, where it differs from the name of the field.

    Attributes:
        name: flag, such as ``--set``; by default the field's name.
        metavar: placeholder for the value in the help text.
        flag_value: value of the flag if the user types the flag alone.
        argument: True for a positional argument.
        alias: earlier name of the flag, which still works and is not in the help text.
    """

    name: str = ""
    metavar: str | None = None
    flag_value: str | None = None
    argument: bool = False
    alias: str = ""


ARGUMENT = Spelling(argument=True)
"""Spelling of a positional argument."""


class Options(StrictModel):
    """Base class of the option models; each command has a subclass."""
