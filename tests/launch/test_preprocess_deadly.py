"""A clip that ends the process which has it in hand is found and rejected, the rest is encoded, and it is not tried again."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_preprocess import SMALL, contents
from tests.launch.test_preprocess_workers import finish, noise, start
from tests.support import deadly
from wands.commands.preprocess import decoding
from wands.commands.preprocess import leader as preprocess_job
from wands.commands.preprocess.leader import QUARANTINE_NAME, Job
from wands.commands.preprocess.preprocess import preprocess
from wands.commands.preprocess.work_folder import BEGUN, IN_ENCODER, Marks
from wands.data.cache.reader import LatentCache
from wands.data.clips.isolated import Crashed

SITE = {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "support" / "deadly_site")}
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
            f"{line['key']}.mp4 cannot be decoded: the process ended by SIGSEGV; replace or re-encode the file"
        )
    assert contents(out) == good(whole)
    assert len((out / QUARANTINE_NAME).read_text().splitlines()) == 2


@pytest.mark.slow
def test_workers_that_a_clip_ends_are_started_again(
    source: Path, tiny_pipeline: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers begin with a deadly clip, so both die; what takes their place finds out."""
    out = tmp_path / "cache"
    text = finish(start(source, out, tiny_pipeline, env=SITE, workers=2))
    assert "was ended by signal 11; the others took over its work" in text
    assert "clips that end a process are tried again once they change" in text
    assert_found(out, whole)
    with monkeypatch.context() as patch:  # the next run does not touch them
        patch.setattr(decoding, "decode_clip", None)
        again = preprocess(str(source), out, tiny_pipeline, **OPTIONS)
    assert again is not None
    assert len(again.rejected) == 2
    assert_found(out, whole)
    changed = tmp_path / "source"
    shutil.copytree(source, changed)
    noise(changed / "deadly1.mp4", 17)
    preprocess(str(changed), out, tiny_pipeline, **OPTIONS)  # changed: tried again, here it does no harm
    assert {key.partition("#")[0] for key in contents(out)} == {"deadly1", "good0", "good1"}
    (out / QUARANTINE_NAME).unlink()  # the user asks
    preprocess(str(source), out, tiny_pipeline, **OPTIONS)
    assert contents(out) == contents(whole)


@pytest.mark.full
def test_one_process_dies_and_the_same_command_goes_on(
    source: Path, tiny_pipeline: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    codes = []
    while not (out / "index.npz").exists():
        process = start(source, out, tiny_pipeline, env=SITE)
        process.communicate(timeout=300)
        codes.append(process.returncode)
        assert len(codes) <= 3
    assert codes[0] == -signal.SIGSEGV
    assert codes[-1] == 0
    assert_found(out, whole)


def test_what_a_killed_run_had_in_hand_is_suspect(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the test before it, without processes: the first run ends with a clip in hand, the second decodes that one apart."""

    class Death(BaseException):
        pass

    def dies(work: Path, *args: Any) -> None:
        Marks(work / "clips.marks")[0] = BEGUN
        raise Death

    def crashes(function: Any, path: Path, *args: Any, **options: Any) -> Any:
        apart.append(path.stem)
        raise Crashed("the process ended by SIGSEGV")

    apart: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_job, "encode_share", dies)
        with pytest.raises(Death):
            preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    monkeypatch.setattr(decoding, "iterate_isolated", crashes)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    assert report is not None
    assert apart == [item.key for item in report.rejected] == ["deadly0"]
    assert report.quarantine == tmp_path / "cache" / QUARANTINE_NAME


@pytest.mark.slow
def test_suspects_that_are_innocent_are_encoded_as_ever(
    source: Path, tiny_pipeline: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, which the marks of an earlier death ask for, clips give the same bits."""
    monkeypatch.setattr(
        Job, "_marks", lambda self, clips: bytes(BEGUN + ("good1" in clip.path) for clip in clips)
    )
    assert IN_ENCODER == BEGUN + 1
    preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    assert contents(tmp_path / "cache") == contents(whole)
    metas = [
        {key: cache.meta(i) for i, key in enumerate(cache.keys)}
        for cache in (LatentCache(tmp_path / "cache"), LatentCache(whole))
    ]
    assert metas[0] == metas[1]


def test_a_clip_that_ends_the_encoder_is_rejected(
    source: Path, tiny_pipeline: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Job, "_marks", lambda self, clips: bytes(IN_ENCODER * ("good1" in clip.path) for clip in clips)
    )
    monkeypatch.setattr(decoding, "encode_windows", deadly.encode_windows)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **OPTIONS)
    assert report is not None
    (rejected,) = report.rejected
    assert rejected.reason.endswith(
        "good1.mp4 cannot be encoded: the process ended by SIGABRT; lower --max-frames or --max-pixels"
    )
    assert "good0#0000" in contents(tmp_path / "cache")
