"""A sandbox that notices what a command does to it."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tests.support.clip_files import numbered, write_clip
from wands.cli import main
from wands.texts import printable


@dataclass
class Sandbox:
    """Folders in which commands run: `data` with hostile files, `out` for what commands write, `outside` with private files.

    Attributes:
        root: the current folder of the commands. Nothing in it changes, except `out`.
        limit: longest time of a command in seconds.
    """

    root: Path
    limit: float = 60.0
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def __post_init__(self) -> None:
        for folder in (self.data, self.out, self.outside):
            folder.mkdir(parents=True)
        self.listener.setblocking(False)
        self.clip = write_clip(
            self.outside / "private.mp4", [numbered(k)[:48, :64] for k in range(24)], fps=16
        )
        (self.outside / "private.txt").write_text("a private caption")
        os.mkfifo(self.root / "pipe.mp4")

    data = property(lambda self: self.root / "data")
    out = property(lambda self: self.root / "out")
    outside = property(lambda self: self.root / "outside")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    @property
    def shell(self) -> str:
        return f"touch {self.root}/canary"

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(_Payload(self.shell))

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Return type, size, time of the last change and digest of everything in the sandbox, except in `out`."""
        found = {}
        for folder, folders, files in os.walk(self.root):
            if Path(folder) == self.root:
                folders.remove("out")
            for name in [*folders, *files]:
                path = Path(folder, name)
                status = path.lstat()
                is_small = path.is_file() and not path.is_symlink() and status.st_size < 1 << 20
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_small else ""
                found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, digest)
        return found

    def calls(self) -> int:
        """Return the number of connections to `url` since the last call."""
        count = 0
        while True:
            try:
                self.listener.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1

    def run(self, *words: object) -> tuple[Result, list[str]]:
        """Run a command. Return its result, and what it did wrong."""
        try:
            with time_limit(self.limit):
                done = CliRunner().invoke(main, [str(word) for word in words])
        except TimeoutError:
            return Result(CliRunner(), b"", b"", b"", None, 9, None), ["hangs"]
        wrong = []
        if not isinstance(done.exception, SystemExit | None):
            wrong.append(f"crashes: {done.exception!r:.500}")
        if done.exit_code == 2 and not done.stderr.rpartition("wands: ")[2].strip():
            wrong.append("gives no reason")
        if "Traceback" in done.output:
            wrong.append("prints a traceback")
        if any(line != printable(line) for line in done.output.split("\n")):
            wrong.append("prints control characters")
        if len(done.output) > 200_000:
            wrong.append(f"prints {len(done.output)} characters")
        return done, wrong


class _Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the `with` block after a time, also in a read that waits forever."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
