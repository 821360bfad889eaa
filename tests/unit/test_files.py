"""Folders that appear whole: killed at any moment, the same command works again and leaves nothing else. Rows of JSON lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wands import lock
from wands.errors import ConfigError, WandsError
from wands.files import atomic_folder, delete_leftovers, read_rows, write_text

# Writes argv[1], and kills itself at argv[2].
WRITE = """
import os, signal, sys, time
from pathlib import Path
from wands import files
out, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "publish":
    files.publish = die
if moment == "delete":
    files.shutil.rmtree = die
with files.atomic_folder(out, replaceable="record") as partial:
    (partial / "record").write_text("new")
    if moment == "write":
        die()
    if moment == "wait":
        print("writing", flush=True)
        sys.stdin.read()
"""


def write(out: Path, text: str) -> None:
    with atomic_folder(out, replaceable="record") as partial:
        (partial / "record").write_text(text)


@pytest.mark.parametrize("moment", ["write", "publish", "delete"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_killed_export_does_not_block_the_next(moment: str, replaces: bool, tmp_path: Path):
    out = tmp_path / "out"
    if replaces:
        write(out, "earlier")
    done = subprocess.run([sys.executable, "-c", WRITE, str(out), moment])
    assert done.returncode == -signal.SIGKILL
    whole = [path for path in (out, tmp_path / "out.old") if (path / "record").exists()]
    assert bool(whole) is (replaces or moment == "delete")
    write(out, "again")
    assert os.listdir(tmp_path) == ["out"]
    assert (out / "record").read_text() == "again"


def test_a_second_export_is_refused_while_the_first_writes(tmp_path: Path):
    out = tmp_path / "out"
    pipe = subprocess.PIPE
    first = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(out), "wait"], stdin=pipe, stdout=pipe, text=True
    )
    assert first.stdout
    assert first.stdout.readline() == "writing\n"
    with pytest.raises(
        WandsError, match=rf"--out .*out is being written by another process \(host .*pid {first.pid}, since"
    ):
        write(out, "second")
    first.communicate(timeout=20)
    assert (out / "record").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [None, OSError("gone"), RuntimeError("gone")])
def test_a_folder_that_another_process_has_taken_over_is_left_alone(error, tmp_path: Path, monkeypatch):
    """As after a suspension: the other process has deleted the temporary folder, and writes its own."""
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.05)

    def write_slowly() -> None:
        with atomic_folder(tmp_path / "out") as partial:
            (tmp_path / ".out.lock").write_text(json.dumps({"owner": "host b, pid 7, since today"}))
            (partial / "record").write_text("of the other")
            if error:
                raise error

    with pytest.raises(WandsError, match=r"--out .*out was taken over by another process \(host b, pid 7"):
        write_slowly()
    assert sorted(os.listdir(tmp_path)) == [".out.lock", "out.tmp"]
    assert (tmp_path / "out.tmp" / "record").read_text() == "of the other"


@pytest.mark.parametrize("suffix", ["tmp", "old"])
def test_folders_of_the_users_are_not_deleted(suffix: str, tmp_path: Path):
    precious = tmp_path / f"out.{suffix}" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("keep me")
    for _ in range(2):  # the refusal of the first leaves nothing that makes the second delete it
        with pytest.raises(ConfigError, match=rf"out\.{suffix}, but a folder with this name already exists"):
            write(tmp_path / "out", "new")
    assert precious.read_text() == "keep me"
    assert os.listdir(tmp_path) == [precious.parent.name]


def test_rows_end_at_line_feeds_alone(tmp_path: Path):
    """JSON need not escape U+2028, U+0085 and others, at which `str.splitlines` splits."""
    rows = [{"prompt": f"a{character}b"} for character in "\u2028\u2029\x85\x0b"] + [{"prompt": "last"}]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + '{"prompt": "cut')
    assert read_rows(path) == rows
    assert read_rows(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize("target", ["precious", "missing"])
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path, target: str):
    """Also a link in the place of the temporary file, whose name can be guessed."""
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "report.html").symlink_to(target)
    (tmp_path / f".report.{os.getpid()}.tmp.html").symlink_to(target)
    write_text(tmp_path / "report.html", "page")
    assert not (tmp_path / "report.html").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["precious", "report.html"]
    assert ((tmp_path / "precious").read_text(), (tmp_path / "report.html").read_text()) == (
        "keep me",
        "page",
    )


def test_only_temporary_files_of_wands_are_deleted(tmp_path: Path):
    kept = {".notes.tmp", ".cache.tmp.d", ".latest.8.tmp", "latest"}
    for name in (".latest.7.tmp", ".recipe.77.tmp.yaml", ".notes.tmp", "latest"):
        (tmp_path / name).write_text("text")
    (tmp_path / ".cache.tmp.d").mkdir()
    (tmp_path / ".latest.8.tmp").mkdir()
    (tmp_path / ".report.9.tmp.html").symlink_to("latest")
    delete_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == kept
    (tmp_path / ".latest.7.tmp").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    delete_leftovers(tmp_path / "link")
    assert (tmp_path / ".latest.7.tmp").exists()


def test_a_failed_copy_names_the_file_and_restarts_if_the_disk_failed(tmp_path: Path):
    """copytree collects the failures of files, and shutil raises the same class with a plain text for a file copied to itself."""
    failed = [
        ("a", "b", "[Errno 5] Input/output error: 'a'"),
        ("c", "d", "[Errno 13] Permission denied: 'c'"),
    ]
    for error, reason, number in (
        (shutil.Error(failed), "[Errno 5] Input/output error: 'a'); check this file", 5),
        (shutil.Error([("a", "b", "a is a named pipe")]), "a is a named pipe); check this file", None),
        (shutil.SameFileError("a and a are the same file"), "a and a are the same file); free space", None),
    ):
        with pytest.raises(WandsError, match=re.escape(f"out cannot be written ({reason}")) as caught:
            with atomic_folder(tmp_path / "out"):
                raise error
        assert getattr(caught.value, "number", None) == number
