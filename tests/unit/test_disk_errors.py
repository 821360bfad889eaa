"""Errors of the file system: a read is repeated, and never blamed on the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wands import disk_errors
from wands.disk_errors import disk_number, load_patiently, read_patiently
from wands.errors import CacheError, DiskError, WandsError
from wands.files import write_text


def failing(number: int, times: int) -> tuple[list[int], object]:
    calls: list[int] = []

    def read() -> str:
        calls.append(number)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return "content"

    return calls, read


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_errors, "WAITS", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN"])
def test_a_read_that_succeeds_a_moment_later_is_repeated_with_a_line(
    name: str, caplog: pytest.LogCaptureFixture
):
    number = getattr(errno, name)
    calls, read = failing(number, 3)
    assert read_patiently("shard", read) == "content"  # type: ignore[arg-type]
    assert len(calls) == 4
    assert caplog.messages == [f"shard cannot be read ({os.strerror(number)}); trying again in 0 s"] * 3


@pytest.mark.parametrize(("name", "num_calls"), [("EIO", 4), ("ESTALE", 4), ("EACCES", 1), ("EPERM", 1)])
def test_a_read_that_stays_impossible_names_the_error_of_the_disk(name: str, num_calls: int):
    number = getattr(errno, name)
    calls, read = failing(number, 99)
    with pytest.raises(DiskError) as caught:
        read_patiently("shard", read)  # type: ignore[arg-type]
    assert len(calls) == num_calls
    assert f"shard cannot be read ({os.strerror(number)})" in str(caught.value)
    assert (caught.value.number, caught.value.exit_code) == (number, 3)


@pytest.mark.parametrize(
    "error", [ValueError("no JSON"), OSError("the file ends too early"), OSError(errno.EINVAL, "x")]
)
def test_an_error_of_the_content_is_raised_at_once(error: Exception):
    def read() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        read_patiently("shard", read)
    assert caught.value is error


def library(read: Callable[[], str]) -> Callable[[], str]:
    """A function that replaces every error by one without a number, after a look for a file that may be missing."""

    def load() -> str:
        try:
            return read()
        except OSError:
            try:
                raise FileNotFoundError(errno.ENOENT, "no optional file")
            except FileNotFoundError:
                raise ValueError("the tokenizer cannot be made") from None

    return load


def test_an_error_that_a_library_has_replaced_is_found():
    calls, read = failing(errno.EIO, 2)
    assert load_patiently("the tokenizer", library(read)) == "content"  # type: ignore[arg-type]
    assert len(calls) == 3
    _, read = failing(errno.EACCES, 99)
    with pytest.raises(DiskError, match=r"the tokenizer cannot be read \(Permission denied\)"):
        load_patiently("the tokenizer", library(read))  # type: ignore[arg-type]


def test_an_error_of_a_library_about_the_content_is_raised_as_it_is(tmp_path: Path):
    with pytest.raises(ValueError, match="the tokenizer cannot be made"):
        load_patiently("the tokenizer", library((tmp_path / "absent").read_text))


def test_a_missing_file_stays_a_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_patiently("a", (tmp_path / "a").read_bytes)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (
            OSError("Can't read data (file read failed: time = x, errno = 5, error message = 'I/O')"),
            errno.EIO,
        ),
        (
            KeyError("Unable to open object (file read failed: errno = 116, error message = 'Stale')"),
            errno.ESTALE,
        ),
        (OSError("Input/output error (os error 5)"), errno.EIO),
        (
            RuntimeError("unable to open file </a (1)/b> in read-only mode: Stale file handle (116)"),
            errno.ESTALE,
        ),
        (OSError("truncated file: eof = 96"), 0),
        (OSError(errno.ENOTDIR, "Not a directory"), 0),
        (CacheError("errno = none"), 0),
    ],
)
def test_numbers_in_the_texts_of_libraries_are_found(error: Exception, number: int):
    assert disk_number(error) == number


def test_a_failed_write_may_be_restarted_and_a_wrong_path_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(WandsError) as wrong:
        write_text(tmp_path / "file" / "a", "text")

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WandsError) as failed:
        write_text(tmp_path / "b", "text")
    assert (wrong.value.exit_code, failed.value.exit_code) == (2, 3)
