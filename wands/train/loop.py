"""Training loop: run the optimizer steps, write the metrics of each step, compare the ranks, and save checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from wands.attention.kernels.registry import Backend
from wands.checkpoint.ema import build_averages
from wands.checkpoint.resume import restore
from wands.checkpoint.save import BackgroundPush, CheckpointSaver, build_state
from wands.distributed.bootstrap import group_timeout
from wands.distributed.consistency import check_agreement
from wands.distributed.dims import ProcessGroups
from wands.model.offload import ActivationOffloader
from wands.report.page import write_report
from wands.run.append_log import EventLog
from wands.run.run import Log, TrainingRun
from wands.run.trackers import Trackers
from wands.train.attention_choice import agree_on_backend
from wands.train.batches import prefetched
from wands.train.engine import build_engine, build_model
from wands.train.evaluation import Evaluator, Verdict
from wands.train.metrics import StepLog, memory_peaks, sigma_sums, step_metrics
from wands.train.profiler import memory_snapshots, profiled_steps
from wands.train.samples import RunSamples, encode_samples
from wands.train.step import train_step
from wands.train.trainer import Trainer
from wands.transfer import to_device
from wands.watch.bad_steps import BadSteps
from wands.watch.rank_checks import FIXES, check_step, run_digests
from wands.watch.stragglers import ComputeTimes
from wands.watch.watchdog import ControlRequest, Watchdog, poll_requests

T = TypeVar("T")


def train(run: TrainingRun, rank: int, device: torch.device, log: Log, watchdog: Watchdog) -> Path | None:
    """Train to the end of the run, or until a request to stop arrives.

    Return the folder of the newest checkpoint; None if there is no checkpoint.

    Args:
        run: the checked training run.
        rank: rank of this process. The process group must exist.
        device: device of this process.
        log: function that prints a line for the user on rank 0.
        watchdog: watchdog of this process, whose thread already runs.
    """
    recipe, total_steps, checkpoint = run.recipe, run.sampler.total_steps, run.checkpoint
    start_step = checkpoint.state.step if checkpoint else 0
    watchdog.saved = checkpoint and checkpoint.folder
    watchdog.watch_run(run.output_dir, recipe.train.step_timeout, group_timeout().total_seconds())
    check_agreement(run_digests(run, start_step), device, FIXES)  # ranks that differ would hang
    groups = ProcessGroups.build(run.grid(rank), device)
    backend, attention = agree_on_backend(run, rank, device, log)
    encoded = encode_samples(run, rank, device)  # before the engines take the memory of the device
    watchdog.begin_work("building the model and its engine")
    trainer = _build_trainer(run, rank, device, groups, log, backend)
    engines, averages, events = trainer.engines, trainer.averages, trainer.events
    step_log, bad_steps = StepLog(trainer), BadSteps(run, events)
    saver, hub = CheckpointSaver(trainer), BackgroundPush(trainer)
    evaluator = Evaluator(trainer, step_log, watchdog) if recipe.eval else None
    samples = RunSamples(trainer, encoded, watchdog) if run.samples else None
    compute_times = ComputeTimes(trainer)

    batches = prefetched(run, groups.dims, start_step, pins=device.type == "cuda")
    with events, closing(saver), closing(batches), memory_snapshots(trainer):
        if evaluator and evaluator.is_missing(start_step):
            evaluator.evaluate(start_step)
        if samples and start_step == 0:
            samples.write(0)
        watchdog.begin_work("the first step")
        started = time.perf_counter()
        for (plan, of_experts), own_wait in profiled_steps(trainer, _timed(batches), start_step):
            lr = float(engines[run.experts[0].subfolder].optimizer.param_groups[0]["lr"])  # of this step
            step, shared = plan.step + 1, (run, groups, device, run.denominator(plan))
            events.step = step
            trained = zip(engines.values(), of_experts, bad_steps.judges(plan), strict=True)
            blocks_every = recipe.logging.blocks_every
            measures = bool(blocks_every and step % blocks_every == 0)
            results = [
                train_step(engine, data, *shared, is_bad, measures) for engine, data, is_bad in trained
            ]
            own_losses = torch.stack([result.loss for result in results]) / run.count(plan)
            own_request = poll_requests(run.output_dir, watchdog, rank)
            if rank == 0 and saver.minutes_passed:
                own_request = own_request._replace(save=True)
            numbers = (own_wait, float(saver.is_writing), *memory_peaks(device), *own_request)
            # A row for each rank, 0 in the rows of other ranks: one sum over the ranks also collects what needs a maximum.
            of_ranks = torch.zeros(run.world_size, len(numbers), dtype=torch.float64)
            of_ranks[rank] = torch.tensor(numbers, dtype=torch.float64)
            own_table = to_device(of_ranks, device).flatten()
            parts = (own_losses.double(), sigma_sums(results, groups.dims), own_table)
            sums = torch.cat(parts)
            dist.all_reduce(sums)
            losses, of_sigmas, table = (part.tolist() for part in sums.cpu().split([*map(len, parts)]))
            data_wait, is_writing, *rest = (max(table[i :: len(numbers)]) for i in range(len(numbers)))
            peaks, request = rest[:2], ControlRequest(*map(bool, rest[2:]))  # requests that any rank received
            for expert, loss, result in zip(run.experts, losses, results, strict=True):
                bad_steps.check(plan, expert, loss, result)
                if averages and not result.skipped:
                    averages[expert.subfolder].update(step)
            seconds, started = time.perf_counter() - started, time.perf_counter()
            watchdog.end_step(step, seconds)
            own_seconds = compute_times.end_step(step)
            measured = {"lr": lr, "seconds": seconds, "data_wait": data_wait, "own_seconds": own_seconds}
            row = step_metrics(trainer, plan, results, losses, of_sigmas, peaks, measured)
            step_log.write(row, results)

            verdict, evaluates = Verdict(), evaluator is not None and evaluator.is_due(step, request.quit)
            if evaluator and evaluates:
                verdict = evaluator.evaluate(step)
                request = request._replace(quit=request.quit or verdict.stops)
            is_best = verdict.is_best and recipe.checkpoint.keep_best
            is_last = request.quit or step == total_steps
            is_due = is_last or is_best or request.save or saver.is_due(step)
            every, reads_all = recipe.train.check_every, request.check or plan.step == start_step
            checks = reads_all or bool(every and (is_due or step % every == 0))
            if checks:
                num_equal = sum(check_step(engine, plan, device, reads_all) for engine in engines.values())
                if reads_all:
                    log(f"step {step}: {num_equal} parameters and the packing plan are equal on all ranks")
            finishes = saver.is_pending and (is_due or not is_writing)
            if finishes:
                saver.finish()
            if is_due:
                state = build_state(run, step, plan.epoch, step_log.history)
                state = replace(state, bad_steps=bad_steps.state, attention=attention)
                watchdog.begin_work(f"saving the checkpoint of step {step}")
                saver.save(state, plan, required=is_last, is_best=is_best)
            if samples and samples.is_due(step) and not request.quit:
                samples.write(step)
                started = time.perf_counter()
            if checks or finishes or is_due or evaluates:
                started = time.perf_counter()  # the next step does not contain this time
            if watchdog.saved != saver.saved:
                watchdog.saved = saver.saved
                events.write("save", checkpoint=watchdog.saved and watchdog.saved.name)
                hub.add(saver.saved)
            if request.quit:
                if step < total_steps and not verdict.stops:  # otherwise the run is complete
                    log(f"stopped after step {step} as requested; use --resume to continue the run")
                break
            watchdog.begin_step(step + 1)
    hub.close(group_timeout().total_seconds() / 2 if step == total_steps else 0.0)
    events.write("end" if step == total_steps else "stop")
    for log_file in (step_log, events, trainer.trackers):
        log_file.close()
    if rank == 0:
        write_report(run.output_dir)
    return saver.saved


def _build_trainer(
    run: TrainingRun, rank: int, device: torch.device, groups: ProcessGroups, log: Log, backend: Backend
) -> Trainer:
    """Build the `Trainer` of a run, with an engine for each trained DiT. Restore the checkpoint that the run resumes from."""
    events = EventLog(run, rank)
    store = ActivationOffloader(device)  # experts run one after the other and share this host memory
    engines = {}
    for expert in run.experts:
        model = build_model(run, groups, device, expert, store, backend)
        engines[expert.subfolder] = build_engine(model, run.ds_config, run.recipe, run.sampler.total_steps)
    restore(run, engines, rank, log)
    averages = build_averages(run, engines, log)
    return Trainer(run, rank, device, groups, engines, averages, events, Trackers(run, rank), log)


def _timed(batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """Yield (batch, seconds that the loop waited for this batch)."""
    requested = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - requested
        requested = time.perf_counter()
