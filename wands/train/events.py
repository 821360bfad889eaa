"""Write `events.jsonl`: starts, restarts, saves, bad updates and other events of a run, with their steps and times."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Lock
from typing import Any

from wands import __version__
from wands.distributed.bootstrap import accelerator_type, ranks_per_node
from wands.errors import one_line
from wands.files import read_rows
from wands.train.append_log import AppendLog, continue_rows, to_line
from wands.train.run import TrainingRun


class EventLog:
    """Log of the events of a run. Rank 0 writes the log; on other ranks, the methods do nothing.

    The constructor writes the first event: `restart` after a crash, otherwise `start`. A crash means that the last process of
    the run neither reached the end of the run nor stopped on request. If an exception leaves the `with` block, the log writes
    an `error` event.

    Args:
        run: the checked training run. A resumed run must create this log before it removes rows from `metrics.jsonl`: the
            `restart` event contains the last step in `metrics.jsonl`.
        rank: rank of this process.

    Attributes:
        step: number of the current step. `write` stores this number with each event.
    """

    def __init__(self, run: TrainingRun, rank: int) -> None:
        self._log: AppendLog | None = None
        self._lock = Lock()  # a thread writes the results of pushes
        self.step = run.checkpoint.state.step if run.checkpoint else 0
        if rank != 0:
            return
        rows, self._log = continue_rows(run.output_dir / "events.jsonl", self.step)
        past = [row for row in rows if row.get("event") in ("start", "restart", "error", "end", "stop")]
        is_restart = bool(past) and past[-1]["event"] not in ("end", "stop")
        values: dict[str, Any] = {"wands_version": __version__, "world_size": run.world_size}
        values["num_nodes"] = run.world_size // ranks_per_node()
        values["checkpoint"] = run.checkpoint and run.checkpoint.folder.name
        values |= {
            "device": accelerator_type(),
            "variant": run.variant.name,
            "total_steps": run.sampler.total_steps,
        }
        values["data"] = {"num_samples": len(run.data.keys), "num_tokens": int(run.seq_lens.sum())}
        if is_restart:
            steps = [row["step"] for row in read_rows(run.output_dir / "metrics.jsonl")]
            number = 1 + sum(row["event"] == "restart" for row in past)
            reason = past[-1]["reason"] if past[-1]["event"] == "error" else None
            values |= {"number": number, "last_step": max(steps, default=0), "reason": reason}
        self.write("restart" if is_restart else "start", **values)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.write("error", reason=one_line(error))

    def write(self, event: str, **values: Any) -> None:
        """Write a row with the current step, the kind of the event, the time in seconds since 1970, and `values`."""
        if self._log is not None:
            row = {"step": self.step, "event": event, "time": round(time.time(), 3)}
            with self._lock:
                self._log.append(to_line(row | values))

    def close(self) -> None:
        """Write the rows that could not be written before, or report that rows are missing."""
        if self._log is not None:
            self._log.close()


def marked_steps(output_dir: Path, last_step: int) -> dict[str, list[int]]:
    """Return the steps of a run's restarts and skipped updates, for model cards and plots.

    Args:
        output_dir: run folder.
        last_step: last step to include. Events of later steps are left out.

    Returns:
        A dict that maps "restart" and "skipped update" to lists of steps. If slow ranks were reported, "slow-rank report" maps
        to the steps of these reports. The dict is empty if the run folder has no events.
    """
    rows = [row for row in read_rows(output_dir / "events.jsonl") if row.get("step", last_step) <= last_step]
    restarts = [row["step"] for row in rows if row.get("event") == "restart"]
    skipped = [row["step"] for row in rows if row.get("skipped")]
    slow = sorted({row["step"] for row in rows if row.get("event") == "slow rank"})
    marks = {"restart": restarts, "skipped update": skipped} | ({"slow-rank report": slow} if slow else {})
    return marks if rows else {}
