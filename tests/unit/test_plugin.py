"""Outside code is found by its file, module or entry point, and every mistake is one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wands.errors import ConfigError
from wands.plugin import Plugin, load_plugins

JOB = "import wands\nplugin = wands.Plugin(jobs=(wands.Job(),))\n"
OBJECTIVE = "import wands\nplugin = wands.Plugin(objective=wands.FlowMatching())\n"


@pytest.fixture
def _modules():
    before = set(sys.modules)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("outside_"):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


@pytest.mark.usefixtures("_modules")
def test_a_file_and_a_module_add_their_parts(tmp_path: Path):
    file = write(tmp_path, "outside_objective", OBJECTIVE)
    write(tmp_path, "outside_job", JOB)
    sys.path.append(str(tmp_path))
    plugin = load_plugins([file, "outside_job"])
    assert plugin.objective.name == "flow_matching"
    assert len(plugin.jobs) == 1


@pytest.mark.usefixtures("_modules")
def test_an_installed_package_is_found_by_its_entry_point(tmp_path: Path):
    write(tmp_path, "outside_installed", JOB)
    facts = tmp_path / "outside-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[wands.plugins]\noutside = outside_installed:plugin\n")
    assert load_plugins() == Plugin()
    sys.path.append(str(tmp_path))
    plugin = load_plugins()
    assert len(plugin.jobs) == 1
    assert plugin.sources == ("outside 1.0",)


@pytest.mark.usefixtures("_modules")
def test_a_file_can_be_imported_again_and_by_its_stem(tmp_path: Path):
    file = write(tmp_path, "outside_twice", OBJECTIVE)
    assert load_plugins([file]).objective is load_plugins([file]).objective
    assert "outside_twice" in sys.modules


def test_an_absent_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nosuch\.py of --import does not exist; correct the path"):
        load_plugins([str(tmp_path / "nosuch.py")])


@pytest.mark.usefixtures("_modules")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import numpy_of_nobody", "numpy_of_nobody"),
        ("plugin = 3", "found int"),
        ("x = 1", "found NoneType"),
        ("1 / 0", "division by zero"),
        ("def", "invalid syntax"),
    ],
)
def test_a_module_that_is_no_plugin_is_named(tmp_path: Path, text: str, said: str):
    file = write(tmp_path, "outside_wrong", text)
    with pytest.raises(ConfigError) as caught:
        load_plugins([file])
    assert str(caught.value).startswith(f"--import {file}")
    assert said in str(caught.value)
    assert "outside_wrong" not in sys.modules or text in ("plugin = 3", "x = 1")


@pytest.mark.usefixtures("_modules")
@pytest.mark.parametrize("name", ["missing.py", "outside_missing", "json.py"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "json", JOB)  # the standard library's module has this name
    with pytest.raises(ConfigError, match=name):
        load_plugins([name])


@pytest.mark.usefixtures("_modules")
def test_a_run_has_one_objective(tmp_path: Path):
    files = [write(tmp_path, f"outside_{i}", OBJECTIVE) for i in range(2)]
    with pytest.raises(ConfigError, match="objective"):
        load_plugins(files)
