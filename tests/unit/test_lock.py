"""One writer: two processes, killed processes, and two hosts that share a folder but not always their locks."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wands import lock
from wands.errors import WandsError
from wands.lock import WriterLock

# Locks argv[1], and says so; then waits. argv[2]: whether `flock` reaches other hosts (with Lustre's localflock it does not).
HOLD = """
import fcntl, logging, sys, time
from pathlib import Path
from wands import lock
from wands.errors import WandsError
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
lock.BEAT_SECONDS, lock.STALE_SECONDS, lock.SETTLE_SECONDS = 0.05, 2.0, 0.5
if sys.argv[2] == "False":
    fcntl.flock = lambda *_: None
try:
    with lock.WriterLock(Path(sys.argv[1]), "output_dir=run") as held:
        held.on_lost = lambda message: print(message, flush=True)
        print("locked", held.has_leftovers, flush=True)
        sys.stdin.read()
except WandsError as error:
    print(error)
    sys.exit(2)
"""
CAN_UNSHARE = subprocess.run(["unshare", "-umn", "true"], capture_output=True).returncode == 0
needs_hosts = pytest.mark.skipif(
    not CAN_UNSHARE, reason="unshare is not allowed here, so there is no second host"
)


class Process(subprocess.Popen[str]):
    """A process that locks `path`: on this host, or on `host`, which is a set of namespaces with its own name and boot id."""

    def __init__(self, path: Path, host: str = "", reaches: bool = True) -> None:
        command = [sys.executable, "-c", HOLD, str(path), str(reaches)]
        if host:
            boot_id = path.parent.parent / f"boot_id.{host}"
            boot_id.write_text(f"{host}\n")
            become = (
                f"hostname {host} && mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec " + '"$@"'
            )
            command = ["unshare", "-umn", "sh", "-c", become, "sh", *command]
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def line(self) -> str:
        assert self.stdout
        return self.stdout.readline().strip()

    def until(self, *starts: str) -> list[str]:
        """The lines up to the first that starts so."""
        lines = [self.line()]
        while lines[-1] and not lines[-1].startswith(starts):
            lines.append(self.line())
        return lines

    def rest(self) -> str:
        return self.communicate(timeout=20)[0]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(*args: object, **options: object) -> Process:
        started.append(Process(tmp_path / "shared" / "lock", *args, **options))  # type: ignore[arg-type]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_a_second_process_learns_who_writes_since_when(start, tmp_path: Path):
    first = start()
    assert first.line() == "locked False"
    path = tmp_path / "shared" / "lock"
    with pytest.raises(WandsError) as caught:
        WriterLock(path, "output_dir=run")
    year = time.strftime("%Y-")
    assert (
        f"output_dir=run is being written by another process (host {socket.gethostname()}, pid {first.pid}, since {year}"
        in str(caught.value)
    )
    assert "Wait until that process ends" in str(caught.value)
    first.rest()
    assert not path.parent.exists()  # the file, and the folder that was made for it
    with WriterLock(path, "output_dir=run"):
        pass


def test_the_lock_of_a_killed_process_is_free_at_once(
    start, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    first = start()
    assert first.line() == "locked False"
    first.kill()
    first.wait()
    with (
        caplog.at_level(logging.WARNING),
        WriterLock(tmp_path / "shared" / "lock", "output_dir=run") as taken,
    ):
        assert taken.has_leftovers
    assert (
        f"output_dir=run: took over the lock of an ended process (host {socket.gethostname()}, pid {first.pid},"
        in (caplog.text)
    )
    assert list((tmp_path / "shared").iterdir()) == []
    with WriterLock(tmp_path / "shared" / "lock", "output_dir=run") as fresh:
        assert not fresh.has_leftovers


def test_of_processes_that_start_at_once_one_writes(start, tmp_path: Path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "lock").write_text("")  # a process killed between creating and writing it
    processes = [start() for _ in range(3)]
    lines = [process.line() for process in processes]
    assert sum(line.startswith("locked") for line in lines) == 1
    assert sum("is being written by another process" in line for line in lines) == 2


def test_the_holder_can_be_waited_for(start, tmp_path: Path):
    first = start()
    assert first.line() == "locked False"
    threading.Timer(0.3, first.rest).start()
    with WriterLock(tmp_path / "shared" / "lock", "cache=c", patience=20):
        pass
    assert first.wait() == 0


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), None])
def test_a_file_system_without_locks_has_the_heartbeat(
    error, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        if error:
            raise error

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "_boot_id", lambda: str(time.monotonic()))
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    with WriterLock(tmp_path / "lock", "cache=c"), pytest.raises(WandsError, match="another process"):
        WriterLock(tmp_path / "lock", "cache=c")


def fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> threading.Event:
    """Let `os.NAME` fail with this error number until the returned event is set."""
    works = threading.Event()
    real = getattr(os, name)

    def call(*args: object, **options: object) -> object:
        if not works.is_set():
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(lock.os, name, call)
    return works


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.1)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("name", ["pwrite", "fsync"])
def test_a_record_that_cannot_be_written_is_one_warning(
    name: str, number: int, fast, tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "lock"
    with WriterLock(path, "output_dir=run") as held, caplog.at_level(logging.WARNING):
        for streak in (1, 2):
            works = fail(monkeypatch, name, number)
            wait_until(lambda: caplog.text.count("cannot be written") == streak)  # noqa: B023
            time.sleep(0.2)
            held.check()
            works.set()
            before = json.loads(path.read_bytes())["time"]
            wait_until(lambda: json.loads(path.read_bytes())["time"] > before)  # noqa: B023
            monkeypatch.undo()
            monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
        assert caplog.text.count("cannot be written") == 2
        assert f"output_dir=run: {path} cannot be written ({os.strerror(number)}); going on" in caplog.text
    assert not path.exists()


def test_the_first_record_that_cannot_be_written_is_no_error(fast, tmp_path: Path, monkeypatch, caplog):
    works = fail(monkeypatch, "pwrite", errno.EIO)
    with WriterLock(tmp_path / "lock", "output_dir=run"), caplog.at_level(logging.WARNING):
        with pytest.raises(WandsError, match="output_dir=run is being written by another process"):
            WriterLock(tmp_path / "lock", "output_dir=run")
        wait_until(lambda: "cannot be written (Input/output error); going on" in caplog.text)
        works.set()
        wait_until((tmp_path / "lock").read_bytes)


def test_without_locks_a_record_that_cannot_be_written_is_an_error(fast, tmp_path: Path, monkeypatch):
    """Nothing else would keep a second process out."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    fail(monkeypatch, "pwrite", errno.EIO)
    with pytest.raises(WandsError, match=r"cannot be created \(neither a lock nor a record is possible"):
        WriterLock(tmp_path / "lock", "cache=c")


@pytest.mark.parametrize("path", ["/proc/wands/lock", "/proc/wands.lock"])
def test_a_folder_in_which_nothing_can_be_created_is_an_error(path: str):
    with pytest.raises(WandsError, match=r"cannot be created \(No such file or directory"):
        WriterLock(Path(path), "cache=c")


def test_a_deleted_lock_file_does_not_keep_the_folder(fast, tmp_path: Path):
    with WriterLock(tmp_path / "new" / "lock", "cache=c"):
        (tmp_path / "new" / "lock").unlink()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 400, b"{", b"[1]", b"[" * 1000, b"{}", b"\xff\xfe", None])
def test_a_damaged_record_is_no_other_owner(content: bytes | None, fast, tmp_path: Path, monkeypatch):
    works = fail(monkeypatch, "pwrite", errno.EIO)
    with WriterLock(tmp_path / "lock", "cache=c") as held:
        (tmp_path / "lock").unlink() if content is None else (tmp_path / "lock").write_bytes(content)
        time.sleep(0.2)
        held.check()
        works.set()


def test_another_owner_that_is_seen_once_is_no_other_owner(fast, tmp_path: Path, monkeypatch):
    path = tmp_path / "lock"
    lost = list[str]()
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.3)
    with WriterLock(path, "cache=c") as held:
        held.on_lost = lost.append
        ours = path.read_bytes()
        path.write_bytes(b'{"owner": "host b, pid 1, since today"}')
        time.sleep(0.1)
        path.write_bytes(ours)
        time.sleep(0.6)
        held.check()
    assert lost == []


def test_a_holder_learns_of_another_owner(fast, tmp_path: Path):
    path = tmp_path / "lock"
    lost = list[str]()
    held = WriterLock(path, "cache=c")
    held.on_lost = lost.append
    path.write_bytes(b'{"owner": "host b, pid 1, since today"}')
    wait_until(lambda: lost)
    for end in (held.check, held.__exit__):
        with pytest.raises(WandsError, match=re.escape(lost[0])):
            end()
    assert len(lost) == 1
    assert "cache=c was taken over by another process (host b, pid 1, since today)." in lost[0]
    assert path.read_bytes() == b'{"owner": "host b, pid 1, since today"}'  # of the other


@pytest.mark.slow
def test_force_takes_the_lock_of_another_machine_only(start, tmp_path: Path):
    path = tmp_path / "shared" / "lock"
    path.parent.mkdir()
    path.write_text(json.dumps({"owner": "host b, pid 1, since today", "boot_id": "b"}))
    began = time.monotonic()
    with WriterLock(path, "output_dir=run", force=True) as held:
        assert held.has_leftovers
    assert time.monotonic() - began < 30
    first = start()
    assert first.line() == "locked False"
    with pytest.raises(WandsError, match="is being written by another process"):
        WriterLock(path, "output_dir=run", force=True)


def test_without_locks_a_dead_owner_on_this_machine_is_known(start, tmp_path: Path, fast, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    first = start()
    assert first.line() == "locked False"
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.raises(WandsError, match="is being written by another process"):
        WriterLock(tmp_path / "shared" / "lock", "cache=c")
    first.kill()
    first.wait()
    began = time.monotonic()
    with WriterLock(tmp_path / "shared" / "lock", "cache=c") as held:
        assert held.has_leftovers
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("precious")])
def test_only_a_regular_file_is_locked(make, tmp_path: Path):
    (tmp_path / "precious").write_text("keep me")
    make(tmp_path / "lock")
    with pytest.raises(WandsError, match="lock must be a regular file"):
        WriterLock(tmp_path / "lock", "cache=c")
    assert (tmp_path / "precious").read_text() == "keep me"
    (tmp_path / "lock2").symlink_to("missing")
    with pytest.raises(WandsError, match="lock2 must be a regular file"):
        WriterLock(tmp_path / "lock2", "cache=c")
    assert not (tmp_path / "missing").exists()


@needs_hosts
@pytest.mark.parametrize("reaches", [True, False])
def test_two_hosts_do_not_write_at_once(reaches: bool, start):
    first = start("node-a", reaches)
    assert first.line() == "locked False"
    second = start("node-b", reaches).rest()
    assert (
        f"output_dir=run is being written by another process (host node-a, pid {first.pid}, since " in second
    )
    assert "waiting" in second
    assert first.poll() is None


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("reaches", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_lock_of_a_dead_host_is_taken_over_after_a_while(reaches: bool, start):
    first = start("node-a", reaches)
    assert first.line() == "locked False"
    first.kill()
    first.wait()
    began = time.monotonic()
    both = [start("node-b", reaches), start("node-c", reaches)]
    assert "was being written by another process (host node-a" in both[0].line()
    lines = [process.until("locked", "output_dir=run is being") for process in both]
    assert time.monotonic() - began > 2
    assert sorted(line[-1].startswith("locked True") for line in lines) == [False, True]
    taken = "output_dir=run: took over the lock of an ended process (host node-a"
    assert sum(taken in text for line in lines for text in line) == 1


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("reaches", [True, False])
def test_a_host_that_was_only_stopped_ends_when_it_is_back(reaches: bool, start):
    """With a `flock` that the stopped host still holds, and without."""
    first = start("node-a", reaches)
    assert first.line() == "locked False"
    os.kill(first.pid, signal.SIGSTOP)
    second = start("node-b", reaches)
    assert "took over the lock" in second.until("locked")[-2]
    os.kill(first.pid, signal.SIGCONT)
    taken = f"output_dir=run was taken over by another process (host node-b, pid {second.pid}"
    assert taken in first.line()
    assert first.poll() is None  # it has time to save
    assert taken in first.rest()
    assert first.returncode == 2
    assert second.poll() is None
