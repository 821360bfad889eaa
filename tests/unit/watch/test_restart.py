"""When torchrun's agent restarts its workers, with workers that only write down their options and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Each start of the worker takes the next word of the file `plan`.
WORKER = """
cd "$(dirname "$0")"
echo "$*" >>calls
read -r action <plan
sed -i 1d plan
case "$action" in
  save | next)
    step="$(printf 'step_%08d' "$(wc -l <calls)")"
    mkdir -p "run/checkpoints/$step"
    case "$action" in save) action=latest ;; esac
    echo "$step" >"run/checkpoints/$action"
    exit 1 ;;
  kill) kill -9 $$ ;;
  *) exit "$action" ;;
esac
"""
# One process runs all cases, because the import of torch takes longer than the cases.
DRIVER = """
import contextlib, io, json, os, sys
from wands.watch import restart

assert "transformers" not in sys.modules, "this import would delay each launch by 5 seconds"
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    os.chdir(name)
    sys.argv = ["restart", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", name]
    sys.argv += ["--monitor-interval", "0.01", "--no-python", os.path.abspath("worker"), "train", *arguments]
    code = 0
    try:
        restart.main()
    except SystemExit as end:
        code = end.code
    results[name] = code
    os.chdir("..")
print(json.dumps(results))
"""
OUT = ["--set", "output_dir=run"]
CASES = {
    # name: (options, what the starts do, exit code, for each start: whether --resume was added)
    "a crash": (OUT, "1 0", 0, "-r"),
    "a killed worker": (OUT, "kill 0", 0, "-r"),
    "a lost rank": (OUT, "3 0", 0, "-r"),
    "no progress": (OUT, "1 1 kill 3 0", 2, "-rrr"),
    "progress": (OUT, "1 1 1 save 1 1 1 0", 2, "-rrrrrr"),
    "always progress": (OUT, "save save save save save save 0", 0, "-rrrrrr"),
    "an error of the user": (OUT, "2 0", 2, "-"),
    "an error of the user after a crash": (OUT, "1 2 0", 2, "-r"),
    "a signal": (OUT, "143 0", 2, "-"),
    "the end": (OUT, "0", 0, "-"),
    "a checkpoint of another run": ([*OUT, "--resume", "other/run"], "1 save 0", 0, "--r"),
    "a kill before latest is replaced": ([*OUT, "--resume", "other/run"], "next 0", 0, "-r"),
    "an unknown recipe": (["unknown.yaml"], "2", 2, "-"),
}
DEFAULT_TIER = {"a crash", "no progress", "an error of the user"}
Results = Callable[[str], tuple[Path, dict[str, int], str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Folder, exit codes and output of the cases of a tier, made when the first of them is needed."""

    @cache
    def run(default_tier: bool) -> tuple[Path, dict[str, int], str]:
        root = tmp_path_factory.mktemp("restart")
        cases = {name: case for name, case in CASES.items() if (name in DEFAULT_TIER) == default_tier}
        for name, (_, plan, *_) in cases.items():
            (root / name).mkdir()
            (root / name / "plan").write_text(plan.replace(" ", "\n") + "\n")
            (root / name / "worker").write_text(f"#!/usr/bin/env bash\n{WORKER}")
            (root / name / "worker").chmod(0o755)
        arguments = json.dumps({name: options for name, (options, *_) in cases.items()})
        command = [sys.executable, "-c", DRIVER, arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return root, json.loads(done.stdout.splitlines()[-1]), done.stderr

    return lambda name: run(name in DEFAULT_TIER)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.slow) for name in CASES]
)
def test_workers_are_restarted_when_it_helps(name: str, results: Results):
    root, codes, _ = results(name)
    options, _, code, resumes = CASES[name]
    calls = (root / name / "calls").read_text().splitlines()
    first = " ".join(["train", *options])
    assert calls == [first if mark == "-" else f"{first} --resume" for mark in resumes]
    assert codes[name] == code


def test_the_end_without_progress_is_one_sentence(results: Results):
    *_, text = results("no progress")
    assert text.count("restarted 3 times without a new checkpoint") == 1
    assert (
        "rank 0 ended with exit code -9; restarting (restart 3 of at most 3 without a new checkpoint)" in text
    )


# The worker saves for three seconds; torchrun alone would kill it after one second.
SAVING_WORKER = """#!/usr/bin/env bash
trap 'sleep 3; touch saved; exit 143' TERM
touch started
while :; do sleep 0.1; done
"""
SIGNAL_DRIVER = """
import os, signal, sys, threading, time
from torch.distributed import run
from wands.watch import restart

def send():
    while not os.path.exists("started"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=send, daemon=True).start()
sys.argv = ["restart", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
if any("--shutdown-timeout" in action.option_strings for action in run.get_args_parser()._actions):
    sys.argv += ["--shutdown-timeout", "1"]
sys.argv += ["--monitor-interval", "0.01", "--no-python", os.path.abspath("worker"), "train"]
restart.main()
"""


@pytest.mark.slow
def test_workers_may_save_after_a_signal(tmp_path: Path):
    worker = tmp_path / "worker"
    worker.write_text(SAVING_WORKER)
    worker.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_DRIVER],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "SignalException" in done.stderr
    assert (tmp_path / "saved").exists()
