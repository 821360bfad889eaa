"""Find the launcher that started this process, such as deepspeed or torchrun, and check that the launcher still runs.

A worker whose launcher was killed is an orphan: the worker trains on, and nobody sees or stops the worker.
"""

from __future__ import annotations

import os
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

_LAUNCHERS = {
    *("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "wands.train.restart"),
    *("accelerate", "srun", "slurmstepd"),
    *("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted", "prterun", "prted"),
}
"""Names of launchers: programs, Python scripts, and modules that Python runs with -m."""


class Ancestor(NamedTuple):
    """Parent of this process, or an ancestor further up.

    Attributes:
        pid: process id.
        start: start time of the process, in clock ticks since the boot. If the system gives the process id to a new process
            later, the start time differs.
        name: name of the program.
    """

    pid: int
    start: int
    name: str

    def is_gone(self) -> bool:
        """Return True if the process has ended."""
        status = _read_status(self.pid)
        return status is None or status[1] != self.start


def find_launcher() -> tuple[Ancestor, ...]:
    """Return the processes from the parent of this process up to its launcher.

    If one of these processes ends, this process is an orphan. A launcher can consist of several processes: `deepspeed`
    starts `deepspeed.launcher.launch`, which starts the workers. The result is empty if this process has no launcher.
    A shell, a terminal or a container above the launcher is never part of the result, because it may end before a run
    in the background.
    """
    ancestors: list[Ancestor] = []
    length = 0
    pid = os.getppid() if "RANK" in os.environ else 0  # launchers set RANK
    while (status := _read_status(pid)) is not None:
        parent, start = status
        ancestors.append(Ancestor(pid, start, _program(pid)))
        if ancestors[-1].name in _LAUNCHERS:
            length = len(ancestors)
        elif length:
            break
        pid = parent
    # `deepspeed` was killed while its child imported, before there were workers: process 1 has adopted the child.
    if pid == 1 and length and ancestors[length - 1].name == "deepspeed.launcher.launch":
        return (*ancestors[:length], Ancestor(0, 0, "deepspeed"))
    return tuple(ancestors[:length])


def _read_status(pid: int) -> tuple[int, int] | None:
    """Return (parent, start in clock ticks) of a process. Return None if the process has ended, or if /proc is missing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()  # the name of the program may contain spaces and parentheses
    # A process that was killed stays in the list until its parent asks for its exit code.
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[19]))


def _program(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    name = Path(words[0]).name
    if name.startswith("python"):
        rest = [*dropwhile(lambda word: word.startswith("-") and word != "-m", words[1:]), ""]
        name = rest[1] if rest[0] == "-m" else Path(rest[0]).name
    return name.partition(":")[0]  # slurmstepd writes the number of its job behind its name
