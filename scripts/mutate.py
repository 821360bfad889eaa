"""Insert the bugs of tests/mutations.yaml into a copy of the repository, one by one, and check that tests find each bug.

    python scripts/mutate.py                              # try all bugs
    python scripts/mutate.py --only lora-alpha-dropped    # try this bug; the option can be repeated
    python scripts/mutate.py --jobs 2                     # use two copies of the repository at the same time
    python scripts/mutate.py --marker "not slow" --at-least 60    # run only fast tests; 60 found bugs are enough

tests/mutations.yaml names the tests of each bug. All these tests first run once without a bug and must pass. A bug is "found" if
one of its tests fails (pytest's exit code 1). A bug is "not found" if its tests pass, or if --marker selects no test of the bug.
The result is "broken" if pytest cannot run the tests. The exit code is 0 if all bugs, or at least as many as --at-least, are
found.

The script needs pytest, pyyaml and the clips of the tests: .setup/clips, or the folder that WANDS_CLIPS names.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutations.yaml"
KEYS = {"id", "breaks", "file", "find", "replace", "test"}
HEAVY = (
    *(
        "pytest",
        "hypothesis",
        "torch",
        "torch.utils.tensorboard",
        "deepspeed",
        "peft",
        "datasets",
        "h5py",
        "av",
    ),
    "diffusers.models.transformers.transformer_wan",
    "diffusers.pipelines.wan.pipeline_wan",
    "transformers.models.umt5.modeling_umt5",
    "matplotlib.pyplot",
)
# exit codes of pytest
PASSED = 0
FAILED = 1
NOTHING_SELECTED = 5


class Outcome(NamedTuple):
    """Outcome for one bug after its tests have run.

    Attributes:
        word: "found" if a test failed. "NOT FOUND" if no test failed, or if --marker selects no test of the bug. "broken" if
            pytest could not run the tests.
        seconds: duration of the tests.
        reason: for "found", the name of the failed test. For "broken", the exit code and the last output of pytest. For "NOT
            FOUND", a text that says whether the tests passed or were not selected.
    """

    word: str
    seconds: float
    reason: str


def read_mutations(only: list[str]) -> list[dict]:
    """Return the bugs that tests/mutations.yaml lists, each as a dict. An invalid entry ends the script with an error.

    Args:
        only: ids of the bugs to return. An empty list returns all bugs.
    """
    mutations = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    names = [one.get("id") for one in mutations]
    for one in mutations:
        if set(one) != KEYS or names.count(one["id"]) > 1 or not one["test"]:
            sys.exit(f"{LIST.name}: {one.get('id')} needs a unique id, tests, and the keys {sorted(KEYS)}.")
        path = ROOT / one["file"]
        times = path.read_text(encoding="utf-8").count(one["find"]) if path.is_file() else 0
        if times != 1:
            sys.exit(
                f"{LIST.name}: {one['id']} finds its text {times} times in {one['file']}, not once; correct file or find."
            )
        if one["find"] == one["replace"]:
            sys.exit(f"{LIST.name}: {one['id']} changes nothing; fix replace.")
    if unknown := set(only) - set(names):
        sys.exit(f"--only {', '.join(sorted(unknown))} is not in {LIST.name}; --list prints all ids.")
    return [one for one in mutations if not only or one["id"] in only]


def copy_tree(target: Path) -> Path:
    """Copy the repository to `target`, with modification times but without files that git ignores. Return `target`."""
    asked = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):  # a file that was deleted is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def start_pytest(tree: Path, tests: list[str], marker: str | None) -> int:
    """Fork a process that runs tests in `tree` until a test fails, and return its process id. The output goes to `tree`.txt."""
    command = [
        "-x",
        "-q",
        "-rfE",
        "--tb=line",
        f"--basetemp={tree}.tmp",
        *(["-m", marker] if marker else []),
        *tests,
    ]
    if pid := os.fork():
        return pid
    code = -1
    try:
        with open(f"{tree}.txt", "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        os.environ.update(PYTHONPATH=str(tree), COLUMNS="240")  # pytest cuts its summary to the terminal
        sys.path[:0] = [str(tree)]
        import pytest

        code = int(pytest.main(command))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def wait_for_one() -> tuple[int, int]:
    """Wait until one of the forked processes ends. Return its process id and its exit code."""
    pid, status = os.wait()
    return pid, os.waitstatus_to_exitcode(status)


def warm_up() -> None:
    """Set environment variables for the tests, and import large packages, so that forked processes start faster.

    wands is not imported, because each forked process must import its own copy with a bug.
    """
    os.environ.update(
        DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"
    )
    for name, folder in (("WANDS_CLIPS", "clips"), ("TORCH_EXTENSIONS_DIR", "torch_extensions")):
        os.environ.setdefault(name, str(ROOT / ".setup" / folder))
    for name in HEAVY:
        importlib.import_module(name)


def judge(tree: Path, code: int, seconds: float, marker: str | None) -> Outcome:
    """Return whether tests found a bug: "found", "NOT FOUND", or "broken" if pytest could not run the tests.

    Args:
        tree: copy of the repository with the bug. The file `tree`.txt contains the output of pytest.
        code: exit code of pytest.
        seconds: duration of the tests.
        marker: value of --marker; None if the option is not set.
    """
    output = Path(f"{tree}.txt").read_text(encoding="utf-8", errors="replace")
    if code == FAILED:
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.*)$", output, re.MULTILINE)
        return Outcome("found", seconds, failed[1][:200] if failed else "")
    if code == PASSED or (code == NOTHING_SELECTED and marker):
        return Outcome("NOT FOUND", seconds, f"none of its tests {'is selected' if code else 'fails'}")
    return Outcome("broken", seconds, f"exit code {code}: {' '.join(output.split())[-300:]}")


def judge_all(mutations: list[dict], trees: list[Path], marker: str | None) -> list[Outcome]:
    """Check whether the tests find each bug in `mutations`, and return the outcomes.

    For each bug, the function waits for a free copy of the repository in `trees` and inserts the bug there. It runs the tests
    that tests/mutations.yaml names for the bug. It then prints the outcome and removes the bug.

    Args:
        mutations: entries of the bugs in tests/mutations.yaml.
        trees: copies of the repository without a bug. One copy is used for one bug at a time.
        marker: value of --marker; None if the option is not set.
    """
    waiting = list(mutations)
    running = {}
    outcomes = []
    while waiting or running:
        while waiting and trees:
            one = waiting.pop(0)
            tree = trees.pop()
            source = (ROOT / one["file"]).read_text(encoding="utf-8")
            (tree / one["file"]).write_text(source.replace(one["find"], one["replace"]), encoding="utf-8")
            running[start_pytest(tree, one["test"], marker)] = one, tree, time.monotonic()
        pid, code = wait_for_one()
        one, tree, began = running.pop(pid)
        outcomes.append(judge(tree, code, time.monotonic() - began, marker))
        shutil.copy2(ROOT / one["file"], tree / one["file"])
        trees.append(tree)
        word, seconds, reason = outcomes[-1]
        print(f"{one['id']:<44} {word:<9} {seconds:6.1f} s  {reason}", flush=True)
    return outcomes


def main() -> int:
    """Run the command line, and print whether the tests find each bug. Return 0 if enough bugs are found (--at-least), else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="ID", help="test only this bug; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of bugs to test at the same time")
    parser.add_argument("--marker", metavar="EXPR", help="run only the tests that pytest -m EXPR selects")
    parser.add_argument("--at-least", type=int, metavar="N", help="bugs that must be found [default: all]")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a bug first")
    parser.add_argument("--list", action="store_true", help="print the bugs and do nothing")
    options = parser.parse_args()
    mutations = read_mutations(options.only)
    if options.list:
        print("\n".join(f"{one['id']}: {one['breaks']} ({one['file']})" for one in mutations))
        return 0
    warm_up()
    with tempfile.TemporaryDirectory(prefix="wands-mutate-") as folder:
        trees = [copy_tree(Path(folder) / str(number)) for number in range(max(1, options.jobs))]
        if not options.no_check:
            tests = list(dict.fromkeys(test for one in mutations for test in one["test"]))
            start_pytest(trees[0], tests, options.marker)
            if wait_for_one()[1] not in (PASSED, NOTHING_SELECTED):
                print(Path(f"{trees[0]}.txt").read_text(encoding="utf-8", errors="replace"))
                sys.exit("The tests do not pass without a bug; no bug was judged.")
        outcomes = judge_all(mutations, trees, options.marker)
    found = sum(outcome.word == "found" for outcome in outcomes)
    print(f"{found} of {len(mutations)} found")
    return 0 if found >= (len(mutations) if options.at_least is None else options.at_least) else 1


if __name__ == "__main__":
    sys.exit(main())
