"""Resume a run after clips were added to its data or removed. The change takes effect at the end of the current epoch.

Each checkpoint contains the plan of its epoch. A resumed run finishes this epoch as it was planned, without the removed clips,
and plans the next epoch from the changed data. The noise of a clip depends only on the clip and the epoch, so the noise of
unchanged clips stays the same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from typing import Any

from wands.data.packing import EpochPlan
from wands.data.sampler import EarlierEpoch, StepPlan
from wands.errors import CheckpointError
from wands.train.run import TrainingRun

EPOCH_FILE = "epoch.json"


def epoch_values(run: TrainingRun, plan: StepPlan) -> dict[str, Any]:
    """Return the contents of `epoch.json`: the plan of an epoch, with a name and a checksum for each sample.

    Args:
        run: the checked training run.
        plan: plan of any step of the epoch.
    """
    keys, steps = run.data.keys, plan.epoch_plan.steps
    used = {keys[i] for i in chain.from_iterable(chain.from_iterable(steps))}
    return {
        "epoch": plan.epoch,
        "first_step": plan.step - plan.step_in_epoch,
        "totals": plan.epoch_plan.totals,
        "steps": [
            [[(keys[i], int(plan.repeat_index_of[i]), run.data.crc32(i)) for i in bin] for bin in step]
            for step in steps
        ],
        "unused": sorted(set(keys) - used),
    }


def follow_data(run: TrainingRun) -> TrainingRun:
    """Let a resumed run finish the epoch of its checkpoint as planned, if its data has changed since the checkpoint.

    Args:
        run: the checked training run, planned for the changed data.

    Returns:
        The run with the checkpoint's plan for the current epoch; `run` itself if the data has not changed.

    Raises:
        CheckpointError: if the contents of a sample of the epoch have changed, because it was encoded again.
    """
    assert run.checkpoint is not None
    folder, state = run.checkpoint
    is_same = run.data_fingerprint() == state.data_fingerprint
    start = (state.data_start[0], state.data_start[1])
    if EPOCH_FILE not in state.files or (is_same and start == (0, 0)):
        return run
    if is_same and state.step >= start[1]:
        return replace(run, sampler=replace(run.sampler, start=start))
    values, sampler = json.loads((folder / EPOCH_FILE).read_bytes()), run.sampler
    rows = {(key, int(sampler.repeat_index_of[i])): i for i, key in enumerate(run.data.keys)}
    samples = list(chain.from_iterable(chain.from_iterable(values["steps"])))
    for key, repeat_index, crc32 in samples:
        row = rows.get((key, repeat_index))
        if row is not None and run.data.crc32(row) != crc32:
            raise CheckpointError(
                f"--resume {folder}: the training sample {key} was encoded again since the checkpoint; use the cache of the "
                "checkpoint's run, or export the checkpoint and start a new run from it."
            )
    steps = tuple(
        tuple(tuple(rows[key, index] for key, index, _ in bin if (key, index) in rows) for bin in step)
        for step in values["steps"]
    )
    plan = EpochPlan(steps, sampler.seq_lens, sampler.max_tokens, tuple(values["totals"]))
    start = (values["epoch"] + 1, values["first_step"] + len(steps))
    earlier = EarlierEpoch(values["epoch"], values["first_step"], plan) if state.step < start[1] else None
    before, after = {*values["unused"], *(key for key, *_ in samples)}, set(run.data.keys)
    change = (
        f"data: {len(after - before)} clips were added and {len(before - after)} were removed since the checkpoint. Removed "
        "clips are left out at once. The plan with the added clips takes effect"
    )
    change = "data: a change that was made before the checkpoint takes effect" if is_same else change
    change += f" at step {start[1] + 1}, where epoch {start[0]} starts."
    return replace(run, sampler=replace(sampler, start=start, earlier=earlier), data_change=change)
