"""Shape of the code: one statement a line, functions and files that a reader can take in at once.

Each test reports all offenders at once.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("wands", "data_tools", "scripts", "examples", "tests")
MAX_FUNCTION_LINES = 60
"""Lines of a function without its docstring."""
MAX_LEVELS = 4
MAX_FILE_LINES = 450
LONG_FILES = {
    "wands/config/options.py": "every option of the command line, declared once",
    "wands/config/recipe.py": "every key of a recipe, declared once",
}
"""Files that may be longer, each with the reason."""
POSITIONAL = {"Sequential", "Progress"}
"""Classes of libraries that take any number of values of one kind."""


def names(node: ast.AST) -> set[str]:
    return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}


def hides_statements(node: ast.AST) -> bool:
    """Whether a statement assigns several values at once, none of which reads what another one replaces."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *node.value.elts)):
        return False
    pairs = list(zip(target.elts, node.value.elts, strict=True))
    return not any(
        names(earlier) & names(value) for i, (earlier, _) in enumerate(pairs) for _, value in pairs[i + 1 :]
    )


def starred_class(node: ast.AST) -> str | None:
    """Name of the class that a call builds from starred positional values, without those of dataclass fields by name."""
    if not isinstance(node, ast.Call) or not any(isinstance(value, ast.Starred) for value in node.args):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    is_class = name == "cls" or (name[:1].isupper() and not name.isupper())
    return name if is_class and name not in POSITIONAL else None


def levels(node: ast.AST) -> int:
    """Greatest number of blocks inside each other in a function, without the functions inside it."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            continue
        is_block = isinstance(child, ast.If | ast.For | ast.While | ast.With | ast.Try)
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and [child] == node.orelse
        deepest = max(deepest, levels(child) + (is_block and not is_elif))
    return deepest


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    count = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        text = node.body[0]
        assert text.end_lineno is not None
        count -= text.end_lineno - text.lineno + 1
    return count


def functions(nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@cache
def offences() -> dict[str, list[str]]:
    """Offenders of each rule.

    Every file is parsed once and forgotten: a million nodes at once would slow down the garbage collector.
    """
    found: dict[str, list[str]] = {"hidden": [], "starred": [], "long": [], "deep": [], "files": []}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        nodes = list(ast.walk(ast.parse(source)))
        found["hidden"] += [place(name, node) for node in nodes if hides_statements(node)]
        if not name.startswith("tests/"):
            found["starred"] += [place(name, node) for node in nodes if starred_class(node)]
        for function in functions(nodes):
            where = f"{name}:{function.lineno}: {function.name}"
            if (count := lines(function)) > MAX_FUNCTION_LINES:
                found["long"].append(f"{where} has {count} lines")
            if (depth := levels(function)) > MAX_LEVELS:
                found["deep"].append(f"{where} has {depth} levels")
        if (count := source.count("\n")) > MAX_FILE_LINES and name not in LONG_FILES:
            found["files"].append(f"{name} has {count} lines")
    return found


def place(name: str, node: ast.AST) -> str:
    return f"{name}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:100]}"


@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        ("hidden", "Assign one value a line:"),
        ("starred", "Name the values instead of * before them:"),
        ("long", f"Split these functions (at most {MAX_FUNCTION_LINES} lines):"),
        ("deep", f"Flatten these functions (at most {MAX_LEVELS} levels):"),
        ("files", f"Split these files (at most {MAX_FILE_LINES} lines):"),
    ],
)
def test_no_file_breaks_a_rule(rule: str, advice: str):
    offenders = offences()[rule]
    assert not offenders, "\n".join([advice, *offenders])


@pytest.mark.parametrize(
    ("statement", "hidden"),
    [
        ("a, b = 1, 2", True),
        ("self.a, self.b = a, None", True),
        ("a, b = b, a", False),
        ("a, b = b, a + b", False),
        ("height, width = size", False),
        ("a, *b = 1, *c", False),
    ],
)
def test_a_hidden_statement_is_found(statement: str, hidden: bool):
    assert hides_statements(ast.parse(statement).body[0]) is hidden


def test_levels_and_lines_are_counted():
    source = """def f():
        '''Text
        of it.'''
        for a in b:
            if a:
                with c:
                    pass
            elif d:
                pass
    """
    (node,) = functions(ast.walk(ast.parse(textwrap.dedent(source))))
    assert levels(node) == 3
    assert lines(node) == 7
    call = ast.parse("Rejection(*parts)").body[0]
    assert isinstance(call, ast.Expr)
    assert starred_class(call.value) == "Rejection"
