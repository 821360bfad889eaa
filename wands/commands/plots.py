"""Plot the loss of training runs, for the demo, the model card and `scripts/loss_compare.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from wands.files import atomic_path
from wands.report.run_data import smooth, smoothing_window


def save_loss_plot(
    path: Path,
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    *,
    title: str = "Training loss",
    window: int | None = None,
    marks: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Plot loss curves over the optimizer steps as a PNG: raw losses as a thin line, their running mean as a thick line.

    Args:
        path: PNG to create or replace.
        series: (steps, losses) of each curve, by name; at least one.
        title: heading of the plot.
        window: steps in the running mean; 1 plots only the raw losses. None is a twentieth of each curve's steps, at most 200.
        marks: steps to mark at the lower edge, by the name of the event, such as "restart".

    Raises:
        WandsError: if the file cannot be written.
    """
    # pyplot is not used, because it would need a display and keep a global list of figures.
    from matplotlib.figure import Figure

    assert series, "a plot needs a series"
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for i, (name, (steps, losses)) in enumerate(series.items()):
        values = np.asarray(losses, dtype=np.float64)
        width = window or smoothing_window(len(values))
        label = name if width == 1 else f"{name} (mean of {width})"
        lone = "o" if len(values) == 1 else ""  # a line of one point is invisible
        raw = np.where(np.isfinite(values), values, np.nan)
        axes.plot(steps, raw, color=f"C{i}", linewidth=0.6, alpha=0.35)
        axes.plot(steps, smooth(values, width), color=f"C{i}", linewidth=1.8, marker=lone, label=label)
    for number, (name, marked) in enumerate(marks.items(), start=3):
        if marked:
            low = axes.get_xaxis_transform()  # 0 is the lower edge
            axes.scatter(marked, [0.02] * len(marked), color=f"C{number}", label=name, transform=low)
    axes.set(title=title, xlabel="optimizer step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
