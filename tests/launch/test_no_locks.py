"""Every command that writes, on a file system without locks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import BASE
from wands.data.cache.reader import LatentCache
from wands.files import read_rows

SOURCE = Path(__file__).parents[1] / "support" / "no_locks.c"
WRITE = """
import fcntl, sys
from pathlib import Path
from tests.support.cache_samples import make_sample, write
from wands.files import atomic_folder
try:
    fcntl.flock(0, fcntl.LOCK_EX)
except OSError as error:
    print(error.strerror)
write(Path(sys.argv[1]), [make_sample(number) for number in range(3)], max_samples=2)
with atomic_folder(Path(sys.argv[2])) as partial:
    (partial / "record").touch()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "no_locks.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return path


@pytest.fixture
def python(library: Path) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**environment, "LD_PRELOAD": str(library)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        assert "Traceback" not in done.stdout
        return done.stdout

    return run


@pytest.mark.slow
def test_a_cache_and_a_folder_are_written(python: Callable[..., str], tmp_path: Path):
    assert "No locks available" in python("-c", WRITE, tmp_path / "cache", tmp_path / "out")
    assert len(LatentCache(tmp_path / "cache", verify=True)) == 3
    assert os.listdir(tmp_path / "out") == ["record"]


@pytest.mark.slow
def test_training_and_what_is_made_of_it(python: Callable[..., str], tiny_pipeline: Path, tmp_path: Path):
    run = tmp_path / "run"
    values = [*BASE, f"model.path={tiny_pipeline}", f"output_dir={run}", "checkpoint.every=1"]
    settings = [part for value in values for part in ("--set", value)]
    train = ["-m", "wands", "train", *settings, "--set"]
    python(*train, "train.max_steps=2")
    python(*train, "train.max_steps=3", "--resume")
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3]
    assert (run / "checkpoints" / "latest").read_text() == "step_00000003"
    python("-m", "wands", "tools", "pack", *settings, "--out", tmp_path / "plan.jsonl")
    python("-m", "wands", "export", run, "--out", tmp_path / "exported")
    python("-m", "wands", "convert", tmp_path / "exported", "--to", "comfyui", "--out", tmp_path / "comfy")
    expected = ["comfy", "exported", "plan.jsonl", "run"]
    assert sorted(os.listdir(tmp_path)) == expected


@pytest.mark.slow
def test_caches(python: Callable[..., str], tiny_pipeline: Path, clips_dir: Path, tmp_path: Path):
    parts = []
    for name in ("bikes", "carphone_pristine"):
        clips = tmp_path / f"clips of {name}"
        clips.mkdir()
        (clips / f"{name}.mp4").symlink_to(clips_dir / f"{name}.mp4")
        (clips / f"{name}.txt").write_text("Cyclists.")
        parts.append(tmp_path / name)
        options = ["--model", tiny_pipeline, "--max-pixels", 64 * 96, "--max-frames", 9, "--workers", 1]
        python("-m", "wands", "preprocess", clips, "--out", parts[-1], *options)
    python("-m", "data_tools.merge", *parts, "--out", tmp_path / "merged")
    assert len(LatentCache(tmp_path / "merged", verify=True)) == sum(len(LatentCache(part)) for part in parts)
    assert not list(tmp_path.rglob("*.lock"))
