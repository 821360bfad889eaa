"""Budgets of code lines for wands: lines without docstrings, comments and blank lines. A budget is raised only with a reason."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

WANDS = Path(__file__).resolve().parents[2] / "wands"
CORE = 2_700
CORE_FILES = (
    *("attention", "flow", "distributed"),
    *(f"model/{name}.py" for name in ("transformer", "modulation", "checkpointing", "offload")),
    *("train/step.py", "data/collate.py"),
)
FOLDERS = {
    ".": 749,
    "attention": 812,
    "commands": 4131,
    "config": 1195,
    "data": 4223,
    "distributed": 376,
    "encoders": 315,
    "export": 358,
    "flow": 203,
    "model": 2342,
    "planning": 684,
    "recipes": 0,
    "report": 268,
    "sampling": 909,
    "train": 3877,
}
"""Folder of wands -> its budget; "." is the files next to the folders. A higher sum needs a line in CHANGELOG.md."""
TOTAL = 20_442
"""Sum of the folders."""

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_code_lines(source: str) -> int:
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def lines_of_files() -> dict[str, int]:
    return {
        path.relative_to(WANDS).as_posix(): count_code_lines(path.read_text(encoding="utf-8"))
        for path in sorted(WANDS.rglob("*.py"))
    }


def test_lines_of_code_are_within_their_budgets():
    lines = lines_of_files()
    folders: Counter[str] = Counter()
    for name, number in lines.items():
        folders[name.split("/")[0] if "/" in name else "."] += number
    core = sum(number for name, number in lines.items() if name.startswith(CORE_FILES))
    used = {"all of wands": (sum(lines.values()), TOTAL), "the core": (core, CORE)}
    used |= {folder: (number, FOLDERS.get(folder, 0)) for folder, number in folders.items()}
    over = [
        f"{name}: {number} lines of code, budget {budget}"
        for name, (number, budget) in used.items()
        if number > budget
    ]
    assert not over, "\n".join(over)
    assert FOLDERS.keys() == folders.keys()
    assert sum(FOLDERS.values()) == TOTAL


def test_only_code_counts():
    source = '"""Title.\n\nText."""\n\n# comment\nx = (\n    1,  # why\n)\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert count_code_lines(source) == 6
