"""A clip that crashes its process is found and rejected, the rest is encoded, and later runs skip the clip."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_preprocess_interrupted import start as start_python
from tests.launch.test_preprocess_workers import finish, noise, start
from tests.support import deadly
from tests.support.commands import preprocess
from tests.support.preprocessed import SMALL, contents
from wands.data.cache.reader import LatentCache
from wands.data.clips.isolated import Crash, IsolatedWorker
from wands.preprocess import decoding
from wands.preprocess import preprocess as module
from wands.preprocess.decoding import WORK_NAME
from wands.preprocess.encoding import encode_clips
from wands.preprocess.preprocess import QUARANTINE_NAME
from wands.preprocess.scan import SourceScan

SITE = {"PYTHONPATH": str(Path(deadly.__file__).parent / "deadly_site")}
OPTIONS = SMALL | {"clip_mode": "slide", "max_samples": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four short clips; two have names that `deadly_site` takes for reasons to die."""
    folder = tmp_path_factory.mktemp("deadly")
    for number, name in enumerate(("deadly0", "deadly1", "good0", "good1")):
        noise(folder / f"{name}.mp4", number)
        (folder / f"{name}.txt").write_text(f"The clip {name}.")
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a machine whose decoders are well."""
    out = tmp_path_factory.mktemp("whole") / "cache"
    preprocess(str(source), out, tiny_pipeline, **OPTIONS)
    return out


def good(path: Path) -> dict[str, tuple[bytes, bytes, str]]:
    return {key: value for key, value in contents(path).items() if key.startswith("good")}


def assert_found(out: Path, whole: Path) -> None:
    """Both are rejected with their reason, what is good is there."""
    lines = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == ["deadly0", "deadly1"]
    for line in lines:
        assert line["reason"].endswith(
            f"{line['key']}.mp4 cannot be decoded: the process ended with signal SIGSEGV; replace or re-encode the file"
        )
    assert contents(out) == good(whole)
    assert len((out / QUARANTINE_NAME).read_text().splitlines()) == 2


def assert_later_runs_skip_them(
    source: Path, model: Path, out: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_clip", None)
        again = preprocess(str(source), out, model, **OPTIONS)
    assert again is not None
    assert len(again.rejected) == 2
    assert again.quarantine == out / QUARANTINE_NAME
    assert_found(out, whole)
    changed = tmp_path / "source"
    shutil.copytree(source, changed)
    noise(changed / "deadly1.mp4", 17)
    preprocess(str(changed), out, model, **OPTIONS)  # changed: decoded again, here without harm
    assert {key.partition("#")[0] for key in contents(out)} == {"deadly1", "good0", "good1"}
    (out / QUARANTINE_NAME).unlink()  # the user wants to try the other clip again
    preprocess(str(source), out, model, **OPTIONS)
    assert contents(out) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_clip_that_crashes_its_decoder_is_rejected_and_the_run_continues(
    source: Path,
    tiny_pipeline: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    out = tmp_path / "cache"
    text = finish(start(source, out, tiny_pipeline, env=SITE, workers=workers))
    assert "clips that crash or hang a process are skipped until their files change" in text
    assert_found(out, whole)
    assert_later_runs_skip_them(source, tiny_pipeline, out, whole, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_decoder_that_hangs_is_killed(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_hanging(worker: IsolatedWorker, function: Any, path: Path, *args: Any, **limit: Any) -> Any:
        if path.stem == "deadly0":
            return run(worker, deadly.hang, **limit)
        return run(worker, function, path, *args, **limit)

    run = IsolatedWorker.run
    monkeypatch.setattr(IsolatedWorker, "run", run_hanging)
    monkeypatch.setattr(decoding, "LIMIT_SECONDS", 20.0)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    assert report is not None
    (rejected,) = report.rejected
    assert "deadly0.mp4 cannot be decoded: the process took more than 20 s; replace" in rejected.reason
    assert report.quarantine == tmp_path / "cache" / QUARANTINE_NAME


@pytest.mark.slow
def test_one_crash_is_forgiven(
    source: Path, tiny_pipeline: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when something outside kills the decoder, here after the first window: the same bits, each window once."""
    run = IsolatedWorker.run
    crashed = []

    def crash_once(self: IsolatedWorker, *args: Any, **limit: Any) -> Any:
        stream = run(self, *args, **limit)
        if crashed:
            return (yield from stream)
        crashed.append(True)
        yield next(stream)
        yield next(stream)
        stream.close()
        raise Crash("the process ended with signal SIGKILL")

    monkeypatch.setattr(IsolatedWorker, "run", crash_once)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    assert report is not None
    assert crashed
    assert not report.rejected
    assert contents(tmp_path / "cache") == contents(whole)


def leave_suspects(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave what a run leaves whose process died while these clips were in the encoder, in one batch."""
    read = SourceScan.__init__

    def scanned(scan: SourceScan, **values: Any) -> None:
        read(scan, **values)
        videos = [clip.video for clip in scan.clips.values() if Path(clip.path).stem in names]
        (work[0] / "encoding-0").write_text("\n".join(videos))

    def prepared(self: Any) -> None:
        prepare(self)
        work.append(self.settings.work)

    work: list[Path] = []
    prepare = module.PreprocessRun.prepare
    monkeypatch.setattr(module.PreprocessRun, "prepare", prepared)
    monkeypatch.setattr(SourceScan, "__init__", scanned)


@pytest.mark.slow
def test_innocent_suspects_are_encoded_as_ever(
    source: Path, tiny_pipeline: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a subprocess, in which suspects of an earlier death are encoded, clips give the same bits."""
    leave_suspects(monkeypatch, "good0", "good1")
    preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    assert contents(tmp_path / "cache") == contents(whole)
    metas = [
        {key: cache.meta(i) for i, key in enumerate(cache.keys)}
        for cache in (LatentCache(tmp_path / "cache"), LatentCache(whole))
    ]
    assert metas[0] == metas[1]


@pytest.mark.slow
def test_a_clip_that_crashes_the_encoder_is_rejected(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = IsolatedWorker.run

    def run_deadly(self: IsolatedWorker, function: Any, *args: Any, **limit: Any) -> Any:
        return run(self, deadly.encode_clips if function is encode_clips else function, *args, **limit)

    leave_suspects(monkeypatch, "good1")
    monkeypatch.setattr(IsolatedWorker, "run", run_deadly)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    assert report is not None
    (rejected,) = report.rejected
    assert rejected.reason.endswith(
        "good1.mp4 cannot be encoded: the process ended with signal SIGABRT; lower --max-frames or --max-pixels"
    )
    assert report.quarantine == tmp_path / "cache" / QUARANTINE_NAME
    assert "good0#0000" in contents(tmp_path / "cache")


@pytest.mark.slow
def test_the_clip_in_the_encoder_of_a_killed_process_is_a_suspect(
    source: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    """The encoder aborts in the middle of a window: its clip is named on the disk."""
    process = start_python(
        """
        import os
        WanVideoEncoder.encode = lambda self, pixels: os.abort()
        preprocess(source, out, model, **options)
        """,
        *(source, tmp_path / "cache", tiny_pipeline),
    )
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGABRT
    assert (tmp_path / "cache" / WORK_NAME / "encoding-0").read_text()
