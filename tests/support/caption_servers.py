"""An endpoint that captions clips, with all its faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.footage import write_captions
from wands.config.options import CaptionOptions
from wands.data.clips.tables import read_table
from wands.data.clips.video import save_video

SUNSET = "A red sun sets over the sea."


class Server:
    """OpenAI-compatible endpoint. Each request takes the next answer: a text, (text, reason), a status, (status, headers), bytes,
    seconds to wait, or a function that gets the handler. After the last answer, every request gets `SUNSET`.
    """

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                request = json.loads(self.rfile.read(size))
                server.requests.append(request)
                server.keys.append(self.headers["Authorization"])
                answer = server.answer(request)
                if callable(answer):
                    with suppress(OSError):  # the client has closed the connection
                        answer(self)
                    return
                status, headers = (
                    answer if isinstance(answer, tuple) and isinstance(answer[1], dict) else (200, {})
                )
                self.send_response(answer if isinstance(answer, int) else status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if not isinstance(answer, int) and not headers:
                    self.wfile.write(answer if isinstance(answer, bytes) else completion(answer))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: dict[str, Any]) -> Any:
        return self.answers.pop(0) if self.answers else SUNSET

    def prompts(self) -> list[str]:
        return [prompt_of(request) for request in self.requests]


def prompt_of(request: dict[str, Any]) -> str:
    return request["messages"][0]["content"][-1]["text"]


def completion(answer: str | tuple[str, str]) -> bytes:
    text, reason = answer if isinstance(answer, tuple) else (answer, "stop")
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": reason, "message": message}
    return json.dumps({"id": "x", "created": 1, "model": "m", "choices": [choice]}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running server. Clips are decoded in this process."""
    monkeypatch.setattr(
        write_captions, "map_isolated", lambda function, items, **_: enumerate(map(function, items))
    )
    monkeypatch.setenv("OPENAI_API_KEY", "sk-local\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a local server needs no Hub
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clips, a file that is no clip, and a table of them."""
    folder = tmp_path_factory.mktemp("clips")
    rows = [{"video": f"{k}.mp4", "film": f"film {k}", "license": "CC0"} for k in range(6)]
    for k in range(5):
        save_video(folder / f"{k}.mp4", np.full((12, 64, 96, 3), k * 40, np.uint8), 12)
    (folder / "5.mp4").write_text("<html>")
    (folder / "shots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def caption(
    server: Server, clips: Path, out: Path, source: str = "shots.jsonl", **options: Any
) -> tuple[str, list[Any]]:
    values = {"model": "m", "endpoint": server.url, "frames": 3, "batch": 1, **options}
    summary = write_captions.caption(CaptionOptions(source=str(clips / source), out=out, **values))
    return str(summary), [row for _, row in read_table(out)]
