"""Values of the right form and the wrong type or size, to put into every field of a JSON file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from wands.errors import WandsError

ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "x" * 100_000, "\udc80<b>\0"),
    *([], [1], [[1, 2], None], {}, {"a": 1}, {"": [None]}),
    *(-1, 0, 2**31, 2**63, 10**30, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field of a JSON value, the value itself included. Of a long list, only the ends."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from places(value[i], (*path, i))


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    value = copy.copy(value)
    value[path[0]] = put(value[path[0]], path[1:], odd)
    return value


def odd_copies(value: Any, share: float = 1.0, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """(what was put where, damaged copy): every odd value in every field, or a random share of these."""
    rng = random.Random(seed)
    for path in places(value):
        for odd in ODD:
            if rng.random() < share:
                name = f"{'.'.join(map(str, path)) or 'all'}={ascii(odd)[:40]}"
                yield name, put(value, path, odd)


def to_text(value: Any) -> str:
    """The JSON text, in which 1e400 stands for an infinite number, as some writers have it."""
    return json.dumps(value).replace("Infinity", "1e400")


def outcome(action: Callable[[], Any]) -> str:
    """Return "done", or the sentence of the WandsError. Any other exception is the caller's failure."""
    try:
        action()
    except WandsError as error:
        problems = error.problems
    else:
        return "done"
    assert all(problem and "\n" not in problem and len(problem) < 5000 for problem in problems), problems
    return "; ".join(problems)
