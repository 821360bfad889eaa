"""Files that ask a running process for something."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from wands.watch import watchdog
from wands.watch.watchdog import REQUESTS, take_requests


@pytest.mark.parametrize("files", [(), ("save",), ("check", "save_quit"), REQUESTS])
def test_a_request_counts_once(files: tuple[str, ...], tmp_path: Path):
    for name in files:
        (tmp_path / name).touch()
    (tmp_path / "other").touch()
    assert take_requests(tmp_path) == {*files}
    assert os.listdir(tmp_path) == ["other"]
    assert take_requests(tmp_path) == set()


def test_a_folder_a_pipe_and_a_link_are_requests_too(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "run" / "save_quit").mkdir()
    os.mkfifo(tmp_path / "run" / "save")
    (tmp_path / "run" / "check").symlink_to(tmp_path / "precious")
    assert take_requests(tmp_path / "run") == {*REQUESTS}
    assert os.listdir(tmp_path / "run") == []
    assert (tmp_path / "precious").is_dir()


def test_a_request_that_cannot_be_removed_is_ignored_with_one_line(tmp_path: Path, caplog):
    (tmp_path / "save_quit" / "notes").mkdir(parents=True)
    (tmp_path / "save").touch()
    with caplog.at_level(logging.WARNING):
        assert take_requests(tmp_path) == {"save"}
        assert take_requests(tmp_path) == set()
    assert caplog.text.count(f"the request {tmp_path / 'save_quit'} is ignored") == 1
    assert (tmp_path / "save_quit" / "notes").is_dir()


def test_a_failed_look_is_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "save_quit").touch()
    for name in ("lstat", "stat", "unlink"):
        with monkeypatch.context() as patched:
            patched.setattr(watchdog.os, name, fail)
            assert take_requests(tmp_path) == set()
    assert take_requests(tmp_path) == {"save_quit"}
