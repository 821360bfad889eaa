"""The whole job through the real commands and launchers: clips, cache, ZeRO-3 on two processes, resume, export, sampling."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.support.fake_hub import FakeHub
from tests.support.runs import losses, run_training
from tests.support.steps import DS_CONFIGS
from tests.support.world import WorldPool, free_port
from wands.cli import main

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]


def call(*command: object, check: bool = True, **more_env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **more_env, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, cwd=ROOT, timeout=400
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def call_here(*command: object, exit_code: int = 0, **more_env: str) -> Result:
    """Call `wands` in this process, in tests that do not depend on the start of a process."""
    done = CliRunner().invoke(main, [str(part) for part in command], env=more_env)
    assert done.exit_code == exit_code, done.output
    return done


def deepspeed(*args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return call(
        "deepspeed",
        "--num_gpus",
        2,
        "--master_port",
        free_port(),
        "--module",
        "wands",
        "train",
        *args,
        check=check,
    )


def torchrun(*args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return call(
        "torchrun",
        "--nproc-per-node",
        2,
        "--master-port",
        free_port(),
        "-m",
        "wands",
        "train",
        *args,
        check=check,
    )


@pytest.fixture(scope="module")
def job(tiny_pipeline: Path, clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three real clips of different size and length in a cache, and the arguments of a short run."""
    root = tmp_path_factory.mktemp("job")
    source = root / "clips"
    source.mkdir()
    rows = []
    for name, end in (("bikes.mp4", 0.6), ("carphone_pristine.mp4", 0.9), ("cityCC0.mpg", 0.4)):
        shutil.copy(clips_dir / name, source)
        rows.append(json.dumps({"file_name": name, "caption": f"a clip of {name}", "start": 0, "end": end}))
    (source / "metadata.jsonl").write_text("\n".join(rows))
    done = call_here(
        "preprocess",
        source,
        "--out",
        root / "cache",
        "--model",
        tiny_pipeline,
        "--max-pixels",
        64 * 96,
    )
    assert "3 samples" in done.stdout
    return {"root": root, "model": tiny_pipeline, "cache": root / "cache"}


RECIPE = ("packing.max_tokens=96", "train.bins_per_step=2", "precision.compute=fp32", "optim.lr=1e-3")


def settings(job: dict[str, Path], run: str, *more: str) -> list[str]:
    values = (
        f"model.path={job['model']}", f"data.cache={job['cache']}", f"output_dir={job['root'] / run}", *RECIPE, *more,
    )  # fmt: skip
    return [part for value in values for part in ("--set", value)]


def rows_of(job: dict[str, Path], run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (job["root"] / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_launcher_trains_what_one_world_of_a_test_trains(job: dict[str, Path], worlds: WorldPool):
    first = deepspeed("--deepspeed", "cpu", *settings(job, "launched", "train.max_steps=3"))
    assert "2 ranks = dp 2" in first.stdout
    assert first.stdout.count("step 3/3") == 1  # one rank speaks
    overrides = ("data.mock=null", f"data.cache={job['cache']}", *RECIPE, "train.max_steps=3")
    straight = worlds[2].run(run_training, job["model"], job["root"] / "alone", overrides, DS_CONFIGS["cpu"])[
        0
    ]
    assert losses(straight) == losses(rows_of(job, "launched"))


@pytest.mark.slow
def test_clips_to_samples(job: dict[str, Path], worlds: WorldPool):
    root = job["root"]
    cache = np.load(job["cache"] / "index.npz", allow_pickle=False)
    assert len({tuple(shape) for shape in cache["latent_shapes"].tolist()}) == 3  # different size and length

    zero3 = ("--deepspeed", "ds_configs/zero3.json")
    first = deepspeed(*zero3, *settings(job, "run", "train.max_steps=4"))
    assert "2 ranks = dp 2" in first.stdout
    assert first.stdout.count("step 4/4") == 1  # one rank speaks
    torchrun(*zero3, *settings(job, "run", "train.max_steps=6"), "--resume")
    assert [row["step"] for row in rows_of(job, "run")] == [1, 2, 3, 4, 5, 6]

    # both launchers started what neither started here, and nobody stopped
    overrides = ("data.mock=null", f"data.cache={job['cache']}", *RECIPE, "train.max_steps=6")
    straight = worlds[2].run(run_training, job["model"], root / "straight", overrides, DS_CONFIGS["zero3"])[0]
    assert losses(straight) == losses(rows_of(job, "run"))

    # one process continues where two have stopped
    alone = call("wands", "train", *settings(job, "run", "train.max_steps=8"), "--resume")
    assert "number of processes=1 (checkpoint: 2)" in alone.stdout
    overrides = (*overrides[:-1], "train.max_steps=8")
    straight = worlds[2].run(run_training, job["model"], root / "more", overrides, DS_CONFIGS["zero3"])[0]
    assert losses(straight) == pytest.approx(losses(rows_of(job, "run")), rel=2e-5)

    call_here("export", root / "run", "--out", root / "exported")
    small = ("--height", 64, "--width", 96, "--frames", 5, "--steps", 2)
    sampled = (*small, "--prompt", "a clip of bikes.mp4", "--save-latents")
    call_here("infer", "--model", root / "exported", "--out", root / "a", *sampled)
    call_here("infer", "--model", job["model"], "--checkpoint", root / "run", "--out", root / "b", *sampled)
    call_here("infer", "--model", job["model"], "--out", root / "c", *sampled)
    latents = {name: next((root / name).glob("*.safetensors")).read_bytes() for name in "abc"}
    assert latents["a"] == latents["b"]  # export and checkpoint are the same weights
    assert latents["a"] != latents["c"]  # and not the ones training started from

    # the pipeline goes to a Hub with its samples and comes back whole
    shutil.copytree(root / "a", root / "exported" / "samples")
    with FakeHub({"hf_secret": "alice"}) as hub:
        where = ("--endpoint", hub.url)
        secret = {"HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
        pushed = call("wands", "push", root / "exported", "alice/wan", *where, **secret)
        files = hub.files("alice/wan")
        refused = call_here("push", root / "exported", "bob/wan", *where, exit_code=2, HF_TOKEN="hf_secret")
    assert pushed.stdout.strip() == f"{hub.url}/alice/wan"
    assert refused.stderr.count("bob/wan") == 1
    for done in (pushed, refused):
        assert "hf_secret" not in done.stdout + done.stderr
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert files[weights] == (root / "exported" / weights).read_bytes()
    assert "a clip of bikes.mp4" in files["README.md"].decode()
    assert "loss.png" in files


@pytest.mark.slow
@pytest.mark.parametrize("launch", [deepspeed, pytest.param(torchrun, marks=pytest.mark.full)])
def test_a_mistake_under_a_launcher_is_said_once(job: dict[str, Path], launch):
    done = launch(*settings(job, "mistake", "packing.max_tokens=8"), check=False)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("packing.max_tokens=8 is less than sample") == 1
    assert not (job["root"] / "mistake").exists()


@pytest.mark.slow
def test_one_process_without_a_launcher(job: dict[str, Path]):
    done = call("wands", "train", *settings(job, "single", "train.max_steps=2"))
    assert "1 rank = dp 1 x" in done.stdout
    assert "accumulation 2" in done.stdout
    assert [row["step"] for row in rows_of(job, "single")] == [1, 2]
    assert (job["root"] / "single" / "recipe.yaml").is_file()


@pytest.mark.slow
def test_a_full_disk_ends_a_run_in_one_sentence(job: dict[str, Path]):
    """A file size limit of 100 KiB: the run trains, cannot save, says so once and leaves nothing half written."""
    command = ["wands", "train", *settings(job, "full", "train.max_steps=1")]
    done = call("bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command, check=False)
    assert done.returncode == 3  # a restart may help
    assert done.stderr.count("the file size limit (ulimit -f) is") == 1
    assert "Traceback" not in done.stderr
    assert not list((job["root"] / "full").rglob("step_*"))
