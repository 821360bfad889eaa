"""Option models: one declaration makes the click parameters and their help; a stranger can read every line alone."""

from __future__ import annotations

import pkgutil
import re
import shlex
from typing import get_type_hints

import click
import pytest
from click.testing import CliRunner

from wands.cli import COMMANDS, TOOLS, main, tools
from wands.config import options as options_module
from wands.config.base import Options
from wands.config.click_options import command_name, help_line

BY_NAME = {
    command_name(kind): kind
    for kind in vars(options_module).values()
    if isinstance(kind, type) and issubclass(kind, Options) and not kind.__subclasses__()
}


def help_of(*command: str) -> str:
    return CliRunner().invoke(main, [*command, "--help"], env={"COLUMNS": "80"}).output


def refusal(*args: str) -> str:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2, result.output
    return result.output


def test_commands_are_listed_in_order_of_work_without_ellipsis():
    listing = help_of().partition("Commands:\n")[2]
    assert "..." not in listing
    lines = [line for line in listing.splitlines() if not line.startswith("   ")]  # without continued lines
    assert [line.split()[0] for line in lines] == [*map(command_name, COMMANDS), "tools"]
    assert all(len(line.split()) > 3 for line in lines)


def test_commands_that_a_usual_run_does_not_need_are_in_a_group():
    names = ["verify", "score", "selftest", "calibrate", "profile", "pack"]
    listing = help_of("tools").partition("Commands:\n")[2]
    assert [line.split()[0] for line in listing.splitlines()] == names == list(tools.commands)
    assert "No such command 'verify'" in refusal("verify", ".")
    assert {*COMMANDS, *TOOLS} == set(BY_NAME.values())


@pytest.mark.parametrize("options", BY_NAME.values(), ids=command_name)
def test_every_description_is_readable_alone(options: type[Options]):
    for name, field in options.model_fields.items():
        text = help_line(field)
        assert text.endswith((".", "].")), (name, text)
        assert not re.match(r"Of |The same|Their |All of them|Whose ", text), (name, text)
        assert not re.search(r"\b(likewise|told|beside|those|lies|stands)\b", text, re.IGNORECASE), (
            name,
            text,
        )
        for sentence in re.split(r"[.;:] ", text):
            assert len(sentence.split()) <= 25, (name, sentence)


@pytest.mark.parametrize("name", BY_NAME)
def test_examples_parse(name: str):
    group = [] if name in main.commands else ["tools"]
    examples = help_of(*group, name).partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert 1 <= len(examples) <= 3
    for example in examples:
        words = shlex.split(example)
        start = words.index("wands") + 1
        args = words[start + len(group) + 1 :]
        assert words[start : start + len(group) + 1] == [*group, name]
        (tools if group else main).commands[name].make_context(name, args)


@pytest.mark.parametrize("options", COMMANDS | TOOLS, ids=command_name)
def test_every_command_has_a_function_that_takes_its_options(options: type[Options]):
    run = (COMMANDS | TOOLS)[options]
    function = pkgutil.resolve_name(run) if isinstance(run, str) else run
    assert next(iter(get_type_hints(function).items())) == ("options", options)


def test_fields_become_parameters_of_their_type():
    params = {param.name: param for param in main.commands["preprocess"].params}
    assert isinstance(params["source"], click.Argument)
    assert params["out"].required
    assert params["out"].type.convert("x", None, None).name == "x"
    assert params["max_pixels"].multiple
    assert params["center_crop"].is_flag
    assert params["clip_mode"].type.choices == ("head", "middle", "slide")
    assert (params["workers"].type.min, params["workers"].default) == (1, None)
    memory = next(param for param in main.commands["plan"].params if param.name == "gpu_memory")
    assert (memory.type.min, memory.type.min_open) == (0, True)
    forward = next(param for param in main.commands["convert"].params if param.name == "forward")
    assert (forward.opts, forward.secondary_opts, forward.default) == (["--forward"], ["--no-forward"], True)


def test_wrong_values_name_the_flag():
    assert "'--clip-mode': 'tail' is not one of" in refusal("check", ".", "--clip-mode", "tail")
    assert "'--gpu-memory': 0.0 is not in the range x>0" in refusal("plan", "--gpu-memory", "0")
    assert "Missing option '--out'" in refusal("tools", "pack")


def test_zero_frames_keep_whole_clips():
    assert BY_NAME["check"](source="x", max_frames=0).max_frames is None
    assert BY_NAME["check"](source="x").max_frames == 81


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused_with_the_name_of_the_option(value: str):
    assert "Invalid value for '--fps'" in refusal("check", "clips", "--fps", value)
    assert "Invalid value for '--min-seconds'" in refusal(
        "split", "films", "--out", "a.csv", "--min-seconds", value
    )
