"""Describe the recipe keys, the shipped recipes and the commands, on the terminal and as reference pages in Markdown."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wands.config.recipe import Recipe, inner_section
from wands.config.recipe_loading import list_recipes, load_recipe, shipped_recipe
from wands.errors import ConfigError
from wands.variants import VARIANTS

WIDTH = 100
_TYPES = {int: "integer", float: "number", str: "text", bool: "true | false"}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_NOTE = "<!-- Written by scripts/build_reference.py from wands/config. Change the docstrings there. -->"

_RECIPE_INTRO = """\
A recipe is a YAML file with the sections below. `wands recipes` lists the shipped recipes, and `--set section.key=value`
sets a key on the command line. Precedence: defaults, then the file, then `--set`. An unknown key or an invalid value is an
error. `wands config` prints this page in short, `wands config optim.lr` one key."""
_CLI_INTRO = """\
`wands COMMAND --help` prints the same texts. `python -m wands` is the same as `wands`; launchers such as torchrun and
deepspeed start it this way. `wands -v COMMAND` prints debug messages. Exit code 2 means an error that you can fix; the last
line names the option or key and the fix."""


class Key(NamedTuple):
    """One recipe key.

    Attributes:
        name: full name, such as optim.lr; keys of list items contain [], as in data.sources[].path.
        type: type and limits.
        default: default as in YAML, or "required" or "unset".
        description: Markdown.
    """

    name: str
    type: str
    default: str
    description: str

    @property
    def limits(self) -> str:
        """Type and default in brackets, as in the help of an option."""
        default = self.default if self.default == "required" else f"default: {self.default}"
        return f"[{self.type}; {default}]"

    @property
    def summary(self) -> str:
        """First sentence of the description."""
        return re.split(r"\.\s", self.description, maxsplit=1)[0].rstrip(".") + "."


class Section(NamedTuple):
    """One recipe section, or the top level with an empty name."""

    name: str
    description: str
    keys: tuple[Key, ...]


def list_sections() -> list[Section]:
    """Return all sections of the recipe; a nested section follows its parent."""
    return list(_walk(Recipe, "", str(inspect.getdoc(Recipe))))


def _walk(model: type[BaseModel], name: str, description: str) -> Iterator[Section]:
    prefix = f"{name}." if name else ""
    fields = {f"{prefix}{key}": field for key, field in model.model_fields.items()}
    inner = {key: section for key, field in fields.items() if (section := inner_section(field.annotation))}
    keys = (
        Key(key, _type_text(field), _default_text(field), field.description or "")
        for key, field in fields.items()
        if key not in inner
    )
    yield Section(name, description, tuple(keys))
    for key, section in inner.items():
        annotation, text = (
            fields[key].annotation,
            f"{inspect.getdoc(section)} {fields[key].description or ''}",
        )
        is_list = any(get_origin(kind) is list for kind in (annotation, *get_args(annotation)))
        yield from _walk(section, key + "[]" * is_list, " ".join(text.split()))


def _type_text(field: FieldInfo) -> str:
    signs = [(rule, name) for rule in field.metadata for name in _LIMITS if hasattr(rule, name)]
    limits = " and ".join(f"{_LIMITS[name]} {getattr(rule, name)}" for rule, name in signs)
    return f"{_type_name(field.annotation)} {limits}".strip()


def _type_name(annotation: Any) -> str:
    origin, members = get_origin(annotation), get_args(annotation)
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


def describe_config(query: str | None) -> str:
    """Return a line about every recipe key, or the full description of one section or key.

    Args:
        query: section, section.key or key; None for all.

    Raises:
        ConfigError: if no section or key has this name.
    """
    sections = list_sections()
    if query is None:
        return _list_keys(sections)
    name = re.sub(r"\[\]|\.\d+", "", query)
    by_section = {section.name.replace("[]", ""): section.keys for section in sections if section.name}
    by_name = {key.name.replace("[]", ""): key for section in sections for key in section.keys}
    keys = by_section.get(name) or ((by_name[name],) if name in by_name else ())
    # A name without a section means all keys of this name.
    keys = keys or tuple(key for full_name, key in by_name.items() if full_name.endswith(f".{name}"))
    if not keys:
        last_parts = (full_name.rpartition(".")[2] for full_name in by_name)
        near = difflib.get_close_matches(name, [*last_parts, *by_section, *by_name], n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else "`wands config` lists all keys."
        raise ConfigError(f"{query} is not a key of the recipe; {fix}")
    formatter = click.HelpFormatter(max_width=WIDTH)
    for section in sections:
        if section.name.replace("[]", "") == name:
            formatter.write_text(f"{section.name}: {section.description}")
    for key in keys:
        formatter.write_paragraph()
        formatter.write_text(f"{key.name}  {key.limits}")
        with formatter.indentation():
            formatter.write_text(key.description.replace("\n- ", "\n\n- "))
    return formatter.getvalue().strip()


def _list_keys(sections: list[Section]) -> str:
    """Return one line per key, grouped by section."""
    formatter = click.HelpFormatter(max_width=WIDTH)
    for section in sections:
        formatter.write_paragraph()
        formatter.write_text(f"{section.name or 'Top level'}: {section.description}")
        with formatter.indentation():
            formatter.write_dl(
                [(key.name.rpartition(".")[2], f"{key.summary}  {key.limits}") for key in section.keys]
            )
    return formatter.getvalue().strip()


def describe_recipes(name: str | None) -> str:
    """Return the YAML of a shipped recipe, or a table of all shipped recipes.

    Raises:
        ConfigError: if there is no shipped recipe of this name.
    """
    if name is not None:
        return shipped_recipe(name).rstrip()
    rows = [("NAME", "VARIANT", "TRAINS", "DESCRIPTION"), *map(_recipe_row, list_recipes())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _recipe_row(name: str) -> tuple[str, str, str, str]:
    """Return name, model variant, trained weights and the first comment line of a shipped recipe."""
    variant = next((known for known in VARIANTS if name.startswith(f"{known}-")), "any")
    description = shipped_recipe(name).partition("\n")[0].lstrip("# ").rstrip(".")
    return name, variant, "LoRA" if load_recipe(name).lora else "full", description


def recipe_page() -> str:
    """Return the recipe reference in Markdown."""
    lines = ["# Recipe reference", _NOTE, _RECIPE_INTRO]
    for section in list_sections():
        lines += [f"## {section.name or 'Top level'}", section.description]
        for key in section.keys:
            default = key.default if key.default in ("required", "unset") else f"default `{key.default}`"
            lines += [f"### {key.name}", f"`{key.type}`, {default}", key.description]
    return "\n\n".join(lines) + "\n"


def cli_page(commands: Mapping[str, click.Command]) -> str:
    """Return the command-line reference in Markdown.

    Args:
        commands: the subcommands by name, in order.
    """
    lines = ["# Command-line reference", _NOTE, _CLI_INTRO]
    table = ["| command | purpose |", "|---|---|"]
    for name, command in commands.items():
        table.append(f"| [{name}](#wands-{name}) | {command.get_short_help_str(WIDTH)} |")
    lines.append("\n".join(table))
    for name, command in commands.items():
        context = click.Context(command, info_name=f"wands {name}")
        text, _, examples = str(command.help).partition("\b\nExamples:\n")
        options = (param for param in command.params if isinstance(param, click.Option))
        records = filter(None, (option.get_help_record(context) for option in options))
        lines += [
            f"## wands {name}",
            f"```\n{context.get_usage().removeprefix('Usage: ')}\n```",
            text.strip(),
            "\n".join(f"- `{option}`: {' '.join(help.split())}" for option, help in records),
            f"```bash\n{textwrap.dedent(examples).strip()}\n```",
        ]
    return "\n\n".join(lines) + "\n"
