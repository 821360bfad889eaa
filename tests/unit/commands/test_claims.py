"""Claims between the reading of the state and the lock. What several processes do is in test_preprocess_workers.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wands.commands.preprocess import claims
from wands.commands.preprocess.claims import Claims


def test_a_piece_done_since_the_state_was_read_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process finishes piece 0 and lifts its lock after we have read that it is to do."""
    path = tmp_path / "claims"
    Claims.create(path, 2)
    ours, read, reads = Claims(path), os.pread, []

    def read_early(file: int, length: int, offset: int) -> bytes:
        state = read(file, length, offset)
        if not reads:
            with path.open("r+b") as other:
                other.write(b"\1")
        reads.append(length)
        return state

    monkeypatch.setattr(claims.os, "pread", read_early)
    assert ours.take() == 1
    assert reads[0] == 2
    ours.done(1)
    assert ours.take() is None
