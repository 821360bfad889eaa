"""Shape of the code: one statement a line, functions and files that a reader can take in at once.

Each test reports all offenders at once.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterable, Iterator
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


@cache
def trees() -> list[tuple[str, list[ast.AST], int]]:
    """Name, nodes and number of lines of each file."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(source)))
            found.append((path.relative_to(ROOT).as_posix(), nodes, source.count("\n")))
    return found


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
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
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


def found(is_offence: Callable[[ast.AST], object], outside: str = "") -> list[str]:
    """Nodes that are an offence, without those of files whose path begins with `outside`."""
    return [
        f"{name}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:100]}"
        for name, nodes, _ in trees()
        if not (outside and name.startswith(outside))
        for node in nodes
        if is_offence(node)
    ]


def test_one_statement_a_line():
    offenders = found(hides_statements)
    assert not offenders, "\n".join(["Assign one value a line:", *offenders])


def test_values_of_a_class_are_named():
    offenders = found(starred_class, outside="tests/")
    assert not offenders, "\n".join(["Name the values instead of * before them:", *offenders])


def test_functions_are_short():
    offenders = [
        f"{name}:{node.lineno}: {node.name} has {lines(node)} lines"
        for name, nodes, _ in trees()
        for node in functions(nodes)
        if lines(node) > MAX_FUNCTION_LINES
    ]
    assert not offenders, "\n".join(
        [f"Split these functions (at most {MAX_FUNCTION_LINES} lines):", *offenders]
    )


def test_functions_are_flat():
    offenders = [
        f"{name}:{node.lineno}: {node.name} has {levels(node)} levels"
        for name, nodes, _ in trees()
        for node in functions(nodes)
        if levels(node) > MAX_LEVELS
    ]
    assert not offenders, "\n".join([f"Flatten these functions (at most {MAX_LEVELS} levels):", *offenders])


def test_files_are_short():
    offenders = [
        f"{name} has {count} lines"
        for name, _, count in trees()
        if count > MAX_FILE_LINES and name not in LONG_FILES
    ]
    assert not offenders, "\n".join([f"Split these files (at most {MAX_FILE_LINES} lines):", *offenders])


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
