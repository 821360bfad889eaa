"""The training loop: step after step, and what is said, written and saved about them."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wands.data.sampler import StepPlan
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.errors import DataError
from wands.model.offload import ActivationOffloader
from wands.train.batches import prefetched
from wands.train.checkpoint import abandon_newer, load_checkpoint, save_checkpoint
from wands.train.consistency import check_agreement, check_step, plan_digests
from wands.train.control import ControlRequest, ControlRequests
from wands.train.ema import build_averages
from wands.train.engine import build_engine, build_model
from wands.train.metrics import MetricsWriter, StepReport, peak_tflops, read_rows, thin
from wands.train.run import Log, TrainingRun
from wands.train.state import TrainState, with_whole_paths
from wands.train.step import SampleLoss, StepResult, train_step
from wands.variants import Expert


def train(
    run: TrainingRun, resume: tuple[Path, TrainState] | None, rank: int, device: torch.device, log: Log
) -> Path | None:
    """Run the training to its end, or to the next step boundary after someone asked it to stop.

    Args:
        run: from `prepare_run`.
        resume: checkpoint to go on from, already checked against the run.
        rank: this process; the process group exists.
        device: of this process.
        log: takes the lines for the person who watches (rank 0).

    Returns:
        The last checkpoint.
    """
    recipe, sampler = run.recipe, run.sampler
    start_step = resume[1].step if resume else 0
    # Before ranks that differ could wait for each other.
    check_agreement(plan_digests(run, start_step), device)
    groups = ProcessGroups.build(run.grid(rank), device)
    engines = _build_engines(run, groups, device, fresh=resume is None)
    saved, step, past = _resume(engines, run, resume, rank, log) if resume else (None, 0, ())
    averages = build_averages(engines, recipe.ema, resume, log)
    writer = MetricsWriter(run.output_dir, step, past) if rank == 0 else None

    def save() -> Path:
        state = build_state(run, step, plan.epoch, writer.history if writer else [])
        folder = run.output_dir / "checkpoints"
        path = save_checkpoint(engines, folder, state, recipe.checkpoint.keep, averages)
        log(f"saved {path}")
        return path

    with (
        ControlRequests(run.output_dir) as requests,
        _SampleLog(run, groups.dims, step) as sample_log,
        contextlib.closing(prefetched(run, groups.dims, step)) as batches,
    ):
        waiting_since = asked = time.perf_counter()
        for plan, mine in batches:
            started = time.perf_counter()
            first = engines[run.experts[0].subfolder]
            lr = float(first.optimizer.param_groups[0]["lr"])  # before the scheduler moves on
            denominator = run.denominator(plan)
            results = [
                train_step(
                    engines[expert.subfolder], mine, run, groups, device, denominator, expert.sigma_range
                )
                for expert in run.experts
            ]
            step = plan.step + 1
            losses, data_wait, wishes = _agree(
                torch.stack([result.loss for result in results]) / run.count(plan),
                started - asked,
                requests.poll(rank),
                device,
            )
            for expert, loss, result in zip(run.experts, losses, results, strict=True):
                _check_finite(expert, loss, result, step)
                sample_log.write(step, expert, result.samples)
            for average in averages.values():
                average.update(step)
            seconds, waiting_since = time.perf_counter() - waiting_since, time.perf_counter()
            if writer is not None:
                report = _report(
                    run,
                    plan,
                    device,
                    losses=losses,
                    lr=lr,
                    grad_norms=[result.grad_norm for result in results],
                    ema_decay=next((average.decay for average in averages.values()), None),
                    seconds=seconds,
                    data_wait=data_wait,
                )
                writer.write(report)
                if step % recipe.train.log_every == 0 or step == sampler.total_steps:
                    log(report.line(sampler.total_steps))
            if wishes.check or plan.step == start_step:
                num_same = sum(check_step(engine, plan, device) for engine in engines.values())
                log(f"step {step}: {num_same} parameters and the plan are the same on all ranks")
                waiting_since = time.perf_counter()  # comparing is not waiting for data
            due = recipe.checkpoint.every and step % recipe.checkpoint.every == 0
            if due or wishes.save or step == sampler.total_steps:
                saved = save()
                waiting_since = time.perf_counter()  # nor is saving
            if wishes.quit:
                if step < sampler.total_steps:  # else the run is over in any case
                    log(f"stopped after step {step} as asked; go on with --resume")
                break
            asked = time.perf_counter()  # writing and saying is not waiting for data either
    if writer is not None:
        writer.close()
    return saved


def _build_engines(
    run: TrainingRun, groups: ProcessGroups, device: torch.device, *, fresh: bool
) -> dict[str, Any]:
    """An engine for each expert, by its folder in a pipeline."""
    store = ActivationOffloader(device)  # experts take turns, and so do their activations in host memory
    return {
        expert.subfolder: build_engine(
            build_model(run, groups, device, expert, fresh=fresh, store=store),
            run.ds_config,
            run.recipe,
            run.sampler.total_steps,
        )
        for expert in run.experts
    }


def _resume(
    engines: Mapping[str, Any], run: TrainingRun, resume: tuple[Path, TrainState], rank: int, log: Log
) -> tuple[Path | None, int, Sequence[tuple[int, float]]]:
    """Load a checkpoint; returns it, the steps made, and the loss series up to them."""
    checkpoint, state = resume
    load_checkpoint(engines, checkpoint)
    log(f"resumed from {checkpoint} at step {state.step}")
    if rank == 0 and checkpoint.parent.resolve() == (run.output_dir / "checkpoints").resolve():
        abandon_newer(checkpoint)
    return checkpoint, state.step, state.loss


def _agree(
    losses: torch.Tensor, data_wait: float, wishes: ControlRequest, device: torch.device
) -> tuple[list[float], float, ControlRequest]:
    """Two small all-reduces a step: the losses of all ranks, the longest wait, and what any rank was asked for."""
    summed = losses.to(torch.float64)
    most = torch.tensor([data_wait, *wishes], dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    wait, *asked = most.tolist()
    return summed.tolist(), wait, ControlRequest(*map(bool, asked))


def _check_finite(expert: Expert, loss: float, result: StepResult, step: int) -> None:
    if math.isfinite(loss) and math.isfinite(result.grad_norm):
        return
    bad = [
        f"{item.sample_id} (sigma {item.sigma:.4f})"
        for item in result.samples
        if not math.isfinite(item.loss)
    ]
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, bad)
    names = ", ".join(dict.fromkeys(name for part in found for name in part)) or "no single clip"
    whose = f" of the {expert.name}-noise expert" if expert.name else ""
    raise DataError(
        f"step {step}: the loss{whose} is {loss} and the gradient's norm {result.grad_norm}, from {names}; look at these "
        "clips or lower optim.lr, and --resume from the last checkpoint.",
        agreed=True,
    )


def _report(
    run: TrainingRun,
    plan: StepPlan,
    device: torch.device,
    *,
    losses: Sequence[float],
    lr: float,
    grad_norms: Sequence[float],
    ema_decay: float | None,
    seconds: float,
    data_wait: float,
) -> StepReport:
    tflops = run.step_flops(plan.bins) / seconds / run.world_size / 1e12
    peak = peak_tflops(device)
    used = sum(1 for one in plan.bins if one)
    names = [expert.name for expert in run.experts]
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
        fill=plan.num_tokens / (used * run.recipe.packing.max_tokens),
        imbalance=run.imbalance(plan.bins),
        expert_losses=dict(zip(names, losses, strict=True)) if all(names) else {},
        expert_norms=dict(zip(names, grad_norms, strict=True)) if all(names) else {},
        ema_decay=ema_decay,
    )


def build_state(run: TrainingRun, step: int, epoch: int, history: list[tuple[int, float]]) -> TrainState:
    """What a checkpoint after `step` remembers; `history` is the loss series so far."""
    base, recipe = run.recipe.model.path, run.recipe.model_dump(mode="json")
    recipe["model"]["merge_loras"] = with_whole_paths(recipe["model"]["merge_loras"])
    local = Path(base).is_dir()
    return TrainState(
        step=step,
        epoch=epoch,
        world_size=run.world_size,
        zero_stage=run.zero_stage,
        variant=run.variant.name,
        parts=[expert.subfolder for expert in run.experts],
        transformer_config=run.transformer_config,
        data_fingerprint=run.data_fingerprint(),
        data_summary=_summarize_data(run),
        recipe=recipe,
        base=str(Path(base).resolve()) if local else base,
        loss=thin(history),
        files={},
        base_on_hub=not local,
    )


def _summarize_data(run: TrainingRun) -> dict[str, int]:
    """Clips and their tokens, each counted once however often an epoch visits it."""
    lengths = dict(zip(run.data.keys, run.seq_lens.tolist(), strict=True))
    return {"num_samples": len(lengths), "num_tokens": sum(lengths.values())}


class _SampleLog:
    """`train.log_samples`: the first rank of each bin writes the error of each clip, so that an odd one can be found."""

    def __init__(self, run: TrainingRun, grid: ParallelDims, start_step: int) -> None:
        wanted = run.recipe.train.log_samples and grid.cp_rank == 0
        self._path = run.output_dir / f"samples-rank{grid.rank}.jsonl" if wanted else None
        self._start_step = start_step
        self._file: Any = None

    def __enter__(self) -> _SampleLog:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = [row for row in read_rows(self._path) if row["step"] <= self._start_step]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, step: int, expert: Expert, losses: list[SampleLoss]) -> None:
        if self._file is not None:
            named = {"step": step} | ({"expert": expert.name} if expert.name else {})
            self._file.writelines(json.dumps({**named, **vars(item)}) + "\n" for item in losses)
            self._file.flush()
