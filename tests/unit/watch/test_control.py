"""Files and signals that ask a running process for something."""

from __future__ import annotations

from pathlib import Path

import pytest

from wands.watch.watchdog import ControlRequest, Watchdog, poll_requests


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ((), ControlRequest()),
        (("save",), ControlRequest(save=True)),
        (("save_quit",), ControlRequest(save=True, quit=True)),
        (("check",), ControlRequest(check=True)),
        (("check", "save"), ControlRequest(save=True, check=True)),
        (("check", "save", "save_quit"), ControlRequest(True, True, True)),
    ],
)
def test_files(files: tuple[str, ...], wanted: ControlRequest, tmp_path: Path):
    watchdog = Watchdog()
    for name in files:
        (tmp_path / name).touch()
    assert poll_requests(tmp_path, watchdog, rank=1) == ControlRequest()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)  # only rank 0 takes them
    assert poll_requests(tmp_path, watchdog, rank=0) == wanted
    assert list(tmp_path.iterdir()) == []
    assert poll_requests(tmp_path, watchdog, rank=0) == ControlRequest()


def test_a_requested_stop_saves_and_quits_on_any_rank(tmp_path: Path):
    watchdog = Watchdog()
    watchdog.stop_requested = True  # by a signal
    assert poll_requests(tmp_path, watchdog, rank=3) == ControlRequest(save=True, quit=True)
    (tmp_path / "check").touch()
    assert poll_requests(tmp_path, watchdog, rank=0) == ControlRequest(True, True, True)
