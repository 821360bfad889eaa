"""Describe the recipe keys and the shipped recipes, for `wands recipes` and the reference pages."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wands.config.base import limits_of
from wands.config.options import RecipesOptions
from wands.config.recipe import Recipe, inner_section
from wands.config.recipe_loading import load_recipe, shipped_recipes
from wands.errors import ConfigError
from wands.variants import VARIANTS

WIDTH = 100
_TYPES = {int: "integer", float: "number", str: "text", bool: "true | false"}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Key(NamedTuple):
    """One recipe key and its description.

    Attributes:
        name: full name, such as `optim.lr`, or `data.sources[].path` for a key of the items of a list.
        type: type and limits of the value, such as "number > 0".
        default: as written in YAML; "required" without a default, "unset" for null or an empty text.
    """

    name: str
    type: str
    default: str
    description: str

    @property
    def limits(self) -> str:
        """Type, limits and default, for example "[number > 0; default: 1e-05]"."""
        default = self.default if self.default == "required" else f"default: {self.default}"
        return f"[{self.type}; {default}]"

    @property
    def summary(self) -> str:
        """First sentence of the key's description, for the list of all keys."""
        return re.split(r"\.\s", self.description, maxsplit=1)[0].rstrip(".") + "."


class Section(NamedTuple):
    """One section of the recipe, and its keys. The top level of the recipe is a section with an empty name."""

    name: str
    description: str
    keys: tuple[Key, ...]


def list_sections(model: type[BaseModel] = Recipe, name: str = "", text: str | None = "") -> list[Section]:
    """Return a section of the recipe, by default all of it, and its nested sections. `text` is added to the description."""
    prefix = f"{name}." if name else ""
    fields = {f"{prefix}{key}": field for key, field in model.model_fields.items()}
    inner = {key: section for key, field in fields.items() if (section := inner_section(field.annotation))}
    keys = (
        Key(
            name=key,
            type=_type_text(field),
            default=_default_text(field),
            description=field.description or "",
        )
        for key, field in fields.items()
        if key not in inner
    )
    description = f"{inspect.getdoc(model)} {text or ''}"
    sections = [Section(name, " ".join(description.split()), tuple(keys))]
    for key, section in inner.items():
        annotation = fields[key].annotation
        is_list = any(get_origin(kind) is list for kind in (annotation, *get_args(annotation)))
        sections += list_sections(section, key + "[]" * is_list, fields[key].description)
    return sections


def _type_text(field: FieldInfo) -> str:
    limits = " and ".join(f"{_LIMITS[rule]} {bound}" for rule, bound in limits_of(field).items())
    return f"{_type_name(field.annotation)} {limits}".strip()


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    members = get_args(annotation)
    if origin is Literal:
        return " | ".join(members)
    if origin is Annotated:
        return _type_name(members[0])
    if origin is list:
        return f"list of {_type_name(members[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type_name, members))}]"
    if members:
        return " | ".join(_type_name(member) for member in members if member is not NoneType)
    return _TYPES[annotation]


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default in (None, ""):
        return "unset"
    return default if isinstance(default, str) else json.dumps(default)


def describe_recipes(options: RecipesOptions) -> str:
    """Return the text of `wands recipes`: the shipped recipes, all keys, or one recipe, section or key.

    Raises:
        ConfigError: if no recipe, section or key has this name.
    """
    if options.keys:
        if options.name is not None:
            raise ConfigError(
                f"--keys lists all keys, so it cannot be used with {options.name}; leave one of them out."
            )
        return _list_keys()
    if options.name is None:
        return _list_recipes()
    recipe = shipped_recipes().get(options.name.removesuffix(".yaml"))
    return recipe.rstrip() if recipe else _describe_keys(options.name)


def _list_keys() -> str:
    formatter = click.HelpFormatter(max_width=WIDTH)
    for section in list_sections():
        formatter.write_paragraph()
        formatter.write_text(f"{section.name or 'Top level'}: {section.description}")
        with formatter.indentation():
            rows = [(key.name.rpartition(".")[2], f"{key.summary}  {key.limits}") for key in section.keys]
            formatter.write_dl(rows)
    return formatter.getvalue().strip()


def _list_recipes() -> str:
    rows = [("NAME", "VARIANT", "TRAINS", "DESCRIPTION")]
    for name, text in shipped_recipes().items():
        variant = next((known for known in VARIANTS if name.startswith(f"{known}-")), "any")
        first_comment = text.partition("\n")[0].lstrip("# ").rstrip(".")
        rows.append((name, variant, "LoRA" if load_recipe(name).lora else "full", first_comment))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _describe_keys(query: str) -> str:
    """Return the full text of a section, or of all keys with a name."""
    sections = list_sections()
    name = re.sub(r"\[\]|\.\d+", "", query)
    by_section = {section.name.replace("[]", ""): section for section in sections if section.name}
    by_name = {key.name.replace("[]", ""): key for section in sections for key in section.keys}
    found = by_section.get(name)
    # A name without a section means all keys of this name.
    keys = found.keys if found else [by_name[key] for key in by_name if f".{key}".endswith(f".{name}")]
    if not keys:
        last_parts = (full_name.rpartition(".")[2] for full_name in by_name)
        known = [*last_parts, *by_section, *by_name, *shipped_recipes()]
        near = difflib.get_close_matches(query, known, n=1, cutoff=0.5)
        fix = (
            f"did you mean {near[0]}?"
            if near
            else "`wands recipes` lists the recipes, `wands recipes --keys` all keys."
        )
        raise ConfigError(f"{query} is neither a shipped recipe nor a recipe key; {fix}")
    formatter = click.HelpFormatter(max_width=WIDTH)
    if found:
        formatter.write_text(f"{found.name}: {found.description}")
    for key in keys:
        formatter.write_paragraph()
        formatter.write_text(f"{key.name}  {key.limits}")
        with formatter.indentation():
            formatter.write_text(key.description.replace("\n- ", "\n\n- "))
    return formatter.getvalue().strip()
