"""The command `wands train`: check the recipe, the model, the data and the memory, print a summary of the run, and train."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from wands.checkpoint.step_folders import finish_publish
from wands.commands.plan import find_model
from wands.config.deepspeed import load_ds_config
from wands.config.options import TrainOptions
from wands.config.recipe import FlowConfig
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import accelerator_type, init_process_group, ranks_per_node, start_together
from wands.engine.engine import check_offload
from wands.errors import ConfigError
from wands.files import write_text
from wands.flow.rng import philox
from wands.flow.sigmas import BASE_TOKENS, NUM_TRAIN_TIMESTEPS, sample_sigma
from wands.lock import LOCK_NAME, WriterLock
from wands.planning.search import SHIPPED, Task, check_memory, machine_here
from wands.run.terminal import Terminal
from wands.texts import Log
from wands.train.prepare import check_hashes, load_run
from wands.train.prepared_run import PreparedRun
from wands.train.summary import start_block
from wands.variants import VARIANTS
from wands.watch.launcher import Ancestor
from wands.watch.watchdog import REQUESTS, Watchdog

BAR_WIDTH, NUM_BARS = 50, 20
"""Width of the longest bar of a histogram in characters, and number of bars."""
NUM_SAMPLES = 20_000
"""Number of random timesteps in a histogram. The standard error of a bar is then below 0.4 % of all samples."""


def run_train(options: TrainOptions, log: Log, launcher: Sequence[Ancestor] = ()) -> None:
    """Check a recipe and its data, and train the model that the recipe names.

    With `options.dry_run`, only check the recipe and print the summary of the run. With `options.show_timesteps`, only print
    histograms of the sampled timesteps.

    Args:
        options: options of the command.
        log: function that prints a text for the user. This command calls the function only on rank 0.
        launcher: processes from the parent of this process up to its launcher, such as torchrun. If one of these
            processes ends, the run stops.

    Raises:
        WandsError: if the run cannot start or fails. One message lists all problems with recipe, model and data.
    """
    rank = int(os.environ.get("RANK", "0"))
    more = [] if options.plan is None else [f"packing.plan={options.plan}"]
    overrides = (*_mock_overrides(options.mock), *options.overrides, *more)
    options = options.model_copy(update={"overrides": overrides})
    log = terminal = Terminal(log if rank == 0 else None)
    with closing(terminal), Watchdog(launcher, terminal.heartbeat) as watchdog, ExitStack() as stack:
        if options.show_timesteps:
            return _show_timesteps(options, log)
        run = _load_run(options, rank, log, stack)
        with start_together():
            # start_block queries the accelerator of the calling rank; rank 0 uses that accelerator.
            if rank == 0:
                log(start_block(run))
            _check_memory(run, options, log)
            if not options.dry_run:
                check_offload(run.ds_config)
                if rank == 0:
                    write_text(run.output_dir / "recipe.yaml", run.recipe.to_yaml())
                    write_text(run.output_dir / "deepspeed.json", json.dumps(run.ds_config, indent=2))
        if options.dry_run:
            if not run.model.has_files:
                log(
                    f"not checked, because {run.recipe.model.path} is not downloaded: the files of the model, and whether this "
                    "model's encoders made the cache. wands train without --dry-run downloads and checks the files."
                )
            return

        from wands.train.loop import train

        rank, _, device = init_process_group()
        if saved := train(run, rank, device, log, watchdog):
            log(f"done: {saved}")


def _mock_overrides(name: str | None) -> tuple[str, ...]:
    """Return the recipe overrides for `wands train --mock NAME`: a published model with random weights, and random
    clips of its official size. Return () for None.
    """
    if name is None:
        return ()
    if name not in VARIANTS:
        raise ConfigError(f"--mock {name} is not a published model; use one of {', '.join(VARIANTS)}.")
    variant, official = VARIANTS[name], VARIANTS[name].sampling
    size = official.num_frames, official.height, official.width
    mock = f"data={{mock: {{num_samples: 1000, shapes: [{list(variant.latent_size(*size))}]}}}}"
    return f"model.path={name}", "model.init=random", mock, f"packing.max_tokens={variant.num_tokens(*size)}"


def _load_run(options: TrainOptions, rank: int, log: Log, stack: ExitStack) -> PreparedRun:
    """Check the recipe, the model and the data, and return the run. If the checkpoint to resume from is damaged,
    repeat the checks with an older checkpoint.

    Unless this is a dry run, rank 0 locks the run folder until `stack` is closed.
    """
    claim = partial(_claim, stack=stack, log=log) if rank == 0 and not options.dry_run else None
    load = partial(load_run, options.recipe, options.deepspeed, options.overrides, resume=options.resume)
    damaged: dict[Path, str] = {}
    while True:
        with start_together():
            run = load(is_dry_run=options.dry_run, claim=None if damaged else claim, damaged=damaged)
        damage = check_hashes(run, rank)
        if damage is None:
            return run
        assert run.checkpoint is not None
        damaged[run.checkpoint.folder] = damage


def _claim(output_dir: Path, stack: ExitStack, log: Log) -> None:
    """Lock a run folder until `stack` is closed. Finish a save that a kill interrupted, and delete the temporary files that an
    earlier run left in the folder. Also delete files by which the user sent requests to an earlier run, such as the file "save".
    """
    stack.enter_context(WriterLock(output_dir / LOCK_NAME, f"output_dir={output_dir}"))
    for request in (output_dir / name for name in REQUESTS):
        if request.exists():
            request.unlink()
            log(f"deleted {request}, a request to an earlier run")
    for leftover in chain(output_dir.glob(".*.tmp*"), output_dir.glob("checkpoints/.*.tmp*")):
        leftover.unlink()
    finish_publish(output_dir / "checkpoints")


def _check_memory(run: PreparedRun, options: TrainOptions, log: Log) -> None:
    """Raise a ConfigError if the run needs more memory than this rank's machine has.

    With --force or --dry-run, log the problem and raise no error.
    """
    device_type, name = accelerator_type(), str(options.deepspeed or "zero2")
    machine = machine_here(device_type, ranks_per_node())
    ds_configs = {key: load_ds_config(key) for key in SHIPPED} | {name: load_ds_config(options.deepspeed)}
    problem = check_memory(
        Task(run.workload(device_type), run.schedule.num_tokens, machine, ds_configs), name
    )
    if problem and not (options.force or options.dry_run):
        raise ConfigError(f"{problem}. Run wands plan to find what fits, or add --force to start anyway.")
    if problem:
        log(f"memory may not be enough: {problem}")


def _show_timesteps(options: TrainOptions, log: Log) -> None:
    """Log a histogram of the sampled timesteps for each expert (DiT for a range of noise levels) that the recipe trains.

    If the recipe has no `model.path`, log one histogram over all noise levels.
    """
    recipe = load_recipe(options.recipe, options.overrides)
    experts = find_model(recipe)[2] if recipe.model.path else ()
    for expert in experts or (None,):
        if expert and expert.name:
            log(f"{expert.name}-noise expert ({expert.subfolder})")
        sigma_range = expert.sigma_range if expert else recipe.flow.sigma_range
        log(timestep_histogram(recipe.flow, recipe.train.seed, sigma_range))


def timestep_histogram(flow: FlowConfig, seed: int, sigma_range: tuple[float, float] = (0.0, 1.0)) -> str:
    """Return a text histogram of random timesteps. The timesteps are sampled and shifted as in training.

    Args:
        flow: `flow` section of a recipe.
        seed: random seed.
        sigma_range: (lowest, highest) noise level of the trained expert (DiT for high or low noise).

    Returns:
        ASCII lines: a heading, one line per bar from high noise to low noise, and a line with the mean and the
        quantiles.
    """
    generator = philox(seed, "histogram")
    sigmas = [sample_sigma(generator, flow, *sigma_range) for _ in range(NUM_SAMPLES)]
    timesteps = np.array(sigmas) * NUM_TRAIN_TIMESTEPS
    counts, edges = np.histogram(timesteps, bins=NUM_BARS, range=(0, NUM_TRAIN_TIMESTEPS))
    heights = np.round(BAR_WIDTH * counts / counts.max()).astype(int)
    rows = zip(edges, edges[1:], counts / NUM_SAMPLES, heights, strict=False)
    bars = [f"{low:6.0f} - {high:4.0f}  {share:6.1%}  {'#' * height}" for low, high, share, height in rows]
    quantiles = ", ".join(f"{q}% {np.percentile(timesteps, q):.0f}" for q in (5, 25, 50, 75, 95))
    summary = f"mean {timesteps.mean():.0f}; {quantiles}"
    return "\n".join([_heading(flow), "  timestep     share", *reversed(bars), summary])


def _heading(flow: FlowConfig) -> str:
    details = {"logit_normal": f"({flow.logit_mean:g}, {flow.logit_std:g})", "mode": f"({flow.mode_scale:g})"}
    sampling = flow.timestep_sampling + details.get(flow.timestep_sampling, "")
    mixture = f", {flow.mix_uniform:.0%} uniform unshifted" if flow.mix_uniform else ""
    by_size = f", for a clip of {BASE_TOKENS:,} tokens" * flow.shift_by_size
    return f"{flow.preset}: {sampling}, flow_shift {flow.flow_shift:g}{mixture}{by_size}"
