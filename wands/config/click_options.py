"""Build click commands from the classes in `wands.config.options`, whose fields become command-line options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from wands.config.base import Options, heading_of, invalid_reason, limits_of, spelling_of


def command_name(options: type[Options]) -> str:
    """Return the name of the subcommand that takes these options: the class name without "Options", in lower case."""
    return options.__name__.removesuffix("Options").lower()


class GroupedCommand(click.Command):
    """Command whose help page lists the options under headings.

    Attributes:
        headings: maps the name of the first parameter of a group to the heading of the group.
    """

    headings: Mapping[str, str]

    def option_groups(self, context: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the (option, help) pairs under each heading, in order."""
        heading = "Options"
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            heading = self.headings.get(parameter.name or "", heading)
            record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
            if record:
                groups.setdefault(heading, []).append(record)
        return groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, records in self.option_groups(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)


def build_command(options: type[Options], run: Callable[[Any], Any]) -> GroupedCommand:
    """Return a subcommand that parses the command line into an instance of `options`, and calls `run` with it.

    The help lists required parameters first and --import last, and otherwise keeps the order of the fields.
    """
    parameters = [_build_parameter(name, field) for name, field in options.model_fields.items()]

    def parse_and_run(**values: Any) -> Any:
        try:
            parsed = options(**values)
        except ValidationError as error:  # click accepts nan and inf
            problem = error.errors()[0]
            [parameter] = (item for item in parameters if item.name == problem["loc"][0])
            raise click.BadParameter(invalid_reason(problem), param=parameter) from None
        return run(parsed)

    command = GroupedCommand(
        command_name(options),
        callback=parse_and_run,
        # --import, which commands inherit, comes last.
        params=sorted(
            parameters, key=lambda parameter: (not parameter.required, parameter.name == "imports")
        ),
        help=_help_text(options),
        short_help=str(inspect.getdoc(options)).partition("\n")[0].rstrip("."),
    )
    headings = {name: text for name, field in options.model_fields.items() if (text := heading_of(field))}
    if headings:
        headings["imports" if "imports" in options.model_fields else "help"] = "Other options"
    command.headings = headings
    return command


def help_line(field: FieldInfo) -> str:
    """Return the first paragraph of a field's docstring as one line."""
    return " ".join((field.description or "").partition("\n\n")[0].split())


def _help_text(options: type[Options]) -> str:
    """Return the docstring of `options`, with the descriptions of the positional arguments before the examples at its end."""
    text, _, examples = str(inspect.getdoc(options)).partition("Examples:\n")
    fields = options.model_fields.items()
    arguments = [
        f"{name.upper()}: {help_line(field)}" for name, field in fields if spelling_of(field).argument
    ]
    return "\n\n".join([text.strip(), *arguments, f"\b\nExamples:\n{examples}"])


def _build_parameter(name: str, field: FieldInfo) -> click.Parameter:
    spelling = spelling_of(field)
    members = get_args(field.annotation)
    kind: Any = members[0] if NoneType in members else field.annotation
    multiple = get_origin(kind) is tuple
    if multiple:
        kind = get_args(kind)[0]
    value_type = _click_type(kind, field)
    required = field.is_required()
    if spelling.argument:
        return click.Argument([name], type=value_type, required=required, nargs=-1 if multiple else 1)
    flag = spelling.name or f"--{name.replace('_', '-')}"
    if kind is bool:
        if field.default:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        return click.Option([flag, name], is_flag=True, default=field.default, help=help_line(field))
    more: dict[str, Any] = {"metavar": spelling.metavar, "help": help_line(field)}
    if spelling.flag_value:
        more |= {"is_flag": False, "flag_value": spelling.flag_value}
    if not multiple and not required:
        more |= {"default": field.default, "show_default": field.default is not None}
    return click.Option([flag, name], type=value_type, required=required, multiple=multiple, **more)


def _click_type(kind: Any, field: FieldInfo) -> Any:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is Path:
        return click.Path(path_type=Path)
    limits = limits_of(field)
    if not limits:
        return kind
    number = click.IntRange if kind is int else click.FloatRange
    low = limits.get("ge", limits.get("gt"))
    high = limits.get("le", limits.get("lt"))
    return number(min=low, max=high, min_open="gt" in limits, max_open="lt" in limits)
