"""The wheel, installed outside of the checkout: it contains all files that the commands read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.clip_files import write_clip
from tests.support.corpus import PLAIN, real_frames

ROOT = Path(__file__).resolve().parents[2]


def call(*command: Any, cwd: Path) -> str:
    """Run a command that finds no module of the checkout, and return what it prints."""
    hidden = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel, which finds the other packages where they are installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into its source
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "dist", source, cwd=folder)
    [wheel] = (folder / "dist").glob("wands-*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    call(*pip, "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    # A path file inside that folder is not read, so the editable wands of the checkout stays unknown.
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_every_stage_runs_from_the_wheel(
    python: Path, tiny_pipeline: Path, clips_dir: Path, tmp_path: Path
) -> None:
    where = call(python, "-c", "import wands, data_tools, ds_configs; print(wands.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    clips = tmp_path / "clips"
    clips.mkdir()
    for name in "ab":
        write_clip(clips / f"{name}.mp4", real_frames(clips_dir)[:9], options=PLAIN)
        (clips / f"{name}.txt").write_text(f"cyclists wait, clip {name}")
    wands = python.with_name("wands")
    small = ("--max-frames", 9, "--max-pixels", 64 * 96, "--device", "cpu")
    run = tmp_path / "run"
    assert "wan2.1-t2v-14b-lora" in call(wands, "recipes", cwd=tmp_path)
    call(wands, "check", clips, "--html", "clips.html", cwd=tmp_path)
    call(wands, "preprocess", clips, "--out", "cache", "--model", tiny_pipeline, *small, cwd=tmp_path)
    keys = (f"model.path={tiny_pipeline}", "data.cache=cache", f"output_dir={run}", "train.max_steps=2")
    settings = [part for key in ("data.mock=null", *keys) for part in ("--set", key)]
    call(wands, "train", "tiny", "--deepspeed", "cpu", *settings, cwd=tmp_path)
    assert (run / "report.html").is_file()
    call(wands, "export", run, "--out", "exported", cwd=tmp_path)
    call(
        wands, "push", "exported", "you/model", "--dry-run", cwd=tmp_path
    )  # with the template of the model card
    size = ("--height", 64, "--width", 96, "--frames", 5, "--steps", 2, "--out", "video.mp4")
    call(wands, "infer", "--model", "exported", "--prompt", "cyclists", *size, cwd=tmp_path)
    assert (tmp_path / "video.mp4").stat().st_size > 1000
    call(python, "-m", "data_tools.inspect", "cache", cwd=tmp_path)
