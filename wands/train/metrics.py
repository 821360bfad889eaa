"""Write the metrics of a run: a line of text per step, curves in experiment trackers, and metrics.jsonl for plots."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean, median
from typing import Any

import torch

from wands.distributed.dims import ParallelDims
from wands.planning.hardware import peak_tflops
from wands.run.append_log import AppendLog, continue_rows, to_line
from wands.run.run_model import RunModel
from wands.run.schedule import Schedule
from wands.run.sizes import step_flops
from wands.run.step_result import StepResult
from wands.run.terminal import Terminal
from wands.train.jobs import FinishedStep, Job
from wands.train.training import Training
from wands.transfer import to_device
from wands.variants import Expert

_log = logging.getLogger(__name__)

NO_GRADIENT = (
    "the gradient is 0, so this run changes no weight. A LoRA cannot learn on a model with random weights, whose output layer is "
    "0; use a model with trained weights, or train all weights."
)
NUM_SIGMAS = 10
"""Number of equal ranges of the noise level for which the loss is reported."""
NUM_RECENT = 50
"""Number of steps whose median duration predicts the end of the run."""


class StepLog(Job):
    """Job that writes the results of each step: `metrics.jsonl`, curves in trackers, terminal lines, and sample losses.

    Rank 0 writes the metrics. With `train.log_samples`, the first rank of each context-parallel group writes the losses of its
    samples to a file. A resumed run first removes the rows of the steps after its checkpoint, because it repeats them.

    Attributes:
        history: (step, loss) pairs of the run so far; empty on other ranks than 0.
        held_out: newest held-out loss, for the terminal; None before the first evaluation.
    """

    belongs_to_step = True

    def __init__(
        self,
        training: Training,
        model: RunModel,
        schedule: Schedule,
        past_losses: Sequence[tuple[int, float]],
    ) -> None:
        self._model = model
        self._schedule = schedule
        self._averages = training.averages
        self._device = training.device
        self._dp_size = training.groups.dims.dp_size
        self._max_tokens = training.recipe.packing.max_tokens
        self._log = training.log
        self._trackers = training.trackers
        self._total_steps = training.total_steps
        self._log_every = training.recipe.train.log_every
        self.history: list[tuple[int, float]] = []
        self._is_first = True
        self.held_out: float | None = None
        self._recent = deque[float](maxlen=NUM_RECENT)
        self._times = (0.0, 0, 0.0)
        self._rows: AppendLog | None = None
        self._samples: AppendLog | None = None
        folder = training.output_dir
        if training.rank == 0:
            # An earlier part of the run may have had more ranks.
            for path in folder.glob("samples-rank*.jsonl"):
                continue_rows(path, training.start_step)
            rows, self._rows = continue_rows(folder / "metrics.jsonl", training.start_step, "loss")
            self.history = [(row["step"], row["loss"]) for row in rows if row["loss"]]
            # The checkpoint may be from another run folder.
            self.history = self.history or [(int(step), float(loss)) for step, loss in past_losses]
        if training.recipe.train.log_samples and training.groups.dims.is_first_of_bin:
            path = folder / f"samples-rank{training.rank}.jsonl"
            self._samples = continue_rows(path, training.start_step)[1]

    def run(self, step: FinishedStep) -> None:
        """Compute the metrics of a step and `eta_seconds`, the expected seconds to the end of the run, and write its results."""
        plan = step.plan
        step.metrics = step_metrics(
            step,
            self._model.experts,
            flops=step_flops(self._model, self._schedule, plan.bins),
            imbalance=self._schedule.imbalance(plan.bins, self._dp_size),
            max_tokens=self._max_tokens,
            ema_decay=next((average.decay for average in self._averages.values()), None),
            device=self._device,
        )
        self._write(step.metrics, step.results)

    def _write(self, row: dict[str, Any], results: Sequence[StepResult]) -> None:
        step = row["step"]
        total_steps = self._total_steps
        if self._samples is not None:
            for expert, result in zip(self._model.experts, results, strict=True):
                prefix = {"step": step} | ({"expert": expert.name} if expert.name else {})
                self._samples.append(*(to_line({**prefix, **item}) for item in result.samples))
        if self._rows is None:
            return
        row["eta_seconds"] = self._eta(row["seconds"], total_steps - step)
        if self._is_first and row["loss"]:
            self._is_first = False
            if row["grad_norm"] == 0:
                _log.warning("step %d: %s", step, NO_GRADIENT)
        if row["loss"] and math.isfinite(row["loss"]):  # a step whose samples are all excluded has the loss 0
            self.history.append((step, row["loss"]))
        self._rows.append(to_line(row))
        self._trackers.log(step, curves(row))
        loss = fmean([loss for _, loss in self.history[-NUM_RECENT:]] or [math.nan])
        held_out = f"  held-out {self.held_out:.4f}" if self.held_out is not None else ""
        memory = row["device_peak"] or row["host_peak"]
        speed = f"{row['tokens_per_second']:,.0f} tok/s  {memory / 2**30:.1f} GiB"
        line = f"step {step}/{total_steps}  loss {loss:.4f}{held_out}  {format_left(row)}  {speed}"
        if isinstance(self._log, Terminal) and self._log.show(line):
            return
        if step % self._log_every == 0 or step == total_steps:
            self._log(describe_step(row, total_steps))

    def _eta(self, seconds: float, steps_left: int) -> float:
        """Return the expected seconds to the end of the run.

        A remaining step counts as the median of the last steps, and its share of the saves and evaluations so far.
        """
        now = time.perf_counter()
        began, num_steps, total = self._times
        began = began or now - seconds
        num_steps += 1
        total += seconds
        self._times = (began, num_steps, total)
        self._recent.append(seconds)
        between = now - began - total  # saves and evaluations
        return steps_left * (median(self._recent) + between / num_steps)

    def close(self) -> None:
        """Try again to write rows that could not be written. If this fails, log how many rows are missing."""
        for log_file in (self._rows, self._samples):
            if log_file is not None:
                log_file.close()


def sigma_sums(results: Sequence[StepResult], grid: ParallelDims) -> torch.Tensor:
    """Return this rank's (sum of losses, number of clips) in each of 10 ranges of the noise level, flattened to float64 [20].

    Ranks that share a bin have the same clips, so all but the first of them return zeros.
    """
    device = results[0].errors.device
    sums = torch.zeros(NUM_SIGMAS, 2, dtype=torch.float64, device=device)
    for result in results if grid.is_first_of_bin else ():
        rows = torch.tensor([min(int(clip.sigma * NUM_SIGMAS), NUM_SIGMAS - 1) for clip in result.clips])
        counts = to_device(torch.tensor([clip.weight > 0 for clip in result.clips]).double(), device)
        sums.index_add_(0, to_device(rows, device), torch.stack([result.errors * counts, counts], dim=1))
    return sums.flatten()


def memory_peaks(device: torch.device) -> tuple[float, float]:
    """Return the largest (device memory of tensors, host memory) of this process so far, in bytes. The first is 0 on a CPU."""
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return on_device, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def step_metrics(
    step: FinishedStep,
    experts: Sequence[Expert],
    *,
    flops: int,
    imbalance: float,
    max_tokens: int,
    ema_decay: float | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return the metrics of one optimizer step over all ranks: a row of `metrics.jsonl`.

    `flops` is the result of `step_flops`, `imbalance` that of `Schedule.imbalance`.

    Returns:
        A dict with these keys, and `lr`, `seconds` and `own_seconds` as in `FinishedStep`.
        `data_wait`: seconds that the slowest rank waited for data.
        `step`: number of optimizer steps made, including this step.
        `loss`: mean of the losses of the trained DiTs.
        `grad_norm`: norm of the whole gradient before clipping. With two experts, the larger norm.
        `tokens`, `samples`: number of video tokens and of clips; `tokens_per_second` also per GPU.
        `tflops`: TFLOP/s of the model per device, forward and backward. Recomputation is not counted.
        `mfu`: `tflops` / bf16 peak of the device; None if the peak is unknown.
        `fill`: `tokens` / capacity of the bins that are not empty.
        `imbalance`: sum over the micro steps of the largest planned FLOPs of a rank / sum of their means; 1 is optimal.
        `ema_decay`: decay of the moving average in this step; None without `ema`.
        `loss_by_sigma`: mean loss of the clips in each range of the noise level; None for a range without clips.
        `device_peak`, `host_peak`: largest bytes of device and host memory over the ranks; `device_peak` is None on a CPU.
        `loss_NAME`, `grad_norm_NAME`: loss and norm of the expert NAME, for a model with two experts.
        `grad_norm_blocks`: norm of each block's gradient, by name ("high.blocks.0" with two experts); missing if not measured.
        `update_ratio_blocks`: norm of each block's update / norm of its weights.
    """
    plan = step.plan
    sums = step.sums
    world_size = sums.world_size
    tflops = flops / step.seconds / world_size / 1e12
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    speed = plan.num_tokens / step.seconds
    pairs = zip(sums.of_sigmas[::2], sums.of_sigmas[1::2], strict=True)
    row: dict[str, Any] = {
        "step": plan.step + 1,
        "epoch": plan.epoch,
        "loss": sum(sums.losses) / len(sums.losses),
        "grad_norm": max(result.grad_norm for result in step.results),
        "tokens": plan.num_tokens,
        "samples": plan.num_samples,
        "lr": step.lr,
        "seconds": step.seconds,
        "own_seconds": step.own_seconds,
        "data_wait": sums.largest["data_wait"],
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "fill": plan.num_tokens / (max(1, sum(map(bool, plan.bins))) * max_tokens),
        "imbalance": imbalance,
        "ema_decay": ema_decay,
        "tokens_per_second": speed,
        "tokens_per_second_per_gpu": speed / world_size,
        "loss_by_sigma": [total / count if count else None for total, count in pairs],
        "device_peak": round(sums.largest["device_peak"]) or None,
        "host_peak": round(sums.largest["host_peak"]),
    }
    for expert, loss, result in zip(experts, sums.losses, step.results, strict=True):
        name = f"{expert.name}." if expert.name else ""
        if expert.name:
            row |= {f"loss_{expert.name}": loss, f"grad_norm_{expert.name}": result.grad_norm}
        for key, of_blocks in result.blocks.items():
            row.setdefault(key, {}).update({name + block: value for block, value in of_blocks.items()})
    return row


def describe_step(row: Mapping[str, Any], total_steps: int) -> str:
    """Return the metrics of a step, with `eta_seconds`, as one line of text for the user."""
    mfu = f" ({row['mfu']:.1%} MFU)" if row["mfu"] is not None else ""
    experts = ""
    if "loss_high" in row and "loss_low" in row:
        experts = f" (high {row['loss_high']:.5f}, low {row['loss_low']:.5f})"
    norm = f"{row['grad_norm']:.3f}" if row["grad_norm"] else "0 (no weight is trained)"
    return (
        f"step {row['step']:>{len(str(total_steps))}}/{total_steps}  loss {row['loss']:.5f}{experts}  lr {row['lr']:.2e}  "
        f"grad {norm}  {row['samples']} clips {row['tokens']} tokens  {row['tokens_per_second']:,.0f} tok/s  "
        f"{row['seconds']:.2f} s (data {row['data_wait']:.2f})  {row['tflops']:.3g} TFLOP/s{mfu}  "
        f"fill {row['fill']:.0%}  imbalance {row['imbalance']:.2f}  {format_left(row)}"
    )


def format_left(row: Mapping[str, Any]) -> str:
    """Return the expected time to the end of the run, such as "1:02:30 left"."""
    return f"{timedelta(seconds=round(row['eta_seconds']))} left"


def curves(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of `metrics.jsonl` by the names of their curves, such as "train/loss"."""
    of_training = ("loss", "lr", "grad_norm", "epoch", "ema_decay")
    named = {f"{'train' if name.startswith(of_training) else 'speed'}/{name}": row[name] for name in row}
    named.pop("speed/step")
    for i, value in enumerate(named.pop("train/loss_by_sigma", ())):
        named[f"loss_by_sigma/{i / NUM_SIGMAS:g}"] = value
    for key in ("train/grad_norm_blocks", "speed/update_ratio_blocks"):
        named |= {f"{key.partition('/')[2]}/{block}": value for block, value in named.pop(key, {}).items()}
    if times := named.pop("speed/own_seconds", None):
        named |= {"speed/own_seconds_max": max(times), "speed/own_seconds_median": median(times)}
    return {name: value for name, value in named.items() if value is not None}
