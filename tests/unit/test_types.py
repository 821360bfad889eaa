"""Type checks: mypy sees the types of PyTorch, and no comment hides an error without a reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
IGNORE = re.compile(r"# type: ignore(?P<codes>\[[\w, -]+\])?(?P<reason>  # \w.*)?")


def unexplained(source: str) -> list[str]:
    """Lines that hide an error of any kind, or without a reason."""
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(source.splitlines(), start=1)
        if (found := IGNORE.search(line)) and not (found["codes"] and found["reason"])
    ]


def test_the_types_of_torch_are_checked():
    skipped = {name for override in MYPY["overrides"] for name in override["module"]}
    assert not {name for name in skipped if name.split(".")[0] in ("torch", "wands", "data_tools")}
    assert MYPY["files"] == ["wands", "data_tools"]
    assert MYPY["disallow_untyped_defs"]


def test_a_hidden_error_has_a_reason():
    assert MYPY["warn_unused_ignores"]
    offenders = [
        f"{path.relative_to(ROOT).as_posix()}:{found}"
        for folder in MYPY["files"]
        for path in sorted((ROOT / folder).rglob("*.py"))
        for found in unexplained(path.read_text(encoding="utf-8"))
    ]
    assert not offenders, "\n".join(["Write the kind of the error and a reason:", *offenders])


def test_the_check_sees_an_offender():
    assert unexplained("a = b()  # type: ignore\n") == ["1: a = b()  # type: ignore"]
    assert unexplained("a = b()  # type: ignore[misc]") == ["1: a = b()  # type: ignore[misc]"]
    assert unexplained("a = b()  # type: ignore[misc]  # a library's fault") == []
