"""Named pipes in the place of files: nothing waits for a writer or a reader that never comes."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_tools.verify import verify_cache
from tests.support.cache_samples import make_sample, write
from wands.data.cache.reader import LatentCache
from wands.data.cache.shards import open_hdf5
from wands.data.cache.write_ahead_log import WriteAheadLog
from wands.errors import CacheError, DataError, WandsError
from wands.run.append_log import AppendLog, continue_rows
from wands.sampling.images import read_image
from wands.watch.watchdog import answer_file, call_roll


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """End a test that blocks."""

    def end(*_: object) -> None:
        raise TimeoutError("the test has blocked")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_log_is_refused_at_the_start(pipe: Path):
    with pytest.raises(WandsError, match="pipe must be a regular file, and no link"):
        continue_rows(pipe, 3)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_log_that_is_replaced_later_does_not_end_the_run(kind: str, tmp_path: Path, caplog):
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "precious").write_text("keep me")
    log = AppendLog(path)
    log.append(b"first\n")
    path.rename(tmp_path / "moved")
    make = {"pipe": os.mkfifo, "link": lambda path: path.symlink_to("precious"), "folder": os.mkdir}
    make[kind](path)
    with caplog.at_level(logging.ERROR):
        log.append(b"second\n")
        log.append(b"third\n")
    assert caplog.text.count(f"{path} cannot be written") == 1
    path.rmdir() if kind == "folder" else path.unlink()
    log.append(b"fourth\n")
    assert path.read_bytes() == b"second\nthird\nfourth\n"
    assert (tmp_path / "precious").read_text() == "keep me"


def test_an_image_is_refused(pipe: Path):
    with pytest.raises(DataError, match="is a named pipe, not a file"):
        read_image(pipe, 32, 32)


def test_a_shard_is_refused(tmp_path: Path, pipe: Path):
    cache = write(tmp_path / "cache", [make_sample(0)])
    (shard,) = cache.glob("*.h5")
    shard.unlink()
    shutil.move(pipe, shard)
    with pytest.raises(WandsError, match="must be a regular file"):
        open_hdf5(shard)
    with pytest.raises(CacheError, match="is missing"):
        LatentCache(cache)
    problems = list(map(str, verify_cache(cache).problems))
    assert any("must be a regular file" in problem for problem in problems), problems


def test_a_write_ahead_log_is_refused(pipe: Path):
    with pytest.raises(WandsError, match="pipe must be a regular file"):
        WriteAheadLog(pipe)
    assert os.listdir(pipe.parent) == ["pipe"]


def test_the_file_of_the_stacks_is_left_out(tmp_path: Path):
    (tmp_path / "stacks").mkdir()
    os.mkfifo(answer_file(tmp_path / "stacks", 0))
    text, _ = call_roll(tmp_path / "stacks", 0.0)
    assert "no answer within 0 s from rank 0" in text
