"""Subprocesses: a crash or a hang costs one call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from wands.data.clips.isolated import Crash, Hang, IsolatedWorker, map_isolated, num_cores
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


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_item_has_a_result_or_a_crash(num_workers: int) -> None:
    items = ["a", "crash", "b", "hang", "leave", "c", "crash", "d"]
    pairs = list(map_isolated(work, items, num_workers=num_workers, limit_seconds=8.0))
    assert sorted(index for index, _ in pairs) == list(range(len(items)))
    results = dict(pairs)
    assert [results[i] for i in (0, 2, 5, 7)] == ["A", "B", "C", "D"]
    for index, reason in (
        (1, "the process ended with signal SIGSEGV"),
        (6, "the process ended with signal SIGSEGV"),
        (3, "the process took more than 8 s"),
        (4, "the process ended with exit code 3"),
    ):
        assert isinstance(results[index], Crash)
        assert str(results[index]) == reason


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


def iterate(worker: IsolatedWorker, *items: str, limit_seconds: float = 60) -> Iterator[str]:
    return worker.run(values, *items, limit_seconds=limit_seconds)


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ("crash", Crash, "the process ended with signal SIGSEGV"),
        ("leave", Crash, "the process ended with exit code 3"),
        pytest.param("hang", Hang, "the process took more than 4 s", marks=pytest.mark.slow),
        ("mistake", DataError, "^a sentence.$"),
        ("raise", RuntimeError, "a mistake of the programmer"),
    ],
)
def test_values_come_one_by_one_until_the_process_ends(item: str, error: type, message: str) -> None:
    with closing(IsolatedWorker()) as worker:
        results = iterate(worker, "a", "b", item, "c", limit_seconds=4.0)
        assert [next(results), next(results)] == ["A", "B"]
        with pytest.raises(error, match=message):
            next(results)
        assert list(iterate(worker, "d")) == ["D"]  # a new process if the old one ended


def test_one_process_serves_many_calls_and_a_loop_may_end_early() -> None:
    with closing(IsolatedWorker()) as worker:
        assert list(iterate(worker, "a", "b")) == ["A", "B"]
        process = worker._process.pid
        results = iterate(worker, *["a"] * 1000)
        assert next(results) == "A"
        assert worker._process.pid == process
        results.close()
        assert list(iterate(worker, "c")) == ["C"]


def test_a_loop_over_results_may_end_early() -> None:
    results = map_isolated(work, ["a", "hang", "b"], num_workers=2, limit_seconds=600)
    assert next(results)[1] == "A"
    results.close()


def test_a_worker_may_be_killed_while_its_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = IsolatedWorker()
    context = worker._context

    def process(**options: Any) -> Any:
        made = context.Process(**options)
        return SimpleNamespace(start=lambda: (worker.kill(), made.start()), kill=made.kill, join=made.join)

    monkeypatch.setattr(worker, "_context", SimpleNamespace(Pipe=context.Pipe, Process=process))
    with pytest.raises(Crash, match="was killed"):
        next(iterate(worker, "a"))
