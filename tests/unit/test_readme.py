"""The README keeps up with the tree, its commands exist, and its options are real."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from wands.cli import main
from wands.config.recipe import list_recipes

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tree_names_every_file():
    tree = README[README.index("## The tree") : README.index("## Limits")]
    named = set(re.findall(r"[\w./-]+", tree))
    for path in sorted((ROOT / "wands").rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            assert path.name in named, path
    folders = {
        path.name for path in (ROOT / "wands").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert {f"{folder}/" for folder in folders} <= named


def test_files_that_it_points_to_exist():
    for name in set(re.findall(r"`((?:scripts|tests|wands|ds_configs|data_tools)/[\w./-]+)`", README)):
        assert (ROOT / name).exists(), name


def test_commands_recipes_and_options_are_real():
    for name, options in re.findall(r"^(?:.*--module |.*-m )?wands (\w+)((?: .*)?)$", README, re.MULTILINE):
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0, name
        for option in re.findall(r"(?<!\S)--[a-z-]+", options):
            assert option in result.output, f"wands {name} {option}"
    named = set(re.findall(r"wan2\.1-t2v-[\w.]+-(?:finetune|pretrain)", README))
    assert named
    assert named <= set(list_recipes())


def test_folder_readmes():
    for folder in ("wands", "ds_configs", "data_tools", "scripts", "tests"):
        text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
        assert len(text) > 200
    scripts = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "scripts").iterdir():
        if path.suffix in (".py", ".sh"):
            assert path.name in scripts, path
