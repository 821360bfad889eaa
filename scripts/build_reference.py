"""Write docs/reference/ from the descriptions of the command options and of the recipe keys.

    python scripts/build_reference.py
    python scripts/build_reference.py --options   # for a release: also add all options to tests/fixtures/options.json

A test fails if a page does not have the current descriptions.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from wands.cli import main
from wands.config.click_options import GroupedCommand
from wands.config.reference import WIDTH, list_sections
from wands.variants import VARIANTS, sampling_table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
OPTIONS = ROOT / "tests" / "fixtures" / "options.json"
"""File with the options of each command in earlier releases. A test checks that the commands still have these options."""
_NOTE = "<!-- Written by scripts/build_reference.py from wands/config. Change the docstrings there. -->"

_RECIPE_INTRO = """\
A recipe is a YAML file with the sections below. `wands recipes` lists the shipped recipes, and `--set section.key=value`
sets a key on the command line. Precedence: defaults, then the file, then `--set`. An unknown key or an invalid value is an
error. `wands recipes --keys` prints this page in short, `wands recipes optim.lr` one key."""
_CLI_INTRO = """\
`wands COMMAND --help` prints the same texts. `python -m wands` is the same as `wands`; launchers such as torchrun and
deepspeed start it this way. `wands -v COMMAND` prints debug messages. Exit code 2 means an error that you can fix; the last
line names the option or key and the fix."""
_SAMPLING_INTRO = """\
These values are the defaults of `wands infer`. They come from the configs, `generate.py` and the README of Wan 2.1 and 2.2. Two
numbers of guidance are for the high-noise and the low-noise expert. A model with another shape has the size 832 x 480, 81
frames, 50 steps, guidance 5, the shift of its scheduler, and no negative prompt."""


def list_commands(group: click.Group) -> dict[str, GroupedCommand]:
    """Return the commands of a group and of the groups in it by their names, such as "train" and "tools verify"."""
    found: dict[str, GroupedCommand] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": item for inner, item in list_commands(command).items()}
        elif isinstance(command, GroupedCommand):
            found[name] = command
    return found


def recipe_page() -> str:
    """Return the recipe reference in Markdown."""
    lines = ["# Recipe reference", _NOTE, _RECIPE_INTRO]
    for section in list_sections():
        lines += [f"## {section.name or 'Top level'}", section.description]
        for key in section.keys:
            default = key.default if key.default in ("required", "unset") else f"default `{key.default}`"
            lines += [f"### {key.name}", f"`{key.type}`, {default}", key.description]
    return "\n\n".join(lines) + "\n"


def cli_page(commands: Mapping[str, GroupedCommand]) -> str:
    """Return the command-line reference in Markdown.

    Args:
        commands: the subcommands by name, in order, see `list_commands`.
    """
    lines = ["# Command-line reference", _NOTE, _CLI_INTRO]
    table = ["| command | purpose |", "|---|---|"]
    for name, command in commands.items():
        table.append(f"| [{name}](#wands-{name.replace(' ', '-')}) | {command.get_short_help_str(WIDTH)} |")
    lines.append("\n".join(table))
    for name, command in commands.items():
        context = click.Context(command, info_name=f"wands {name}")
        text, _, examples = str(command.help).partition("\b\nExamples:\n")
        groups = command.option_groups(context)
        lines += [
            f"## wands {name}",
            f"```\n{context.get_usage().removeprefix('Usage: ')}\n```",
            text.strip(),
            *_option_lists(groups),
            f"```bash\n{textwrap.dedent(examples).strip()}\n```",
        ]
    lines += ["## Sampling options of the models' authors", _SAMPLING_INTRO, sampling_table()]
    prompts: dict[str, list[str]] = {}
    for variant in VARIANTS.values():
        prompts.setdefault(variant.sampling.negative_prompt, []).append(variant.name)
    lines.append("Negative prompts:")
    lines.append("\n".join(f"- {', '.join(names)}: {prompt}" for prompt, names in prompts.items()))
    return "\n\n".join(lines) + "\n"


def _option_lists(groups: Mapping[str, Sequence[tuple[str, str]]]) -> Iterator[str]:
    """Yield a list of the options under each heading, without --help, and the headings if there are several."""
    for heading, records in groups.items():
        lines = [
            f"- `{option}`: {' '.join(help.split())}" for option, help in records if "--help" not in option
        ]
        if len(groups) > 1 and lines:
            yield f"**{heading}**"
        if lines:
            yield "\n".join(lines)


def build_pages() -> dict[str, str]:
    """Return a dictionary that maps the file name of each reference page to its Markdown text."""
    return {"cli.md": cli_page(list_commands(main)), "recipe.md": recipe_page()}


def options_of(command: click.Command) -> dict[str, bool]:
    """Return a dictionary that maps each spelling of each option to whether the option takes a value (False for a flag)."""
    return {
        name: not (option.is_flag or option.count)
        for option in command.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    }


def add_options(stored: dict[str, dict[str, bool]]) -> dict[str, dict[str, bool]]:
    """Return `stored` plus the current options of every command. Options that a command no longer has are kept.

    Args:
        stored: maps each command to its options. An option maps to True if it takes a value, and to False if it is a flag.
    """
    added = {
        name: stored.get(name, {}) | options_of(command) for name, command in list_commands(main).items()
    }
    return stored | added


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--options", action="store_true")
    if parser.parse_args().options:
        stored = json.loads(OPTIONS.read_text(encoding="utf-8"))
        OPTIONS.write_text(json.dumps(add_options(stored), indent=1) + "\n", encoding="utf-8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in build_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
