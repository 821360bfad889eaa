"""The write-ahead log: whatever part of it reached the disk, whole records come back and nothing else."""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from wands.data.cache.write_ahead_log import WriteAheadLog, read_records
from wands.errors import CacheError, DiskError, WandsError

RECORDS = [(f"key {n}", [np.arange(6 + n, dtype=np.uint16), np.full((2, 3), n, np.uint16)]) for n in range(3)]


def fill(path: Path) -> list[int]:
    """Write all records; returns the size of the file after each."""
    path.touch()
    journal = WriteAheadLog(path)
    sizes = []
    for name, arrays in RECORDS:
        journal.add(name, arrays, {"caption": name + " ä"})
        sizes.append(path.stat().st_size)
    journal.close()
    return sizes


def assert_holds(path: Path, number: int) -> None:
    records = list(read_records(path))
    assert [record.name for record in records] == [name for name, _ in RECORDS[:number]]
    for record, (name, arrays) in zip(records, RECORDS, strict=False):
        assert record.meta == {"caption": name + " ä"}
        for found, wanted in zip(record.read(), arrays, strict=True):
            assert (found == wanted).all()
            assert found.shape == wanted.shape


def test_torn_at_any_byte_it_goes_on(tmp_path: Path) -> None:
    sizes = fill(tmp_path / "whole.journal")
    content = (tmp_path / "whole.journal").read_bytes()
    assert_holds(tmp_path / "whole.journal", 3)
    for length in range(len(content)):
        path = tmp_path / "torn.journal"
        path.write_bytes(content[:length])
        number = sum(size <= length for size in sizes)
        assert_holds(path, number)
        journal = WriteAheadLog(path)
        assert (journal.num_records, journal.num_bytes) == (number, [0, *sizes][number])
        name, arrays = RECORDS[number]
        journal.add(name, arrays, {"caption": name + " ä"})
        journal.close()
        assert_holds(path, number + 1)


def test_a_flipped_bit_is_never_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    sizes = fill(path)
    content = path.read_bytes()
    for position in range(sizes[0], sizes[1]):
        damaged = bytearray(content)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        records = list(read_records(path))
        if len(records) == 3:
            with pytest.raises(CacheError, match=r"damaged a\.journal \(wrong checksum of key 1\); delete"):
                records[1].read()
        else:
            assert_holds(path, 1)


def test_cleared_it_is_empty(tmp_path: Path) -> None:
    fill(tmp_path / "a.journal")
    journal = WriteAheadLog(tmp_path / "a.journal")
    journal.clear()
    assert (journal.num_records, journal.num_bytes) == (0, 0)
    journal.add(*RECORDS[0], {"caption": RECORDS[0][0] + " ä"})
    assert_holds(tmp_path / "a.journal", 1)


def _fill_small_disk(path: Path, limit: int, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        fill(path)
    except DiskError as error:
        pipe.send(str(error))


def test_full_disk_leaves_the_records_before(tmp_path: Path) -> None:
    sizes = fill(tmp_path / "a.journal")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    path = tmp_path / "b.journal"
    child = context.Process(target=_fill_small_disk, args=(path, sizes[1] + 20, theirs))
    child.start()
    child.join(60)
    assert ours.poll(), "no DiskError"
    assert "cannot store b.journal (File too large" in ours.recv()
    assert path.stat().st_size == sizes[1]
    assert_holds(path, 2)


def test_only_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "cache" / ".work" / "a.journal"
    first = WriteAheadLog(path)
    with pytest.raises(WandsError, match=r"cache \(a\.journal\) is being written by another process \(host"):
        WriteAheadLog(path, patience=0)
    first.close()
    WriteAheadLog(path, patience=0).close()
    assert [file.name for file in path.parent.iterdir()] == ["a.journal"]
