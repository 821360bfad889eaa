"""The architecture as a test: imports go down, siblings do not know each other, one optional package has one importing file."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from wands import api

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "wands").rglob("*.py"))

# The longest matching prefix decides. Files of one layer may import each other inside one folder; in layers 0 and 1, everywhere.
LAYERS = {
    "wands": 12,
    "wands.version": 0,
    "wands.lock": 0,
    "wands.errors": 0,
    "wands.disk_errors": 0,
    "wands.config": 0,
    "wands.files": 0,
    "wands.own_files": 0,
    "wands.secret_patterns": 0,
    "wands.texts": 0,
    "wands.values": 0,
    "wands.log_rows": 0,
    "wands.variants": 0,
    "wands.recipes": 0,
    "wands.compiled": 1,
    "wands.transfer": 1,
    "wands.attention": 1,
    "wands.conditions": 1,
    "wands.flow": 1,
    "wands.data.bins": 1,
    "wands.data.packing": 1,
    "wands.patches": 1,
    "wands.model": 2,
    "wands.distributed": 2,
    "wands.data": 2,
    "wands.encoders": 3,
    "wands.objectives": 3,
    "wands.plugin": 4,
    "wands.sampling": 4,
    "wands.export": 4,
    "wands.report": 4,
    "wands.planning": 5,
    "wands.run": 6,
    "wands.checkpoint": 7,
    "wands.watch": 8,
    "wands.engine": 8,
    "wands.train": 9,
    "wands.preprocess": 9,
    "wands.convert": 9,
    "wands.selftest": 9,
    "wands.api": 10,
    "wands.commands": 10,
    "wands.cli": 11,
    "wands.__main__": 12,
}
# package -> the only files of wands that may import it
ONE_IMPORTER = {
    "flash_attn": {"wands.attention.kernels.flash"},
    "flash_attn_interface": {"wands.attention.kernels.flash"},
    "bitsandbytes": {"wands.model.quantized", "wands.engine.adamw8bit"},
    "h5py": {"wands.data.cache.reader", "wands.data.cache.shards", "wands.data.cache.writer"},
    "av": {"wands.data.clips.video_file", "wands.data.clips.video"},
    "click": {"wands.cli", "wands.config.click_options", "wands.config.reference"},
    "datasets": {"wands.data.clips.hf_dataset"},
}
HEAVY = {"torch", "deepspeed", "diffusers", "transformers", "numpy", "h5py", "av"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    prefix = module
    while prefix not in LAYERS:
        prefix = prefix.rpartition(".")[0]
    return LAYERS[prefix]


@cache
def imports(source: str) -> list[tuple[str, bool]]:
    """(module, at module level) of every import; `from wands.x import y` counts as wands.x."""
    tree = ast.parse(source)
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
    return found


def violations(module: str, source: str) -> list[str]:
    problems = []
    for target, _ in imports(source):
        if not target.startswith("wands"):
            continue
        mine = layer(module)
        theirs = layer(target)
        siblings = module.split(".")[1:2] == target.split(".")[1:2]
        if theirs > mine or (theirs == mine and mine not in (0, 1) and not siblings):
            problems.append(f"{module} (layer {mine}) imports {target} (layer {theirs})")
    return problems


def test_imports_go_down():
    assert [problem for path in FILES for problem in violations(module_name(path), path.read_text())] == []


def test_the_check_sees_a_violation():
    assert violations("wands.model.modulation", "from wands.data.cache.reader import LatentCache")
    assert violations("wands.flow.loss", "import wands.train.loop")
    assert not violations("wands.train.loop", "from wands.data.cache.reader import LatentCache")


@pytest.mark.parametrize("package", ONE_IMPORTER)
def test_one_importer(package: str):
    importers = {
        module_name(p) for p in FILES if any(t.split(".")[0] == package for t, _ in imports(p.read_text()))
    }
    assert importers <= ONE_IMPORTER[package]


def test_layer_zero_and_cli_are_light():
    for name in (
        "errors.py",
        "config/recipe.py",
        "config/options.py",
        "config/click_options.py",
        "variants.py",
        "cli.py",
    ):
        heavy = {
            t for t, top in imports((ROOT / "wands" / name).read_text()) if top and t.split(".")[0] in HEAVY
        }
        assert heavy == set(), name


def test_the_package_is_light_until_a_public_name_is_used():
    """`from wands import lock` asks the package for the name first."""
    code = "import sys, wands; from wands import lock; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_print_only_where_people_look():
    for path in FILES:
        calls = [
            n
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"
        ]
        assert not calls or path.name == "cli.py", path


def test_every_public_function_is_documented():
    missing = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                nested = isinstance(node, ast.FunctionDef) and node.col_offset > 0
                if not nested:
                    missing.append(f"{module_name(path)}.{node.name}")
    assert missing == []


def test_no_public_name_is_a_module():
    """`wands.name` would be the module as soon as anything imports it."""
    modules = {path.stem for path in (ROOT / "wands").iterdir()}
    assert not modules & set(api.__all__)
