"""The public way to a training run: everything that goes in, then a plan, then the training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from wands.checkpoint.step_folders import finish_publish
from wands.conditions.condition import Condition
from wands.config.deepspeed import load_ds_config
from wands.config.recipe import Recipe
from wands.distributed.bootstrap import (
    accelerator_type,
    gather_objects,
    init_process_group,
    ranks_per_node,
    start_together,
)
from wands.engine.engine import check_offload
from wands.errors import ConfigError, WandsError
from wands.files import delete_leftovers, write_text
from wands.lock import LOCK_NAME, WriterLock
from wands.objectives.objective import Objective
from wands.planning.search import SHIPPED, Task, check_memory, machine_here, settle_swapping
from wands.plugin import Plugin
from wands.run.terminal import Terminal
from wands.texts import Log
from wands.train.jobs import Job
from wands.train.loop import train
from wands.train.prepare import check_hashes, load_run
from wands.train.prepared_run import PreparedRun
from wands.train.summary import start_block
from wands.watch.launcher import Ancestor
from wands.watch.watchdog import Watchdog, take_requests


class Trainer:
    """Training of a DiT on the data of a recipe, in one process or under a launcher such as torchrun or deepspeed.

    Everything that changes the run is an argument, because the plan of the bins, the denominator of the loss, the cache and a
    resume depend on it. `wands train` calls this class.

    Args:
        recipe: result of `load_recipe`, or a YAML file, or the name of a shipped recipe. None uses the defaults of all keys.
        overrides: texts such as "train.max_steps=200", applied to a recipe that is given by name or file.
        deepspeed: DeepSpeed JSON, or the name of a shipped config, such as "zero3". None sets only ZeRO-2.
        resume: None for a new run, "auto" for the newest checkpoint of the run folder, or the path of a checkpoint or run.
        objective: computes the loss. None is `FlowMatching`.
        conditions: inputs of the model in addition to those of its variant.
        model: function with the arguments and the result of `build_model`, which it may call.
        optimizer: function of (named trained parameters, learning rate) that returns a torch optimizer.
        schedule: function of (`optim` section of the recipe, number of steps) that returns a function from a number of finished
            steps to the factor of the learning rate.
        jobs: jobs that run after those of wands, in this order.
        plugin: further outside code, for example the result of `load_plugins`.
        force: whether to start although the memory may not be enough.
        log: function that prints a text for the user. It is called on rank 0.
        launcher: processes from the parent of this process up to its launcher. If one of them ends, the run stops.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path | None = None,
        overrides: Sequence[str] = (),
        *,
        deepspeed: str | Path | None = None,
        resume: str | Path | None = None,
        objective: Objective | None = None,
        conditions: Sequence[Condition] = (),
        model: Callable[..., Any] | None = None,
        optimizer: Callable[..., Any] | None = None,
        schedule: Callable[..., Any] | None = None,
        jobs: Sequence[Job] = (),
        plugin: Plugin | None = None,
        force: bool = False,
        log: Log = print,
        launcher: Sequence[Ancestor] = (),
    ) -> None:
        if isinstance(recipe, Recipe) and overrides:
            raise ConfigError(
                "overrides apply to a recipe that is given by name or file; pass them to wands.load_recipe instead."
            )
        own = Plugin(
            objective=objective,
            conditions=tuple(conditions),
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            jobs=tuple(jobs),
        )
        self._plugin = own.joined(plugin) if plugin else own
        self._recipe = recipe
        self._overrides = overrides
        self._deepspeed = deepspeed
        self._resume = None if resume is None else str(resume)
        self._force = force
        self._log = log
        self._launcher = launcher
        self._rank = int(os.environ.get("RANK", "0"))

    def plan(self) -> str:
        """Check the recipe, the model, the data and the memory, and return the description of the run. Nothing is written.

        Raises:
            WandsError: with all problems of the recipe, the model and the data.
        """
        run = self._settle(self._load(is_dry_run=True))
        problem = check_memory(*self._task(run))
        lines = [start_block(run)]
        if problem:
            lines.append(f"memory may not be enough: {problem}")
        if not run.model.has_files:
            lines.append(
                f"not checked, because {run.recipe.model.path} is not downloaded: the files of the model, and whether this "
                "model's encoders made the cache. The training downloads and checks the files."
            )
        return "\n".join(lines)

    def train(self) -> Path | None:
        """Train to the end of the run or until a request to stop. Return the folder of the newest checkpoint, or None.

        Raises:
            WandsError: if the run cannot start or fails.
        """
        terminal = Terminal(self._log if self._rank == 0 else None)
        with (
            closing(terminal),
            Watchdog(self._launcher, terminal.heartbeat) as watchdog,
            ExitStack() as stack,
        ):
            claim = partial(_claim, stack=stack, log=terminal, watchdog=watchdog, force=self._force)
            run = self._load(is_dry_run=False, claim=claim if self._rank == 0 else None)
            recipe = run.recipe
            run = self._settle(run)
            with start_together():
                # start_block queries the accelerator of the calling rank; rank 0 uses that accelerator.
                if self._rank == 0:
                    terminal(start_block(run))
                problem = check_memory(*self._task(run))
                if problem and not self._force:
                    raise ConfigError(
                        f"{problem}. Run wands plan to find what fits, or add --force to start anyway."
                    )
                if problem:
                    terminal(f"memory may not be enough: {problem}")
                check_offload(run.ds_config)
                if self._rank == 0:
                    write_text(run.output_dir / "recipe.yaml", recipe.to_yaml())
                    write_text(run.output_dir / "deepspeed.json", json.dumps(run.ds_config, indent=2))
            rank, _, device = init_process_group()
            saved = train(run, rank, device, terminal, watchdog)
            if saved:
                terminal(f"done: {saved}")
            return saved

    def _load(self, is_dry_run: bool, claim: Callable[[Path], None] | None = None) -> PreparedRun:
        """Prepare the run, from an older checkpoint if the newest is damaged. `claim` locks the run folder once."""
        damaged: dict[Path, str] = {}
        while True:
            with start_together():
                run = load_run(
                    self._recipe,
                    self._deepspeed,
                    self._overrides,
                    resume=self._resume,
                    claim=None if damaged else claim,
                    damaged=damaged,
                    is_dry_run=is_dry_run,
                    plugin=self._plugin,
                )
            damage = check_hashes(run, self._rank)
            if damage is None:
                return run
            assert run.checkpoint is not None
            damaged[run.checkpoint.folder] = damage

    def _settle(self, run: PreparedRun) -> PreparedRun:
        """Replace `model.swap_blocks: auto` by a number, which is equal on all ranks. Every rank must call this method."""
        model = run.recipe.model
        if model.swap_blocks != "auto":
            return run
        number = max(gather_objects(settle_swapping(*self._task(run))))
        settled = run.recipe.model_copy(update={"model": model.model_copy(update={"swap_blocks": number})})
        return replace(run, recipe=settled)

    def _task(self, run: PreparedRun) -> tuple[Task, str]:
        """Return the planner's task for this rank's machine, and the name of its DeepSpeed JSON."""
        name = str(self._deepspeed or "zero2")
        ds_configs = {key: load_ds_config(key) for key in SHIPPED} | {name: load_ds_config(self._deepspeed)}
        workload = run.workload(accelerator_type())
        machine = machine_here(workload.device_type, ranks_per_node())
        task = Task(
            workload=workload, seq_lens=run.schedule.num_tokens, machine=machine, ds_configs=ds_configs
        )
        return task, name


def _claim(output_dir: Path, stack: ExitStack, log: Log, watchdog: Watchdog, *, force: bool) -> None:
    """Lock a run folder until `stack` closes. Delete requests and temporary files of an earlier run; finish its save."""
    lock = WriterLock(output_dir / LOCK_NAME, f"output_dir={output_dir}", force=force)
    lock.on_lost = lambda message: watchdog.request_stop(message.rstrip("."), WandsError.exit_code)
    stack.enter_context(lock)
    for name in sorted(take_requests(output_dir)):
        log(f"deleted {output_dir / name}, a request to an earlier run")
    for folder in (output_dir, output_dir / "checkpoints"):
        delete_leftovers(folder)
    finish_publish(output_dir / "checkpoints")
