"""The scripts that people run: loss_compare judges, setup takes an environment that is there, gpu sums up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import loss_compare
import pytest
from click.testing import CliRunner

from wands.cli import main

ROOT = Path(__file__).resolve().parents[2]
MOCK = "data.mock={num_samples: 5, shapes: [[2,4,4],[1,4,6],[2,2,2]], text_lens: [5, 9]}"


def train(recipe: str, settings: list[str]) -> None:
    done = CliRunner().invoke(main, ["train", recipe, *(part for one in settings for part in ("--set", one))])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_loss_compare_accepts_packing_and_refuses_another_seed(
    tiny_pipeline: Path,
    tmp_path: Path,
    new_world,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The first run is started by the script; the others, in the same way otherwise, by us: torchrun takes its time."""
    as_it_is = loss_compare.run
    runs = []

    def run(name: str, args: Namespace, settings: list[str]) -> Path:
        if not runs:
            folder = as_it_is(name, args, settings)
        elif settings == ["train.seed=0"]:
            folder = runs[0]  # that is the default
        else:
            folder = args.out / name
            more = [*settings, "train.log_samples=true", f"output_dir={folder}"]
            new_world(1, train, args.recipe, [*args.both, *more])
        runs.append(folder)
        return folder

    def compare(a: str, b: str, out: Path) -> int:
        both = (
            MOCK,
            f"model.path={tiny_pipeline}",
            "train.max_steps=3",
            "packing.max_tokens=24",
            "precision.compute=fp32",
            "optim.lr=1e-3",
        )
        settings = [part for value in both for part in ("--both", value)]
        command = ["loss_compare.py", "tiny", *settings, "--a", a, "--b", b, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", command)
        return loss_compare.main()

    monkeypatch.setattr(loss_compare, "run", run)
    assert compare("packing.enabled=true", "packing.enabled=false", tmp_path / "same") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]) == 3
    assert (tmp_path / "same" / "compare.png").stat().st_size > 1000
    assert compare("train.seed=0", "train.seed=1", tmp_path / "other") == 1
    assert "largest relative difference" in capsys.readouterr().out
    assert len(set(runs)) == 3


@pytest.mark.slow
def test_compare_precision_prints_curves_held_out_losses_and_cosines(tiny_pipeline: Path, tmp_path: Path):
    settings = (MOCK, f"model.path={tiny_pipeline}", "train.max_steps=4", "packing.max_tokens=24")
    settings += ("data.holdout=0.4", "eval.every=2", "optim.lr=1e-3", "checkpoint.every=4")
    command = [sys.executable, ROOT / "scripts" / "compare_precision.py", "tiny", "--out", tmp_path]
    command += [part for value in settings for part in ("--set", value)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert "held-out loss: bf16" in done.stdout
    found = json.loads((tmp_path / "precision.json").read_text())
    assert found["held_out"][0] != found["held_out"][1]
    assert found["held_out"][1] == pytest.approx(found["held_out"][0], rel=0.02)
    assert {"blocks.attn1.to_q", "blocks.ffn.net.proj"} <= found["cosines"].keys()
    assert all(0.9 < value < 1 for values in found["cosines"].values() for value in values)
    assert (tmp_path / "precision.png").stat().st_size > 1000


# A Python that finds so many GPUs and fails at some scripts.
PYTHON = """#!/bin/sh
case "$*" in
  *"import wands"*) echo "{root}/wands" ;;
  *device_count*) echo {gpus} ;;
  *get_device_name*) echo "NVIDIA Test" ;;
  *"{failing}"*) echo no; exit 3 ;;
  *) echo ran "$@" ;;
esac
"""


def run_gpu(
    folder: Path, gpus: int, *options: str, failing: str = "nothing", end: str = "exit 3"
) -> subprocess.CompletedProcess[str]:
    for name in ("python", "wands", "deepspeed", "nvidia-smi"):
        text = PYTHON.format(gpus=gpus, failing=failing, root=ROOT)
        (folder / name).write_text(text.replace("exit 3", end))
        (folder / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    environment |= {"PATH": f"{folder}:/usr/bin:/bin", "WANDS_VENV": "none", "WANDS_CLIPS": "clips"}
    command = ["bash", str(ROOT / "scripts" / "gpu.sh"), "--out", str(folder / "out"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


STAGES = ("attention", "block", "step", "tests", "memory", "infer", "encode", "compare", "causal")


def test_gpu_runs_everything_and_sums_up(tmp_path: Path):
    done = run_gpu(tmp_path, 1)
    assert done.returncode == 0, done.stderr
    assert "results on 1 x NVIDIA Test" in done.stdout
    assert done.stdout.splitlines()[-len(STAGES) :] == [f"{name:18} passed" for name in STAGES]
    ran = (tmp_path / "out" / "block.log").read_text()
    assert ran == f"ran scripts/gpu_stages.py block --device cuda --out {tmp_path}/out\n"


def test_gpu_continues_after_a_failure_and_runs_only_the_named_stages(tmp_path: Path):
    chosen = ("--only", "attention", "--only", "step", "--set", "model.dropout=0.1", "--part", "8 clips")
    done = run_gpu(tmp_path, 4, *chosen, failing="stages.py attention")
    assert done.returncode == 1
    ends = {"attention": "failed (3)", "bench_attention": "passed", "step": "passed"}
    assert done.stdout.splitlines()[-3:] == [f"{name:18} {end}" for name, end in ends.items()]
    assert (tmp_path / "out" / "step.log").read_text().endswith("--set model.dropout=0.1 --part 8 clips\n")


def test_gpu_ends_a_stage_after_its_limit(tmp_path: Path):
    options = ("--only", "block", "--only", "step", "--limit", "1")
    done = run_gpu(tmp_path, 1, *options, failing="stages.py block", end="exec sleep 60")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [f"{'block':18} ended after 1 s", f"{'step':18} passed"]


def test_gpu_refuses_what_it_cannot_run(tmp_path: Path):
    done = run_gpu(tmp_path, 0)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "finds no GPU here" in done.stderr
    done = run_gpu(tmp_path, 1, "--only", "blocks")
    assert done.returncode == 2
    assert "--only blocks is not a stage; use one of attention block" in done.stderr
    done = run_gpu(tmp_path, 0, "--only", "block", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "block --device cpu" in done.stdout


def test_wheels_of_a_folder_are_installed_once(tmp_path: Path):
    """WANDS_WHEELS: packages go into .setup/site, and the wands of this checkout is imported before the installed one."""
    (tmp_path / "a.whl").write_text("wheel")
    (tmp_path / "root" / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/setup.sh", "scripts/constraints.txt"):
        (tmp_path / "root" / name).write_text((ROOT / name).read_text())
    for name in ("python", "wands", "deepspeed"):
        text = PYTHON.format(gpus=0, failing="nothing", root=tmp_path / "root")
        # "pip install --target SITE" makes the folder.
        (tmp_path / name).write_text(
            text.replace("echo ran", f"mkdir -p {tmp_path}/root/.setup/site; echo ran")
        )
        (tmp_path / name).chmod(0o755)
    (tmp_path / "root" / "wands").mkdir()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WANDS_VENV": "none", "WANDS_WHEELS": str(tmp_path)}
    command = f"source {tmp_path}/root/scripts/setup.sh dev && echo path $PYTHONPATH"
    for installs in (True, False):
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (f"--target {tmp_path}/root/.setup/site {tmp_path}/a.whl" in done.stdout) == installs
        assert f"path {tmp_path}/root:{tmp_path}/root/.setup/site\n" in done.stdout


def test_setup_takes_only_a_whole_environment(tmp_path: Path):
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "WANDS_VENV": "none"}
    command = ["bash", str(ROOT / "scripts" / "gpu.sh"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "on the PATH; pip install -e" in done.stderr


def set_up(folder: Path, venv: str, found: Path) -> subprocess.CompletedProcess[str]:
    """Source setup.sh with an environment whose Python imports the wands in the folder `found`."""
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "wands", "deepspeed"):
        text = PYTHON.format(gpus=0, failing="nothing", root=found)
        (programs / name).write_text(text.replace("ran", "$0 ran"))
        (programs / name).chmod(0o755)
    command = f"source {ROOT}/scripts/setup.sh dev"
    stamp = f"cat {ROOT}/pyproject.toml {ROOT}/scripts/constraints.txt | cksum | cut -d' ' -f1 > {folder}/venv/.wands-dev"
    subprocess.run(["bash", "-c", stamp], check=True)
    environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin", "WANDS_VENV": venv}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)


def test_the_wands_of_another_checkout_is_not_used(tmp_path: Path):
    """An environment that two checkouts share imports the one that was installed last."""
    other = tmp_path / "other"
    (other / "wands").mkdir(parents=True)
    for number, (found, installs) in enumerate(((ROOT, False), (other, True))):
        folder = tmp_path / str(number)
        done = set_up(folder, str(folder / "venv"), found)
        assert done.returncode == 0, done.stderr
        assert (f"-e {ROOT}[dev]" in done.stdout) == installs
    refused = set_up(tmp_path / "none", "none", other)
    assert refused.returncode == 2
    assert "does not import the wands of this checkout; pip install -e" in refused.stderr
    assert set_up(tmp_path / "right", "none", ROOT).returncode == 0
