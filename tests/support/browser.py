"""Headless Chromium, driven over two pipes with the DevTools protocol: JSON messages that end with a null character."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETUP = Path(__file__).resolve().parents[2] / ".setup" / "chromium"  # of scripts/fetch_browser.sh
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """Return the path of Chromium, or None on a machine without it."""
    own = SETUP / "chrome"
    return str(own) if own.is_file() else next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """A page of the browser.

    Attributes:
        problems: what the page has written to the console, errors that it did not catch, and files that it did not get.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write = write
        self._read = read
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.problems: list[Any] = []
        self.loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message | session).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        loaded = self.loaded
        self.call("Page.navigate", url=url)
        while self.loaded == loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression. A promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 10.0) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 30)[0], "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Network.loadingFailed",
        ):
            self.problems.append(message)
        self.loaded += message.get("method") == "Page.loadEventFired"
        return message


@contextmanager
def open_browser(path: str, profile: Path) -> Iterator[Tab]:
    """Start the browser and yield a tab."""
    (down_read, down_write) = os.pipe()
    (up_read, up_write) = os.pipe()
    flags = [
        "--headless",
        "--no-sandbox",
        "--no-zygote",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
    ]
    own = (
        {"LD_LIBRARY_PATH": str(SETUP / "lib"), "FONTCONFIG_PATH": str(SETUP)}
        if path.startswith(str(SETUP))
        else {}
    )
    process = subprocess.Popen(  # the browser reads from 3 and writes to 4
        ["bash", "-c", f'exec "$0" "$@" 3<&{down_read} 4>&{up_write}', path, *flags, f"--user-data-dir={profile}"],
        pass_fds=(down_read, up_write), env=os.environ | own, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        os.close(down_read)
        os.close(up_write)
        yield Tab(down_write, up_read)
    finally:
        process.kill()
        process.wait()
        os.close(down_write)
        os.close(up_read)
