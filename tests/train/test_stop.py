"""Files and signals that ask a running job for something."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from wands.train.stop import StopRequests, Wishes


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ((), Wishes()),
        (("save",), Wishes(save=True)),
        (("save_quit",), Wishes(save=True, quit=True)),
        (("check",), Wishes(check=True)),
        (("check", "save"), Wishes(save=True, check=True)),
        (("check", "save", "save_quit"), Wishes(True, True, True)),
    ],
)
def test_files(files: tuple[str, ...], wanted: Wishes, tmp_path: Path):
    requests = StopRequests(tmp_path)
    for name in files:
        (tmp_path / name).touch()
    assert requests.poll(rank=1) == Wishes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)  # only rank 0 takes them
    assert requests.poll(rank=0) == wanted
    assert list(tmp_path.iterdir()) == []
    assert requests.poll(rank=0) == Wishes()


def test_a_signal_saves_and_quits_on_any_rank(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests(tmp_path) as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.poll(rank=3) == Wishes(save=True, quit=True)
        (tmp_path / "check").touch()
        assert requests.poll(rank=0) == Wishes(True, True, True)
    assert signal.getsignal(signal.SIGTERM) == before
