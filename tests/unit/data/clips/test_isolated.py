"""Work in processes of its own: what crashes or hangs costs one item."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from wands.data.clips.isolated import Crash, Crashed, iterate_isolated, map_isolated, num_cores
from wands.errors import DataError


def work(item: str) -> str:
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "leave":
        os._exit(3)
    if item == "hang":
        time.sleep(600)
    if item == "raise":
        raise ZeroDivisionError("a mistake of the programmer")
    return item.upper()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_item_has_a_result_or_a_crash(num_workers: int) -> None:
    items = ["a", "crash", "b", "hang", "leave", "c", "crash", "d"]
    pairs = list(map_isolated(work, items, num_workers=num_workers, limit_seconds=4.0))
    assert sorted(index for index, _ in pairs) == list(range(len(items)))
    results = dict(pairs)
    assert [results[i] for i in (0, 2, 5, 7)] == ["A", "B", "C", "D"]
    assert results[1] == results[6] == Crash("the process ended by SIGSEGV")
    assert results[3] == Crash("it took more than 4 s")
    assert results[4] == Crash("the process ended with exit code 3")


def test_a_mistake_in_the_function_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="a mistake of the programmer"):
        list(map_isolated(work, ["a", "raise", "b"], limit_seconds=60))


def test_nothing_to_do() -> None:
    assert list(map_isolated(work, [], limit_seconds=1)) == []
    assert num_cores() >= 1


def values(first: str, *items: str) -> Iterator[str]:
    yield first.upper()
    for item in items:
        if item == "mistake":
            raise DataError("a sentence.")
        yield work(item)


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ("crash", Crashed, "the process ended by SIGSEGV"),
        ("leave", Crashed, "the process ended with exit code 3"),
        ("hang", Crashed, "it took more than 4 s"),
        ("mistake", DataError, "^a sentence.$"),
        ("raise", RuntimeError, "a mistake of the programmer"),
    ],
)
def test_values_come_one_by_one_until_the_process_ends(item: str, error: type, message: str) -> None:
    found = iterate_isolated(values, "a", "b", item, "c", limit_seconds=4.0)
    assert [next(found), next(found)] == ["A", "B"]
    with pytest.raises(error, match=message):
        next(found)


def test_an_iterator_in_a_process_may_be_left_early() -> None:
    assert list(iterate_isolated(values, "a", "b", limit_seconds=60)) == ["A", "B"]
    found = iterate_isolated(values, *["a"] * 1000, limit_seconds=60)
    assert next(found) == "A"
    found.close()
