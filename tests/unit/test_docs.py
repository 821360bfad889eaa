"""The documentation matches the code: links, files, commands, options, recipe names and recipe keys on every page."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from wands.checkpoint import resume
from wands.cli import main
from wands.config.recipe import Recipe
from wands.config.recipe_loading import shipped_recipes
from wands.data.clips.file_kinds import CLIP_EXTENSIONS
from wands.objectives.objective import Loss

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / folder / "README.md" for folder in ("data_tools", "ds_configs", "scripts", "tests", "wands")]
README_BYTES = 10_000
FOLDERS = "docs|examples|scripts|tests|wands|ds_configs|data_tools"
FOREIGN_FILES = {"numpy.py", "generate.py"}
"""Files of other projects, or of a test, that pages name."""


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(text: str) -> Iterator[str]:
    """Shell commands of a page, one a line, continuation lines joined, comments and redirections to files removed."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.split(r"\s[#>]\s", line)[0].strip()
            if command and not command.startswith("#"):
                yield command


def wands_arguments(command: str) -> list[str] | None:
    """Arguments of a `wands` command line, whatever launches it; None for other programs."""
    words = shlex.split(command)
    for i, word in enumerate(words):
        if word == "wands" and (i == 0 or words[i - 1] in ("-m", "--module")):
            return words[i + 1 :]
    return None


def test_the_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_and_files_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    for name in set(re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)):
        assert (ROOT / name).exists(), name
    for name in set(re.findall(rf"(?:bash|python|sbatch) ((?:{FOLDERS})/[\w./-]+)", text)):
        assert (ROOT / name).exists(), name
    for name in set(re.findall(r"`(?:[\w/]*/)?(\w+\.(?:py|sh))`", text)) - FOREIGN_FILES:
        assert any(any((ROOT / folder).rglob(name)) for folder in FOLDERS.split("|")), name


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_parse(page: Path):
    """Every documented command line has a known command, known options and values of the right type."""
    for command in code_blocks(page.read_text(encoding="utf-8")):
        arguments = wands_arguments(command)
        if not arguments or arguments[0].startswith("-"):
            continue
        known: click.Command | None = main
        while isinstance(known, click.Group):
            name, *arguments = arguments
            known = known.commands.get(name)
        assert known is not None, command
        try:
            known.make_context(name, arguments)
        except click.UsageError as error:
            pytest.fail(f"{command}: {error.format_message()}")


def recipe_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the recipe."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in re.findall(r"(\w+Config)", str(field.annotation)):
            section = next(
                (value for value in _configs() if value.__name__ == inner and value is not model), None
            )
            if section is not None:
                yield from recipe_keys(section, f"{prefix}{name}.")


def _configs() -> list[type[BaseModel]]:
    todo = [Recipe]
    found = []
    while todo:
        model = todo.pop()
        found.append(model)
        todo += [
            child for child in model.__base__.__subclasses__() if child not in found and child not in todo
        ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_recipes_and_keys_are_real(page: Path):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"\bwan2\.[12]-[\w.]+-(?:finetune|pretrain|lora)\b", text))
    assert named <= set(shipped_recipes()), named - set(shipped_recipes())
    keys = set(recipe_keys(Recipe))
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    written = set(re.findall(rf"\b((?:{'|'.join(sorted(sections))})\.[a-z_]+)\b(?!\.md|\.py|/)", text))
    written -= {
        f"loss.{name}" for name in Loss._fields
    }  # in code of an objective, not keys of the section loss
    assert {key for key in written if not key.endswith((".md", ".py", ".cache"))} <= keys, written - keys


def test_scripts_are_listed():
    listed = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    assert [
        p.name for p in (ROOT / "scripts").iterdir() if p.suffix in (".py", ".sh") and p.name not in listed
    ] == []


def messages(root: Path) -> Iterator[str]:
    """Every string of the code, with ... for the values that are filled in."""
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_format_of_clips_is_listed():
    page = (ROOT / "docs" / "data.md").read_text()
    assert [
        extension for extension in CLIP_EXTENSIONS if f"`{extension}`" not in page.replace("a.png", ".png")
    ] == []


def test_the_errors_of_the_troubleshooting_page_exist():
    """The first cell of each row quotes a message of wands; rows about other programs' messages say so."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        quote
        for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
        if "(PyTorch)" not in row and "(DeepSpeed)" not in row
        for quote in re.findall(r"`([^`]+)`", row)
    ]
    known = {*messages(ROOT / "wands"), *messages(ROOT / "data_tools")}
    missing = [
        quote
        for quote in quoted
        if not any(all(part in text for part in quote.split("...")) for text in known)
    ]
    assert len(quoted) >= 25
    assert not missing, missing


def test_the_keys_that_a_resumed_run_may_not_change_are_listed():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = page.partition("| may not change at a resume |")[2].partition("\n\n")[0]
    keys = {*chain(*resume._FIXED_KEYS.values()), *resume._BASE_KEYS}
    assert sorted(key for key in keys if f"`{key}`" not in table) == []
