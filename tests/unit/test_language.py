"""Plain English in all Python files: how docstrings begin, words that are not used, names with two meanings.

Each test reports all offenders at once.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("wands", "data_tools", "scripts", "tests", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

FIRST_WORDS = re.compile(r"(What|Which|Where|How|Of|Whose|Who|In what)\b")
PRIVATE_WORDS = re.compile(
    r"\b(likewise|mend(s|ed|ing)?|told|beside|of its own|is told of|goes on"
    r"|(go|goes|going|gone|turn|turns|turned) round|round (the|a|an|it|them|this|each|every))\b",
    re.IGNORECASE,
)
HAVE_PRIVATE_WORDS = {
    "tests/unit/test_language.py": "the list of the words",
    "tests/unit/config/test_options.py": "a list of words that no option may have",
    "tests/unit/config/test_reference.py": "a list of words that no key may have",
}
"""Files that may contain the words, each with the reason."""
SAME_FILE_NAME = {
    "__init__.py": "Python",
}
"""File names that may be in several folders, each with the reason."""
SAME_FUNCTION_NAME = {
    "main": "the entry point of a program",
}
"""Names of public functions that may be in several modules, each with the reason."""


@cache
def texts(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Docstrings, and all texts (strings, docstrings, comments), each with its line.

    A text after a # inside a string is in the list twice: that costs less than to tokenize every file.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings = []
    strings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append((node.lineno, node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.append((node.lineno, str(node.value.value)))
    for number, line in enumerate(source.splitlines(), 1):
        _, mark, comment = line.partition("#")
        if mark:
            strings.append((number, comment))
    return docstrings, strings


def judged() -> list[tuple[str, Path]]:
    return [(path.relative_to(ROOT).as_posix(), path) for path in FILES]


def first_words(docstrings: list[tuple[int, str]]) -> list[str]:
    return [f"{line}: {text.split('.')[0][:80]!r}" for line, text in docstrings if FIRST_WORDS.match(text)]


def private_words(strings: list[tuple[int, str]]) -> list[str]:
    return [
        f"{line + text.count(chr(10), 0, match.start())}: {match[0]!r}"
        for line, text in strings
        for match in PRIVATE_WORDS.finditer(text)
    ]


def test_docstrings_begin_with_a_verb_or_a_noun():
    offenders = [f"{name}:{found}" for name, path in judged() for found in first_words(texts(path)[0])]
    assert not offenders, "\n".join(["Begin with a verb or a noun phrase:", *offenders])


def test_words_are_those_of_everybody():
    offenders = [
        f"{name}:{found}"
        for name, path in judged()
        if name not in HAVE_PRIVATE_WORDS
        for found in private_words(texts(path)[1])
    ]
    assert not offenders, "\n".join(["Use everyday words:", *offenders])


def test_a_class_name_is_in_one_module():
    modules = defaultdict(list)
    for path in (ROOT / "wands").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path.relative_to(ROOT).as_posix())
    offenders = [
        f"{name}: {', '.join(sorted(paths))}" for name, paths in sorted(modules.items()) if len(paths) > 1
    ]
    assert not offenders, "\n".join(["Class names with two meanings:", *offenders])


def test_a_function_name_is_in_one_module():
    modules = defaultdict(list)
    for path in (path for folder in ("wands", "data_tools") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                modules[node.name].append(path.relative_to(ROOT).as_posix())
    offenders = [
        f"{name}: {', '.join(sorted(paths))}"
        for name, paths in sorted(modules.items())
        if len(paths) > 1 and name not in SAME_FUNCTION_NAME
    ]
    assert not offenders, "\n".join(["Function names with two meanings:", *offenders])


def test_a_file_name_is_in_one_folder():
    folders = defaultdict(list)
    for path in (ROOT / "wands").rglob("*.py"):
        folders[path.name].append(path.relative_to(ROOT).as_posix())
    offenders = [
        f"{name}: {', '.join(sorted(paths))}"
        for name, paths in sorted(folders.items())
        if len(paths) > 1 and name not in SAME_FILE_NAME
    ]
    assert not offenders, "\n".join(["File names with two meanings:", *offenders])


def test_the_checks_see_offenders():
    assert first_words([(3, "What a rank holds.")]) == ["3: 'What a rank holds'"]
    assert first_words([(3, "In what the weights are kept."), (4, "Offset of a row."), (5, "Howto.")]) == [
        "3: 'In what the weights are kept'"
    ]
    text = "A file.\n\nIt lies beside the other,\nand likewise goes round the ring."
    assert [found.split(": ")[1] for found in private_words([(1, text)])] == [
        "'beside'",
        "'likewise'",
        "'goes round'",
    ]
    assert private_words([(1, "besides, round(x) is a round number; amend it")]) == []
