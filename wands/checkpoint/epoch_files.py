"""Read the plan of an epoch from a file, instead of planning the epoch.

`wands tools pack` writes a plan file for `packing.plan`. Every checkpoint contains the plan of its epoch in `epoch.json`. If
clips were added or removed since, or this version of wands plans the epoch in another way, a resumed run finishes the epoch with
that plan, without the removed clips. The noise of unchanged clips stays the same, because it depends only on the clip and the
epoch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from wands.checkpoint.checkpoint_files import EPOCH_FILE, Checkpoint
from wands.data.datasets import Dataset
from wands.data.packing import EpochPlan
from wands.data.sampler import PlanSampler, StepPlan
from wands.disk_errors import read_patiently
from wands.errors import CheckpointError, ConfigError, one_line
from wands.values import Count, Text, check_values

FORMAT = "wands-plan-1"
"""Format of plan files, stored in their first line. A format with other keys gets another number at the end."""


def follow_plan(sampler: PlanSampler, path: Path, fingerprint: str) -> PlanSampler:
    """Return a sampler that takes the bins of one epoch from a plan file of `wands tools pack`, and plans the other epochs.

    A user may edit the key `indices` of the bins, to move samples to other bins and steps. The samples of the epoch, the number
    of steps, and the number of bins in each step must stay the same.

    Raises:
        ConfigError: if the file cannot be read, or does not fit the data (its `fingerprint`) or the recipe.
    """
    fix = "write the file again with wands tools pack --out and this recipe"
    try:
        header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        epoch = header["epoch"]
        known = (header["format"], header["data_fingerprint"])
        steps = tuple(tuple(tuple(bin["indices"]) for bin in line["bins"]) for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"packing.plan={path} cannot be read ({one_line(error)}); {fix}.") from None
    planned, found = (
        ([len(step) for step in plan], sorted(i for step in plan for bin in step for i in bin))
        for plan in (sampler.epoch_plan(epoch).steps, steps)
    )
    if known != (FORMAT, fingerprint) or planned != found:
        raise ConfigError(
            f"packing.plan={path} has other samples, steps or bins than epoch {epoch} of this run; {fix}."
        )
    plan = EpochPlan(steps, sampler.seq_lens, sampler.max_tokens)
    if max(sampler.seq_lens[list(bin)].sum() for step in steps for bin in step) > sampler.max_tokens:
        raise ConfigError(
            f"packing.plan={path} has a bin with more than packing.max_tokens={sampler.max_tokens} tokens; {fix}."
        )
    return replace(sampler, given={epoch: plan})


def epoch_values(keys: Sequence[str], checksums: np.ndarray, plan: StepPlan) -> dict[str, Any]:
    """Return the contents of `epoch.json`: the plan of an epoch, with the key and CRC-32 of each sample.

    The keys are "epoch", "first_step" (counted from 0 over the whole run), "totals" (numbers of samples and tokens), "steps" and
    "unused" (sorted keys of the samples that the epoch does not use). A step is a list of bins, a bin a list of (key of the
    sample, repeat, CRC-32). `plan` may be of any step of the epoch.
    """
    steps = plan.epoch_plan.steps
    used = {keys[i] for i in chain.from_iterable(chain.from_iterable(steps))}
    return {
        "epoch": plan.epoch,
        "first_step": plan.step - plan.step_in_epoch,
        "totals": plan.epoch_plan.totals,
        "steps": [
            [[(keys[i], int(plan.repeat_index_of[i]), int(checksums[i])) for i in bin] for bin in step]
            for step in steps
        ],
        "unused": sorted(set(keys) - used),
    }


@dataclass(frozen=True)
class _Epoch:
    epoch: Count
    first_step: Count
    totals: tuple[Count, Count]
    steps: list[list[list[tuple[Text, Count, Count]]]]
    unused: list[Text]


_EPOCH = TypeAdapter(_Epoch)


def _read_epoch(checkpoint: Checkpoint, bins_per_step: int) -> dict[str, Any]:
    folder, state = checkpoint
    try:
        path = folder / EPOCH_FILE
        values = json.loads(read_patiently(path, path.read_bytes))
        epoch = check_values(_EPOCH, values)
        if not epoch.first_step <= state.step <= epoch.first_step + len(epoch.steps):
            raise ValueError(f"it does not contain step {state.step}")
        if any(len(step) != bins_per_step for step in epoch.steps):
            raise ValueError(f"a step does not have {bins_per_step} bins")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"--resume {folder}: {EPOCH_FILE} is damaged ({one_line(error)}); use another step_* folder of the run."
        ) from None
    return vars(epoch)


def trained_samples(checkpoint: Checkpoint) -> set[tuple[str, int]]:
    """Return (key, CRC-32) of the training samples in the epoch of a checkpoint. CheckpointError if its plan is damaged."""
    steps = _read_epoch(checkpoint, checkpoint.state.recipe["train"]["bins_per_step"])["steps"]
    return {(key, crc32) for step in steps for bin in step for key, _, crc32 in bin}


def follow_data(
    sampler: PlanSampler, data: Dataset, checkpoint: Checkpoint, fingerprint: str
) -> tuple[PlanSampler, str | None]:
    """Let a resumed run finish its epoch with the plan in the checkpoint, if the data or the planning has changed.

    Removed clips are left out at once; added clips and a new way of packing begin with the next epoch. Return the sampler, and a
    text about the change. Without a change, these are `sampler` and None.

    Raises:
        CheckpointError: if the contents of a sample of the epoch have changed, because it was encoded again.
    """
    folder, state = checkpoint
    is_same = fingerprint == state.data_fingerprint
    start = (state.data_start[0], state.data_start[1])
    values = _read_epoch(checkpoint, state.recipe["train"]["bins_per_step"])
    if sampler.bins_per_step != state.recipe["train"]["bins_per_step"]:
        return sampler, None  # `check_resumable` refuses the recipe
    rows = {(key, int(sampler.repeat_index_of[i])): i for i, key in enumerate(data.keys)}
    steps = tuple(
        tuple(tuple(rows[key, index] for key, index, _ in bin if (key, index) in rows) for bin in step)
        for step in values["steps"]
    )
    is_planned = is_same and state.step >= start[1]
    if is_planned:
        sampler = replace(sampler, start=start) if start != (0, 0) else sampler
        if values["epoch"] < start[0] or sampler.epoch_plan(values["epoch"]).steps == steps:
            return sampler, None
    samples = list(chain.from_iterable(chain.from_iterable(values["steps"])))
    for key, repeat_index, crc32 in samples:
        row = rows.get((key, repeat_index))
        if row is not None and data.checksums[row] != crc32:
            raise CheckpointError(
                f"--resume {folder}: the training sample {key} was encoded again since the checkpoint was saved. Restore the "
                "cache of the checkpoint's run, or export the checkpoint (wands export) and start a new run from the export."
            )
    plan = EpochPlan(
        steps=steps,
        seq_lens=sampler.seq_lens,
        max_tokens=sampler.max_tokens,
        planned_totals=tuple(values["totals"]),
    )
    start = (values["epoch"] + 1, values["first_step"] + len(steps))
    given = {**sampler.given, **({values["epoch"]: plan} if state.step < start[1] else {})}
    before = {*values["unused"], *(key for key, *_ in samples)}
    after = set(data.keys)
    change = (
        f"data: {len(after - before)} clips were added and {len(before - after)} were removed since the checkpoint. Removed "
        "clips are left out at once. The plan with the added clips takes effect"
    )
    if is_same:
        version = "this version of wands packs the clips in another way, which"
        change = (
            f"data: {version if is_planned else 'a change that was made before the checkpoint'} takes effect"
        )
    change += f" at step {start[1] + 1}, where epoch {start[0]} starts."
    return replace(sampler, start=start, given=given), change
