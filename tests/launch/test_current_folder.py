"""Commands started in a folder with files such as numpy.py and torch.py, which Python would import first. None of them runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub
from tests.support.runs import BASE
from tests.support.world import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIBRARIES = ("av", "numpy", "torch", "click", "yaml", "deepspeed")
PACKAGES = ("wands", "data_tools")
STANDARD = ("random", "pickle", "selectors", "tempfile")
"""Modules of the standard library that Python imports when it starts a child process of multiprocessing."""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., str]:
    """`start(names, *command)` runs a command in a folder with modules of these names, and returns what it printed."""
    folder = tmp_path / "here"

    def run(names: tuple[str, ...], *command: object, **more_env: str) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in names:
            path = folder / (f"{name}/__init__.py" if name in PACKAGES else f"{name}.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"open({str(folder / 'executed')!r}, 'a').write({name + ' '!r})")
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **more_env}
        done = subprocess.run(
            [str(part) for part in command], cwd=folder, env=env, capture_output=True, text=True, timeout=300
        )
        executed = folder / "executed"
        assert not executed.exists(), f"{command}: executed {executed.read_text()}\n{done.stderr[-2000:]}"
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    return run


@pytest.mark.slow
def test_child_processes_import_nothing_from_it(start, clips_dir: Path, tmp_path: Path):
    clips = tmp_path / "clips"
    clips.mkdir()
    shutil.copy(clips_dir / "bikes.mp4", clips)
    (clips / "bikes.txt").write_text("bikes")
    start((*LIBRARIES, *PACKAGES, *STANDARD), "wands", "check", clips)


@pytest.mark.slow
def test_modules_started_with_m_import_nothing_from_it(start):
    start(LIBRARIES, sys.executable, "-m", "wands", "recipes")
    # The programs of data_tools import wands too. Python itself finds the first package.
    start((*LIBRARIES, "wands"), sys.executable, "-m", "data_tools.program")
    safe = {"PYTHONSAFEPATH": "1"}
    start((*LIBRARIES, *PACKAGES, *STANDARD), sys.executable, "-m", "wands", "recipes", **safe)


def test_a_checkout_that_is_not_installed_is_searched_last():
    code = f"""
import runpy, sys
sys.argv[0], sys.path[0] = "-m", {str(ROOT)!r}  # as Python sets them for -m
runpy.run_module("wands.errors")
print(sys.path[-1])
"""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT), done.stderr


@pytest.mark.slow
def test_every_command_imports_nothing_from_it(start, tiny_pipeline: Path, clips_dir: Path, tmp_path: Path):
    every = (*LIBRARIES, *PACKAGES, *STANDARD)
    clips = tmp_path / "clips"
    cache = tmp_path / "cache"
    run = tmp_path / "run"
    clips.mkdir()
    for name in ("bikes", "carphone_pristine"):
        shutil.copy(clips_dir / f"{name}.mp4", clips)
        (clips / f"{name}.txt").write_text(name)
    small = ["--max-frames", 5, "--max-pixels", 4096]
    start(
        every, "wands", "preprocess", clips, "--out", cache, "--model", tiny_pipeline, *small, "--workers", 2
    )
    recipe = ["tiny", "--set", f"data.cache={cache}", "--set", f"model.path={tiny_pipeline}"]
    start(every, "wands", "tools", "pack", *recipe, "--out", tmp_path / "plan.jsonl")
    start(every, "wands", "plan", *recipe, "--gpus", 1)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    training = [f"model.path={tiny_pipeline}", f"output_dir={run}", "train.max_steps=2", *BASE]
    settings = [word for setting in training for word in ("--set", setting)]
    nodes = ["--hostfile", tmp_path / "hosts", "--node-rank", 0, "--master-addr", "127.0.0.1"]
    script = ROOT / "scripts" / "launch_multinode.sh"
    start(every, "bash", script, *nodes, "--master-port", free_port(), "--", *settings)
    start(every, "wands", "export", run, "--out", tmp_path / "exported")
    request = ["--prompt", "bikes", "--out", tmp_path / "samples", "--steps", 1, "--frames", 5]
    start(every, "wands", "infer", "--model", tmp_path / "exported", *request)
    start(
        every, "wands", "convert", tmp_path / "exported", "--out", tmp_path / "official", "--to", "official"
    )
    for folder in (cache, run, tmp_path / "exported"):
        start(every, "wands", "tools", "verify", folder)
    start(every, "wands", "recipes", "optim.lr")
    start(every, "wands", "tools", "selftest", "--model", tmp_path / "exported", "--only", "vae")
    with FakeHub({"hf_secret": "alice"}) as hub:
        environment = {"HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
        start(
            every, "wands", "push", tmp_path / "exported", "alice/wan", "--endpoint", hub.url, **environment
        )
    start(every, sys.executable, "-m", "data_tools.verify", cache, PYTHONSAFEPATH="1")
