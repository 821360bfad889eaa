"""Set up a training process: its engines with the state of the checkpoint, and the ordered list of its jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from wands.checkpoint.ema import build_averages
from wands.checkpoint.resume import restore, restore_objective
from wands.checkpoint.save import BackgroundPush, CheckpointSaver
from wands.distributed.bootstrap import accelerator_type, ranks_per_node
from wands.distributed.dims import ProcessGroups
from wands.engine.attention_choice import Choice
from wands.engine.engine import build_engine, build_model
from wands.model.offload import ActivationOffloader
from wands.run.append_log import EventLog
from wands.run.trackers import Trackers
from wands.texts import Log
from wands.train.checkpoint_job import Checkpoints, Pushes, RankComparison
from wands.train.evaluation import Evaluator
from wands.train.jobs import Job
from wands.train.metrics import StepLog
from wands.train.prepared_run import PreparedRun
from wands.train.samples import RunSamples
from wands.train.summary import describe_lr_change
from wands.train.training import Training
from wands.watch.bad_steps import BadSteps
from wands.watch.watchdog import Watchdog


def build_training(
    run: PreparedRun, groups: ProcessGroups, device: torch.device, choice: Choice, log: Log
) -> Training:
    """Build the engine of each trained DiT, and restore the checkpoint that the run resumes from."""
    rank = groups.dims.rank
    events = EventLog(output_dir=run.output_dir, rank=rank, step=run.start_step, facts=_facts(run))
    store = ActivationOffloader(device)  # experts run one after the other and share this host memory
    build = run.plugin.model or build_model
    engines = {}
    for expert in run.model.experts:
        model = build(
            run.recipe,
            run.ds_config,
            expert,
            groups=groups,
            device=device,
            backend=choice[0],
            store=store,
            resumes=run.checkpoint is not None,
            config=run.model.config,
        )
        engines[expert.subfolder] = build_engine(
            model,
            run.ds_config,
            run.recipe,
            run.schedule.total_steps,
            groups=groups,
            optimizer=run.plugin.optimizer,
            schedule=run.plugin.schedule,
        )
    if run.checkpoint:
        planned_lr = restore(run.checkpoint, run.output_dir, engines, rank, log)
        lr = float(next(iter(engines.values())).optimizer.param_groups[0]["lr"])
        if rank == 0 and planned_lr is not None and (change := describe_lr_change(run, planned_lr, lr)):
            log(change)
        restore_objective(run.checkpoint, run.objective)
    return Training(
        recipe=run.recipe,
        variant=run.model.variant,
        output_dir=run.output_dir,
        start_step=run.start_step,
        total_steps=run.schedule.total_steps,
        rank=rank,
        device=device,
        groups=groups,
        engines=engines,
        averages=build_averages(run.recipe.ema, run.checkpoint, engines, log),
        events=events,
        trackers=Trackers(run.recipe, rank, run.start_step + 1 if run.checkpoint else 0),
        log=log,
    )


def _facts(run: PreparedRun) -> dict[str, Any]:
    """Return what the first event of a process says about the run."""
    return {
        "world_size": run.world_size,
        "num_nodes": run.world_size // ranks_per_node(),
        "checkpoint": run.checkpoint and run.checkpoint.folder.name,
        "device": accelerator_type(),
        "variant": run.model.variant.name,
        "total_steps": run.schedule.total_steps,
        "data": {
            "num_samples": len(run.data.keys),
            "num_tokens": int(run.schedule.num_tokens.sum()),
        },
        "changed": "; ".join(run.changes()) or None,
    }


def build_jobs(
    run: PreparedRun,
    training: Training,
    *,
    saver: CheckpointSaver,
    bad_steps: BadSteps,
    attention: dict[str, str] | None,
    encoded_samples: dict[str, Any],
    watchdog: Watchdog,
) -> list[Job]:
    """Return the jobs of a run in the order in which they run after a step.

    1. The log, so that a step is logged even if a later job fails.
    2. The evaluation, which decides whether the step is the best so far, and whether the run ends.
    3. The comparison of the ranks, so that no checkpoint contains the weights of ranks that differ.
    4. The checkpoint.
    5. The samples, after the checkpoint, so that the step is safe if they fail.
    6. The push, which needs the files of the checkpoint.
    7. Outside jobs, which see what all others have decided.
    """
    past_losses = run.checkpoint.state.loss if run.checkpoint else []
    step_log = StepLog(training=training, model=run.model, schedule=run.schedule, past_losses=past_losses)
    checkpoints = Checkpoints(
        saver,
        replace(run.state, attention=attention),
        bad_steps=bad_steps.state,
        history=step_log.history,
        keep_best=run.recipe.checkpoint.keep_best,
        watchdog=watchdog,
    )
    push = BackgroundPush(
        config=run.recipe.hub,
        output_dir=run.output_dir,
        total_steps=run.schedule.total_steps,
        events=training.events,
        log=training.log,
    )
    jobs: list[Job] = [step_log]
    if run.recipe.eval:
        jobs.append(Evaluator(run=run, training=training, step_log=step_log, watchdog=watchdog))
    jobs.append(RankComparison(training, checkpoints))
    jobs.append(checkpoints)
    if run.samples:
        jobs.append(
            RunSamples(training=training, requests=run.samples, tensors=encoded_samples, watchdog=watchdog)
        )
    jobs.append(Pushes(training=training, push=push, saved=lambda: saver.saved, watchdog=watchdog))
    jobs += run.plugin.jobs
    return jobs
