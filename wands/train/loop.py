"""The training loop: run the optimizer steps, sum their numbers over the ranks, and let the jobs act after each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from wands.checkpoint.save import CheckpointSaver
from wands.data.sampler import StepPlan
from wands.distributed.bootstrap import gather_objects, group_timeout
from wands.distributed.consistency import check_agreement
from wands.distributed.dims import ProcessGroups
from wands.engine.attention_choice import agree_on_backend
from wands.engine.engine import release_engine
from wands.report.page import write_report
from wands.run.step_result import StepResult
from wands.texts import Log
from wands.train.batches import MicroBatch
from wands.train.jobs import FinishedStep, Job
from wands.train.metrics import memory_peaks, sigma_sums
from wands.train.prepared_run import PreparedRun
from wands.train.profiler import memory_snapshots, profiled_steps
from wands.train.reduction import StepSums, sum_over_ranks
from wands.train.samples import encode_samples
from wands.train.set_up import build_jobs, build_training
from wands.train.step import train_step
from wands.train.training import Training
from wands.watch.bad_steps import BadSteps
from wands.watch.rank_checks import FIXES
from wands.watch.stragglers import ComputeTimes
from wands.watch.watchdog import Watchdog, take_requests

T = TypeVar("T")


def train(run: PreparedRun, rank: int, device: torch.device, log: Log, watchdog: Watchdog) -> Path | None:
    """Train to the end of the run or until a request to stop. Return the folder of the newest checkpoint, or None.

    The process group must exist, and the watchdog's thread must run.
    """
    watchdog.saved = run.checkpoint and run.checkpoint.folder
    watchdog.watch_run(run.output_dir, run.recipe.train.step_timeout, group_timeout().total_seconds())
    check_agreement(run.digests(), device, FIXES)  # ranks that differ would hang
    groups = ProcessGroups.build(run.grid(rank), device)
    choice = agree_on_backend(
        run.recipe,
        run.model.shape,
        run.degrees.ulysses,
        run.checkpoint.state.attention if run.checkpoint else None,
        rank=rank,
        device=device,
        log=log,
    )
    # Before the engines take the memory of the device.
    encoded = encode_samples(
        run.samples, run.recipe.model.path, run.output_dir, run.model.variant, rank=rank, device=device
    )
    watchdog.begin_work("building the model and its engine")
    training = build_training(run, groups, device, choice, log)
    try:
        bad_steps = BadSteps(
            config=run.recipe.train,
            excluded=run.recipe.data.exclude,
            experts=run.model.experts,
            saved=run.checkpoint.state.bad_steps if run.checkpoint else None,
            events=training.events,
        )
        saver = CheckpointSaver(
            config=run.recipe.checkpoint,
            output_dir=run.output_dir,
            engines=training.engines,
            averages=training.averages,
            objective=run.objective,
            data=run.data,
            resumed=run.checkpoint,
            log=log,
        )
        jobs = build_jobs(
            run,
            training,
            saver=saver,
            bad_steps=bad_steps,
            attention=choice[1],
            encoded_samples=encoded,
            watchdog=watchdog,
        )
        last_step = run_steps(run, training, jobs, bad_steps, saver, watchdog)
        _raise_failure(training, last_step, watchdog)
    finally:
        for engine in training.engines.values():
            release_engine(engine)
    training.events.write("end" if last_step == training.total_steps else "stop")
    training.events.close()
    training.trackers.close()
    if rank == 0:
        write_report(run.output_dir)
    return saver.saved


def run_steps(
    run: PreparedRun,
    training: Training,
    jobs: Sequence[Job],
    bad_steps: BadSteps,
    saver: CheckpointSaver,
    watchdog: Watchdog,
) -> int:
    """Run the steps of this process, and the jobs between them. Return the number of the last step."""
    step = run.start_step
    models = [engine.module for engine in training.engines.values()]
    compute_times = ComputeTimes(
        models=models, device=training.device, events=training.events, log=training.log
    )
    reader = run.reader(training.groups.dims)
    pins = training.device.type == "cuda"
    batches = reader.prefetched(step, run.recipe.data.prefetch, pins, on_failure=watchdog.stop_for)
    with training.events, ExitStack() as stack, memory_snapshots(training):
        stack.callback(batches.close)
        for job in jobs:
            stack.callback(job.close)
            job.start(training)
        if any(gather_objects(watchdog.failure is not None)):
            # Nothing to save yet, and the evaluation before the first step may have been left out.
            return step
        watchdog.begin_work("the first step")
        started = time.perf_counter()
        for (plan, of_models), data_wait in profiled_steps(training, _timed(batches), step):
            step = plan.step + 1
            training.events.step = step
            count = run.schedule.count(plan)
            lr = float(next(iter(training.engines.values())).optimizer.param_groups[0]["lr"])
            results = _train_dits(run, training, plan, of_models, bad_steps.judges(plan, count))
            run.objective.after_step(training.engines)
            sums = _sum_step(training, results, count, data_wait, saver, watchdog)
            for expert, loss, result in zip(run.model.experts, sums.losses, results, strict=True):
                bad_steps.check(plan, count, expert, loss, result)
                if training.averages and not result.skipped:
                    training.averages[expert.subfolder].update()
            now = time.perf_counter()
            seconds = now - started
            started = now
            watchdog.end_step(step, seconds)
            finished = FinishedStep(
                plan=plan,
                results=results,
                sums=sums,
                lr=lr,
                seconds=seconds,
                own_seconds=compute_times.end_step(step),
                is_first=plan.step == training.start_step,
                is_last=step == training.total_steps,
            )
            started = _run_jobs(jobs, finished, started)
            if finished.stops:
                if not finished.is_last and not finished.ends_early and watchdog.failure is None:
                    training.log(f"stopped after step {step} as requested; use --resume to continue the run")
                break
            watchdog.begin_step(step + 1)
        watchdog.begin_work("the end of the run", float("inf"))  # an upload may take longer than a step
    return step


def _train_dits(
    run: PreparedRun,
    training: Training,
    plan: StepPlan,
    batches: Sequence[Sequence[MicroBatch]],
    judges: Sequence[Callable[[torch.Tensor, float], bool] | None],
) -> list[StepResult]:
    """Run the optimizer step of each trained DiT, one after the other."""
    blocks_every = run.recipe.logging.blocks_every
    return [
        train_step(
            engine,
            own_batches,
            run.objective,
            groups=training.groups,
            device=training.device,
            denominator=run.schedule.denominator(plan),
            is_bad=is_bad,
            measures_blocks=bool(blocks_every and (plan.step + 1) % blocks_every == 0),
        )
        for engine, own_batches, is_bad in zip(training.engines.values(), batches, judges, strict=True)
    ]


def _run_jobs(jobs: Sequence[Job], finished: FinishedStep, started: float) -> float:
    """Run the jobs that are due. Return the start of the next step's time: `started`, or the end of the last pause."""
    for job in jobs:
        if job.is_due(finished):
            job.run(finished)
            if not job.belongs_to_step:
                started = time.perf_counter()
    return started


def _raise_failure(training: Training, last_step: int, watchdog: Watchdog) -> None:
    """Raise the error for which a rank has stopped the run, on all ranks. A finished run only logs it."""
    failure = watchdog.failure
    failures = gather_objects((type(failure), str(failure)) if failure else None)
    for error_class, text in filter(None, failures):
        if last_step == training.total_steps:
            training.log(f"{text} The run is complete otherwise.")
            return
        training.events.write("error", reason=text)
        raise error_class(text, agreed=True) from failure


def _sum_step(
    training: Training,
    results: Sequence[StepResult],
    count: float,
    data_wait: float,
    saver: CheckpointSaver,
    watchdog: Watchdog,
) -> StepSums:
    requests = take_requests(training.output_dir) if training.rank == 0 else set()
    quits = watchdog.stop_requested or "save_quit" in requests
    device_peak, host_peak = memory_peaks(training.device)
    return sum_over_ranks(
        [result.loss / count for result in results],
        sigma_sums(results, training.groups.dims),
        {
            "data_wait": data_wait,
            "device_peak": device_peak,
            "host_peak": host_peak,
            "is_writing": saver.is_writing,
            "save": quits or "save" in requests or (training.rank == 0 and saver.minutes_passed),
            "quit": quits,
            "check": "check" in requests,
        },
        rank=training.rank,
        world_size=training.groups.dims.world_size,
    )


def _timed(batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """Yield each batch with the seconds that the loop waited for it."""
    requested = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - requested
        requested = time.perf_counter()
