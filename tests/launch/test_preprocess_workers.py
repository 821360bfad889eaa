"""Several processes make one cache: each sample exactly once, the same as one process makes, whoever dies on the way."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.merge import merge
from tests.launch.test_preprocess import break_some
from tests.support.commands import preprocess
from tests.support.preprocessed import SMALL, contents
from tests.support.world import free_port
from wands.data.cache.reader import LatentCache
from wands.data.clips.records import ClipRecord
from wands.data.clips.video import save_video
from wands.errors import ConfigError
from wands.preprocess.scan import parse_part, select_part

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = SMALL | {"clip_mode": "slide", "max_samples": 3}
PLACES = ("shard_names", "shard_bytes", "shard_ids", "shards", "rows", "offsets")


def noise(path: Path, seed: int, scale: int = 16) -> None:
    """A clip of 21 frames, two windows, 64 x 96 pixels at the usual scale."""
    frames = np.random.default_rng(seed).integers(0, 255, (21, 4, 6, 3), np.uint8)
    save_video(path, frames.repeat(scale, 1).repeat(scale, 2), 16)


@pytest.fixture(scope="module")
def source(clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real clips, several short ones and some broken ones."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copy(clips_dir / "bikes.mp4", folder / "bikes.mp4")
    (folder / "bikes.txt").write_text("Street scenes of cyclists.")
    broken = break_some(folder, clips_dir)
    assert len(broken) == 5
    for number in range(6):
        noise(folder / f"noise{number}.mp4", number)
        (folder / f"noise{number}.txt").write_text(f"Noise, {number % 3} of three.")
    return folder


@pytest.fixture(scope="module")
def undisturbed(source: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "cache"
    report = preprocess(str(source), out, tiny_pipeline, **OPTIONS)
    assert report is not None
    assert report.num_accepted > 20
    assert len(report.rejected) == 5
    return out


def assert_equal_caches(path: Path, reference: Path) -> None:
    """Sample for sample and in the index, but for the places in the shards; nothing is stored twice."""
    assert contents(path) == contents(reference)
    ours, theirs = (LatentCache(folder).index for folder in (path, reference))
    for name, value in vars(theirs).items():
        if name not in PLACES:
            assert np.array_equal(getattr(ours, name), value), name
    rejects = [sorted((folder / "rejects.jsonl").read_text().splitlines()) for folder in (path, reference)]
    assert rejects[0] == rejects[1]
    assert not list(path.glob(".*"))


def samples_in_shards(path: Path) -> int:
    """Counted in the files, not in the index."""
    import h5py

    total = 0
    for shard in path.glob("shard-*.h5"):
        with h5py.File(shard, "r") as file:
            total += len(file["samples"])
    return total


def command(source: Path, out: Path, model: Path, *more: str, **changes: Any) -> list[str]:
    options = OPTIONS | changes
    code = (
        "import sys; from tests.support.commands import preprocess\n"
        "if __name__ == '__main__':\n"
        f"    report = preprocess({str(source)!r}, {str(out)!r}, {str(model)!r}, **{options!r})\n"
        "    print(report if report else 'followed')\n"
    )
    return [sys.executable, *more, "-c", code]


def start(*args: Any, env: dict[str, str] | None = None, **changes: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args, **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | (env or {}),
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


@pytest.mark.slow
def test_two_workers_make_the_cache_of_one(
    source: Path, tiny_pipeline: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    text = finish(start(source, out, tiny_pipeline, workers=2))
    assert "2 processes, encoders waited " in text
    assert "5 rejected" in text
    assert_equal_caches(out, undisturbed)
    assert samples_in_shards(out) == len(LatentCache(out))


@pytest.mark.slow
def test_ranks_of_a_launcher_make_the_cache_of_one(
    source: Path, tiny_pipeline: Path, undisturbed: Path, tmp_path: Path
) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    out = tmp_path / "cache"
    ranks = [
        start(source, out, tiny_pipeline, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    texts = [finish(rank) for rank in ranks]
    assert "samples for wan2.1-t2v-tiny" in texts[0]
    assert texts[1] == "followed\n"
    assert_equal_caches(out, undisturbed)
    assert samples_in_shards(out) == len(LatentCache(out))


def children(process: subprocess.Popen[str]) -> list[int]:
    """Processes whose parent is `process` and which encode."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == process.pid and b"spawn_main" in line:
            found.append(int(entry.name))
    return sorted(found)


def wait_for(condition: Any, seconds: float = 300.0) -> Any:
    began = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() - began < seconds, "it does not come"
        time.sleep(0.02)
    return value


@pytest.mark.kill
def test_a_killed_worker_is_replaced_by_the_others(
    source: Path, tiny_pipeline: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    process = start(source, out, tiny_pipeline, workers=2)
    logs = [out / ".work" / f"samples-{slot}.journal" for slot in range(2)]
    wait_for(lambda: any(log.is_file() and log.stat().st_size for log in logs))
    os.kill(children(process)[0], signal.SIGKILL)
    text = finish(process)
    assert (
        "ended early (the process ended with signal SIGKILL); the worker's other captions or clips were encoded later"
        in text
    )
    assert_equal_caches(out, undisturbed)


@pytest.mark.slow
def test_no_orphan_outlives_the_leader(source: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    process = start(source, tmp_path / "cache", tiny_pipeline, workers=2)
    workers = wait_for(lambda: len(found := children(process)) == 2 and found)
    process.kill()
    process.communicate(timeout=300)
    wait_for(lambda: not any(alive(pid) for pid in workers))


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_again_and_again(
    source: Path, model: Path, out: Path, num_kills: int, seed: int, **changes: Any
) -> int:
    """Start, kill -9 after a random time or number of stored bytes, start again; then let one run finish.

    Returns how many kills hit a run that was not done.
    """
    generator = random.Random(seed)
    hits = 0
    for _ in range(num_kills):
        process = start(source, out, model, **changes)
        work = out / ".work"
        moment = generator.random()
        if generator.random() < 0.2:  # anywhere: while importing, scanning, loading
            time.sleep(moment * 6)
        else:  # once some more bytes are stored
            enough = stored_bytes(work) + int(moment * 20_000)
            while process.poll() is None and stored_bytes(work) <= enough:
                time.sleep(0.02)
            time.sleep(generator.random() * 0.05)
        hits += process.poll() is None
        process.kill()
        process.communicate(timeout=300)
        if (out / "index.npz").exists():
            shutil.rmtree(out)  # it was done sooner: begin anew
    finish(start(source, out, model, **changes))
    return hits


def stored_bytes(work: Path) -> int:
    try:
        shards = sum(path.stat().st_size for path in work.parent.glob("shard-*.h5"))
        return shards + sum(path.stat().st_size for path in work.glob("*.journal"))
    except FileNotFoundError:
        return 0


@pytest.mark.kill
@pytest.mark.parametrize(
    ("num_kills", "workers"),
    [
        (5, 1),
        (3, 2),
        pytest.param(50, 1, marks=pytest.mark.full),
        pytest.param(50, 2, marks=pytest.mark.full),
    ],
)
def test_kill_9_at_any_moment(
    source: Path, tiny_pipeline: Path, undisturbed: Path, tmp_path: Path, num_kills: int, workers: int
) -> None:
    out = tmp_path / "cache"
    hits = kill_again_and_again(source, tiny_pipeline, out, num_kills, seed=workers, workers=workers)
    assert hits > num_kills // 2
    assert_equal_caches(out, undisturbed)


# ---- parts


@pytest.mark.slow
def test_parts_joined_are_the_cache_of_one(
    source: Path, tiny_pipeline: Path, undisturbed: Path, tmp_path: Path
) -> None:
    sizes = []
    for number in (1, 2):
        report = preprocess(str(source), tmp_path / "out", tiny_pipeline, **OPTIONS, part=f"{number}/2")
        assert report is not None
        assert report.out == tmp_path / "out" / f"part-{number}-of-2"
        sizes.append(report.num_accepted)
    assert min(sizes) > 0
    merge(tmp_path / "merged", sorted((tmp_path / "out").iterdir()))
    assert contents(tmp_path / "merged") == contents(undisturbed)
    rejects = (tmp_path / "merged" / "rejects.jsonl").read_text()
    assert sorted(rejects.splitlines()) == sorted((undisturbed / "rejects.jsonl").read_text().splitlines())


def test_a_part_stays_when_clips_are_added(tmp_path: Path) -> None:
    rows = [ClipRecord(f"{n}~{c}", tmp_path / f"{n}.mp4", "A.") for n in range(300) for c in range(2)]
    parts = [select_part(rows, str(tmp_path), (number, 3)) for number in (1, 2, 3)]
    assert sorted([*parts[0], *parts[1], *parts[2]], key=rows.index) == rows
    assert min(map(len, parts)) > 160
    assert all(sum(row.path.stem == str(n) for row in part) in (0, 2) for part in parts for n in range(300))
    assert select_part(rows[:40], str(tmp_path), (1, 3)) == [row for row in parts[0] if row in rows[:40]]
    moved = [replace(row, path=tmp_path / "elsewhere" / row.path.name) for row in rows]
    (tmp_path / "elsewhere").mkdir()
    assert [row.key for row in select_part(moved, str(tmp_path / "elsewhere"), (1, 3))] == [
        row.key for row in parts[0]
    ]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--part {text} is not a valid part\. Use I/N"):
        parse_part(text)
