"""Metrics of a run: one line per step, TensorBoard scalars, and metrics.jsonl for plots and model cards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from wands.planning.hardware import PEAK_TFLOPS


def peak_tflops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s, or None if unknown (a CPU, or a GPU not in the table)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


@dataclass(frozen=True)
class StepReport:
    """Metrics of one optimizer step over all ranks.

    Attributes:
        step: number of optimizer steps made, including this step.
        epoch: epoch of the step's samples.
        loss: mean weighted squared error of the step's samples or tokens; with two experts, the mean of both.
        lr: learning rate of this step.
        grad_norm: norm of the whole gradient before clipping.
        tokens: video tokens of the step.
        samples: clips of the step.
        seconds: wall time of the step, including the wait for data.
        data_wait: seconds that the slowest rank waited for data.
        tflops: model TFLOP/s per device (three forwards; recomputation is not counted).
        mfu: share of the device's bf16 peak; None if the peak is unknown.
        fill: tokens / (bins x packing.max_tokens).
        imbalance: cost of the slowest rank / mean cost of the ranks, each summed over the micro steps.
        expert_losses: name of each trained expert -> loss; empty for a model with one DiT.
        expert_norms: name of each trained expert -> `grad_norm`; empty for a model with one DiT.
        ema_decay: decay of the moving average in this step; None without `ema`.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    samples: int
    seconds: float
    data_wait: float
    tflops: float
    mfu: float | None
    fill: float
    imbalance: float
    expert_losses: dict[str, float] = field(default_factory=dict)
    expert_norms: dict[str, float] = field(default_factory=dict)
    ema_decay: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Video tokens per second over all ranks."""
        return self.tokens / self.seconds

    def line(self, total_steps: int) -> str:
        """Return the step as one line of text."""
        mfu = f" ({self.mfu:.1%} MFU)" if self.mfu is not None else ""
        experts = ", ".join(f"{name} {loss:.5f}" for name, loss in self.expert_losses.items())
        loss = f"{self.loss:.5f} ({experts})" if len(self.expert_losses) > 1 else f"{self.loss:.5f}"
        return (
            f"step {self.step:>{len(str(total_steps))}}/{total_steps}  loss {loss}  lr {self.lr:.2e}  "
            f"grad {self.grad_norm:.3f}  {self.samples} clips {self.tokens} tokens  {self.tokens_per_second:,.0f} tok/s  "
            f"{self.seconds:.2f} s (data {self.data_wait:.2f})  {self.tflops:.3g} TFLOP/s{mfu}  "
            f"fill {self.fill:.0%}  imbalance {self.imbalance:.2f}"
        )


class MetricsWriter:
    """Writer of TensorBoard events and `metrics.jsonl` in the run folder; used on rank 0 only.

    Args:
        output_dir: the run folder.
        start_step: number of optimizer steps made. Rows of later steps, which the resumed run writes again, are removed.
        past: loss series of the checkpoint, for a run that resumes in another folder.
    """

    def __init__(self, output_dir: Path, start_step: int, past: Sequence[tuple[int, float]] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        kept, self._rows = continue_rows(output_dir / "metrics.jsonl", start_step)
        self._board = SummaryWriter(
            str(output_dir / "tensorboard"), purge_step=start_step + 1 if start_step else None
        )
        self.history = [(int(step), float(loss)) for step, loss in past]
        if kept:
            self.history = [(row["step"], row["loss"]) for row in kept]

    def write(self, report: StepReport) -> None:
        """Add one step to the file, to TensorBoard and to `history`."""
        self.history.append((report.step, report.loss))
        row = asdict(report) | {"tokens_per_second": report.tokens_per_second}
        experts = {f"loss_{name}": loss for name, loss in row.pop("expert_losses").items()}
        experts |= {f"grad_norm_{name}": norm for name, norm in row.pop("expert_norms").items()}
        self._rows.write(json.dumps(row | experts) + "\n")
        self._rows.flush()
        of_training = {"loss", "lr", "grad_norm", "epoch", "ema_decay", *experts}
        for name, value in (row | experts).items():
            if name != "step" and value is not None:
                group = "train" if name in of_training else "speed"
                self._board.add_scalar(f"{group}/{name}", value, report.step)

    def close(self) -> None:
        """Flush and close both."""
        self._rows.close()
        self._board.close()


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl`."""
    return read_rows(output_dir / "metrics.jsonl")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a jsonl file, up to the first damaged line; no rows if the file is missing."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def continue_rows(path: Path, start_step: int) -> tuple[list[dict[str, Any]], TextIO]:
    """Open a jsonl file to append to, without the rows after `start_step`, which a resumed run writes again.

    Returns:
        The remaining rows and the open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read_rows(path) if row["step"] <= start_step]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows, path.open("a", encoding="utf-8")


def thin(history: Sequence[tuple[int, float]], most: int = 2000) -> list[tuple[int, float]]:
    """Return at most `most` evenly spaced points of a series, including the first and the last."""
    if len(history) <= most:
        return list(history)
    return [history[round(i * (len(history) - 1) / (most - 1))] for i in range(most)]
