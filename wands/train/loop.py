"""The training loop: optimizer steps, and the metrics, checks and checkpoints after each of them."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist

from wands.data.sampler import StepPlan
from wands.distributed.consistency import check_agreement
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.errors import DataError
from wands.model.offload import ActivationOffloader
from wands.train.batches import prefetched
from wands.train.checkpoint import build_state, save_checkpoint
from wands.train.control import ControlRequest, ControlRequests
from wands.train.ema import build_averages
from wands.train.engine import build_engine, build_model
from wands.train.metrics import MetricsWriter, StepReport, continue_rows, peak_tflops
from wands.train.rank_checks import FIXES, check_step, run_digests
from wands.train.resume import restore
from wands.train.run import Log, TrainingRun
from wands.train.step import SampleLoss, StepResult, train_step
from wands.variants import Expert

T = TypeVar("T")


def train(run: TrainingRun, rank: int, device: torch.device, log: Log) -> Path | None:
    """Train to the end, or to the next step boundary after a request to stop.

    Args:
        run: the checked run.
        rank: rank of this process; the process group exists.
        device: device of this process.
        log: prints a line for the user; called on rank 0.

    Returns:
        The last checkpoint.
    """
    recipe, total_steps, checkpoint = run.recipe, run.sampler.total_steps, run.checkpoint
    saved, start_step = (checkpoint.folder, checkpoint.state.step) if checkpoint else (None, 0)
    # Ranks that differ would wait for each other forever.
    check_agreement(run_digests(run, start_step), device, FIXES)
    groups = ProcessGroups.build(run.grid(rank), device)
    engines = _build_engines(run, groups, device)
    restore(engines, checkpoint, run.output_dir, rank, log)
    averages = build_averages(engines, recipe.ema, checkpoint, log)
    past_losses = checkpoint.state.loss if checkpoint else ()
    writer = MetricsWriter(run.output_dir, start_step, past_losses) if rank == 0 else None

    with (
        ControlRequests(run.output_dir) as requests,
        contextlib.closing(_SampleLog(run, groups.dims, start_step)) as sample_log,
        contextlib.closing(prefetched(run, groups.dims, start_step)) as batches,
    ):
        timer = _StepTimer()
        for plan, slices in timer.timed(batches):
            lr = float(engines[run.experts[0].subfolder].optimizer.param_groups[0]["lr"])  # of this step
            results = [
                train_step(engine, slices, run, groups, device, run.denominator(plan), expert.sigma_range)
                for expert, engine in zip(run.experts, engines.values(), strict=True)
            ]
            step = plan.step + 1
            losses, data_wait, request = _reduce(
                torch.stack([result.loss for result in results]) / run.count(plan),
                timer.data_wait,
                requests.poll(rank),
                device,
            )
            for expert, loss, result in zip(run.experts, losses, results, strict=True):
                _check_finite(expert, loss, result, step)
                sample_log.write(step, expert, result.samples)
            for average in averages.values():
                average.update(step)
            seconds = timer.end_step()
            if writer is not None:
                norms = [result.grad_norm for result in results]
                ema_decay = next((average.decay for average in averages.values()), None)
                report = _report(run, plan, device, losses, norms, lr, ema_decay, seconds, data_wait)
                writer.write(report)
                if step % recipe.train.log_every == 0 or step == total_steps:
                    log(report.line(total_steps))
            if request.check or plan.step == start_step:
                num_equal = sum(check_step(engine, plan, device) for engine in engines.values())
                log(f"step {step}: {num_equal} parameters and the plan are equal on all ranks")
                timer.start_step()
            is_due = recipe.checkpoint.every and step % recipe.checkpoint.every == 0
            if is_due or request.save or step == total_steps:
                state = build_state(run, step, plan.epoch, writer.history if writer else [])
                saved = save_checkpoint(run, engines, state, averages)
                log(f"saved {saved}")
                timer.start_step()
            if request.quit:
                if step < total_steps:  # otherwise the run is complete
                    log(f"stopped after step {step} as requested; continue with --resume")
                break
    if writer is not None:
        writer.close()
    return saved


class _StepTimer:
    """Wall time of each step and of its wait for data, without checks and checkpoints."""

    def __init__(self) -> None:
        self.data_wait = 0.0
        self.start_step()

    def start_step(self) -> None:
        """Start the next step now, so that the time since the last step does not count."""
        self._start = time.perf_counter()

    def end_step(self) -> float:
        """Return the seconds of this step, and start the next step."""
        start = self._start
        self.start_step()
        return self._start - start

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and measure the wait for each batch in `data_wait`."""
        requested = time.perf_counter()
        for batch in batches:
            self.data_wait = time.perf_counter() - requested
            yield batch
            requested = time.perf_counter()


def _build_engines(run: TrainingRun, groups: ProcessGroups, device: torch.device) -> dict[str, Any]:
    """Return the subfolder of each expert -> its engine."""
    store = ActivationOffloader(device)  # experts run one after the other and share this host memory
    engines = {}
    for expert in run.experts:
        model = build_model(run, groups, device, expert, store)
        engines[expert.subfolder] = build_engine(model, run.ds_config, run.recipe, run.sampler.total_steps)
    return engines


def _reduce(
    losses: torch.Tensor, data_wait: float, request: ControlRequest, device: torch.device
) -> tuple[list[float], float, ControlRequest]:
    """Return the summed losses, the longest wait and the requests of all ranks, with two small all-reduces."""
    summed = losses.to(torch.float64)
    maxima = torch.tensor([data_wait, *request], dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    longest_wait, *flags = maxima.tolist()
    return summed.tolist(), longest_wait, ControlRequest(*map(bool, flags))


def _check_finite(expert: Expert, loss: float, result: StepResult, step: int) -> None:
    if math.isfinite(loss) and math.isfinite(result.grad_norm):
        return
    samples = [item for item in result.samples if not math.isfinite(item.loss)]
    names = [f"{item.sample_id} (sigma {item.sigma:.4f})" for item in samples]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    clips = ", ".join(dict.fromkeys(chain(*gathered))) or "no single clip"
    of_expert = f" of the {expert.name}-noise expert" if expert.name else ""
    raise DataError(
        f"step {step}: the loss{of_expert} is {loss} and the gradient norm is {result.grad_norm}, because of {clips}; check "
        "these clips or lower optim.lr, and --resume from the last checkpoint.",
        agreed=True,
    )


def _report(
    run: TrainingRun,
    plan: StepPlan,
    device: torch.device,
    losses: Sequence[float],
    grad_norms: Sequence[float],
    lr: float,
    ema_decay: float | None,
    seconds: float,
    data_wait: float,
) -> StepReport:
    tflops = run.step_flops(plan.bins) / seconds / run.world_size / 1e12
    peak = peak_tflops(device)
    num_bins = sum(map(bool, plan.bins))
    names = [expert.name for expert in run.experts if expert.name]
    return StepReport(
        step=plan.step + 1,
        epoch=plan.epoch,
        loss=sum(losses) / len(losses),
        lr=lr,
        grad_norm=max(grad_norms),
        tokens=plan.num_tokens,
        samples=plan.num_samples,
        seconds=seconds,
        data_wait=data_wait,
        tflops=tflops,
        mfu=tflops / peak if peak else None,
        fill=plan.num_tokens / (num_bins * run.recipe.packing.max_tokens),
        imbalance=run.imbalance(plan.bins),
        expert_losses=dict(zip(names, losses, strict=False)),
        expert_norms=dict(zip(names, grad_norms, strict=False)),
        ema_decay=ema_decay,
    )


class _SampleLog:
    """Log of `train.log_samples`: the first rank of each group writes the loss of each clip to samples-rank*.jsonl."""

    def __init__(self, run: TrainingRun, grid: ParallelDims, start_step: int) -> None:
        self._file: TextIO | None = None
        if run.recipe.train.log_samples and grid.cp_rank == 0:
            _, self._file = continue_rows(run.output_dir / f"samples-rank{grid.rank}.jsonl", start_step)

    def write(self, step: int, expert: Expert, losses: list[SampleLoss]) -> None:
        if self._file is not None:
            prefix = {"step": step} | ({"expert": expert.name} if expert.name else {})
            self._file.writelines(json.dumps({**prefix, **vars(item)}) + "\n" for item in losses)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
