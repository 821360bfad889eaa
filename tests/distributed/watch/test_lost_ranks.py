"""Ranks that die, are stopped or never come back: the other ranks end soon, with one message that names them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Hooked, run_training
from wands.plugin import Plugin
from wands.watch import watchdog

FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "asleep": lambda: time.sleep(600),
}


def train_until(fault: str, model: Path, out: Path, overrides: tuple[str, ...]) -> str:
    """Train on this rank. Rank 1 has the fault in step 3."""
    rank = int(os.environ["RANK"])
    sys.stderr.flush()
    os.dup2(os.open(out / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    watchdog._HANG_WAIT = 1.0
    watchdog._LOSS_WAIT = 0.2
    watchdog._TICK = 0.1

    def fail(step: int) -> None:
        if step == 3 and rank == 1:
            FAULTS[fault]()

    def dump_late(folder: Path) -> None:  # when rank 1 has ended, and the connection to it has broken
        time.sleep(rank == 0)
        dump(folder)

    dump = watchdog.dump_collectives
    watchdog.dump_collectives = dump_late
    plugin = Plugin(objective=Hooked(before=fail))
    try:
        run_training(model, out, ("train.max_steps=50", *overrides), plugin=plugin)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_rank_that_dies_is_one_sentence_on_the_others(new_world, tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(AssertionError, match="rank 1 died"):
        new_world(2, catch_to_file, "killed", tiny_pipeline, tmp_path, ())
    error = (tmp_path / "error-0").read_text()
    closed = r"Connection (closed|reset) by peer"
    prefix = r"RankError: step 3: the connection to another rank failed \([^()]*"
    assert re.match(prefix + closed, error)
    assert "no answer within 0 s from rank 1; rank 0 in " in error
    assert re.search(closed, (tmp_path / "stacks" / "rank-0.txt").read_text())


def catch_to_file(fault: str, model: Path, out: Path, overrides: tuple[str, ...]) -> None:
    text = train_until(fault, model, out, overrides)
    (out / f"error-{os.environ['RANK']}").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["asleep", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_step_that_does_not_end_names_the_rank(fault: str, new_world, tiny_pipeline: Path, tmp_path: Path):
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0 died"):
        new_world(2, train_until, fault, tiny_pipeline, tmp_path, ("train.step_timeout=1",))
    assert time.monotonic() - started < 30
    message = (tmp_path / "stderr-0").read_text()
    assert message.count("wands: step 3 did not end within 1 s: ") == 1
    stacks = tmp_path / "stacks"
    if fault == "stopped":
        assert "no answer within 1 s from rank 1; rank 0 in " in message
        assert not (stacks / "rank-1.txt").exists()
    else:
        assert "rank 1 in " in message
        assert "test_lost_ranks.py" in (stacks / "rank-1.txt").read_text()
    text = (stacks / "rank-0.txt").read_text()
    assert "Current thread" in text
    assert "Traceback" not in text  # of the broken connection, which the end of rank 1 has caused
    entries = json.loads((stacks / "rank-0.collectives.json").read_text())["entries"]
    assert "gloo:all_reduce" in {entry["profiling_name"] for entry in entries}
