"""`wands caption` on two workers of torchrun: each clip is captioned once, whichever worker fails or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.launch.test_end_to_end import ROOT
from tests.support.caption_servers import Server, prompt_of
from tests.support.world import free_port
from wands.data.clips.tables import read_table
from wands.data.clips.video import save_video


class Echo(Server):
    """Endpoint that answers with the prompt, except for one prompt."""

    exception: tuple[str, Any] = ("", "")

    def answer(self, request: dict[str, Any]) -> Any:
        prompt = prompt_of(request)
        (wanted, answer) = self.exception
        return answer if prompt == wanted else f"{prompt} shows a square."


def start(source: Path, out: Path, server: Server) -> subprocess.Popen[str]:
    server.requests.clear()
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(), "-m", "wands")
    options = (
        "--model",
        "m",
        "--endpoint",
        server.url,
        "--prompt",
        "Film {film}",
        "--batch",
        "1",
        "--frames",
        "1",
    )
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "caption", str(source), "--out", str(out), *options],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kill_rank(launcher: subprocess.Popen[str], rank: int) -> None:
    workers = psutil.Process(launcher.pid).children()
    (worker,) = [worker for worker in workers if worker.environ().get("RANK") == str(rank)]
    os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.slow
def test_torchrun_captions_each_clip_once(tmp_path: Path):
    rows = [{"video": f"{number}.mp4", "film": number, "license": "CC0"} for number in range(6)]
    for number in range(5):
        save_video(tmp_path / f"{number}.mp4", np.full((4, 64, 96, 3), number * 40, np.uint8), 12)
    (tmp_path / "5.mp4").write_text("<html>")
    (tmp_path / "shots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = tmp_path / "shots.jsonl"
    out = tmp_path / "captioned.csv"
    server = Echo()

    # Rank 1 captions film 1, and is killed while it waits for the caption of film 3.
    server.exception = ("Film 3", lambda handler: time.sleep(120))
    run = start(source, out, server)
    began = time.monotonic()
    stored = 0
    while stored < 4 or "Film 3" not in server.prompts():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() - began < 120
        time.sleep(0.1)
        logs = tmp_path.glob(".captioned.csv.captions/*/*.jsonl")
        stored = sum(len(log.read_text().splitlines()) for log in logs)
    kill_rank(run, 1)
    assert run.wait(60) != 0
    assert sorted(server.prompts()) == [f"Film {number}" for number in range(5)]
    assert not out.exists()

    # A worker fails at film 3. The other worker finishes its share.
    server.exception = ("Film 3", 401)
    run = start(source, out, server)
    _, errors = run.communicate(timeout=120)
    assert run.returncode != 0
    assert server.prompts() == ["Film 3"]
    assert errors.count("worker 0 ended early (--endpoint=") == 1, errors
    assert "status 401" in errors
    assert "finished captions are stored, so run the same command again" in errors

    server.exception = ("", "")
    run = start(source, out, server)
    printed, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    assert server.prompts() == ["Film 3"]
    assert printed.count("clips captioned") == 1
    table = [row for _, row in read_table(out)]
    assert [row["caption"] for row in table] == [*(f"Film {k} shows a square." for k in range(5)), ""]
    assert all(row["license"] == "CC0" for row in table)
    assert [bool(row["caption_problem"]) for row in table] == [False] * 5 + [True]
    assert not list(tmp_path.glob(".*"))
    server.http.shutdown()
    server.http.server_close()
