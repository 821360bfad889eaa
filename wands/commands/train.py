"""`wands train`: check everything, print what will happen, then run it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wands.config.deepspeed import load_ds_config
from wands.config.recipe import Recipe, load_recipe
from wands.distributed.bootstrap import accelerator_type, init_process_group, ranks_per_node, start_together
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.errors import ConfigError
from wands.files import write_text
from wands.planning.search import SHIPPED, Task, check_memory, machine_here
from wands.train.checkpoint import find_checkpoint, list_steps
from wands.train.engine import check_offload
from wands.train.run import Log, TrainingRun, prepare_run, read_model
from wands.train.state import TrainState
from wands.train.summary import start_block


def run_train(
    recipe_path: str | None,
    *,
    deepspeed: Path | None,
    overrides: Sequence[str],
    resume: str | None,
    dry_run: bool,
    show_timesteps: bool,
    log: Log,
    force: bool = False,
) -> None:
    """Train as the recipe says.

    Args:
        recipe_path: YAML file or name of a shipped recipe; None takes the defaults and the overrides.
        deepspeed: DeepSpeed JSON; None is ZeRO-2.
        overrides: ``section.key=value`` each.
        resume: "auto" for the newest checkpoint of the run folder (a new run when there is none), or a path.
        dry_run: print the start block and stop.
        show_timesteps: print the histogram of sampled timesteps and stop.
        log: prints a text for the user; called on rank 0 only.
        force: start although the memory is not expected to be enough.

    Raises:
        WandsError: before the process group forms wherever that is possible.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    log = log if rank == 0 else lambda text: None
    if show_timesteps:
        _show_timesteps(load_recipe(recipe_path, overrides), log)
        return
    names = (str(deepspeed or "the built-in DeepSpeed config"), str(recipe_path or "the recipe"))
    with start_together():
        recipe, ds_user = load_recipe(recipe_path, overrides), load_ds_config(deepspeed)
        run = prepare_run(
            recipe,
            ds_user,
            world_size=world_size,
            device_type=accelerator_type(),
            names=names,
            # Hashing a UMT5 takes seconds: one rank does it for all.
            encoders=fingerprint_pipeline if rank == 0 else lambda path: {},
            ranks_per_node=ranks_per_node(),
            fresh=resume is None or (resume == "auto" and not _has_checkpoints(Path(recipe.output_dir))),
        )
        found = _resume_from(run, resume)
        if rank == 0:  # it asks what the accelerator can do: only rank 0 sits on the one that it asks
            log(start_block(run, found[1].step if found else 0))
        _check_memory(run, str(deepspeed or "zero2"), ds_user, log, force=force or dry_run)
        if not dry_run:
            check_offload(run.ds_config)
            if rank == 0:
                _write_run_files(run)
    if dry_run:
        return

    from wands.train.loop import train

    rank, _, device = init_process_group()
    last = train(run, found, rank, device, log)
    log(f"done: {last}")


def _check_memory(
    run: TrainingRun, ds_name: str, ds_user: Mapping[str, Any], log: Log, *, force: bool
) -> None:
    """Refuse a run for which this rank's machine has no room; with `force` only say so."""
    device_type = accelerator_type()
    load = run.load(device_type)
    task = Task(
        run.shape,
        run.weights,
        len(run.experts),
        run.recipe,
        run.seq_lens,
        machine_here(device_type, ranks_per_node()),
        run.world_size,
        {ds_name: ds_user, **{name: load_ds_config(name) for name in SHIPPED if name != ds_name}},
        device_type,
        load.text_len,
    )
    problem = check_memory(task, load, ds_name, run.ds_config)
    if problem is None:
        return
    if not force:
        raise ConfigError(f"{problem}. --force starts all the same; wands plan shows what fits.")
    log(f"memory may not be enough: {problem}")


def _show_timesteps(recipe: Recipe, log: Log) -> None:
    """One histogram, or one for each expert of a model that has two."""
    from wands.commands.timestep_histogram import timestep_histogram

    experts = read_model(recipe)[2] if recipe.model.path else ()
    for expert in experts or (None,):
        if expert and expert.name:
            log(f"{expert.name}-noise expert ({expert.subfolder})")
        sigma_range = expert.sigma_range if expert else (0.0, 1.0)
        log(timestep_histogram(recipe.flow, recipe.train.seed, sigma_range=sigma_range))


def _has_checkpoints(output_dir: Path) -> bool:
    return bool(list_steps(output_dir / "checkpoints"))


def _resume_from(run: TrainingRun, resume: str | None) -> tuple[Path, TrainState] | None:
    folder, exists = run.output_dir / "checkpoints", _has_checkpoints(run.output_dir)
    if resume is None:
        if exists:
            raise ConfigError(
                f"output_dir={run.output_dir} holds checkpoints of an earlier run; add --resume to go on with it, or choose "
                "another output_dir."
            )
        return None
    if resume == "auto" and not exists:
        return None
    where = run.output_dir if resume == "auto" else Path(resume)
    if not where.exists():
        raise ConfigError(
            f"--resume {resume} does not exist; put --resume behind the recipe, or give a run or step folder."
        )
    checkpoint, state = find_checkpoint(where)
    if ".abandoned" in checkpoint.name:
        raise ConfigError(
            f"--resume {resume} was set aside when its run went on from an older step; rename it to "
            f"{checkpoint.name.partition('.')[0]} to go on from it, once the steps from there on are moved away."
        )
    if exists and checkpoint.parent.resolve() != folder.resolve():
        raise ConfigError(
            f"output_dir={run.output_dir} holds checkpoints of another run than --resume {checkpoint}; choose another output_dir."
        )
    state.check_resumable(
        where=str(checkpoint),
        world_size=run.world_size,
        zero_stage=run.zero_stage,
        recipe=run.recipe.model_dump(mode="json"),
        parts=[expert.subfolder for expert in run.experts],
        transformer_config=run.transformer_config,
        data_fingerprint=run.data_fingerprint(),
    )
    if state.step >= run.sampler.total_steps:
        raise ConfigError(
            f"--resume {checkpoint}: step {state.step} is the end of this run (train.max_steps or train.epochs gives "
            f"{run.sampler.total_steps} steps); raise train.max_steps to train on."
        )
    return checkpoint, state


def _write_run_files(run: TrainingRun) -> None:
    write_text(run.output_dir / "recipe.yaml", run.recipe.to_yaml())
    write_text(run.output_dir / "deepspeed.json", json.dumps(run.ds_config, indent=2))
