"""Find the launcher that started this process, such as deepspeed or torchrun, and check that it still runs.

A worker whose launcher was killed is an orphan: it continues to train, and nobody sees or stops it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import psutil

PATIENT_LAUNCHER = "wands.watch.restart"
"""Module of the launcher that gives its workers enough time after a signal to save. Others may kill them after 30 s."""
_LAUNCHERS = {
    *("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", PATIENT_LAUNCHER),
    *("accelerate", "srun", "slurmstepd"),
    *("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted", "prterun", "prted"),
}
"""Names of launchers: programs, Python scripts, and modules that Python runs with -m."""
_VARIABLES = {"TORCHELASTIC_RUN_ID": "torchrun", "CROSS_RANK": "deepspeed"}
"""Maps environment variables of workers to the launcher that sets them."""


class Ancestor(NamedTuple):
    """One ancestor of this process.

    Attributes:
        process: the ancestor; None if it ended before `find_launcher` was called.
        name: name of the program, or of the script or module that Python runs, such as "torchrun".
    """

    process: psutil.Process | None
    name: str

    def is_gone(self) -> bool:
        """Return whether the ancestor has ended, also if a newer process has its id."""
        # A process that was killed stays in the list until its parent asks for its exit code.
        with suppress(psutil.NoSuchProcess):
            ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return not (self.process and self.process.is_running() and self.process.status() not in ended)
        return True


def find_launcher() -> tuple[Ancestor, ...]:
    """Return the processes from the parent of this process up to its launcher, both included; () without a launcher.

    If one of them ends, this process is an orphan. A launcher can have several: `deepspeed` starts `deepspeed.launcher.launch`,
    which starts the workers. The launcher's ancestors, such as a shell, may end while the run continues in the background.
    """
    ancestors: list[Ancestor] = []
    length = 0
    process = psutil.Process() if "RANK" in os.environ else None  # launchers set RANK
    # An ancestor may end in this moment, or belong to a user whose processes are hidden.
    with suppress(psutil.Error):
        while process := process and process.parent():
            ancestors.append(Ancestor(process, _program(process)))
            if ancestors[-1].name in _LAUNCHERS:
                length = len(ancestors)
            elif length:
                # `deepspeed` was killed while its child imported: process 1 has adopted the child. There are no workers yet.
                if process.pid == 1 and ancestors[length - 1].name == "deepspeed.launcher.launch":
                    return (*ancestors[:length], Ancestor(None, "deepspeed"))
                break
    if not length:
        return _lost_launcher(ancestors)
    return tuple(ancestors[:length])


def _lost_launcher(ancestors: list[Ancestor]) -> tuple[Ancestor, ...]:
    """Return the launcher that was killed before this process looked for it, so that process 1 has adopted this process."""
    # Process 1 as parent says nothing by itself: in a container, it can be the shell of a single `wands train`.
    names = [name for variable, name in _VARIABLES.items() if variable in os.environ]
    is_adopted = [ancestor.process and ancestor.process.pid for ancestor in ancestors] == [1]
    return tuple(Ancestor(None, name) for name in names[:1]) if is_adopted else ()


def _program(process: psutil.Process) -> str:
    try:
        words = process.cmdline() or [""]
    except psutil.Error:
        return ""
    name = Path(words[0]).name
    if name.startswith("python"):
        rest = [*dropwhile(lambda word: word.startswith("-") and word != "-m", words[1:]), ""]
        name = rest[1] if rest[0] == "-m" else Path(rest[0]).name
    return name.partition(":")[0]  # slurmstepd writes the number of its job behind its name
