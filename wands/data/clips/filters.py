"""Filter clips by the columns of their table rows or JSON objects: the condition of --where.

A condition is a Python expression of comparisons, `and`, `or` and `not`. It is parsed by `ast` but never run by Python.
"""

from __future__ import annotations

import ast
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wands.data.clips.records import ClipRecord
from wands.data.clips.rows import RANGE_COLUMNS, is_empty, read_number
from wands.errors import ConfigError, suggest
from wands.texts import printable

MAX_LENGTH = 1000
"""Largest number of characters of a condition. The limit also bounds how deeply a condition can be nested."""
MAX_COLUMNS = 16
"""Largest number of columns that `numeric_columns` returns."""
_UNKNOWN = 0.5
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.In: lambda part, text: part in text},
}
_NEGATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.IsNot: ast.Is, ast.NotIn: ast.In}


class Filter:
    """Condition that every clip must meet, such as `motion > 0.2 and sharpness > 100`.

    `thresholds` are (column, number) of the comparisons outside `or` and `not`, which every clip must meet.
    """

    def __init__(self, text: str) -> None:
        """Parse a condition. ConfigError if it is too long or has other parts than comparisons, `and`, `or` and `not`."""
        self._text = re.sub(r"[\r\n]", " ", text).strip()
        if len(text) > MAX_LENGTH:
            raise ConfigError(f"--where has {len(text):,} characters. Use at most {MAX_LENGTH:,}.")
        try:
            tree = ast.parse(self._text, mode="eval").body
            self._test(tree, {})  # visits every node, because no test stops at its first false part
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # Each version of Python names another place for these characters.
            odd = re.search(r"[\0\ud800-\udfff]", self._text)
            offset = getattr(error, "offset", 1) or len(self._text) + 1  # 0: the end
            begin = odd.start() if odd else offset - 1
            raise ConfigError(
                f"--where {self._text} cannot be used: error at character {begin + 1} "
                f'({self._text[begin:][:30] or "the end"}). Write comparisons such as seconds >= 2, license == "cc0", '
                'license in ["a", "b"] or motion is None. Join comparisons by and, or, not.'
            ) from None
        self.columns = _names(tree)
        self._parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
        self.thresholds = [
            (identifier(part.left.id), number)
            for part in self._parts
            if isinstance(part, ast.Compare) and isinstance(part.left, ast.Name)
            if (number := read_number(getattr(part.comparators[0], "value", None))) is not None
        ]

    def mark(self, records: Sequence[ClipRecord]) -> list[ClipRecord]:
        """Return the records with `ClipRecord.unmet` set. ConfigError if no clip has a column of the condition."""
        rows = [columns_of(record) for record in records]
        known = sorted({name for row in rows for name in row} or self.columns)
        for name in set(self.columns).difference(known):
            raise ConfigError(
                f"--where names the column {name}, but the clips have the columns {', '.join(known)}; {suggest(name, known)}"
            )
        return [replace(record, unmet=self.reason(row)) for record, row in zip(records, rows, strict=True)]

    def reason(self, row: Mapping[str, object]) -> str:
        """Return the first unmet part of the condition with the cells it compares, or "". `row` comes from `columns_of`."""
        for part in self._parts:
            if (value := self._test(part, row)) < 1:
                facts = [_fact(name, row.get(name), value == _UNKNOWN) for name in _names(part)]
                rule = ast.get_source_segment(self._text, part)
                return printable(f"{', '.join(facts)}, but --where requires {rule}")
        return ""

    def _test(self, node: ast.expr, row: Mapping[str, object]) -> float:
        """Return 1 if a row meets the part `node`, 0 if not, and 0.5 if a cell is empty or not the needed number.

        So `x and y` is the minimum, `x or y` the maximum, and `not x` is 1 - x.
        """
        if isinstance(node, ast.BoolOp):
            values = [self._test(value, row) for value in node.values]
            return min(values) if isinstance(node.op, ast.And) else max(values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return 1 - self._test(node.operand, row)
        if isinstance(node, ast.Compare) and _names(node):
            sides = [node.left, *node.comparators]
            return min([self._compare(*pair, row) for pair in zip(sides, node.ops, sides[1:], strict=False)])
        raise self._refusal(node)

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr, row: Mapping[str, object]) -> float:
        if type(op) in _NEGATIONS:
            return 1 - self._compare(left, _NEGATIONS[type(op)](), right, row)
        if isinstance(op, ast.In) and isinstance(right, ast.List | ast.Tuple) and right.elts:
            return max([self._compare(left, ast.Eq(), item, row) for item in right.elts])
        if isinstance(op, ast.Is) and isinstance(right, ast.Constant) and right.value is None:
            return float(is_empty(self._value(left, row)))
        sides = left, right
        cells = [self._value(side, row) for side in sides]
        is_text = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
        if type(op) not in _COMPARE or (isinstance(op, ast.In) and not is_text):
            raise self._refusal(right)
        values = [None if is_empty(cell) else str(cell) if is_text else read_number(cell) for cell in cells]
        return _UNKNOWN if None in values else float(_COMPARE[type(op)](*values))

    def _value(self, node: ast.expr, row: Mapping[str, object]) -> object:
        if isinstance(node, ast.Name):
            return row.get(identifier(node.id))
        value = ast.literal_eval(node) if isinstance(node, ast.Constant | ast.UnaryOp) else None
        value = value if isinstance(value, str) else read_number(value)
        if not is_empty(value):
            return value
        raise self._refusal(node)

    def _refusal(self, node: ast.expr) -> SyntaxError:
        begin = len(self._text.encode()[: node.col_offset].decode())
        return SyntaxError("", ("", 1, begin + 1, ""))


def columns_of(record: ClipRecord) -> dict[str, object]:
    """Return the clip's values of all columns that --where can name.

    These are "key", "path", "caption", "license", "start", "end", "seconds" (for a range with both ends), and the columns of the
    row, renamed by `identifier`.
    """
    own = {name: getattr(record, name) for name in ("key", "path", "caption", "license", "start", "end")}
    if record.start is not None and record.end is not None:
        own["seconds"] = record.end - record.start
    return {identifier(name): cell for name, cell in record.row.items()} | own


def numeric_columns(records: Sequence[ClipRecord]) -> dict[str, list[float]]:
    """Return the sorted numbers of each numeric column (only numbers and empty cells), renamed by `identifier`.

    The columns of the time range are left out, and only the last `MAX_COLUMNS` columns are returned.
    """
    columns: dict[str, list[Any]] = {}
    for record in records:
        for name, cell in record.row.items():
            if not is_empty(cell):
                columns.setdefault(name, []).append(read_number(cell))
    numbers = {name: sorted(cells) for name, cells in columns.items() if None not in cells}
    names = [name for name in numbers if name not in RANGE_COLUMNS]
    return {identifier(name): numbers[name] for name in names[-MAX_COLUMNS:]}


def _fact(name: str, cell: object, is_unknown: bool) -> str:
    kind = " (not a number)" if is_unknown and read_number(cell) is None else ""
    return f"{name} is empty" if is_empty(cell) else f"{name} = {str(cell)[:60]}{kind}"


def _names(node: ast.AST) -> tuple[str, ...]:
    names = (identifier(name.id) for name in ast.walk(node) if isinstance(name, ast.Name))
    return tuple(dict.fromkeys(names))


def identifier(name: str) -> str:
    """Return the name of a column as the condition of --where must write it, such as "motion_score" for "Motion score"."""
    return re.sub(r"\W|^(?=\d)", "_", unicodedata.normalize("NFKC", name).lower())
