"""Run commands of wands while a library fails chosen calls, each command in a fork of one process that has imported everything.

`FaultServer` starts that process with `faults.c` preloaded. `python -m tests.support.faults` is the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

KINDS = {"read": 1, "write": 2, "lock": 4, "fsync": 8, "rename": 16, "open": 32}
SOURCE = Path(__file__).with_suffix(".c")
ROOT = SOURCE.parents[2]
NEVER = 1 << 40


class Fault(NamedTuple):
    """Error `number` for the calls `first` to `first + times - 1` among those of this kind on paths that contain `part`."""

    kind: str
    number: int = 0
    first: int = NEVER
    times: int = 1
    part: str = ""


class Outcome(NamedTuple):
    """Exit code of a command, how many calls could have failed, and what the command printed."""

    code: int
    num_calls: int
    text: str


class FaultServer(AbstractContextManager["FaultServer"]):
    """A process that runs commands with faults. Skips the test where there is no C compiler."""

    def __init__(self, folder: Path, **environment: str) -> None:
        if shutil.which("gcc") is None:
            pytest.skip("needs gcc")
        library = folder / "faults.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        own = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        inherited = {name: value for name, value in os.environ.items() if name not in ranks}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, **own, **environment},
            cwd=ROOT,
            text=True,
        )

    def run(self, args: Sequence[object], fault: Fault | None = None) -> Outcome:
        """Run `wands ARGS` with a fault, and return its outcome."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([[*map(str, args)], fault or Fault("read")]) + "\n")
        self._process.stdin.flush()
        return Outcome(*json.loads(self._process.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(library: str) -> None:
    faults = ctypes.CDLL(library)
    faults.faults_plan.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int)
    faults.faults_seen.restype = ctypes.c_long
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch.utils.tensorboard  # noqa: F401

    from wands import cli, disk_errors

    disk_errors.WAITS = (0.01, 0.01, 0.01)
    for line in sys.stdin:
        args, fault = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            printed = Path(folder, "printed")
            counted = Path(folder, "counted")
            child = os.fork()
            if child == 0:
                _run(cli.main, args, Fault(*fault), faults, printed, counted)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            num_calls = int(counted.read_text()) if counted.exists() else -1
            answers.write(json.dumps([status, num_calls, printed.read_text(errors="replace")]) + "\n")
            answers.flush()


def _run(main: Any, args: list[str], fault: Fault, faults: Any, printed: Path, counted: Path) -> NoReturn:
    leave = os._exit

    def count_and_leave(code: int) -> NoReturn:
        counted.write_text(str(faults.faults_seen()))
        leave(code)

    os._exit = count_and_leave  # type: ignore[assignment]
    file = os.open(printed, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        faults.faults_plan(KINDS[fault.kind], fault.part.encode(), fault.first, fault.times, fault.number)
        main(args)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
