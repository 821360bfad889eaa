"""Links, named pipes and folders in the place of a file of wands."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from wands.errors import WandsError
from wands.own_files import open_own_file, open_regular_file

FLAGS = {
    "read": os.O_RDONLY,
    "append": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "replace": os.O_WRONLY | os.O_TRUNC | os.O_CREAT,
    "lock": os.O_RDWR | os.O_CREAT,
}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the length of a socket's path is limited


MAKERS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("precious"),
    "broken link": lambda path: path.symlink_to("missing"),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_only_a_regular_file_is_opened(kind: str, flags: int, tmp_path: Path):
    (tmp_path / "precious").write_text("keep me")
    MAKERS[kind](tmp_path / "log")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(WandsError, match="log must be a regular file, and no link"):
        open_own_file(tmp_path / "log", flags)
    if kind in ("pipe", "folder", "socket", "device"):
        with pytest.raises(WandsError, match="log must be a regular file"):
            open_regular_file(tmp_path / "log", flags)
    assert (tmp_path / "precious").read_text() == "keep me"
    assert sorted(os.listdir(tmp_path)) == before


def test_files_of_wands_open_as_usual(tmp_path: Path):
    with open(tmp_path / "log", "ab", opener=open_own_file) as file:
        file.write(b"row\n")
    (tmp_path / "link").symlink_to("log")
    for path, opener in ((tmp_path / "log", open_own_file), (tmp_path / "link", open_regular_file)):
        with open(path, "rb", opener=opener) as file:
            assert file.read() == b"row\n"
    with pytest.raises(FileNotFoundError):
        open_own_file(tmp_path / "missing", os.O_RDONLY)
