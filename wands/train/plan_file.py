"""Train the bins of one epoch that `wands pack` wrote to a file, instead of planning the epoch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from wands.data.packing import EpochPlan
from wands.data.sampler import EarlierEpoch
from wands.errors import ConfigError, one_line
from wands.train.run import TrainingRun

FORMAT = "wands-plan-1"
"""Name of the file format, in the first line of a plan file. The number at the end changes when the keys change."""


def follow_plan(run: TrainingRun, path: Path) -> TrainingRun:
    """Return a run that trains one epoch in the bins of a plan file. A bin is the list of samples of one forward pass.

    The other epochs are planned without the file. A user may edit the key `indices` of the bins, to move samples to other
    bins and steps. The file must keep the samples of the epoch, the number of steps, and the number of bins in each step.

    Args:
        run: the checked training run.
        path: file that `wands pack` wrote.

    Raises:
        ConfigError: if the file cannot be read, or does not fit the data or the recipe.
    """
    sampler, fix = run.sampler, "write it again with wands pack --out and this recipe"
    try:
        header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        epoch, known = header["epoch"], (header["format"], header["data_fingerprint"])
        steps = tuple(tuple(tuple(bin["indices"]) for bin in line["bins"]) for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"packing.plan={path} cannot be read ({one_line(error)}); {fix}.") from None
    planned, found = (
        ([len(step) for step in plan], sorted(i for step in plan for bin in step for i in bin))
        for plan in (sampler.epoch_plan(epoch).steps, steps)
    )
    if known != (FORMAT, run.data_fingerprint()) or planned != found:
        raise ConfigError(
            f"packing.plan={path} has other samples, steps or bins than epoch {epoch} of this run; {fix}."
        )
    plan = EpochPlan(steps, sampler.seq_lens, sampler.max_tokens)
    if max(sampler.seq_lens[list(bin)].sum() for step in steps for bin in step) > sampler.max_tokens:
        raise ConfigError(
            f"packing.plan={path} has a bin with more than packing.max_tokens={sampler.max_tokens} tokens; {fix}."
        )
    given = EarlierEpoch(epoch, sampler.first_step(epoch), plan)
    return replace(run, sampler=replace(sampler, given=given))
