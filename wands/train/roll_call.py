"""Find the ranks that do not answer, after a step that does not end or a connection that breaks.

Each rank writes its Python stacks to a file in the run folder and waits. A rank without a file does not answer. This works
when the network is down or a process is suspended, and costs no time in a normal step.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from wands.distributed.consistency import group_ranks, name_ranks


def answer_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank writes its stacks, so that the other ranks see that this rank answers."""
    return folder / f"rank-{rank}.txt"


def call_roll(folder: Path, seconds: float, error: BaseException | None = None) -> tuple[str, bool]:
    """Write this rank's stacks to a file, wait for the files of the other ranks, and return a text about all ranks.

    Args:
        folder: folder of the files. All ranks must share this folder.
        seconds: time to wait for the files of the other ranks.
        error: exception that has ended the training of this rank; None if the main thread still runs.

    Returns:
        (text with the ranks that do not answer, and the current function of the ranks that answer; whether this rank is the
        lowest rank that answers).
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    files = [answer_file(folder, number) for number in range(world_size)]
    with contextlib.suppress(OSError):  # the disk may be full
        folder.mkdir(parents=True, exist_ok=True)
        with files[rank].open("w", encoding="utf-8") as file:
            file.write(f"{_place(error)}\n\n")
            file.writelines(traceback.format_exception(error) if error else ())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    time.sleep(seconds)
    answers = [file.read_text("utf-8").partition("\n")[0] if file.exists() else "" for file in files]
    groups = {answers[ranks[0]]: name_ranks(ranks) for ranks in group_ranks(answers)}
    missing = groups.pop("", None)  # the cause: named first
    clauses = [f"no answer within {seconds:.0f} s from {missing}"] if missing else []
    clauses += [f"{ranks} in {place}" for place, ranks in groups.items()]
    text = f"{'; '.join(clauses)}. The stacks are in {folder}"
    return text, not any(answers[:rank])


def dump_collectives(folder: Path) -> None:
    """Write a JSON file with the last collective operations of this rank, which PyTorch's flight recorder has stored."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # with NCCL; other backends
        with contextlib.suppress(AttributeError, OSError, RuntimeError):
            file = answer_file(folder, int(os.environ.get("RANK", "0"))).with_suffix(".collectives.json")
            file.write_bytes(getattr(torch._C._distributed_c10d, name)())
            return


def _place(error: BaseException | None) -> str:
    """Return the innermost function of wands that the main thread is running, or in which `error` was raised."""
    stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
    frames = stack if error is None else reversed([*traceback.walk_tb(error.__traceback__)])
    for frame, line in frames:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("wands."):
            return f"{frame.f_code.co_name} (line {line} of {name})"
    return "code outside wands"
