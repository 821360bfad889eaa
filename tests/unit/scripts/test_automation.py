"""The workflow and the Dockerfile: what they name exists, and they use the Python that pyproject.toml asks for."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST = PROJECT["requires-python"].removeprefix(">=")


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    return found


def steps() -> list[dict[str, Any]]:
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


def dockerfile() -> dict[str, list[str]]:
    """Instruction -> arguments of each line with it."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest)
    return found


def files_of(command: str) -> list[str]:
    """Words of a shell command that are paths of the repository."""
    return [word for word in shlex.split(command) if re.fullmatch(r"(\.ci|scripts|tests)/[\w./]+", word)]


def test_the_workflow_runs_what_exists():
    commands = [step["run"] for step in steps() if "run" in step]
    assert "bash .ci/run" in commands
    for command in commands:
        assert files_of(command), command
        assert all((ROOT / name).is_file() for name in files_of(command)), command


def test_jobs_have_limits_and_no_rights():
    assert workflow()["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in workflow()["jobs"].values())


def test_the_oldest_python_is_used():
    versions = [step["with"]["python-version"] for step in steps() if "setup-python" in step.get("uses", "")]
    assert versions == [OLDEST] * len(workflow()["jobs"])
    assert dockerfile()["FROM"] == [f"python:{OLDEST}-slim"]


def test_the_image_installs_extras_that_exist():
    installs = [command for command in dockerfile()["RUN"] if command.startswith("pip install")]
    assert all(files_of(command) == ["scripts/constraints.txt"] for command in installs)
    [extras] = re.findall(r'"\.\[(.*?)\]"', " ".join(installs))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert dockerfile()["ENTRYPOINT"] == ['["wands"]']


def test_the_image_copies_nothing_that_git_ignores():
    ignored = set((ROOT / ".dockerignore").read_text().split())
    folders = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert {".git", ".venv", ".setup", "demo_out", "runs", "gpu_out", "build"} <= ignored
    assert ignored - {".git"} <= folders


@pytest.mark.parametrize("name", ["Dockerfile", ".github/workflows/checks.yml"])
def test_nothing_in_them_is_a_secret(name: str):
    assert not re.search(r"(?i)token|password|secret", (ROOT / name).read_text())
