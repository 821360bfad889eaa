"""A worker's share: decoding ahead, and mistakes in a thread or of one worker alone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.test_preprocess import SMALL, contents
from wands.commands.preprocess import decoding, encoding
from wands.commands.preprocess.decoding import CLIPS_AHEAD, DECODING_THREADS
from wands.commands.preprocess.preprocess import preprocess
from wands.commands.preprocess.workers import Crew, lock_work, tell_followers, work_share
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CacheError, ConfigError

WINDOWS = SMALL | {"clip_mode": "slide", "max_frames": 5}


@pytest.fixture
def source(clips_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for stem in ("man", "woman"):
        shutil.copy(clips_dir / "carphone_pristine.mp4", folder / f"{stem}.mp4")
        (folder / f"{stem}.txt").write_text("A man in a dark suit sits in a moving car.")
    return folder


def test_decoding_runs_ahead_but_not_away(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded windows wait for the encoder, never more than the queue and the threads' hands hold."""
    to_pixels, encode, mutex = decoding.to_pixels, WanVideoEncoder.encode, threading.Lock()
    counts = {"decoded": 0, "encoded": 0}
    ahead: list[int] = []
    full = threading.Event()

    def decoded(frames: Any) -> torch.Tensor:
        with mutex:
            counts["decoded"] += 1
            ahead.append(counts["decoded"] - counts["encoded"])
            if ahead[-1] == CLIPS_AHEAD + DECODING_THREADS + 1:
                full.set()
        return to_pixels(frames)

    def encoded(self: WanVideoEncoder, pixels: torch.Tensor) -> torch.Tensor:
        assert full.wait(60), "decoding waits for the encoder"
        result = encode(self, pixels)
        with mutex:
            counts["encoded"] += 1
        return result

    monkeypatch.setattr(decoding, "to_pixels", decoded)
    monkeypatch.setattr(WanVideoEncoder, "encode", encoded)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    assert report is not None
    assert report.num_accepted == counts["encoded"] > 20
    # One window is in the encoder's hands, each thread has one, the queue the others.
    assert max(ahead) == CLIPS_AHEAD + DECODING_THREADS + 1
    assert report.waited is not None
    assert f"encoder waited {report.waited:.1%} of the time for decoding" in report.render()


def test_a_failure_in_a_thread_ends_the_run(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "to_pixels", None)
        with pytest.raises(TypeError, match="not callable"):
            preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]
    preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    preprocess(str(source), tmp_path / "whole", tiny_pipeline, **WINDOWS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_a_mistake_of_one_worker_is_left_for_the_leader(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker cannot load the model: the first does its share, and the report says so."""
    cpu = torch.device("cpu")
    share = encoding.encode_share

    def with_company(work: Path, slot: int, token: str, *devices: torch.device) -> None:
        run = json.loads((work / "run.json").read_text())
        (work / "run.json").write_text(json.dumps(run | {"model": "no/such model"}))
        (work / "text-1.journal").touch()
        (work / "samples-1.journal").touch()
        work_share(work, 1, token, (cpu, cpu))
        (work / "run.json").write_text(json.dumps(run))
        work_share(work, 2, "another run", (cpu, cpu))
        assert not (work / "worker-2.json").exists()
        share(work, slot, token, *devices)

    monkeypatch.setattr("wands.commands.preprocess.leader.encode_share", with_company)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    assert report is not None
    assert "a worker ended early (model=no/such model is neither" in report.render()
    monkeypatch.undo()
    preprocess(str(source), tmp_path / "whole", tiny_pipeline, **WINDOWS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_both_ways_of_having_workers_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    crew = Crew.find(1, "cpu", None)
    assert (crew.size, crew.rank, crew.launched) == (4, 3, True)
    with pytest.raises(
        ConfigError, match=r"workers=2 starts processes, but a launcher has started 4; drop one"
    ):
        Crew.find(2, "cpu", None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Crew.find(2, "cpu", None) == Crew(2, 0, False, "cpu", None)
    with pytest.raises(ConfigError, match=r"workers=0 must be at least 1"):
        Crew.find(0, "cpu", None)


def test_workers_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.empty", lambda *_, **__: None)  # there is no GPU to try it on

    def devices(device: str | None, text_device: str | None) -> list[str]:
        pairs = [Crew(4, 0, False, device, text_device).devices(number) for number in range(4)]
        return [f"{vae} {text}".replace("cuda:", "") for vae, text in pairs]

    assert devices(None, None) == devices("cuda", None) == ["0 0", "1 1", "2 2", "0 0"]
    assert devices("cuda:1", None) == ["1 1"] * 4
    assert devices(None, "cpu") == ["0 cpu", "1 cpu", "2 cpu", "0 cpu"]
    assert devices("cpu", "cuda") == ["cpu 0", "cpu 1", "cpu 2", "cpu 0"]


@pytest.mark.parametrize("how", ["work", "nothing", "mistake"])
def test_followers_are_told_once(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    told: list[dict[str, str]] = []

    class Store:
        def set(self, key: str, value: str) -> None:
            told.append(json.loads(value))

    monkeypatch.setattr("wands.commands.preprocess.workers._store", Store)
    crew = Crew(2, 0, True, "cpu", None)
    try:
        with tell_followers(crew) as begin:
            if how == "work":
                begin("abc")
            if how == "mistake":
                raise ConfigError("a sentence.")
    except ConfigError:
        assert how == "mistake"
    assert told == [{"work": {"token": "abc"}, "nothing": {}, "mistake": {"error": "a sentence."}}[how]]


def test_workers_of_another_run_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_SH)
        with pytest.raises(CacheError, match="is being written by workers of another run; wait for it"):
            lock_work(tmp_path, seconds=0)
    ours = lock_work(tmp_path, seconds=0)
    with (tmp_path / "lock").open("rb") as worker:
        fcntl.flock(worker, fcntl.LOCK_SH | fcntl.LOCK_NB)  # those of this run share it
    os.close(ours)

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CacheError, match=r"file system without locks \(No locks available\)"):
        lock_work(tmp_path)
