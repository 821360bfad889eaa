"""The command `wands tools pack`: write the bins of an epoch to a file, exactly as `wands train` uses them."""

from __future__ import annotations

import json
from typing import Any

from wands.checkpoint.epoch_files import FORMAT
from wands.config.options import PackOptions
from wands.data.datasets import describe_data, list_sources
from wands.data.packing import imbalance
from wands.files import atomic_path
from wands.plugin import load_plugins
from wands.train.prepare import load_run
from wands.train.prepared_run import PreparedRun


def pack(options: PackOptions) -> str:
    """Plan the bins of one epoch of a recipe's data, write the plan to a file as JSON lines, and return a summary.

    The first line describes the whole plan. Its keys are:

    - format, seed, epoch, first_step (first optimizer step of the epoch), and sources (see `list_sources`).
    - split, holdout, buffer_size: values of `data.split`, `data.holdout` and `packing.buffer_size`.
    - num_samples, num_tokens, num_bins, num_steps, bins_per_step, and max_tokens (capacity of a bin).
    - fill: tokens in the bins / capacity of the bins, without the last step, unless it is the only one.
    - efficiency: for each possible dp_size of at least 2, mean cost of a rank / cost of the slowest rank.
    - length_bias, length_bias_of_chance: see `EpochPlan.length_bias`. data_fingerprint: see `DataIdentity`.
    - cost: [a, b] in FLOPs. The forward pass of a bin costs a * sum(L) + b * sum(L^2) for sample lengths L.

    Each further line is one step, with the keys step, num_samples, num_tokens, fill, efficiency (mean cost of a bin / largest
    cost) and bins. A bin has `keys`, `indices` and `tokens` of its samples, and its `cost` / mean cost of all bins.

    Raises:
        WandsError: if the recipe or the data have problems, or the file cannot be written.
    """
    settings = options.recipe, None, options.overrides
    # The plan is equal for all numbers of ranks. Hashing the encoders takes longer than planning, so wands train compares them.
    run = load_run(
        *settings,
        world_size=0,
        device_type="cpu",
        encoders=lambda path: {},
        ignore_output_dir=True,
        plugin=load_plugins(options.imports),
    )
    header = _header(run, options.epoch)
    first = header["first_step"]
    mean_cost = header.pop("mean_cost")
    with atomic_path(options.out) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for step in range(first, first + header["num_steps"]):
            file.write(json.dumps(_step_line(run, step, mean_cost), ensure_ascii=False) + "\n")
    levels = ", ".join(f"{level:.3f} on {dp}" for dp, level in header["efficiency"].items())
    sources = describe_data(run.recipe.data, run.data)
    return "\n".join(
        [
            *(f"{'' if number else 'data':<11} {line}" for number, line in enumerate(sources)),
            f"epoch {header['epoch']}, seed {header['seed']}: {header['num_samples']} samples, {header['num_tokens']} tokens",
            f"bins        {header['num_bins']} of at most {header['max_tokens']} tokens, fill {header['fill']:.3f}",
            f"steps       {header['num_steps']} of {header['bins_per_step']} bins; the epoch starts at step {first}",
            f"efficiency  mean cost / cost of the slowest rank, by dp_size: {levels or '1 on one rank'}",
            f"bias        Kolmogorov-Smirnov distance between the lengths in a step and in the data {header['length_bias']:.3f}, "
            f"for random steps {header['length_bias_of_chance']:.3f}",
            f"written     {options.out}",
        ]
    )


def _header(run: PreparedRun, epoch: int) -> dict[str, Any]:
    sampler = run.schedule.sampler
    shape = run.model.shape
    plan = sampler.epoch_plan(epoch)
    bins = [bin for step in plan.steps for bin in step if bin]
    dp_sizes = [dp for dp in range(2, sampler.bins_per_step + 1) if sampler.bins_per_step % dp == 0]
    bias, of_chance = plan.length_bias()
    return {
        "format": FORMAT,
        "seed": sampler.seed,
        "epoch": epoch,
        "first_step": sampler.first_step(epoch),
        "sources": list_sources(run.recipe.data, run.data),
        "split": run.recipe.data.split,
        "holdout": run.recipe.data.holdout,
        "num_samples": plan.totals[0],
        "num_tokens": plan.totals[1],
        "num_bins": len(bins),
        "num_steps": plan.num_steps,
        "bins_per_step": sampler.bins_per_step,
        "max_tokens": sampler.max_tokens,
        "buffer_size": run.recipe.packing.buffer_size,
        "fill": plan.fill,
        "efficiency": {str(dp): 1.0 / imbalance(plan.steps, dp, sampler.bin_cost) for dp in dp_sizes},
        "length_bias": bias,
        "length_bias_of_chance": of_chance,
        "cost": [shape.linear_flops_per_token(), shape.attention_flops_per_squared_token()],
        "data_fingerprint": run.identity.fingerprint,
        "mean_cost": sum(map(sampler.bin_cost, bins)) / len(bins),
    }


def _step_line(run: PreparedRun, step: int, mean_cost: float) -> dict[str, Any]:
    sampler = run.schedule.sampler
    plan = sampler.step_plan(step)
    costs = [sampler.bin_cost(bin) / mean_cost for bin in plan.bins]
    return {
        "step": step,
        "num_samples": plan.num_samples,
        "num_tokens": plan.num_tokens,
        "fill": round(plan.num_tokens / (sampler.max_tokens * max(1, sum(map(bool, plan.bins)))), 4),
        "efficiency": round(sum(costs) / len(costs) / (max(costs) or 1), 4),
        "bins": [
            {
                "keys": [sampler.keys[i] for i in bin],
                "indices": list(bin),
                "tokens": [int(sampler.seq_lens[i]) for i in bin],
                "cost": round(cost, 4),
            }
            for bin, cost in zip(plan.bins, costs, strict=True)
        ],
    }
